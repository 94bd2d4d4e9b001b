"""Options that several commands share: which model, and how to draw."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from hibachi.common.phases import phase
from hibachi.llm.llm import LLM, QUANTIZATIONS

T = TypeVar("T")
BACKEND = (
    "array library: numpy, torch, jax, mlx or an installed one (default: the first of torch, jax, numpy that imports)"
)
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens")


def model_arguments(parser: argparse.ArgumentParser, default: str | None = "tiny") -> None:
    """Add the options that name a model. default: None means the command finds a model itself."""
    add = parser.add_argument
    tiny = "tiny, which ships (default)" if default else "tiny, which ships (default: what `make chat` fetched)"
    add(
        "--model",
        default=default,
        metavar="MODEL",
        help=f"a folder in Hugging Face layout, a .gguf file, org/name on the Hub, or {tiny}",
    )
    add("--backend", metavar="NAME", help=BACKEND)
    add("--device", metavar="NAME", help="device in the backend's own notation, for example cuda:0")
    add("--dtype", metavar="NAME", help="dtype to compute in (default: the checkpoint's, else float32)")
    quantization_argument(parser)
    gguf_unpack_argument(parser)
    add(
        "--autotune",
        metavar="S",
        help="take the fastest kernels of the same bits (with --kernels: of any): 1s, full, off (default: off)",
    )
    add("--kernels", metavar="FILE", help="use the kernels and dtype that a file names; with --autotune: write it")
    deterministic_argument(parser)
    numerics_argument(parser)
    add("--max-model-len", type=int, metavar="N", help="most tokens of a request (default: the model's)")


def open_model(args: argparse.Namespace) -> LLM:
    with phase(f"opening {args.model}"):
        return LLM(
            args.model,
            backend=args.backend,
            device=args.device,
            dtype=args.dtype,
            quantization=args.quantization,
            gguf_unpack=args.gguf_unpack,
            autotune=args.autotune,
            kernels=args.kernels,
            deterministic=args.deterministic,
            numerics=args.numerics,
            max_model_len=args.max_model_len,
        )


def quantization_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="store matrices in eight or four bits: less memory and time; auto: in eight where it is faster here "
        "(default: none)",
    )


def gguf_unpack_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gguf-unpack",
        action="store_true",
        help="multiply a GGUF file's Q4_0 and Q8_0 in the dtype, not as they are",
    )


def deterministic_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="give each request the same bits whatever shares the batch "
        "(default: on a CPU, with hibachi's kernels or with torch)",
    )


def numerics_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--numerics", metavar="NAME", help="refuse to compute bits of another name: docs/determinism.md (default: any)"
    )


def sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int, temperature: str = "1") -> None:
    """Add sampling options; the model's own hold for the rest. temperature: the default where the model has none."""
    add = parser.add_argument
    limit = f"limit of new tokens (default: {max_tokens})"
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help=limit)
    add(
        "--temperature",
        type=float,
        metavar="T",
        help=f"sampling temperature; 0 means greedy (default: the model's, or {temperature})",
    )
    add("--top-k", type=int, metavar="K", help="draw from the K most likely tokens")
    add("--top-p", type=float, metavar="P", help="draw from the most likely tokens with this share of the probability")
    add("--min-p", type=float, metavar="P", help="drop tokens below this share of the most likely one's probability")
    add(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="penalty for tokens that occurred before; above 1 means fewer repeats",
    )
    add("--seed", type=int, metavar="N", help="random seed; the same seed gives the same text")


def told(stream: Iterable[T]) -> Iterator[T]:
    """The items of a stream. A terminal shows how long the first item takes."""
    items = iter(stream)
    with phase("computing the prompt"):
        first = next(items, None)
    if first is not None:
        yield first
        yield from items


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that the arguments give."""
    return {name: value for name in _PARAMETERS if (value := getattr(args, name)) is not None}
