"""PyTorch on the CPU with kernels whose results do not depend on what else is in the batch.

MKL, which PyTorch multiplies float32 with, takes other code for 1 to 3 rows, and with several threads for the last
rows of a small matrix; it also adds up long products in pieces that depend on their length. oneDNN, which PyTorch
has as well, computes every row alike for two rows or more, and as its weights are packed once, it is faster too. What
oneDNN does not take (other dtypes) is padded to a multiple of PADDED rows.

With AMX, which oneDNN multiplies bfloat16 with, it adds up in pieces that depend on the number of rows, the columns and
the threads. Up to TILE rows it makes one piece of the whole sum if each thread has columns enough; otherwise they are
filled up to TILE. More rows are multiplied in tiles.

PyTorch's activations use other code for the last few elements of an array than for the others. Its exp, tanh and erf
do not, so the activations are made of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from typing_extensions import override

from hibachi.backend.array_backend import Array, HostArray, LayerCache
from hibachi.backend.attention_terms import by_distance, terms
from hibachi.backend.layout import StepInputs
from hibachi.common.shapes import CallShapes
from hibachi_torch.backend import TorchBackend

FEW = 8  # rows: with a multiple of them MKL computes sums of up to PIECE products alike
TILE = 32  # rows of bfloat16 that are multiplied at once with AMX
COLUMNS = 256  # that each thread has with AMX, so that oneDNN does not cut the sums of up to TILE rows
SPAN = 16  # positions that attention looks at, and numbers of a value, are a multiple of this: no vector is cut
SPAN_BFLOAT16 = 32  # positions: AMX adds up what is left of a multiple of them apart
PIECE = 128  # positions that are multiplied with values at once: from 193 on MKL adds up in pieces of its own
ONEDNN_FROM = 16**3  # multiplications: PyTorch makes smaller products of bfloat16, all rows together, in another way


def _mkl_rows() -> int:
    """The multiple of rows at which MKL computes every row alike: on AMD 8 do, on Intel a sum of 384 takes 16."""
    try:
        return 8 if "AuthenticAMD" in Path("/proc/cpuinfo").read_text() else 16
    except OSError:
        return 16


PADDED = _mkl_rows()


class Weight:
    """A matrix [out, in] for `linear`, packed for oneDNN when it is first multiplied with.

    Then the plain form is freed, unless rows of it were looked up: an embedding that is the head as well.
    """

    def __init__(self, plain: Array) -> None:
        self.shape, self.dtype = plain.shape, plain.dtype
        self._plain: Array | None = plain
        self._packed: Array | None = None
        self._looked_up = False

    def packed(self) -> Array:
        packed, plain = self._packed, self._plain
        if packed is None:  # two threads may both do it, with the same result
            assert plain is not None
            packed = self._packed = torch.ops.mkldnn._reorder_linear_weight(plain, None)
            if not self._looked_up:
                self._plain = None
        return packed

    def plain(self) -> Array:
        self._looked_up = True
        plain = self._plain
        if plain is None:
            assert self._packed is not None
            plain = self._plain = self._packed.to_dense()
        return plain


class InvariantTorchBackend(TorchBackend):
    """`TorchBackend` on the CPU with kernels that do not depend on the batch: `TorchBackend("cpu").invariant()`."""

    deterministic = True
    shapes = CallShapes(multiple=PADDED)
    kernels = "oneDNN" if torch.backends.mkldnn.is_available() else f"padded to {PADDED} rows"

    @override
    def put_weight(self, w: HostArray, dtype: str) -> Array:
        return weight_of(self.put(w, dtype))

    @override
    def weight_rows(self, w: Array, idx: Array) -> Array:
        return self.take(w.plain() if isinstance(w, Weight) else w, idx)

    @override
    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        rows = self.row_major(x).reshape(-1, x.shape[-1])
        if not len(rows):
            return x.new_empty((*x.shape[:-1], w.shape[0]))
        if isinstance(w, Weight):
            tiles = w.dtype == torch.bfloat16 and _amx() and len(rows) > TILE
            y = torch.cat([_multiply(t, w, b) for t in rows.split(TILE)]) if tiles else _multiply(rows, w, b)
        else:
            y = padded(rows, PADDED, lambda some: F.linear(some, w, b))
        return y.view(*x.shape[:-1], -1)

    @override
    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        cache: LayerCache,
        x: StepInputs[Array],
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        bias: Array | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, LayerCache]:
        # The kernel of the base class, with products in shapes that are safe.
        bias, sinks = terms(self, bias, sinks, q.shape[1])
        k, v = self.storable(k, v, cache[1].dtype)
        keys, values = self.write_cache(cache[0], x.slot, k), self.write_cache(cache[1], x.slot, v)
        (tiles, tile), (kv_heads, dim) = x.tile_q.shape, k.shape[1:]
        group, size = q.shape[1] // kv_heads, keys.shape[1]
        table = x.block_table.index_select(0, x.tile_row)
        unit = SPAN_BFLOAT16 if q.dtype == torch.bfloat16 else SPAN
        table = F.pad(table, (0, -table.shape[1] % (unit // math.gcd(unit, size))))
        span = table.shape[1] * size
        kt = self.take(keys, table).view(tiles, span, kv_heads, dim).permute(0, 2, 3, 1)
        vt = self.take(values, table).view(tiles, span, kv_heads, -1).transpose(1, 2)
        v_dim = vt.shape[-1]
        vt = F.pad(vt, (0, -v_dim % SPAN)) if v_dim % SPAN else vt
        qt = self.take(q, x.tile_q).view(tiles, tile, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        small = FEW * unit * min(dim, vt.shape[-1]) <= ONEDNN_FROM  # or of any size without instructions for them
        if q.dtype == torch.bfloat16 and (small or not _bfloat16()):
            qt, kt, vt = qt.float(), kt.float(), vt.float()
        many = FEW if dim <= PIECE else PADDED
        scores = padded(qt.reshape(tiles, kv_heads, group * tile, dim), many, lambda rows: rows @ kt).float()
        scores = scores * (dim**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        at, seen = x.pos[x.tile_q][:, :, None], self._positions(span)
        hidden = seen > at if window is None else (seen > at) | (seen <= at - window)
        by_head = scores.view(tiles, kv_heads, group, tile, span)
        if bias is not None:
            by_head += by_distance(self.xp, bias, at - seen, kv_heads)
        by_head.masked_fill_(hidden[:, None, None], -math.inf)
        if sinks is None:
            weights = torch.softmax(scores, -1).to(vt.dtype)
        else:  # before the scores, and as many as keep their places in vectors
            before = F.pad(sinks.view(1, kv_heads, group, 1, 1), (0, unit - 1), value=-math.inf)
            before = before.expand(tiles, -1, -1, tile, -1).reshape(tiles, kv_heads, group * tile, unit)
            weights = torch.softmax(torch.cat([before, scores], -1), -1)[..., unit:].to(vt.dtype).contiguous()

        def multiply(rows: Array) -> Array:
            out = rows[..., :PIECE] @ vt[..., :PIECE, :]
            for i in range(PIECE, span, PIECE):
                out = out + rows[..., i : i + PIECE] @ vt[..., i : i + PIECE, :]
            return out

        out = padded(weights, FEW, multiply)[..., :v_dim].to(v.dtype)
        out = out.reshape(tiles, kv_heads, group, tile, -1).permute(0, 3, 1, 2, 4)
        return self.take(out.reshape(tiles * tile, q.shape[1], -1), x.tile_of), (keys, values)

    @override
    def rms_norm(self, x: Array, w: Array, eps: float) -> Array:
        return super().rms_norm(self.row_major(x), w, eps)

    @override
    def gelu(self, x: Array) -> Array:
        f = x.float()
        return (f * (1 + torch.erf(f * math.sqrt(0.5))) * 0.5).to(x.dtype)

    @override
    def gelu_tanh(self, x: Array) -> Array:
        f = x.float()
        return (0.5 * f * (1 + torch.tanh(math.sqrt(2 / math.pi) * (f + 0.044715 * f * f * f)))).to(x.dtype)

    @override
    def silu(self, x: Array) -> Array:
        f = x.float()
        return (f / torch.neg(f).exp_().add_(1)).to(x.dtype)  # exp may be inf, and x / inf is the right answer


def weight_of(plain: Array) -> Array:
    """A matrix [out, in] as `InvariantTorchBackend.linear` takes it: for oneDNN, if it multiplies this dtype."""
    packs = plain.dtype == torch.float32 or (plain.dtype == torch.bfloat16 and _bfloat16())
    return Weight(plain) if packs and torch.backends.mkldnn.is_available() else plain


def _bfloat16() -> bool:
    """Has the processor instructions that oneDNN multiplies bfloat16 with?"""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _amx() -> bool:
    """Has the processor AMX? Yes if this version of PyTorch cannot say: tiles are right on any."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)())


def _multiply(rows: Array, w: Weight, b: Array | None) -> Array:
    """rows w^T + b by oneDNN, with the number of rows filled up where their sums would be cut otherwise."""
    n = len(rows)
    fill = 2 - n  # long sums of a single row are made in other pieces
    if w.dtype == torch.bfloat16 and _amx():
        fill = 2 - n if w.shape[0] >= COLUMNS * torch.get_num_threads() else TILE - n
    if n == fill == 1:
        some = rows.expand(2, -1).contiguous()  # in a third of the time that F.pad takes
    else:
        some = F.pad(rows, (0, 0, 0, fill)) if fill > 0 else rows.contiguous()
    return torch.ops.mkldnn._linear_pointwise(some, w.packed(), b, "none", [], "")[:n]


def padded(rows: Array, many: int, f: Callable[[Array], Array]) -> Array:
    """f(rows) for a function of each row of [..., rows, dim], called with a multiple of `many` rows."""
    n = rows.shape[-2]
    fill = -n % many
    return f(F.pad(rows, (0, 0, 0, fill)))[..., :n, :] if fill else f(rows)
