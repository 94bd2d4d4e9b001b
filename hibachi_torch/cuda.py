"""`TorchBackend` on CUDA: attention straight from the block table, decode steps as CUDA graphs, and few waits.

The host waits for the device once in a step, for the tokens. Indices go to the device in one copy, which is not waited
for, and tokens come back in one as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.nn.attention as attention
from typing_extensions import override

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray, LayerCache
from hibachi.backend.layout import Paged, State, StepInputs
from hibachi.common.shapes import CallShapes
from hibachi_torch.backend import TorchBackend
from hibachi_torch.cuda_attention import Kernel, find, varlen_attn
from hibachi_torch.cuda_graphs import CudaRecorder, GraphRecorder, StepGraphs

_log = logging.getLogger("hibachi.torch")

STAGED = 2**20  # bytes; larger arrays (weights) are copied from where they are


class CudaTorchBackend(TorchBackend):
    """What `TorchBackend("cuda")` gives.

    graphs: decode steps are recorded. recorder: makes what records them, for tests; None: CUDA graphs on CUDA, and
    nothing is recorded elsewhere.
    """

    shapes = CallShapes(few="decode")
    asynchronous = True

    def __new__(cls, *args: Any, **kwargs: Any) -> CudaTorchBackend:
        return object.__new__(cls)

    def __init__(
        self,
        device: Any = None,
        native: bool | None = None,
        *,
        graphs: bool = True,
        recorder: Callable[[], GraphRecorder] | None = None,
    ) -> None:
        super().__init__(device)
        self.prefers_invariant = False
        self.varlen = varlen_attn()
        """`torch.nn.attention.varlen.varlen_attn`; None: PyTorch has none."""
        cuda = self.device.type == "cuda"
        self._pinned = cuda  # memory of the host that the device copies from by itself
        self._recorder = (recorder or (partial(CudaRecorder, self.device) if cuda else None)) if graphs else None
        self._kernels: dict[Any, Kernel | str] = {}
        self._why: set[str] = set()
        self._graphs: WeakSet[StepGraphs] = WeakSet()
        self._spoiled: set[int] = set()
        self._slot: tuple[StepInputs[Array], Array] | None = None

    @override
    def suits(self, dtype: str, arch: Any) -> bool:
        return dtype in ("float32", "float16", "bfloat16")

    @property
    @override
    def block_size(self) -> int:  # type: ignore[override]  # the base has an attribute
        """FlashAttention 2 reads blocks of a multiple of 256 positions; FlashAttention 3, if activated, any. Where
        blocks are gathered, small ones have fewer positions that nobody needs."""
        active = getattr(attention, "current_flash_attention_impl", lambda: None)()
        return TorchBackend.block_size if self.varlen is None or active == "FA3" else 256

    # ---- movement ----------------------------------------------------------------------------------------------

    def _host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._pinned)

    @override
    def put(self, a: HostArray, dtype: str | None = None) -> Array:
        a = np.asarray(a)
        if a.nbytes > STAGED:
            return super().put(a, dtype)
        # A copy from memory that is not pinned would wait for all that the device has still to do.
        host = self._host(a.shape, torch.from_numpy(np.empty(0, a.dtype)).dtype)
        host.numpy()[...] = a
        t = host.to(self.device, non_blocking=True)
        return t if dtype is None else t.to(self.dtype(dtype))

    @override
    def put_all(self, arrays: Sequence[HostArray]) -> list[Array]:
        small = [a for a in arrays if a.dtype == np.int32]
        host = self._host((sum(a.size for a in small),), torch.int32)
        view, at = host.numpy(), 0
        for a in small:
            view[at : at + a.size] = a.reshape(-1)
            at += a.size
        flat, at = host.to(self.device, non_blocking=True), 0
        out = []
        for a in arrays:
            if a.dtype != np.int32:
                out.append(self.put(a))
                continue
            out.append(flat[at : at + a.size].view(a.shape))
            at += a.size
        return out

    @override
    def fetch(self, arrays: Sequence[Array]) -> Callable[[], list[HostArray]]:
        if not self._pinned:
            return super().fetch(arrays)
        stream = torch.cuda.current_stream(self.device)
        host = [self._host(t.shape, t.dtype).copy_(t.detach(), non_blocking=True) for t in arrays]
        copied = torch.cuda.Event()
        copied.record(stream)

        def wait() -> list[HostArray]:
            copied.synchronize()  # and not the stream: a later step may be running
            return [(t.float() if t.dtype == torch.bfloat16 else t).numpy() for t in host]

        return wait

    # ---- cache and attention -----------------------------------------------------------------------------------

    @override
    def make_cache(self, spec: Paged | State, *, blocks: int, block_size: int, rows: int, dtype: str) -> LayerCache:
        cache = super().make_cache(spec, blocks=blocks, block_size=block_size, rows=rows, dtype=dtype)
        if isinstance(spec, Paged):
            self._spoiled.discard(cache[0].data_ptr())
        return cache

    @override
    def usable(self, cache: Sequence[LayerCache]) -> bool:
        return not (self._spoiled and self._spoiled.intersection(_first_pointers(cache)))

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
        keys, values = cache
        given = {"softcap": softcap, "bias": bias, "sinks": sinks}
        lacks = tuple(name for name, value in given.items() if value is not None)
        kernel = self._kernel(q, keys, values, window=window is not None, lacks=lacks)
        if kernel is None:
            how: dict[str, Any] = {"scale": scale, "window": window, **given}
            out, _ = super().attend(q, k, v, cache, x, **how)
            return out, cache
        if x.tile_q.shape[1] > 1:  # the kernel itself passes over what lies behind a row's end: `find` looks
            k, v = self.storable(k, v, values.dtype)
        slot = self._long_slot(x)
        keys.view(-1, *keys.shape[2:]).index_copy_(0, slot, k)
        values.view(-1, *values.shape[2:]).index_copy_(0, slot, v)
        out = kernel(q, keys, values, x, scale=q.shape[2] ** -0.5 if scale is None else scale, window=window)
        return out, cache

    def _kernel(self, q: Array, keys: Array, values: Array, *, window: bool, lacks: tuple[str, ...]) -> Kernel | None:
        """lacks: what is wanted and no kernel has."""
        kind = q.shape[1], q.dtype, keys.shape[1:], keys.dtype, values.shape[3], window, lacks
        found = self._kernels.get(kind)
        if found is None:
            if lacks:
                found = f"it has no {' and no '.join(lacks)}"
            elif q.dtype != keys.dtype:
                found = f"queries are {q.dtype} and keys {keys.dtype}"
            else:
                found = find(self.varlen, self, super().attend, q.shape[1], keys, values, window=window)
            self._kernels[kind] = found
            if isinstance(found, str) and found not in self._why:
                self._why.add(found)
                _log.warning("Attention gathers cache blocks, which is slower than PyTorch's varlen kernel: %s.", found)
        return None if isinstance(found, str) else found

    def _long_slot(self, x: StepInputs[Array]) -> Array:
        """`x.slot` as the index that CUDA writes with, converted once for all layers."""
        kept = self._slot
        if kept is None or kept[0] is not x:
            kept = self._slot = x, x.slot.long()
        return kept[1]

    # ---- math --------------------------------------------------------------------------------------------------

    @override
    def rope(self, x: Array, cos: Array, sin: Array) -> Array:
        # Four kernels instead of seven.
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out[..., half:]).addcmul_(a, sin)
        return out

    # ---- execution ---------------------------------------------------------------------------------------------

    @override
    def compile(self, fn: Callable[..., Any], *, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        if self._recorder is None or donate != (1,):  # not the step of a model, which may overwrite its cache
            return fn
        graphs = StepGraphs(fn, self._recorder, lambda cache: self._spoiled.update(_first_pointers(cache)))
        self._graphs.add(graphs)

        def step(*args: Any) -> Any:
            return graphs(*args) if len(args) == 3 and isinstance(args[2], StepInputs) else fn(*args)

        return step

    @override
    def invariant(self) -> ArrayBackend:
        raise self._not_invariant()

    @override
    def remarks(self) -> list[str]:
        why = "; ".join(sorted(self._why))
        lines = [f"attention: {f'gathers cache blocks ({why})' if why else 'varlen, where it can'}"]
        if self._recorder is None:
            return [*lines, "CUDA graphs: not used"]
        why = "; ".join(sorted({why for g in self._graphs for why in g.why}))
        return [*lines, f"CUDA graphs: for decode steps{f', but not all ({why})' if why else ''}"]


def _first_pointers(cache: Sequence[LayerCache]) -> set[int]:
    return {layer[0].data_ptr() for layer in cache if isinstance(layer, tuple)}
