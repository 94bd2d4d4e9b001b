"""MLX with the names and keywords of the array API that the core uses and MLX lacks. All else is MLX's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from hibachi.backend.array_backend import Array

bool = mx.bool_


def _anywhere(make: Callable[..., Array]) -> Callable[..., Array]:
    """device= means nothing: MLX places what is computed, not arrays."""
    return lambda *args, device=None, **more: make(*args, **more)


def _of_any_size(reduce: Callable[..., Array]) -> Callable[..., Array]:
    """With nothing to reduce, MLX 0.32 leaves the result's memory as it was, if x lies in other ways than this one."""
    return lambda x, *args, **more: reduce(x if x.size else mx.zeros(x.shape, dtype=x.dtype), *args, **more)


zeros, ones, full = _anywhere(mx.zeros), _anywhere(mx.ones), _anywhere(mx.full)
arange, asarray = _anywhere(mx.arange), _anywhere(mx.asarray)
all, any, sum, prod = _of_any_size(mx.all), _of_any_size(mx.any), _of_any_size(mx.sum), _of_any_size(mx.prod)


def astype(x: Array, dtype: Any, copy: Any = True) -> Array:
    return x.astype(dtype)


def clip(x: Array, min: Any = None, max: Any = None) -> Array:
    return mx.clip(x, min, max)


def argsort(x: Array, axis: int = -1, descending: Any = False, stable: Any = True) -> Array:
    if not descending:
        return mx.argsort(x, axis=axis)
    last = x.shape[axis] - 1  # equal ones must stay in their order
    return last - mx.flip(mx.argsort(mx.flip(x, axis=axis), axis=axis), axis=axis)


def sort(x: Array, axis: int = -1, descending: Any = False, stable: Any = True) -> Array:
    return mx.flip(mx.sort(x, axis=axis), axis=axis) if descending else mx.sort(x, axis=axis)


def __getattr__(name: str) -> Any:
    return getattr(mx, name)
