"""Mixtures of experts, and layers that keep a state, by hibachi's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from typing import Any

from typing_extensions import override

from hibachi.backend.array_backend import Array
from hibachi.backend.host_arrays import HostArrays, PackedWeight
from hibachi.backend.kernels.abi import Mixture, Scanned, addresses
from hibachi.backend.packing import INTO
from hibachi.backend.program import ACTIVATIONS
from hibachi.backend.shapechecks import check_convolve, check_experts, check_route, check_scan


class NativeLayers(HostArrays):
    """float32 and bfloat16; other dtypes as the library computes them."""

    @override
    def route(self, x: Array, k: int, *, normalised: bool) -> tuple[Array, Array]:
        code = self.codes.get(x.dtype)
        if code is None:
            return super().route(x, k, normalised=normalised)
        check_route(x, k)
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
        leaves: int = 0,
    ) -> Array:
        mixture = self.mixture(into, out, x.dtype, activation, gated)
        if mixture is None:
            return super().experts(x, chosen, weights, into, out, activation, gated=gated, leaves=leaves)
        check_experts(x, chosen, weights, into, out, gated)
        (mixture.tokens, mixture.each), mixture.leaves = chosen.shape, leaves
        x, chosen = self.row_major(x), self.index(chosen)
        weights, y = self.row_major(self.float32(weights)), self.empty(x.shape, self.xp.float32 if leaves else x.dtype)
        places = (self.address(t) for t in (x, weights, chosen, y))
        self._run.experts(self.codes[x.dtype], addressof(mixture), *places)
        return y

    def mixture(self, into: Sequence[Array], out: Sequence[Array], dtype: Any, activation: str, gated: bool) -> Any:
        """What kernels are told of experts; None means they do not compute these."""
        weights = [*into, *out]
        packed = all(isinstance(w, PackedWeight) and w.dtype == dtype for w in weights)
        if activation not in ACTIVATIONS or not weights or not packed:
            return None
        (dim, inner), kinds = out[0].shape, [{w.kind for w in some} for some in (into, out)]
        odd = dtype != self.xp.float32 and (dim % 2 or inner % 2)  # rows of pairs begin with a pair
        if odd or any(len(some) > 1 for some in kinds):
            return None
        lists = [addresses([w.pointers[i] for w in some]) for i in range(2) for some in (into, out)]
        how = dim, inner, ACTIVATIONS[activation], gated, *(INTO[some.pop()] for some in kinds)
        found = Mixture(0, 0, len(into), *how, 0, *map(addressof, lists))
        found.kept = lists, weights
        return found

    @override
    def convolve(self, past: Array, x: Array, w: Array, b: Array | None = None) -> tuple[Array, Array]:
        code = self.codes.get(x.dtype)
        if code is None or any(t is not None and t.dtype != x.dtype for t in (past, w, b)):
            return super().convolve(past, x, w, b)
        check_convolve(past, x, w, b)
        (rows, tokens, dim), width = x.shape, len(w)
        if not tokens:
            return x, past
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
        narrow, summed = (dt, gate, write, read), (state, decay, skip)
        if code is None or any(t.dtype != x.dtype for t in narrow) or any(t.dtype != wide for t in summed):
            return super().selective_scan(state, x, dt, gate, write, read, decay, skip)
        rows, tokens, dim, size = check_scan(state, x, dt, gate, write, read, decay, skip)
        given, apart = zip(*map(self._over_time, (dt, x, gate, write, read)), strict=True)
        state, decay, skip = map(self.row_major, summed)
        y, last = self.empty((rows, tokens, dim), x.dtype), self.empty(state.shape, wide)
        places = (self.address(t) for t in (state, *given, decay, skip, y, last))
        scanned = Scanned(rows, tokens, dim, size, *apart, *places)
        self._run.scan(code, addressof(scanned))
        return y, last
