"""PyTorch on the CPU with kernels whose results do not depend on what else is in the batch.

MKL, which PyTorch multiplies float32 with, takes other code for 1 to 3 rows, and with several threads for the last
rows of a small matrix; it also adds up long products in pieces that depend on their length. oneDNN, which PyTorch
has as well, computes every row alike for two rows or more, and as its weights are packed once, it is faster too. What
oneDNN does not take (other dtypes) is padded to a multiple of PADDED rows.

PyTorch's activations use other code for the last few elements of an array than for the others. Its exp, tanh and erf
do not, so the activations are made of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hibachi.tensor.array_backend import Array, HostArray, LayerCache
from hibachi.tensor.cache import StepInputs
from hibachi_torch.backend import TorchBackend

PADDED = 8  # rows: with a multiple of them MKL computes every row alike
SPAN = 16  # positions that attention looks at, and numbers of a value, are a multiple of this: no vector is cut
PIECE = 128  # positions that are multiplied with values at once: from 193 on MKL adds up in pieces of its own


class Weight:
    """A matrix [out, in] for `linear`, packed for oneDNN when it is first multiplied with.

    Then the plain form goes, unless somebody has looked up rows in it: an embedding that is the head as well.
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
    multiple = PADDED
    kernels = "oneDNN" if torch.backends.mkldnn.is_available() else f"padded to {PADDED} rows"

    def put_weight(self, w: HostArray, dtype: str) -> Array:
        plain = self.put(w, dtype)
        packs = plain.dtype == torch.float32 or (plain.dtype == torch.bfloat16 and _bfloat16())
        return Weight(plain) if packs and torch.backends.mkldnn.is_available() else plain

    def weight_rows(self, w: Array, idx: Array) -> Array:
        return self.take(w.plain() if isinstance(w, Weight) else w, idx)

    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        rows = x.reshape(-1, x.shape[-1])
        if not len(rows):
            return x.new_empty((*x.shape[:-1], w.shape[0]))
        if isinstance(w, Weight):
            some = rows if len(rows) > 1 else rows.expand(2, -1)  # long sums of a single row are made in other pieces
            y = torch.ops.mkldnn._linear_pointwise(some.contiguous(), w.packed(), b, "none", [], "")[: len(rows)]
        else:
            y = _padded(rows, lambda padded: F.linear(padded, w, b))
        return y.view(*x.shape[:-1], -1)

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
    ) -> tuple[Array, LayerCache]:
        # The kernel of the base class, with products in shapes that are safe.
        k, v = self.storable(k, v, cache[1].dtype)
        keys, values = self.write_cache(cache[0], x.slot, k), self.write_cache(cache[1], x.slot, v)
        (tiles, tile), (kv_heads, dim) = x.tile_q.shape, k.shape[1:]
        group, size = q.shape[1] // kv_heads, keys.shape[1]
        table = x.block_table.index_select(0, x.tile_row)
        table = F.pad(table, (0, -table.shape[1] % (SPAN // math.gcd(SPAN, size))))
        span = table.shape[1] * size
        kt = self.take(keys, table).view(tiles, span, kv_heads, dim).permute(0, 2, 3, 1)
        vt = self.take(values, table).view(tiles, span, kv_heads, -1).transpose(1, 2)
        v_dim = vt.shape[-1]
        vt = F.pad(vt, (0, -v_dim % SPAN)) if v_dim % SPAN else vt
        qt = self.take(q, x.tile_q).view(tiles, tile, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        scores = _padded(qt.reshape(tiles, kv_heads, group * tile, dim), lambda rows: rows @ kt).float()
        scores = scores * (dim**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        at, seen = x.pos[x.tile_q][:, :, None], self._positions(span)
        hidden = seen > at if window is None else (seen > at) | (seen <= at - window)
        scores.view(tiles, kv_heads, group, tile, span).masked_fill_(hidden[:, None, None], -math.inf)
        weights = torch.softmax(scores, -1).to(v.dtype)

        def multiply(rows: Array) -> Array:
            out = rows[..., :PIECE] @ vt[..., :PIECE, :]
            for i in range(PIECE, span, PIECE):
                out = out + rows[..., i : i + PIECE] @ vt[..., i : i + PIECE, :]
            return out

        out = _padded(weights, multiply)[..., :v_dim].reshape(tiles, kv_heads, group, tile, -1).permute(0, 3, 1, 2, 4)
        return self.take(out.reshape(tiles * tile, q.shape[1], -1), x.tile_of), (keys, values)

    def gelu(self, x: Array) -> Array:
        f = x.float()
        return (f * (1 + torch.erf(f * math.sqrt(0.5))) * 0.5).to(x.dtype)

    def gelu_tanh(self, x: Array) -> Array:
        f = x.float()
        return (0.5 * f * (1 + torch.tanh(math.sqrt(2 / math.pi) * (f + 0.044715 * f * f * f)))).to(x.dtype)

    def silu(self, x: Array) -> Array:
        f = x.float()
        return (f / torch.neg(f).exp_().add_(1)).to(x.dtype)  # exp may be inf, and x / inf is the right answer


def _bfloat16() -> bool:
    """Has the processor instructions that oneDNN multiplies bfloat16 with?"""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _padded(rows: Array, f: Callable[[Array], Array]) -> Array:
    """f(rows) for a function of each row of [..., rows, dim], called with a multiple of PADDED rows."""
    n = rows.shape[-2]
    fill = -n % PADDED
    return f(F.pad(rows, (0, 0, 0, fill)))[..., :n, :] if fill else f(rows)
