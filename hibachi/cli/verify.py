"""find out whether a model is safe to batch, and what is wrong if it is not

Everything about a request's calls is changed, one thing at a time: it is made
again, beside others, padded, in chunks, in other blocks of the cache. A table
says what stayed equal; the pattern of what did not names the fault. MODEL is
pkg:Class or file.py:Class for a model of your own (made as `hibachi generate`
makes it), or what `hibachi generate` takes: a folder, a .gguf file, tiny.

Exit status: 0 no fault, 1 a fault, 2 the model or an option cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.discover import resolve_or_best
from hibachi.cli.options import model_arguments
from hibachi.common.named import is_named, object_named
from hibachi.common.phases import phase
from hibachi.errors import ConfigError, HibachiError
from hibachi.llm.model.registry import load_model
from hibachi.llm.users_model import model_named
from hibachi.testing.verify.report import verify
from hibachi.testing.verify.subject import CHUNKS, SIZES, Subject, prompts_in

USAGE = 2


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="MODEL",
        help="model to judge: pkg:Class, file.py:Class, a folder, a file, or tiny",
    )
    model_arguments(parser, ["backend"])
    add(
        "--deterministic",
        action="store_true",
        help="make the model on deterministic kernels and treat rounding as a fault",
    )
    add("--exact", action="store_true", help="treat a difference by rounding as a fault, too")
    add(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest rounding, relative to the largest output (default: by dtype)",
    )
    add("--json", action="store_true", help="write JSON, for programs")
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="IDS",
        help="token ids to try the model on, as 1,2,3; repeatable",
    )
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="file of such prompts, one a line; JSON lists for other tokens",
    )
    add("--examples", metavar="NAME", help="module:NAME of a list or function of other prompts or inputs")
    add("--vocab-size", type=int, metavar="N", help="draw ids below N (default: the model's vocab_size)")
    add(
        "--feedforward",
        action="store_true",
        help="treat the model as feed-forward: one input, not a sequence of tokens",
    )
    add("--padding-token", metavar="TOKEN", help="pad with this token (default: several, if the model takes lengths)")
    add("--no-padding", action="store_true", help="never pad rows")
    add("--batch", type=numbers, default=SIZES, metavar="N,...", help=f"rows in a batch (default: {shown(SIZES)})")
    add("--chunks", type=numbers, default=CHUNKS, metavar="N,...", help=f"tokens in a chunk (default: {shown(CHUNKS)})")
    add("--max-model-len", type=int, metavar="N", help="most tokens of a request (default: the model's)")
    add("--dtype", metavar="NAME", help="dtype to compute in, for a folder or file (default: float32)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the ids that are drawn (default: 0)")


def run(args: argparse.Namespace) -> int:
    try:
        with phase(f"opening {args.model}"):
            subject = _subject(args)
    except (HibachiError, OSError) as e:
        print(f"hibachi: {e}", file=sys.stderr)
        return USAGE
    with phase(f"verifying {args.model}"):
        report = verify(subject)
    if args.json:
        print(json.dumps({"model": args.model, **report.as_json()}, indent=2))
    else:
        print("\n".join(report.lines()))
    return 0 if report.good else 1


def _subject(args: argparse.Namespace) -> Subject:
    given: list[Any] = [ids(p) for p in args.prompt]
    if sum(map(bool, (given, args.prompts, args.examples))) > 1:
        raise ConfigError("Pass one of --prompt, --prompts and --examples; got more.")
    if args.prompts:
        given = prompts_in(args.prompts)
    backend = _backend(args)
    if is_named(args.model):
        model: Any = model_named(args.model, backend)
    else:
        model = load_model(args.model, backend, dtype=args.dtype, max_model_len=args.max_model_len)
        backend = backend or model.backend
    return Subject(
        model,
        backend,
        name=args.model,
        examples=object_named(args.examples) if args.examples else given or None,
        vocab_size=args.vocab_size,
        feedforward=args.feedforward or None,
        padding=not args.no_padding,
        padding_token=token(args.padding_token),
        max_model_len=args.max_model_len,
        tolerance=args.tolerance,
        exact=args.exact or args.deterministic,
        sizes=args.batch,
        chunks=args.chunks,
        seed=args.seed,
    )


def _backend(args: argparse.Namespace) -> ArrayBackend | None:
    if args.backend is None and not args.deterministic:
        return None
    backend = resolve_or_best(args.backend or ("numpy" if is_named(args.model) else None))
    return backend.invariant() if args.deterministic else backend


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def shown(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--prompt takes token ids with commas between them, as 1,2,3; got {text!r}.") from None


def token(text: str | None) -> Any:
    """A number for a scalar token, else an array (1, *tok)."""
    if text is None:
        return None
    try:
        values = [float(part) if set(part) & set(".en") else int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--padding-token takes a number, or several as 0,0,0; got {text!r}.") from None
    return values[0] if len(values) == 1 else np.array([values])
