"""What a model may add to attention's scores: a bias by distance, and sinks. For `attend` of every backend."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class _Library(Protocol):
    """What is needed of a backend."""

    name: str
    xp: Any

    def owns(self, t: Any) -> bool: ...
    def peek(self, t: Any) -> Any: ...
    def float32(self, x: Any) -> Any: ...


def terms(b: _Library, bias: Any, sinks: Any, heads: int) -> tuple[Any, Any]:
    """Both as float32, or None where they are None; `ArrayBackend.attend` says what they are.

    Raises ValueError for another shape or dtype, an array of another library, and numbers that are not finite, where
    they can be seen (`ArrayBackend.peek`).
    """
    if bias is not None:
        mend = "Repeat the last distance if it is to hold beyond"
        bias = _term(b, "bias", bias, f"[{heads}, at least 2]: of each query head, by distance", mend)
        if bias.ndim != 2 or bias.shape[0] != heads or bias.shape[1] < 2:
            raise _refusal("bias", f"[{heads}, at least 2]: of each query head, by distance", list(bias.shape), mend)
    if sinks is not None:
        mend = "Leave sinks out where there are none"
        sinks = _term(b, "sinks", sinks, f"[{heads}]: of each query head", mend)
        if tuple(sinks.shape) != (heads,):
            raise _refusal("sinks", f"[{heads}]: of each query head", list(sinks.shape), mend)
    return bias, sinks


def _term(b: _Library, name: str, t: Any, shape: str, mend: str) -> Any:
    if not b.owns(t):
        kind = f"{type(t).__module__}.{type(t).__qualname__}"
        raise _refusal(name, f"an array of {b.name}, {shape}", kind, "Make it with backend.put(numpy_array)")
    if not b.xp.isdtype(t.dtype, "real floating"):
        raise _refusal(name, f"floating-point numbers {shape}", f"dtype {t.dtype}", "Convert it, to float32 at best")
    seen = b.peek(t)
    if seen is not None and not np.isfinite(seen).all():
        at = np.argwhere(~np.isfinite(seen))[0].tolist()
        raise _refusal(name, "finite numbers", f"{seen[tuple(at)]} at {at}", mend)
    return b.float32(t)


def _refusal(name: str, expected: str, got: Any, mend: str) -> ValueError:
    return ValueError(f"attend: expected {name} to be {expected}; got {got}. {mend}.")


def by_distance(xp: Any, bias: Any, distance: Any, kv_heads: int) -> Any:
    """What a bias [heads, n] adds to the scores of queries at distances [N, tile, span] from positions.

    [N, kv_heads, heads / kv_heads, tile, span]. Entry d is for distance d, and beyond the last one it goes on in a
    straight line through the last two. What is ahead of a query, and hidden, gets any finite number.
    """
    heads, last = bias.shape[0], bias.shape[1] - 1
    slope = xp.reshape(bias[:, last] - bias[:, last - 1], (heads, 1))
    flat = xp.reshape(distance, (-1,))
    beyond = xp.astype(xp.clip(flat - last, min=0), xp.float32)
    found = xp.take(bias, xp.clip(flat, min=0, max=last), axis=1) + slope * beyond
    found = xp.reshape(found, (kv_heads, heads // kv_heads, *distance.shape))
    return xp.permute_dims(found, (2, 0, 1, 3, 4))
