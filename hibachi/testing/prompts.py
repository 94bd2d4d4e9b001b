"""The prompts that a user's own model is tried on: drawn, or given by the user and made longer by the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hibachi.errors import ConfigError
from hibachi.tensor.array_backend import ArrayBackend, HostArray

LENGTHS = 3, 3, 7, 2, 7, 10, 17  # of the prompts that are drawn: some alike, some not
MOST = 6  # examples that are used
HOW = (
    "Give vocab_size (--vocab-size N), and ids are drawn; or two different prompts or more: --prompt 1,2,3 --prompt 4, "
    "--examples package.module:NAME, or an attribute or method `example_prompts` of the model"
)
HOW_INPUTS = "Give --examples package.module:NAME, or an attribute or method `example_inputs` of the model"


def draw(ids: int, length: int, seed: int = 0) -> HostArray:
    """A prompt of `length` random ids below `ids`."""
    return np.random.default_rng(seed).integers(ids, size=length)


def drawn(ids: int, most: int) -> list[HostArray]:
    """Prompts of at most `most` tokens."""
    return [draw(ids, min(length, most), seed) for seed, length in enumerate(LENGTHS)]


def given(examples: Iterable[Any], backend: ArrayBackend, how: str) -> list[HostArray]:
    """The different ones of a user's examples, on the host, the shortest first. Raises ConfigError."""
    found: list[HostArray] = []
    for example in examples:
        host = np.asarray(backend.get(example) if backend.owns(example) else example)
        if host.dtype.kind not in "iufb" or not host.ndim or not len(host):
            raise ConfigError(f"An example is an array or list of numbers, one at least; got {example!r:.80}. {how}.")
        if not any(same(host, other) for other in found):
            found.append(host)
    if len(found) < 2:
        raise ConfigError(
            f"One example must not change another, so at least two different ones are needed; got {len(found)}. {how}."
        )
    return sorted(found[:MOST], key=len)


def grown(first: HostArray, second: HostArray, room: int, ask: Callable[[int], Any]) -> list[HostArray]:
    """`first` with the 1, 3 or so many tokens that a model adds to it that it is as long as `second`.

    What a model says to a prompt of its own kind makes another one, whatever the tokens are. ask(n): n tokens, or
    fewer. room: most tokens to add.
    """
    more = sorted({1, 3, len(second) - len(first)} & {*range(1, room + 1)})
    new = np.array(ask(max(more))) if more else first[:0]
    if new.shape[1:] != first.shape[1:]:
        return []
    return [np.concatenate([first, new[:k].astype(first.dtype)]) for k in more if k <= len(new)]


def same(a: HostArray, b: HostArray) -> bool:
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=True)


def begins(row: HostArray, prompt: HostArray) -> bool:
    """Does the row begin with the prompt, cast as an engine does?"""
    return len(row) >= len(prompt) and same(row[: len(prompt)], prompt.astype(row.dtype))
