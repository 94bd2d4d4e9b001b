"""say what a model is, what loads it and what it needs

MODEL is a folder in Hugging Face layout, a .gguf file, org/name on the Hub, or
pkg:Class for a model of your own. Without one it lists the architectures that
are known.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from hibachi.backend.discover import known, load_backend, why_missing
from hibachi.backend.infer import leaves
from hibachi.backend.layout import Paged, State
from hibachi.backend.library import PORTABLE
from hibachi.common.named import is_named, place
from hibachi.common.phases import phase, short_bytes
from hibachi.engine.build import codebooks_of
from hibachi.engine.forms import vocabulary_of
from hibachi.engine.kinds import kind_of, level_told
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.depth import sizes_of
from hibachi.engine.runners.extra_inputs import declared_by
from hibachi.engine.speculation.choose import check_same
from hibachi.errors import ConfigError
from hibachi.llm.model.describe import Description, as_json, describe
from hibachi.llm.model.files import locate, open_files
from hibachi.llm.model.registry import architectures
from hibachi.llm.users_model import model_named

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_BLOCKS = {"Q4_0": 18 / 32, "Q8_0": 34 / 32}  # as hibachi's kernels multiply them


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--draft", metavar="MODEL", help="a draft model beside it: are its tokens the same?")
    parser.add_argument("--json", action="store_true", help="write JSON, for programs")


def run(args: argparse.Namespace) -> int:
    if args.model is None:
        return _list(args.json)
    if is_named(args.model):
        return _own(args.model, args.json)
    with phase(f"reading {args.model}"):
        d = describe(locate(args.model))
    draft = None
    if args.draft is not None:
        with phase(f"reading {args.draft}"):
            draft = describe(locate(args.draft))
    with phase("starting the backends"):
        facts = as_json(d) | {"memory": _memory(d)}
        if draft is not None:
            facts |= {"draft": as_json(draft) | {"memory": _memory(draft)}}
            facts["problem"] = facts["problem"] or draft.problem or _other_tokens(d, draft)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _show(d, facts)
    return 1 if facts["problem"] else 0


def _list(for_programs: bool) -> int:
    found = architectures()
    if for_programs:
        print(json.dumps(found, indent=2))
    else:
        width = max(map(len, found))
        for name, by in sorted(found.items()):
            print(f"{name:{width}}  {by}")
    return 0


def _own(spec: str, for_programs: bool) -> int:
    """Describe a user's own model: its level, and what the engine would keep for it."""
    with phase(f"opening {spec}"):
        model = model_named(spec)
    kind, vocab = kind_of(model), getattr(model, "vocab_size", None)
    level, layers = kind.level, list(model.cache_spec()) if kind is ModelKind.PAGED else []
    paged = [layer for layer in layers if isinstance(layer, Paged)]
    states = [layer for layer in layers if isinstance(layer, State)]
    codebooks = codebooks_of(model) if level and vocab is not None else None
    facts = {
        "model": f"{place(type(model).__module__)}:{type(model).__qualname__}",
        "level": level,
        "own_cache": kind is ModelKind.OWN_CACHE,
        "samples": "the engine" if level and vocab is not None else "the model itself",
        "vocab_size": vocab if level else None,
        "codebooks": codebooks,
        "vocab_sizes": sizes_of(model) if codebooks else None,
        "depth": bool(codebooks) and callable(getattr(model, "depth", None)),
        "draws": declared_by(model).draws,
        "inputs": {name: [list(one.shape), one.dtype, one.per] for name, one in declared_by(model).inputs.items()},
        "max_model_len": getattr(model, "max_model_len", None),
        "parameters": sum(math.prod(a.shape) for a in leaves(getattr(model, "params", None)) if hasattr(a, "shape")),
        "paged_layers": len(paged),
        "state_layers": len(states),
        "numbers_per_token": sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in paged),
        "numbers_per_request": sum(math.prod(layer.shape) for layer in states),
    }
    if for_programs:
        print(json.dumps(facts, indent=2))
        return 0
    _line("model", facts["model"])
    _line("level", level_told(kind).removeprefix("level "))
    _line("drawn by", facts["samples"])
    _line("vocabulary", facts["vocab_size"] or "any tokens")
    if codebooks:
        _line("codebooks", f"{codebooks}{', drawn in depth' * facts['depth']}, of {facts['vocab_sizes']} ids")
    if facts["draws"]:
        _line("draws", f"{facts['draws']} uniform and normal numbers a token")
    for name, (shape, dtype, per) in facts["inputs"].items():
        _line("input", f"{name}: {tuple(shape)} of {dtype}, per {per}")
    _line("context", f"{facts['max_model_len']} tokens" if facts["max_model_len"] else "as the engine is told")
    if facts["parameters"]:
        _line("parameters", _count(facts["parameters"]))
    if kind is ModelKind.PAGED:
        _line("cache", f"{len(paged)} layers of keys and values, {len(states)} states")
        _line("float32", f"{short_bytes(4 * facts['numbers_per_token'])} a token")
        _line("", f"{short_bytes(4 * facts['numbers_per_request'])} a request")
    return 0


