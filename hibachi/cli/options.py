"""Options that several commands share: which model, and how to draw."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from hibachi.cli.settings import setting_argument
from hibachi.common.phases import phase
from hibachi.common.settings.settle import settings_of
from hibachi.llm.llm import LLM
from hibachi.llm.options import OPTIONS, TextOptions
from hibachi.llm.remote.settings import ModelSettings

T = TypeVar("T")
SETTINGS = settings_of(ModelSettings)
MODEL = [key for key in SETTINGS if key in OPTIONS]  # what `LLM` takes
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens")


def model_arguments(parser: argparse.ArgumentParser, keys: Iterable[str] = ("model", *MODEL)) -> None:
    """Add the options that name a model, or only some of them."""
    for key in keys:
        setting_argument(parser, SETTINGS[key])


def model_options(args: argparse.Namespace) -> TextOptions:
    """What the arguments say, as options of `LLM`."""
    options: Any = {key: getattr(args, key) for key in MODEL}
    found: TextOptions = options
    return found


def open_model(args: argparse.Namespace) -> LLM:
    with phase(f"opening {args.model}"):
        return LLM(args.model, **model_options(args))


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
