"""Shapes as kernels need them: a wrong one is a ValueError, never a read outside of an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Given = tuple[Any, tuple[int, ...]]  # an array or None, and the shape that it should have


def expect(operation: str, x: Any, **given: Given) -> None:
    """All arrays that are given have their shapes. Raises ValueError."""
    if all(t is None or tuple(t.shape) == wanted for t, wanted in given.values()):
        return
    names = {name: pair for name, pair in given.items() if pair[0] is not None}
    wanted = ", ".join(f"{name} {list(shape)}" for name, (_, shape) in names.items())
    got = ", ".join(f"{name} {list(t.shape)}" for name, (t, _) in names.items())
    raise ValueError(f"{operation}: expected {wanted} as x is {list(x.shape)}; got {got}.")


def check_draw(x: Any, how: Sequence[Any], n: int) -> None:
    """n: arrays that the kernel takes; another number means that it was built from other sources."""
    if len(how) != n:
        raise ValueError(f"draw: expected {n} parameters, as the kernels have; got {len(how)}. Install hibachi anew.")
    for t in how:
        expect("draw", x, parameter=(t, (len(x),)))


def check_route(x: Any, k: int) -> None:
    if x.ndim != 2 or not 1 <= k <= x.shape[1]:
        raise ValueError(f"route: expected x [tokens, experts] and 1 <= k <= experts; got {list(x.shape)} and k = {k}.")


def check_experts(x: Any, chosen: Any, weights: Any, into: Sequence[Any], out: Sequence[Any], gated: bool) -> None:
    if x.ndim != 2 or chosen.ndim != 2 or not into or len(into) != len(out):
        raise ValueError(
            f"experts: expected x [tokens, dim], chosen [tokens, k] and as many matrices into experts as out of them; "
            f"got {list(x.shape)}, {list(chosen.shape)}, {len(into)} and {len(out)}."
        )
    (tokens, dim), each, inner = x.shape, chosen.shape[1], out[0].shape[1]
    expect("experts", x, chosen=(chosen, (tokens, each)), weights=(weights, (tokens, each)))
    for w_in, w_out in zip(into, out, strict=True):
        expect("experts", x, into=(w_in, (inner * (1 + gated), dim)), out=(w_out, (dim, inner)))


def check_convolve(past: Any, x: Any, w: Any, b: Any) -> None:
    if x.ndim != 3 or w.ndim != 2 or not len(w):
        raise ValueError(
            f"convolve: expected x [rows, tokens, dim] and w [n, dim]; got {list(x.shape)}, {list(w.shape)}."
        )
    (rows, _, dim), width = x.shape, len(w)
    expect("convolve", x, past=(past, (rows, width - 1, dim)), w=(w, (width, dim)), b=(b, (dim,)))


def check_scan(
    state: Any, x: Any, dt: Any, gate: Any, write: Any, read: Any, decay: Any, skip: Any
) -> tuple[int, int, int, int]:
    """Returns rows, tokens, dim and the size of a channel's state."""
    if x.ndim != 3 or write.ndim != 3:
        raise ValueError(
            f"selective_scan: expected x [rows, tokens, dim] and write [rows, tokens, n]; got {list(x.shape)}, "
            f"{list(write.shape)}."
        )
    (rows, tokens, dim), size = x.shape, write.shape[2]
    whole, narrow = (rows, tokens, dim), (rows, tokens, size)
    expect("selective_scan", x, dt=(dt, whole), gate=(gate, whole), write=(write, narrow), read=(read, narrow))
    expect("selective_scan", x, state=(state, (rows, size, dim)), decay=(decay, (size, dim)), skip=(skip, (dim,)))
    return rows, tokens, dim, size


def check_attend(q: Any, k: Any, v: Any, kv_heads: int, k_dim: int, v_dim: int, x: Any) -> None:
    """x: `StepInputs`."""
    if q.ndim != 3 or q.shape[1] % kv_heads:
        raise ValueError(f"attend: expected q [tokens, a multiple of {kv_heads} heads, {k_dim}]; got {list(q.shape)}.")
    tokens, rows = q.shape[0], x.block_table.shape[0]
    sizes = dict(q=(q, (tokens, q.shape[1], k_dim)), k=(k, (tokens, kv_heads, k_dim)), v=(v, (tokens, kv_heads, v_dim)))
    expect("attend", q, **sizes, slot=(x.slot, (tokens,)), pos=(x.pos, (tokens,)), cu_q=(x.cu_q, (rows + 1,)))
