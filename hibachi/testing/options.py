"""The options of `hibachi conformance`, for the command, for `python -m hibachi.testing.run` and for pytest."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hibachi.errors import ConfigError

BACKEND = {
    "action": "append",
    "default": [],
    "metavar": "NAME",
    "help": "a registered name, package:object, or an array-API module; repeatable (default: all that load; with "
    "--model, the one of the model's arrays)",
}
MODEL: dict[str, dict[str, Any]] = {
    "--model": {"metavar": "NAME", "help": "package.module:Name or path/to/file.py:Name: judge this model instead"},
    "--prompt": {
        "action": "append",
        "default": [],
        "metavar": "IDS",
        "help": "token ids to try the model on, as 1,2,3; at least two prompts (default: the model's example_prompts, "
        "else ids are drawn)",
    },
    "--examples": {"metavar": "NAME", "help": "prompts or inputs of other kinds: module:NAME of a list or function"},
    "--vocab-size": {"type": int, "metavar": "N", "help": "draw ids below N (default: the model's vocab_size)"},
    "--feedforward": {"action": "store_true", "help": "forward takes one input, not a sequence of tokens"},
    "--padding-token": {
        "metavar": "TOKEN",
        "help": "pad with this only (default: zeros, then a token of the prompts, if the model takes lengths)",
    },
    "--no-padding": {"action": "store_true", "help": "do not judge the model on padded rows"},
    "--max-model-len": {"type": int, "metavar": "N", "help": "longest request (default: the model's max_model_len)"},
    "--tolerance": {
        "type": float,
        "default": 1e-3,
        "metavar": "X",
        "help": "of log-probabilities and real values, absolute and relative (default: 0.001)",
    },
}
OPTIONS = {"--backend": BACKEND, **MODEL}


def add_to(add: Callable[..., Any], options: dict[str, dict[str, Any]]) -> None:
    """add: of an argparse parser, or of a group of pytest's options."""
    for flag, how in options.items():
        add(flag, **how)


def words(args: argparse.Namespace) -> Iterator[str]:
    """The command line that gives these values."""
    for flag, how in OPTIONS.items():
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if value == how.get("default", False if how.get("action") == "store_true" else None):
            continue
        if value is True:
            yield flag
        else:
            yield from (f"{flag}={each}" for each in (value if isinstance(value, list) else [value]))


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
