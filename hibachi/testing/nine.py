"""How the conformance suite holds a backend that has the nine operations only."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from hibachi.backend.array_backend import ArrayBackend, array_type
from hibachi.backend.nine import OPERATIONS, NineBackend
from hibachi.errors import ConfigError

MAKERS = "asarray", "array", "tensor"  # what libraries call the function that makes an array of a NumPy array


class NineHandle:
    """The object itself, and what a judge needs besides: `put`, `get` and `owns`. No engine gets this handle.

    Raises ConfigError where no way is found to make an array of the library.
    """

    def __init__(self, backend: NineBackend) -> None:
        self.ops: Any = backend.ops
        self.name: str = backend.name
        self._make = _maker(self.ops)
        self._type = array_type(self._make(np.zeros((2, 3), np.float32)))
        self.versions: Callable[[], dict[str, str]] = backend.versions
        for name in OPERATIONS:
            setattr(self, name, getattr(self.ops, name))
        self._check_get()

    def _check_get(self) -> None:
        """Raises ConfigError where NumPy cannot take the arrays."""
        example = np.array([[1.5, -2.0, 0.0], [4.0, 5.0, 6.0]], np.float32)
        try:
            got = self.get(self.put(example))
            if got.dtype == example.dtype and np.array_equal(got, example):
                return
            why = f"{got.dtype} of shape {got.shape}"
        except Exception as e:
            why = f"{type(e).__name__}: {e}"
        raise ConfigError(
            f"The suite must read arrays of {self.name}: expected numpy.asarray, or a method `get(array)` beside the "
            f"nine operations, to give the numbers of {example.dtype} and shape {example.shape} that were put in; got "
            f"{why}. Add `get`, which no engine calls."
        )

    def put(self, a: Any, dtype: str | None = None) -> Any:
        a = np.array(a, dtype)  # a copy, as the library may take the memory
        return self._make(a)

    def get(self, t: Any) -> Any:
        own = getattr(self.ops, "get", None)
        return np.asarray(own(t) if callable(own) else t)

    def owns(self, t: Any) -> bool:
        return isinstance(t, self._type)


def besides() -> str:
    """What levels 1 and 2 need that the nine operations are not."""
    own = {n for n, f in vars(ArrayBackend).items() if callable(f) and not n.startswith("_")} - {*OPERATIONS}
    return (
        f"which serve level 0 and feed-forward, and were judged. Levels 1 and 2 need a hibachi.ArrayBackend, which "
        f"derives the rest from an array-API namespace `xp`: {', '.join(sorted(own))}."
    )


def _maker(ops: Any) -> Callable[[Any], Any]:
    """A function that makes an array of the library of a NumPy array: the object's own `put`, or the library's."""
    tried = []
    for make in _makers(ops):
        try:
            if tuple(ops.shape(make(np.zeros((2, 3), np.float32)))) == (2, 3):
                return make
        except Exception as e:
            tried.append(f"{type(e).__name__}: {e}")
    if tried and callable(getattr(ops, "put", None)):
        raise ConfigError(
            f"The suite must make arrays of {ops.name}: expected that its `put` takes a NumPy array of float32 and "
            f"shape (2, 3); got {tried[0]}. Mend it, or what the library needs."
        )
    why = f" ({tried[0]})" if tried else ""
    raise ConfigError(
        f"The suite must make arrays of {ops.name}: expected a method `put(numpy_array)` beside the nine operations, "
        f"or a library of that name with `asarray`; got neither{why}. Add `put`, which no engine calls."
    )


def _makers(ops: Any) -> Iterator[Callable[[Any], Any]]:
    if callable(own := getattr(ops, "put", None)):
        yield own
        return
    home = sys.modules.get(type(ops).__module__)
    modules = [m for m in vars(home).values() if isinstance(m, ModuleType)] if home else []
    for name in (ops.name, f"{ops.name}.numpy", f"{ops.name}.core"):
        try:
            modules.append(importlib.import_module(name))
        except Exception:
            continue
    for module in sorted(modules, key=lambda m: m is np):  # NumPy's own last, as every program imports it
        yield from (make for name in MAKERS if callable(make := getattr(module, name, None)))
