"""A paged cache under test beside a slow, obvious one: a dictionary from position to key and value."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from hibachi import Paged, StepInputs

ARRAYS = ("bias", "sinks")  # arguments of attend that are arrays, as q is


@cache
def compiled(backend: Any, special: tuple[tuple[str, Any], ...], more: tuple[str, ...]) -> Any:
    """Attention as a step of the engine runs it. special: scale, window or softcap, where there is one. more: names of
    the arrays that follow the five arguments that there always are."""

    def attend(*args: Any) -> Any:
        return backend.attend(*args[:5], **dict(special), **dict(zip(more, args[5:], strict=True)))

    return backend.compile(attend, donate=(3,))


class Row(NamedTuple):
    """What one request computes in a step: `q` tokens after `start` cached ones, kept in `blocks`."""

    start: int
    q: int
    blocks: tuple[int, ...]


class Memory:
    """One layer's keys and values. `step` runs attention on the backend and the slow way, and compares."""

    def __init__(self, backend: Any, *, heads: int = 4, kv_heads: int = 2, k_dim: int = 8, v_dim: int = 6) -> None:
        self.backend, self.block_size, self.blocks = backend, 4, 8
        self.heads, self.kv_heads, self.k_dim, self.v_dim = heads, kv_heads, k_dim, v_dim
        self.random = np.random.default_rng(0)
        spec = Paged(kv_heads, k_dim, v_dim)
        self.cache = backend.make_cache(spec, blocks=self.blocks, block_size=self.block_size, rows=4, dtype="float32")
        self.slow: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # slot -> key, value

    def dirty(self, value: float = 100.0) -> Memory:
        """Every position of every block holds `value`, left behind by an earlier request."""
        row = Row(0, self.blocks * self.block_size, tuple(range(self.blocks)))
        self.attend(step_inputs([row], self.block_size, tile=4, pad=0), lambda *shape: np.full(shape, value))
        return self

    def step(
        self,
        rows: list[Row],
        *,
        size: float = 1.0,
        tile: int = 4,
        pad: int = 0,
        padding: float = 1.0,
        sick: int = 0,
        nan: tuple[int, ...] = (),
        **special: Any,
    ) -> None:
        """Random queries, keys and values for the new tokens of all rows. AssertionError: attention is wrong.

        special: scale, window, softcap, bias and sinks of `attend`, the last two as NumPy's arrays. pad: so many
        padding tokens, rows and blocks follow; padding: their values are multiplied by it. sick: so many of the first
        tokens are NaN, and nothing is asked of them. nan: new tokens whose values are NaN.
        """
        host, real = step_inputs(rows, self.block_size, tile, pad), sum(row.q for row in rows)

        def draw(*shape: int) -> np.ndarray:
            values = size * self.random.normal(size=shape)
            values[real:] *= padding
            values[:sick] = np.nan
            if shape[1:] == (self.kv_heads, self.v_dim):
                values[list(nan)] = np.nan
            return values

        q, k, v, got = self.attend(host, draw, **special)
        self.slow |= {int(slot): (k[t], v[t]) for t, slot in enumerate(host["slot"][:real])}
        want = self.slow_attention(rows, q, **special)
        # Loose enough for a library that multiplies float32 with the precision of bfloat16.
        off = np.where(np.isnan(want) & np.isnan(got[:real]), 0, np.abs(got[:real] - want)).max(axis=(1, 2))
        bad = [f"token {t} of {rows}" for t in np.flatnonzero(~(off <= 0.02 * size)) if t >= sick]
        assert not bad, f"attend differs from slow attention by up to {off[sick:].max():.3g} ({'; '.join(bad[:3])})"

    def attend(self, host: dict[str, np.ndarray], draw: Any, **special: Any) -> tuple[np.ndarray, ...]:
        """Queries, keys and values of the new tokens, made by draw(*shape), and what attention makes of them."""
        tokens, put = len(host["pos"]), self.backend.put
        shapes = ((self.heads, self.k_dim), (self.kv_heads, self.k_dim), (self.kv_heads, self.v_dim))
        q, k, v = (draw(tokens, *shape).astype("float32") for shape in shapes)
        x = StepInputs(**{name: put(a) for name, a in host.items()})
        more = {name: put(special.pop(name)) for name in ARRAYS if name in special}
        attend = compiled(self.backend, tuple(special.items()), tuple(more))
        with self.backend.guard():
            out, self.cache = attend(put(q), put(k), put(v), self.cache, x, *more.values())
        got = self.backend.get(out)
        assert got.shape == (tokens, self.heads, self.v_dim), f"attend gave shape {got.shape}"
        return q, k, v, got

    def slow_attention(
        self,
        rows: list[Row],
        q: np.ndarray,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        bias: np.ndarray | None = None,
        sinks: np.ndarray | None = None,
    ) -> np.ndarray:
        """Token by token and head by head, in float64."""
        scale = self.k_dim**-0.5 if scale is None else scale
        out, group = [], self.heads // self.kv_heads
        tokens = [(row.blocks, at) for row in rows for at in range(row.start, row.start + row.q)]
        for token, (blocks, at) in enumerate(tokens):
            first = 0 if window is None else max(0, at + 1 - window)
            past = [self.slow[slot_of(blocks, p, self.block_size)] for p in range(first, at + 1)]
            keys, values = (np.array(each, "float64") for each in zip(*past, strict=True))
            for head in range(self.heads):
                scores = keys[:, head // group] @ q[token, head] * scale
                scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
                if bias is not None:
                    scores = scores + [far_off(bias[head].tolist(), at - p) for p in range(first, at + 1)]
                sink = -np.inf if sinks is None else float(sinks[head])
                most = max(scores.max(), sink)
                weights = np.exp(scores - most)
                out.append(weights / (weights.sum() + np.exp(sink - most)) @ values[:, head // group])
        return np.reshape(out, (-1, self.heads, self.v_dim))


def far_off(bias: list[float], distance: int) -> float:
    """A head's bias at a distance: what the table says, then a straight line through its last two numbers."""
    more = max(0, distance + 1 - len(bias))
    return bias[distance - more] + more * (bias[-1] - bias[-2])


def slot_of(blocks: tuple[int, ...], position: int, block_size: int) -> int:
    return blocks[position // block_size] * block_size + position % block_size


def step_inputs(rows: list[Row], block_size: int, tile: int, pad: int) -> dict[str, np.ndarray]:
    """The packed index arrays of one step; `pad` more of each, as with static shapes."""
    pos = [p for row in rows for p in range(row.start, row.start + row.q)]
    seg = [i for i, row in enumerate(rows) for _ in range(row.q)]
    slot = [slot_of(rows[i].blocks, p, block_size) for i, p in zip(seg, pos, strict=True)]
    cu_q = np.cumsum([0] + [row.q for row in rows]).tolist()
    tile_q: list[list[int]] = []
    tile_row: list[int] = []
    tile_of: list[int] = []
    for i, row in enumerate(rows):
        for first in range(cu_q[i], cu_q[i] + row.q, tile):
            tokens = list(range(first, min(first + tile, cu_q[i] + row.q)))
            tile_of += [len(tile_q) * tile + n for n in range(len(tokens))]
            tile_q.append(tokens + [0] * (tile - len(tokens)))
            tile_row.append(i)
    width = max(len(row.blocks) for row in rows) + pad
    host = dict(
        tok=[0] * len(pos) + [0] * pad,
        pos=pos + [0] * pad,
        slot=slot + [0] * pad,
        seg=seg + [0] * pad,
        row=list(range(len(rows))) + [0] * pad,
        start=[row.start for row in rows] + [0] * pad,
        kv_len=[row.start + row.q for row in rows] + [0] * pad,
        cu_q=cu_q + cu_q[-1:] * pad,
        block_table=[[*row.blocks, *[0] * (width - len(row.blocks))] for row in rows] + [[0] * width] * pad,
        last=[end - 1 for end in cu_q[1:]] + [0] * pad,
        tile_q=tile_q + [[0] * tile] * pad,
        tile_row=tile_row + [0] * pad,
        tile_of=tile_of + [0] * pad,
    )
    return {name: np.array(values, "int32") for name, values in host.items()}
