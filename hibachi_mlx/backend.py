"""MLX: the array-API defaults, with MLX's own functions where it has them.

MLX is lazy, and what one thread has put off no other can compute. So what this class makes in any thread is computed
at once, and what a model computes before it leaves the engine's (`settle`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import local
from typing import Any

import mlx.core as mx
import numpy as np
from typing_extensions import override

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray, LayerCache
from hibachi.backend.layout import StepInputs
from hibachi.errors import ConfigError
from hibachi_mlx import array_api

_call = local()
"""donated: the call that this thread is in was given its cache for good."""


def _donated(fn: Callable[..., Any], *args: Any) -> Any:
    _call.donated = True
    try:
        return fn(*args)
    finally:
        _call.donated = False


class MlxBackend(ArrayBackend):
    """device: "cpu", "gpu" or an mlx.core.Device; None means MLX's default device, on a Mac the GPU.

    In MLX arrays are on no device. A step makes its device the default one of the process until it ends, so engines on
    different devices belong into different processes.
    """

    name = "mlx"
    asynchronous = True

    def __init__(self, device: Any = None) -> None:
        kinds = {"cpu": mx.cpu, "gpu": mx.gpu}
        where = kinds.get(device, device) if isinstance(device, str) else device
        where = mx.Device(where, 0) if isinstance(where, mx.DeviceType) else where
        if where is not None and not (isinstance(where, mx.Device) and mx.is_available(where)):
            here = " and ".join(repr(name) for name, kind in kinds.items() if mx.is_available(kind))
            raise ConfigError(
                f"Here MLX has {here}; got the device {device!r}. Leave it out, or name one that is there."
            )
        super().__init__(array_api, device=where)
        self._gpu: bool = (where or mx.default_device()).type == mx.gpu
        self._cuda: bool = self._gpu and mx.cuda.is_available()

    @override
    def suits(self, dtype: str, arch: Any) -> bool:
        return dtype == "float32" or (self._gpu and dtype in ("float16", "bfloat16"))

    @classmethod
    @override
    def for_array(cls, t: Any) -> MlxBackend | None:
        return cls() if isinstance(t, mx.array) else None

    # ---- movement ----------------------------------------------------------------------------------------------

    @override
    def put(self, a: HostArray, dtype: str | None = None) -> Array:
        a = np.asarray(a, order="C")
        t = mx.array(a.copy() if min(a.strides, default=0) < 0 else a, dtype=self.dtype(dtype) if dtype else None)
        t = t if a.size else mx.zeros(a.shape, dtype=t.dtype)  # of no elements, MLX mistakes NumPy's strides
        mx.eval(t)
        return t

    @override
    def put_all(self, arrays: Sequence[HostArray]) -> list[Array]:
        return [self.put(a) for a in arrays]

    @override
    def get(self, t: Array) -> HostArray:
        # A copy, as MLX may write its next array into this one's memory. NumPy has no bfloat16.
        return np.array(t.astype(mx.float32) if t.dtype == mx.bfloat16 else t)

    @override
    def row_major(self, t: Array) -> Array:
        return mx.contiguous(t)

    @override
    def fetch(self, arrays: Sequence[Array]) -> Callable[[], list[HostArray]]:
        mx.async_eval(arrays)
        return super().fetch(arrays)

    @override
    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        t = super().zeros(shape, dtype)
        mx.eval(t)
        return t

    @override
    def take(self, t: Array, idx: Array) -> Array:
        return mx.take(t, idx, axis=0)

    @override
    def scatter_rows(self, dst: Array, idx: Array, src: Array) -> Array:
        new = dst[...]  # its memory is written to if `dst` is not referenced any more when this is computed
        new[idx] = src
        return new

    # ---- cache and attention -----------------------------------------------------------------------------------

    @override
    def write_cache(self, cache: Array, slot: Array, rows: Array) -> Array:
        new = cache if getattr(_call, "donated", False) else cache[...]
        new[slot // cache.shape[1], slot % cache.shape[1]] = rows
        return new

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
        # MLX's own gives hidden positions the lowest number of the dtype as a score; in float16 a sum that overflows is
        # lower. With CUDA it adds -inf to their scores, and NaN stays NaN.
        more = {"softcap": softcap, "bias": bias, "sinks": sinks}
        if any(value is not None for value in more.values()) or q.dtype == mx.float16 or self._cuda:
            how: dict[str, Any] = {"scale": scale, "window": window, **more}
            return super().attend(q, k, v, cache, x, **how)
        k, v = self.storable(k, v, cache[1].dtype)
        cache = self.write_cache(cache[0], x.slot, k), self.write_cache(cache[1], x.slot, v)
        (tiles, tile), (_, heads, dim) = x.tile_q.shape, q.shape
        table = mx.take(x.block_table, x.tile_row, axis=0)  # [N, blocks]
        span = table.shape[1] * cache[0].shape[1]
        kt, vt = (mx.take(c, table, axis=0).reshape(tiles, span, *c.shape[2:]).swapaxes(1, 2) for c in cache)
        at, seen = mx.take(x.pos, x.tile_q)[:, None, :, None], mx.arange(span, dtype=mx.int32)
        visible = seen <= at if window is None else (seen <= at) & (seen > at - window)
        qt, scale = mx.take(q, x.tile_q, axis=0).swapaxes(1, 2), dim**-0.5 if scale is None else scale
        out = mx.fast.scaled_dot_product_attention(qt, kt, vt, scale=scale, mask=visible)
        return mx.take(out.swapaxes(1, 2).reshape(tiles * tile, heads, v.shape[2]), x.tile_of, axis=0), cache

    # ---- math --------------------------------------------------------------------------------------------------

    @override
    def rms_norm(self, x: Array, w: Array, eps: float) -> Array:
        return mx.fast.rms_norm(x, w, eps)

    @override
    def layer_norm(self, x: Array, w: Array, b: Array | None, eps: float) -> Array:
        return mx.fast.layer_norm(x, w, b, eps)

    @override
    def gelu(self, x: Array) -> Array:
        return x * (1 + mx.erf(x * math.sqrt(0.5))) / 2

    @override
    def silu(self, x: Array) -> Array:
        return x * mx.sigmoid(x)

    @override
    def softmax(self, x: Array) -> Array:
        return mx.softmax(x, axis=-1, precise=True)

    @override
    def top(self, x: Array, k: int) -> tuple[Array, Array]:
        first = x.shape[1] - k
        some = mx.argpartition(x, first, axis=-1)[:, first:]
        values = mx.take_along_axis(x, some, axis=-1)
        order = mx.argsort(values, axis=-1)[:, ::-1]
        return mx.take_along_axis(values, order, axis=-1), mx.take_along_axis(some, order, axis=-1)

    @override
    def best(self, x: Array) -> tuple[Array, Array]:
        return mx.argmax(x, axis=-1).astype(mx.int32), mx.max(x, axis=-1)

    # ---- execution ---------------------------------------------------------------------------------------------

    @override
    def compile(self, fn: Callable[..., Any], *, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        """Returns the function uncompiled. If its cache is donated, it writes in place, whatever else refers to it."""
        return partial(_donated, fn) if donate else fn

    @override
    def settle(self, arrays: Sequence[Array]) -> None:
        mx.eval(arrays)

    @override
    def usable(self, cache: Sequence[LayerCache]) -> bool:
        try:
            mx.eval(cache)  # the error of what a step has written comes up again here
        except RuntimeError:
            return False
        return True

    @override
    def out_of_memory(self, error: BaseException) -> bool:
        signs = "malloc]", "Insufficient Memory"  # of the allocators, and of Metal when it runs a step
        return isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
        )

    @override
    def guard(self) -> AbstractContextManager[Any]:
        here = self.device is None or self.device == mx.default_device()
        return nullcontext() if here else mx.stream(self.device)

    @override
    def memory(self) -> tuple[int, int] | None:
        facts = mx.device_info(self.device or mx.default_device()) if self._gpu else {}
        total = facts.get("max_recommended_working_set_size", facts.get("total_memory"))
        return None if total is None else (max(total - mx.get_active_memory(), 0), total)

    @override
    def versions(self) -> dict[str, str]:
        device = mx.device_info(self.device or mx.default_device()).get("device_name", "unknown")
        return {"library": f"mlx {mx.__version__}", "device": f"{'gpu' if self._gpu else 'cpu'} ({device})"}