def _line(name: str, value: Any) -> None:
    print(f"{name:13} {value}")


def _show(d: Description, facts: dict[str, Any]) -> None:
    _line("path", d.path)
    _line("files", d.files)
    _line("architecture", d.architecture)
    _line("loaded by", d.mapping or "nothing that is registered")
    stored = ", ".join(f"{dtype} {_count(n)}" for dtype, n in d.stored.items())
    _line("parameters", f"{_count(d.parameters)} ({stored})")
    if blocks := [dtype for dtype in d.stored if dtype in _BLOCKS]:
        _line("multiplied", f"as {' and '.join(blocks)}, activations rounded to eight bits; not with --gguf-unpack")
    if d.arch:
        a = d.arch
        heads = f"{a.heads} heads" if a.heads == a.kv_heads else f"{a.heads} heads on {a.kv_heads} of keys and values"
        _line("shape", f"{len(a.layers)} layers, {a.hidden_size} wide, {heads} of {a.head_dim}")
        if facts["windows"]:
            n = sum(layer.window is not None for layer in a.layers)
            _line("window", f"{', '.join(map(str, facts['windows']))} tokens in {n} of {len(a.layers)} layers")
        if a.experts:
            _line("experts", f"{a.experts.per_token} of {a.experts.count} for each token")
    _line("vocabulary", d.vocab_size)
    _line("context", f"{d.context} tokens" if d.context else "not limited by the model")
    _line("chat template", d.template or "none")
    for n, (name, value) in enumerate(d.not_obeyed.items()):
        _line("" if n else "not obeyed", f"{name} {json.dumps(value)}")
    if facts["memory"]:
        print("\nmemory        dtype         weights      a token   full context")
        _table(facts["memory"])
    if draft := facts.get("draft"):
        stored = ", ".join(f"{dtype} {_count(n)}" for dtype, n in draft["stored"].items())
        print(f"\nfor its draft model {draft['path']}, besides:\n{_count(draft['parameters'])} parameters ({stored})")
        _table(draft["memory"])
    if facts["problem"]:
        print(f"\n{facts['problem']}")


def _table(memory: list[dict[str, Any]]) -> None:
    for m in memory:
        full = short_bytes(m["full_context"]) if m["full_context"] else "-"
        token = short_bytes(m["cache_per_token"]) if m["cache_per_token"] else "-"
        print(f"{m['backend']:13} {m['dtype']:9} {short_bytes(m['weights']):>11} {token:>12} {full:>14}")


def _other_tokens(d: Description, draft: Description) -> str | None:
    """Why a model cannot guess for another; None means its tokens are the same."""
    main, other = (
        vocabulary_of(open_files(one.path).tokenizer(vocab_size=one.vocab_size), one.vocab_size or 0, ())
        for one in (d, draft)
    )
    try:
        check_same(main, other, str(draft.path))
    except ConfigError as e:
        return str(e)
    return None


def _memory(d: Description) -> list[dict[str, Any]]:
    """What the weights and the cache take on each backend that is here, in bytes."""
    out = []
    for name in known():
        if why_missing(name) is not None:
            continue
        backend = load_backend(name)
        for how in backend.quantizations:  # keys and values are in the dtype of the activations
            out.append(
                {
                    "backend": name,
                    "dtype": how,
                    "weights": _rounded(d, how),
                    "cache_per_token": None,
                    "full_context": None,
                }
            )
        brain = hasattr(backend.xp, "bfloat16") or backend.suits("bfloat16", d.arch)
        for dtype in ("float32", "bfloat16" if brain else "float16"):
            if dtype == "float16" and not hasattr(backend.xp, dtype):
                continue
            size = _BYTES[dtype]
            token = d.token * size
            out.append(
                {
                    "backend": name,
                    "dtype": dtype,
                    "weights": _weights(d, size, native=getattr(backend, "native", False) and dtype in PORTABLE),
                    "cache_per_token": token,
                    "full_context": token * d.context if d.context else 0,
                }
            )
    return out


def _rounded(d: Description, how: str) -> int:
    """Bytes of weights in eight bits, or in four, of which embeddings and head have eight; all with their scales."""
    if how == "int8":
        return d.parameters
    vocabulary = 0 if d.arch is None else d.arch.vocab_size * d.arch.hidden_size * (1 if d.arch.tied else 2)
    return round((d.parameters - vocabulary) * _BLOCKS["Q4_0"] + vocabulary * _BLOCKS["Q8_0"])


def _weights(d: Description, size: int, *, native: bool) -> int:
    """Bytes of all numbers, of `size` bytes each but for blocks that stay as they are."""
    return round(sum(n * (_BLOCKS.get(dtype, size) if native else size) for dtype, n in d.stored.items()))


def _count(n: int) -> str:
    return next(
        (f"{n / unit:.1f} {name}" for unit, name in ((10**9, "billion"), (10**6, "million")) if n >= unit), str(n)
    )
