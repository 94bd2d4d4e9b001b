"""Paged attention by PyTorch's own kernel, `torch.nn.attention.varlen` (FlashAttention; Dao 2023).

What it takes depends on the version of PyTorch, the processor and the implementation that is active: FlashAttention 2,
which PyTorch brings along, wants cache blocks of a multiple of 256 positions. So it is tried once for each kind of
call, on a small problem, and compared with the kernel that gathers blocks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from hibachi.backend.array_backend import Array, ArrayBackend
from hibachi.backend.layout import StepInputs

Kernel: TypeAlias = "Callable[..., Array]"  # (q, keys, values, x, *, scale, window) -> out

CLOSE = 0.05  # difference from the gathering kernel, for queries, keys and values of size 1
LARGEST = 256  # head dimension


def varlen_attn() -> Callable[..., Array] | None:
    """PyTorch's function, or None if this version has none that reads a paged cache."""
    try:
        from torch.nn.attention.varlen import varlen_attn as found
    except ImportError:
        return None
    return found if "block_table" in inspect.signature(found).parameters else None


def paged(varlen: Callable[..., Array], *, keys_end: bool) -> Kernel:
    """The kernel as a function of a step. keys_end: it wants to be told where keys end, though the table says it."""

    def attend(
        q: Array, keys: Array, values: Array, x: StepInputs[Array], *, scale: float, window: int | None
    ) -> Array:
        (tiles, tile), rows = x.tile_q.shape, x.cu_q.shape[0] - 1
        # As every row has at least one tile, the longest has no more than what the others leave.
        longest = 1 if tile == 1 else min(q.shape[0] - rows + 1, (tiles - rows + 1) * tile)
        if window is not None:
            seen = (window - 1, 0)
        else:
            seen = (-1, 0) if longest > 1 else (-1, -1)  # a single query sees all; so it is told, as that is faster
        return varlen(
            q,
            keys,
            values,
            x.cu_q,
            x.cu_q if keys_end else None,
            longest,
            x.block_table.shape[1] * keys.shape[1],
            scale=scale,
            window_size=seen,
            enable_gqa=True,
            seqused_k=x.kv_len,
            block_table=x.block_table,
        )

    return attend


def find(
    varlen: Callable[..., Array] | None,
    backend: ArrayBackend,
    gather: Callable[..., Any],
    heads: int,
    keys: Array,
    values: Array,
    *,
    window: bool,
) -> Kernel | str:
    """A kernel for such a cache, or why there is none. gather: `attend` of the class that gathers blocks."""
    block_size, kv_heads, dim = keys.shape[1:]
    if varlen is None:
        return "this PyTorch has no varlen_attn with a block table"
    if keys.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {str(keys.dtype).removeprefix('torch.')}"
    if values.shape[3] != dim or dim % 8 or dim > LARGEST:
        return f"it takes heads of one size, a multiple of 8 up to {LARGEST}, not {dim} and {values.shape[3]}"
    why = ""
    for keys_end in (True, False):
        kernel = paged(varlen, keys_end=keys_end)
        try:
            worst = np.max(
                [
                    _difference(kernel, backend, gather, heads, kv_heads, dim, block_size, keys.dtype, window, q)
                    for q in ([4, 1], [1, 1])
                ]
            )
        except Exception as e:
            if backend.fatal(e):
                raise
            why = why or f"{type(e).__name__}: {str(e).partition(chr(10))[0]:.120}"
            continue
        if worst <= CLOSE:
            return kernel
        why = f"its result differs by {worst:.3g} from that of gathered blocks"
    return f"cache blocks of {block_size} positions: {why}"


def _difference(
    kernel: Kernel,
    backend: ArrayBackend,
    gather: Callable[..., Any],
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    dtype: Any,
    window: bool,
    q: list[int],
) -> float:
    """The largest difference of the two in a step of two rows with this many queries. The kernel also finds NaN behind
    what the rows have written; if that comes through, the answer is NaN.
    """
    rng = np.random.default_rng(0)
    name = str(dtype).removeprefix("torch.")
    start, seg = [block_size, 2], [0] * q[0] + [1] * q[1]
    pos = [*range(start[0], start[0] + q[0]), *range(start[1], start[1] + q[1])]
    tile = max(q)
    places = list(range(q[0])) + [tile + i for i in range(q[1])]  # of the tokens in the tiles
    tiles = np.zeros(2 * tile, np.int32)
    tiles[places] = np.arange(sum(q))
    table = np.array([[3, 1], [2, 0]])

    def index(*values: Any) -> Array:
        return backend.put(np.array(values, np.int32))

    def random(*shape: int) -> Array:
        return backend.put(rng.normal(size=shape).astype(np.float32), name)

    x = StepInputs(
        tok=index(*pos),
        pos=index(*pos),
        slot=index(
            *(table[row, at // block_size] * block_size + at % block_size for row, at in zip(seg, pos, strict=True))
        ),
        seg=index(*seg),
        row=index(0, 1),
        start=index(*start),
        kv_len=index(start[0] + q[0], start[1] + q[1]),
        cu_q=index(0, q[0], sum(q)),
        block_table=index(*table),
        last=index(q[0] - 1, sum(q) - 1),
        tile_q=index(*tiles.reshape(2, tile)),
        tile_row=index(0, 1),
        tile_of=index(*places),
    )
    cache = tuple(random(4, block_size, kv_heads, dim) for _ in range(2))
    tokens, scale, width = sum(q), dim**-0.5, 3 if window else None
    queries, k, v = random(tokens, heads, dim), random(tokens, kv_heads, dim), random(tokens, kv_heads, dim)
    expected, (keys, values) = gather(queries, k, v, cache, x, scale=scale, window=width)
    for half in keys, values:
        half[0], half[1, q[0] :], half[2, start[1] + q[1] :] = math.nan, math.nan, math.nan
    got = kernel(queries, keys, values, x, scale=scale, window=width)
    return float((got.float() - expected.float()).abs().max())
