"""say what is installed and what is missing"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.candidates import AllowedKernels
from hibachi.backend.discover import best_and_why, best_backend, known, load_backend, why_missing
from hibachi.backend.library import check_numerics
from hibachi.cli.options import model_arguments
from hibachi.common.installed import version
from hibachi.common.phases import phase
from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.batchengine import Facts
from hibachi.engine.kinds import kind_of, level_told
from hibachi.errors import ConfigError, NotDeterministic, UnsupportedOperation
from hibachi.llm.llm import LLM
from hibachi.llm.model.files import locate, open_files
from hibachi.llm.model.registry import arch_of
from hibachi.llm.own import is_own, open_own
from hibachi.llm.tune.autotune import seconds_of, settle
from hibachi.llm.tune.trial import table
from hibachi.testing.bench.speculation import ROOM, step_costs, told

_LEGEND = """\
Milliseconds of a step, by operation: that of all layers, with so many rows, or
rows x cached positions. error: the largest difference from the reference, of
the largest number. dtype and buckets are judged by products and attention."""
_EXTRAS = (
    ("tokenizers", "text"),
    ("minijinja", "text"),
    ("gguf", "gguf"),
    ("transformers", "hf"),
    ("huggingface_hub", "hf"),
    ("matplotlib", "plot"),
    ("starlette", "serve"),
    ("uvicorn", "serve"),
    ("msgspec", "serve"),
    ("prometheus_client", "serve"),
    ("aiohttp", "serve"),
    ("pyarrow", "batch"),
    ("pytest", "test"),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "show which kernels a model gets, and their times on its shapes; of a model of your own (file.py:Class), "
    add("--model", metavar="MODEL", help=f"{about}its level and what an engine finds of it")
    model_arguments(parser, ["backend", "device", "dtype"])
    add("--autotune", metavar="S", default="full", help="seconds to measure for --model (default: full, 20 seconds)")
    add("--kernels", metavar="FILE", help="time kernels of any bits for --model, and write the fastest to a file")
    model_arguments(parser, ["quantization", "deterministic", "numerics"])


def run(args: argparse.Namespace) -> int:
    if args.model is not None:
        return _model(args)
    if args.numerics is not None:
        check_numerics(args.numerics, load_backend(args.backend or best_backend()))
    print(f"hibachi   {version()}")
    print(f"python    {sys.version.split()[0]}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    for package in ("numpy", "array-api-compat", "typing-extensions"):
        print(f"          {package} {version(package)}")
    print("\nbackends")
    width = max(map(len, known()), default=0)
    for name in known():
        with phase(f"starting {name}"):
            said = _backend(name)
        print(f"  {name:{width}}  {said}")
    name, why = best_and_why()
    missing = why_missing(name) if name in known() else "no backend of that name is registered"
    print(f"\ndefault for models from files: {name}, {why}{f' - {missing}' if missing else ''}")
    print("\nextras")
    for module, extra in _EXTRAS:
        with phase(f"importing {module}"):
            said = _library(module, extra)
        print(f"  {extra:{width}}  {said}")
    return 0


def _model(args: argparse.Namespace) -> int:
    """The candidates for a model's operations, timed now; of a model of one's own, what an engine finds."""
    if is_own(args.model):
        return _own(args)
    files = open_files(locate(args.model))
    arch = arch_of(files)
    if arch is None:
        raise ConfigError(
            f"{args.model} is not a decoder that hibachi describes, so its kernels are those of its own code; expected "
            f"one whose architecture `hibachi inspect` knows."
        )
    name = args.backend or best_backend()
    with phase(f"starting {name}"):
        backend = load_backend(name, device=args.device)
    check_numerics(args.numerics, backend)
    invariant = bool(args.deterministic or (args.deterministic is None and backend.keeps_promise))
    began = time.perf_counter()
    choice = settle(
        backend,
        arch,
        args.dtype,
        stored=files.dtype,
        allowed=AllowedKernels(invariant, rounding=args.quantization in ("auto", "int8")),
        budget=seconds_of(args.autotune),
        file=args.kernels,
    )
    print(f"{files.path}: {choice.dtype} on {choice.backend.fingerprint()}")
    print(f"deterministic: {'yes' if choice.backend.deterministic else 'no'}\n")
    if choice.trials:
        print(f"{_LEGEND} Measured in {time.perf_counter() - began:.0f} s.\n")
    print(
        table(choice.trials)
        or "Nothing was measured: there is nothing to choose from with the same bits (see --kernels)."
    )
    _steps(args, choice.backend, choice.dtype)
    return 0


def _steps(args: argparse.Namespace, backend: ArrayBackend, dtype: str) -> None:
    """What its steps cost, and what proposals would bring."""
    with LLM(
        args.model,
        backend=backend,
        dtype=dtype,
        quantization=args.quantization,
        deterministic=args.deterministic,
        numerics=args.numerics,
        max_num_seqs=1,
        cache_tokens=ROOM,
        overlap=False,
        autotune="off",
    ) as llm:
        print(f"\n{_checked(llm)}")
        core = llm.engine.core
        assert core is not None
        why = core.runner.cannot_speculate()
        said = told(step_costs(llm.engine)) if why is None else f"speculative_config: no proposals, as {why}"
    print(f"\n{said}")


def _checked(llm: LLM) -> str:
    """What the check of determinism comes to, in a line."""
    if not llm.deterministic:
        return "Not checked for whether other requests change a bit of one, as it is not deterministic."
    try:
        return f"Checked: {llm.selfcheck()} outputs have the same bits alone and beside others."
    except NotDeterministic as e:
        return f"Checked: {e}"


def _own(args: argparse.Namespace) -> int:
    with phase(f"opening {args.model}"):
        opened = open_own(args.model, backend=args.backend, deterministic=args.deterministic, numerics=args.numerics)
    with opened:
        engine, facts = opened.engine, opened.engine.facts
        level = (
            level_told(kind_of(engine.model)) if isinstance(engine, AutoregressiveBatchInference) else "feed-forward"
        )
        lines = [f"{args.model}: {level}"]
        lines += [f"on {facts.fingerprint}", *facts.remarks]
        if not facts.feedforward:
            lines.append(f"the same bits in any company: {'yes' if facts.deterministic else 'no'}")
            lines.append(f"tokens: {tokens_told(facts)}")
        for name, one in facts.inputs.items():
            lines.append(f"a request brings {name}: {one.shape} of {one.dtype}, per {one.per}")
    print("\n".join(lines))
    return 0


def tokens_told(facts: Facts) -> str:
    """What tokens of an engine are, and who draws them."""
    if facts.vocab_size is None:
        kind = "of any kind" if facts.token is None else f"of shape {facts.token[0]} and {facts.token[1]}"
        return f"{kind}, from the model{', which gets random numbers by seed' if facts.seeded else ''}"
    ids = f"ids below {facts.vocab_size}"
    return f"{ids if facts.codebooks is None else f'frames of {facts.codebooks} {ids}'}, drawn by the engine"


def _backend(name: str) -> str:
    """Describe a backend, whatever it raises: one broken library must not hide the state of the others."""
    if (why := why_missing(name)) is not None:
        return f"missing  {why}"
    try:
        backend = load_backend(name)
        facts, memory, remarks = backend.versions(), backend.memory(), backend.remarks()
    except Exception as e:
        return f"broken   {e}"
    room = f", {memory[0] / 2**30:.1f} of {memory[1] / 2**30:.1f} GiB free" if memory else ""
    lines = [f"ready    {facts['library']} on {facts['device']}{room}{_kernels(backend)}", *remarks]
    return "\n           ".join(lines)


def _kernels(backend: ArrayBackend) -> str:
    """The fingerprint of a deterministic run: where it is the same, bits can be expected to be."""
    try:
        found = backend.invariant().fingerprint()
    except UnsupportedOperation:
        return "\n           not deterministic"
    return f"\n           deterministic: {found}"


def _library(module: str, extra: str) -> str:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name == module:
            return f"missing  {module}: pip install '.[{extra}]' in the checkout"
        return f"broken   {module}: {e}"
    except Exception as e:
        return f"broken   {module}: {type(e).__name__}: {e}"
    return f"ready    {module} {version(module)}"
