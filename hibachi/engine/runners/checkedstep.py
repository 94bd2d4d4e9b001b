"""`model.step` with a check of the cache that it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from hibachi.backend.array_backend import Array, ArrayBackend, LayerCache
from hibachi.backend.layout import StepInputs
from hibachi.errors import InvalidModelOutput


@dataclass(frozen=True)
class CheckedStep:
    """`model.step` with a check of the cache that it returns. Wrappers of one model are equal, so that it is compiled
    once.

    Raises InvalidModelOutput. Only types and shapes are checked; a compiled step is checked once, when it is traced.
    Lists are copied both ways: the model may keep and change its own.
    """

    step: Callable[..., Any]
    backend: ArrayBackend
    name: str

    @property
    def __name__(self) -> str:  # of the program, where a library compiles it
        return "step"

    def __call__(
        self, params: Any, cache: Sequence[LayerCache], x: StepInputs[Array]
    ) -> tuple[Array, list[LayerCache]]:
        result = self.step(params, list(cache), x)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise self._wrong("a pair (outputs, cache)", result)
        out, new = result
        if not isinstance(new, (tuple, list)) or len(new) != len(cache):
            raise self._wrong(f"the cache as a list of {len(cache)} layers, as it was given", new)
        if all(map(is_, new, cache)):  # written into where it lies
            return out, list(new)
        return out, [
            layer if layer is old or self._alike(old, layer) else self._like(old, layer, i)
            for i, (old, layer) in enumerate(zip(cache, new, strict=True))
        ]

    def _alike(self, old: LayerCache, new: LayerCache) -> bool:
        """Quick check that accepts nearly all layers: pairs of arrays of the same types and shapes."""
        if type(new) is not tuple or type(old) is not tuple or len(new) != 2 or len(old) != 2:
            return False
        (a, b), (c, d), unfit = new, old, self.backend.unfit
        try:
            return (a is c or (type(a) is type(c) and a.shape == c.shape and unfit(a) is None)) and (
                b is d or (type(b) is type(d) and b.shape == d.shape and unfit(b) is None)
            )
        except AttributeError:  # not even arrays: `_like` says what is wrong
            return False

    def _like(self, old: LayerCache, new: LayerCache, i: int) -> LayerCache:
        """Check that `new` has the kind and shape of `old`, and return it in the same kind of tuple."""
        if isinstance(old, (tuple, list)):
            if not isinstance(new, (tuple, list)) or len(new) != len(old):
                raise self._wrong(f"layer {i} of the cache as {len(old)} arrays, as it was given", new)
            return type(old)([self._like(a, b, i) for a, b in zip(old, new, strict=True)])
        if self.backend.owns(old):
            if not self.backend.owns(new) or self.backend.unfit(new) is not None or new.shape != old.shape:
                raise self._wrong(f"an array of {self.backend.name} of shape {tuple(old.shape)} in layer {i}", new)
        elif type(new) is not type(old) or getattr(new, "shape", None) != getattr(old, "shape", None):
            raise self._wrong(f"layer {i} of the cache as {type(old).__qualname__}, as it was given", new)
        return new

    def _wrong(self, expected: str, got: Any) -> InvalidModelOutput:
        what = type(got).__qualname__
        if hasattr(got, "shape"):
            what += f" of shape {tuple(got.shape)}"
        elif isinstance(got, (tuple, list)):
            what += f" of {len(got)}"
        return InvalidModelOutput(
            f"{self.name} must return {expected}; got {what}. Return (outputs, [what `attend` returned, or the new "
            f"state, for each layer])."
        )
