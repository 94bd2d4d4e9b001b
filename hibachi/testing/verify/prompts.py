"""The prompts that a model is tried on: drawn, or given by the user."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.engine.prompts import dtype_of
from hibachi.errors import ConfigError

MOST = 6  # examples that are used
HOW = (
    "Give vocab_size (--vocab-size N), and ids are drawn; or two different prompts or more: --prompt 1,2,3 --prompt 4, "
    "--examples package.module:NAME, or an attribute or method `example_prompts` of the model"
)
HOW_INPUTS = "Give --examples package.module:NAME, or an attribute or method `example_inputs` of the model"


def draw(ids: int, length: int, seed: int = 0) -> HostArray:
    """A prompt of `length` random ids below `ids`."""
    return np.random.default_rng(seed).integers(ids, size=length)


def given(examples: Iterable[Any], backend: ArrayBackend, how: str) -> list[HostArray]:
    """The different ones of a user's examples, on the host, the shortest first. Raises ConfigError."""
    found: list[HostArray] = []
    for example in examples:
        host = np.asarray(backend.get(example) if backend.owns(example) else example)
        host = host.astype(dtype_of(example, host, backend), copy=False)
        if host.dtype.kind not in "iufb" or not host.ndim or not len(host):
            raise ConfigError(f"An example is an array or list of numbers, one at least; got {example!r:.80}. {how}.")
        if not any(same(host, other) for other in found):
            found.append(host)
    if len(found) < 2:
        raise ConfigError(
            f"One example must not change another, so at least two different ones are needed; got {len(found)}. {how}."
        )
    return sorted(found[:MOST], key=len)


def same(a: HostArray, b: HostArray) -> bool:
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=True)


def begins(row: HostArray, prompt: HostArray) -> bool:
    """Does the row begin with the prompt, cast as an engine does?"""
    return len(row) >= len(prompt) and same(row[: len(prompt)], prompt.astype(row.dtype))
