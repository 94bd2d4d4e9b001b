"""What can be seen in a model from outside its calls: what it keeps.

Evidence only: a model may count its calls. It gives a name to a fault that a trial has found.
"""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.backend.array_backend import ArrayBackend
from hibachi.common.named import place

DEPTH = 8
GENERATOR = " (a random generator)"
MOST = 20_000  # things that are looked at
SAMPLE, LARGE = 1 << 16, 1 << 24  # numbers of an array that are compared; larger arrays are weights, and passed over
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, property)


def kept(model: Any, backend: ArrayBackend) -> dict[str, Any]:
    """Everything that can change between two calls, by its name: in the model, its class and its module."""
    out: dict[str, Any] = {}
    seen: set[int] = {id(backend)}
    for name, value in _roots(model):
        for path, leaf in _leaves(value, name, backend, seen, DEPTH):
            out[path] = leaf
            if len(out) >= MOST:
                return out
    return out


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what a model keeps and has changed: of attributes, not of what is in them."""
    names = [n for n in (*after, *before) if n not in before or n not in after or before[n] != after[n]]
    return list(dict.fromkeys(n.partition("[")[0] for n in names))


def _roots(model: Any) -> Iterator[tuple[str, Any]]:
    cls = type(model)
    name = cls.__name__
    own = {**getattr(model, "__dict__", {})}
    for key, value in own.items():
        yield f"{name}.{key}", value
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__module__ == "builtins":
        return
    for key, value in {**vars(cls)}.items():
        if (
            key not in own
            and not key.startswith("__")
            and not callable(value)
            and not isinstance(value, (classmethod, staticmethod))
        ):
            yield f"{name}.{key}", value
    home = Path(place(cls.__module__)).name.removesuffix(".py").rpartition(".")[2]
    for key, value in {**vars(module)}.items():
        if not key.startswith("__") and value is not model and not isinstance(value, _OPAQUE):
            yield f"{home}.{key}", value


def _leaves(value: Any, path: str, backend: ArrayBackend, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (str, bytes, int, float, complex, bool, type(None))):
        yield path, value
        return
    if isinstance(value, _OPAQUE) or depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray) or backend.owns(value):
        yield path, _digest(value, backend)
    elif isinstance(value, dict):
        for key, each in list(value.items())[:MOST]:
            yield from _leaves(each, f"{path}[{key!r}]", backend, seen, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield path, len(value)
        for i, each in enumerate(list(value)[:MOST]):
            yield from _leaves(each, f"{path}[{i}]", backend, seen, depth - 1)
    elif isinstance(value, np.random.Generator):
        yield path + GENERATOR, repr(value.bit_generator.state)
    elif isinstance(getattr(value, "__dict__", None), dict):
        for key, each in list(vars(value).items()):
            yield from _leaves(each, f"{path}.{key}", backend, seen, depth - 1)


def _digest(array: Any, backend: ArrayBackend) -> Any:
    """Its shape and numbers; of a large one some of them."""
    try:
        if math.prod(array.shape) > LARGE:
            return tuple(array.shape)
        flat = array.reshape(-1) if isinstance(array, np.ndarray) else backend.xp.reshape(array, (-1,))
        flat = flat[:: max(1, -(-int(flat.shape[0]) // SAMPLE))]
        host = flat if isinstance(flat, np.ndarray) else backend.get(flat)
        return tuple(array.shape), np.asarray(host).tobytes()
    except Exception:  # a strange array is no reason to fail
        return tuple(array.shape)
