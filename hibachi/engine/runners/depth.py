"""Frames drawn in depth: a model's `depth` gives the logits of one codebook after another, and sees the ids of those
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.infer import leaves, mapped
from hibachi.engine.kinds import check_takes, kind_of
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.calls import Theirs
from hibachi.engine.runners.extra_inputs import parameters_of
from hibachi.engine.runners.runner import check_output
from hibachi.errors import ConfigError, InvalidModelOutput, shown

FORGOTTEN = 1e-3  # of the largest logit: what a frame that is computed twice may differ by


def sizes_of(model: Any) -> tuple[int, ...]:
    """The size of each codebook of a model that has `codebooks`: its `vocab_sizes`, else `vocab_size` for each. Raises
    ConfigError.
    """
    n, most, own = int(model.codebooks), int(model.vocab_size), getattr(model, "vocab_sizes", None)
    if own is None:
        return (most,) * n
    try:
        sizes = tuple(own)
    except TypeError:  # one number, perhaps
        sizes = ()
    if len(sizes) != n or not all(isinstance(size, (int, np.integer)) and 1 <= size <= most for size in sizes):
        raise ConfigError(
            f"{type(model).__name__}.vocab_sizes must be the size of each of {n} codebooks, integers from 1 to "
            f"vocab_size, {most}; got {shown(own)}."
        )
    return tuple(map(int, sizes))


def depth_of(model: Any, backend: ArrayBackend) -> DepthCalls | None:
    """What calls the model's `depth`; None where it returns logits of whole frames, or of single ids. Raises
    ConfigError.
    """
    sampled = getattr(model, "codebooks", None) is not None and getattr(model, "vocab_size", None) is not None
    if not sampled or not callable(getattr(model, "depth", None)) or not kind_of(model).level:
        return None
    return DepthCalls(model, backend)


class DepthCalls:
    """Calls `depth` of a model: see `hibachi.engine.ladder.DepthModel`.

    sizes: ids of each codebook. name: of the call, for errors. theirs: notes what the model raises.
    """

    sizes: tuple[int, ...]
    name: str
    theirs: Theirs

    def __init__(self, model: Any, backend: ArrayBackend) -> None:
        takes = "params" in parameters_of(model.depth)
        if iscoroutinefunction(model.depth):
            raise ConfigError(f"{type(model).__name__}.depth is called within a step: expected no `async`. Drop it.")
        check_takes(model, "depth", *["params"] * takes, "k", "given", "codes", "past")
        self.name, self.sizes, self.theirs = f"{type(model).__name__}.depth", sizes_of(model), Theirs()
        self._model, self._backend, self._takes = model, backend, takes
        self._forgets = False  # is known to begin anew with each frame
        places = range(len(self.sizes))
        self._calls: Sequence[Callable[..., Any]]
        if not backend.shapes.compiled or kind_of(model) is not ModelKind.PAGED:
            self._calls = [partial(self._called, k) for k in places]
        elif len({*self.sizes}) == 1:
            one = backend.compile(self._called)
            self._calls = [partial(one, backend.put(np.array(k, np.int32))) for k in places]
        else:
            self._calls = [backend.compile(partial(self._called, k)) for k in places]

    def _called(self, k: Any, params: Any, given: Any, codes: Array, past: Any) -> Any:
        return self._model.depth(*[params] * self._takes, k, given, codes, past)

    def given(self, out: Any, rows: int, call: str) -> Any:
        """What a step returned, to draw so many frames from. call: its name. Raises InvalidModelOutput."""

        def one(place: str, leaf: Any) -> Array:
            shape = (rows, *[None] * (len(getattr(leaf, "shape", ())) - 1))
            return self._backend.row_major(check_output(leaf, self._backend, shape, f"{call}{place}"))

        if not leaves(out):
            raise InvalidModelOutput(
                f"{call} must return what `depth` draws frames from, arrays of {rows} rows; got an empty "
                f"{type(out).__qualname__}."
            )
        return mapped(one, out)

    def logits(self, k: int, given: Any, codes: Array, past: Any) -> tuple[Array, Any]:
        """Of codebook k: logits [n, sizes[k]], and what the next one is given as `past`. codes: int32 [n, codebooks].
        Raises InvalidModelOutput, and what the model raises.
        """
        with self.theirs:
            answer = self._calls[k](self._model.params if self._takes else None, given, codes, past)
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            raise InvalidModelOutput(
                f"{self.name} must return a pair (logits, past); got {type(answer).__qualname__}. Return both, and "
                f"None for a past that is not needed."
            )
        expected, call = (codes.shape[0], self.sizes[k]), f"{self.name} of codebook {k}"
        return check_output(answer[0], self._backend, expected, call, kind="logits"), answer[1]

    def check(self, given: Any, frames: HostArray) -> None:
        """The first time, compute frames [n, codebooks] twice. Raises as `logits` does, and InvalidModelOutput for a
        model that keeps something between frames.
        """
        if self._forgets:
            return
        first, again = (self._backend.get(self._backend.float32(self._forced(given, frames))) for _ in range(2))
        finite = np.isfinite(first)
        far = np.abs(np.where(finite, again, 0) - np.where(finite, first, 0)).max(initial=0)
        if not far <= FORGOTTEN * np.abs(first[finite]).max(initial=0):
            raise InvalidModelOutput(
                f"{self.name} must begin anew with each frame, where `past` is None: expected the same logits for the "
                f"same frame twice; got others, by up to {far:.3g}. Keep what it remembers within a frame in `past` "
                f"only, write into nothing that it is given, and switch off dropout (`.eval()`)."
            )
        self._forgets = True

    def forced(self, given: Any, frames: HostArray) -> Array:
        """The logits of each codebook side by side, [n, sum of sizes], where these frames [n, codebooks] are
        drawn. Raises as `check` does.
        """
        self.check(given, frames)
        return self._forced(given, frames)

    def _forced(self, given: Any, frames: HostArray) -> Array:
        past, parts, backend = None, list[Array](), self._backend
        for k in range(len(self.sizes)):
            codes = np.where(np.arange(len(self.sizes)) < k, frames % self.sizes, 0).astype(np.int32)
            logits, past = self.logits(k, given, backend.put(codes), past)
            parts.append(backend.copy(logits))  # the next call may write to the same memory
        return backend.xp.concat(parts, axis=1)
