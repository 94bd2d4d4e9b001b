"""Mixtures of experts, and layers that keep a state, by hibachi's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from typing import Any

from typing_extensions import override

from hibachi.kernels.abi import Mixture, Scanned, addresses
from hibachi.tensor.array_backend import Array
from hibachi.tensor.host_arrays import HostArrays, PackedWeight
from hibachi.tensor.program import ACTIVATIONS


class NativeLayers(HostArrays):
    """float32 and bfloat16; other dtypes as the library computes them."""

    @override
    def route(self, x: Array, k: int, *, normalised: bool) -> tuple[Array, Array]:
        code = self.codes.get(x.dtype)
        if code is None:
            return super().route(x, k, normalised=normalised)
        (tokens, experts), x = x.shape, self.row_major(x)
        weights, chosen = self.empty((tokens, k), self.xp.float32), self.empty((tokens, k), self.xp.int32)
        places = self.address(weights), self.address(chosen)
        self._run.route(code, self.address(x), tokens, experts, k, normalised, *places)
        return weights, chosen

    @override
    def experts(
        self,
        x: Array,
        chosen: Array,
        weights: Array,
        into: Sequence[Array],
        out: Sequence[Array],
        activation: str,
        *,
        gated: bool,
    ) -> Array:
        mixture = self.mixture(into, out, x.dtype, activation, gated)
        if mixture is None or x.shape[1] != mixture.dim:
            return super().experts(x, chosen, weights, into, out, activation, gated=gated)
        mixture.tokens, mixture.each = chosen.shape
        x, chosen = self.row_major(x), self.index(chosen)
        weights, y = self.row_major(self.float32(weights)), self.empty(x.shape, x.dtype)
        places = (self.address(t) for t in (x, weights, chosen, y))
        self._run.experts(self.codes[x.dtype], addressof(mixture), *places)
        return y

    def mixture(self, into: Sequence[Array], out: Sequence[Array], dtype: Any, activation: str, gated: bool) -> Any:
        """What kernels are told of experts, or None: they do not compute these."""
        weights = [*into, *out]
        if activation not in ACTIVATIONS or not all(isinstance(w, PackedWeight) and w.dtype == dtype for w in weights):
            return None
        (dim, inner), kinds = out[0].shape, len(into[0].pointers)
        alike = all(w.shape == (inner * (1 + gated), dim) for w in into) and all(w.shape == (dim, inner) for w in out)
        odd = dtype != self.xp.float32 and (dim % 2 or inner % 2)  # rows of pairs begin with a pair
        if not alike or odd or any(len(w.pointers) != kinds for w in weights):
            return None
        lists = [addresses([w.pointers[i] for w in some]) for i in range(kinds) for some in (into, out)]
        found = Mixture(0, 0, len(into), dim, inner, ACTIVATIONS[activation], gated, *map(addressof, lists))
        found.kept = lists, weights
        return found

    @override
    def convolve(self, past: Array, x: Array, w: Array, b: Array | None = None) -> tuple[Array, Array]:
        code = self.codes.get(x.dtype)
        if code is None or any(t is not None and t.dtype != x.dtype for t in (past, w, b)):
            return super().convolve(past, x, w, b)
        (rows, tokens, dim), width = x.shape, len(w)
        if past.shape != (rows, width - 1, dim) or w.shape != (width, dim) or (b is not None and b.shape != (dim,)):
            raise ValueError(
                f"convolve: expected past [{rows}, {width - 1}, {dim}], w [{width}, {dim}] and b [{dim}] as x is "
                f"{tuple(x.shape)}; got {[None if t is None else tuple(t.shape) for t in (past, w, b)]}"
            )
        past, w, b = self.row_major(past), self.row_major(w), None if b is None else self.row_major(b)
        (x, apart), y = self._over_time(x), self.empty((rows, tokens, dim), x.dtype)
        last = self.empty(tuple(past.shape), x.dtype)
        places = (self._pointer(t) for t in (w, b, y, last))
        self._run.convolve(code, self.address(past), self.address(x), apart, *places, rows, tokens, dim, width)
        return y, last

    @override
    def selective_scan(
        self, state: Array, x: Array, dt: Array, gate: Array, write: Array, read: Array, decay: Array, skip: Array
    ) -> tuple[Array, Array]:
        code, wide = self.codes.get(x.dtype), self.xp.float32
        (rows, tokens, dim), size = x.shape, write.shape[2]
        narrow, summed = (dt, gate, write, read), (state, decay, skip)
        if code is None or any(t.dtype != x.dtype for t in narrow) or any(t.dtype != wide for t in summed):
            return super().selective_scan(state, x, dt, gate, write, read, decay, skip)
        wanted = [(rows, tokens, dim)] * 2 + [(rows, tokens, size)] * 2 + [(rows, size, dim), (size, dim), (dim,)]
        if [tuple(t.shape) for t in (*narrow, *summed)] != wanted:
            raise ValueError(
                f"selective_scan: expected dt, gate, write, read, state, decay and skip {wanted} as x is "
                f"{tuple(x.shape)}; got {[tuple(t.shape) for t in (*narrow, *summed)]}"
            )
        given, apart = zip(*map(self._over_time, (dt, x, gate, write, read)), strict=True)
        state, decay, skip = map(self.row_major, summed)
        y, last = self.empty((rows, tokens, dim), x.dtype), self.empty(state.shape, wide)
        places = (self.address(t) for t in (state, *given, decay, skip, y, last))
        scanned = Scanned(rows, tokens, dim, size, *apart, *places)
        self._run.scan(code, addressof(scanned))
        return y, last
