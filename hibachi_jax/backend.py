"""JAX: the array-API defaults, compiled per shape, with caches donated from step to step.

On the CPU weights lie the other way round, and attention is of our own (`hibachi_jax/attention.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray, LayerCache
from hibachi.backend.candidates import Candidate
from hibachi.backend.group import RankGroup
from hibachi.backend.layout import Paged, State, StepInputs
from hibachi.common.shapes import CallShapes
from hibachi.errors import UnsupportedOperation
from hibachi_jax import programs, tpu
from hibachi_jax.attention import attend, scoring

VOCABULARY = 16
"""A matrix with this many times as many rows as columns is one of a vocabulary: its rows are looked up."""

jax.tree_util.register_dataclass(StepInputs, data_fields=[f for f in StepInputs.__dataclass_fields__], meta_fields=[])


@partial(jax.jit, static_argnums=1)
def _split(flat: Array, shapes: tuple[tuple[int, ...], ...]) -> list[Array]:
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(jnp.split(flat, ends[:-1]), shapes, strict=True)]


@partial(jax.jit, inline=True)
def _take(t: Array, idx: Array) -> Array:  # compiled, as Python alone takes long over such an index
    return t[idx]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Turned:
    """A weight [out, in] that is kept as [in, out]. On the CPU, XLA multiplies few rows up to 1.4 times as fast so."""

    w: Array


class Variants(Protocol):
    """What the module `hibachi_jax.variants` does for `JaxBackend`, which does not know its heirs."""

    def starts_as(self, device: Any, native: bool | None) -> type[JaxBackend]: ...
    def candidates(self, backend: JaxBackend) -> list[Candidate]: ...
    def invariant(self, backend: JaxBackend) -> JaxBackend: ...
    def quantized(self, backend: JaxBackend, how: str) -> JaxBackend: ...
    def native_state(self) -> str: ...


class JaxBackend(ArrayBackend):
    """device: a jax.Device, or a platform name such as "cpu"; None means JAX's default device.

    native: False means that hibachi's kernels are not used on the CPU; None means that they are used where they load.
    With them no bit depends on the batch, so the backend is deterministic. See `hibachi.backend.kernels.library`.

    What JAX compiles is kept in the user's cache folder (`hibachi_jax/programs.py`), unless a cache of JAX's is
    configured already or the environment variable HIBACHI_JAX_CACHE is 0.
    """

    name = "jax"
    shapes = CallShapes(few="all")
    immutable = True
    quantizations: tuple[str, ...] = ("int8",)
    native = False
    """hibachi's kernels are used."""
    variants: ClassVar[Variants]
    """Set in `hibachi_jax/__init__.py`, which Python runs before any other module of this package."""

    def __new__(cls, device: Any = None, native: bool | None = None) -> JaxBackend:
        return object.__new__(cls.variants.starts_as(device, native) if cls is JaxBackend else cls)

    def __getnewargs__(self) -> tuple[Any, bool]:
        return self.device, self.native  # a copy is of the same class

    def __init__(self, device: Any = None, native: bool | None = None) -> None:
        self._kept = programs.keep()  # before anything is compiled
        super().__init__(jnp, device=jax.devices(device)[0] if isinstance(device, str) else device)
        self._array_type = jax.Array
        self.platform = (self.device or jax.devices()[0]).platform
        self._turns = self._loops = self.platform == "cpu"
        self.shapes = replace(self.shapes, any_width=self._loops)
        self.undecided = native is None

    @override
    def in_leaves(self, leaves: int, group: RankGroup | None = None) -> Self:
        raise UnsupportedOperation(
            "JAX divides its work over devices itself, and adds no sums in leaves. Pass backend='torch'."
        )

    @classmethod
    @override
    def for_array(cls, t: Any) -> JaxBackend | None:
        return cls() if isinstance(t, jax.Array) else None

    # ---- movement ----------------------------------------------------------------------------------------------

    @override
    def put(self, a: HostArray, dtype: str | None = None) -> Array:
        return jax.device_put(a if dtype is None else a.astype(self.dtype(dtype)), self.device)

    @override
    def put_all(self, arrays: Sequence[HostArray]) -> list[Array]:
        # One transfer and one program: of thirteen small ones each, most of the time goes to Python.
        if any(a.dtype != np.int32 for a in arrays):
            return super().put_all(arrays)
        flat = np.concatenate([a.reshape(-1) for a in arrays])
        parts: list[Array] = _split(flat if self.device is None else self.put(flat), tuple(a.shape for a in arrays))
        return parts

    @override
    def peek(self, t: Array) -> HostArray | None:
        return None if isinstance(t, jax.core.Tracer) else self.get(t)

    @override
    def row_major(self, t: Array) -> Array:
        return t  # XLA decides

    @override
    def take(self, t: Array, idx: Array) -> Array:
        return _take(t, idx)

    @override
    def scatter_rows(self, dst: Array, idx: Array, src: Array) -> Array:
        return dst.at[idx].set(src)

    @override
    def put_weight(self, w: HostArray, dtype: str) -> Array:
        if self._turns and w.shape[0] < VOCABULARY * w.shape[1]:
            return Turned(self.put(np.ascontiguousarray(w.T), dtype))
        return self.put(w, dtype)

    @override
    def weight_rows(self, w: Array, idx: Array) -> Array:
        return jnp.moveaxis(w.w[:, idx], 0, -1) if isinstance(w, Turned) else self.take(w, idx)

    # ---- cache and attention -----------------------------------------------------------------------------------

    @override
    def make_cache(self, spec: Paged | State, *, blocks: int, block_size: int, rows: int, dtype: str) -> LayerCache:
        if isinstance(spec, Paged) and tpu.why_not(self.platform, spec) is None:
            return (self.zeros((blocks, block_size, 2 * spec.kv_heads, spec.k_dim), spec.dtype or dtype),)
        if isinstance(spec, State) or not self._loops:
            return super().make_cache(spec, blocks=blocks, block_size=block_size, rows=rows, dtype=dtype)
        shape, dtype = (blocks, spec.kv_heads, block_size), spec.dtype or dtype
        return self.zeros((*shape, spec.k_dim), dtype), self.zeros((*shape, spec.v_dim), dtype)

    @override
    def positions(self, cache: LayerCache, blocks: Sequence[int] | None = None) -> list[HostArray]:
        found = super().positions(cache, blocks)
        return [half.swapaxes(1, 2) for half in found] if self._loops and len(found) == 2 else found

    @override
    def write_cache(self, cache: Array, slot: Array, rows: Array) -> Array:
        if not self._loops:
            return super().write_cache(cache, slot, rows)
        size = cache.shape[2]
        return cache.at[slot // size, :, slot % size].set(rows, mode="promise_in_bounds")

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
        how = scoring(self, q, scale, window, softcap, bias, sinks)
        if len(cache) != 1 and not self._loops:
            return super().attend(q, k, v, cache, x, **how._asdict())
        k, v = self.storable(k, v, cache[-1].dtype)
        if len(cache) == 1:
            pages = tpu.write(cache[0], x.slot, k, v)
            if how.bias is None and how.sinks is None:
                return tpu.attend(q, pages, x, how), (pages,)
            return super().attend(q, k, v, tpu.halves(pages), x, **how._asdict())[0], (pages,)
        keys, values = self.write_cache(cache[0], x.slot, k), self.write_cache(cache[1], x.slot, v)
        return attend(q, keys, values, x, how), (keys, values)

    # ---- math --------------------------------------------------------------------------------------------------

    @override
    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        y = x @ w.w if isinstance(w, Turned) else x @ w.T
        return y if b is None else y + b

    @override
    def gelu(self, x: Array) -> Array:
        return jax.nn.gelu(x, approximate=False)

    @override
    def silu(self, x: Array) -> Array:
        return jax.nn.silu(x)

    @override
    def softmax(self, x: Array) -> Array:
        return jax.nn.softmax(x, axis=-1)

    @override
    def top(self, x: Array, k: int) -> tuple[Array, Array]:
        values, places = jax.lax.top_k(x, k)
        return values, places

    @override
    def scan(
        self, step: Callable[[Array, tuple[Array, ...]], tuple[Array, Array]], state: Array, over: tuple[Array, ...]
    ) -> tuple[Array, Array]:
        return jax.lax.scan(step, state, over)

    # ---- execution ---------------------------------------------------------------------------------------------

    @override
    def candidates(self) -> Sequence[Candidate]:
        return self.variants.candidates(self) if self.undecided else ()

    @override
    def compile(self, fn: Callable[..., Any], *, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        return jax.jit(fn, donate_argnums=donate)

    @property
    def compilations(self) -> int:
        """Programs that JAX has made in this process so far, by compiling or from its cache on disk."""
        return programs.made()

    @override
    def guard(self) -> AbstractContextManager[Any]:
        if getattr(jax.config, "jax_numpy_rank_promotion", "allow") == "allow":
            return nullcontext()
        allowed: AbstractContextManager[Any] = jax.numpy_rank_promotion("allow")  # which ours needs
        return allowed

    @override
    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or (
            isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
        )

    @override
    def fatal(self, error: BaseException) -> bool:
        # XLA's codes for a device or a connection to it that is gone, and the CUDA errors that end a context.
        text = str(error)
        return (
            isinstance(error, jax.errors.JaxRuntimeError)
            and not self.out_of_memory(error)
            and (text.startswith(("UNAVAILABLE", "DATA_LOSS", "ABORTED")) or "CUDA_ERROR_" in text)
        )

    @override
    def usable(self, cache: Sequence[LayerCache]) -> bool:
        arrays = [leaf for leaf in jax.tree.leaves(cache) if isinstance(leaf, jax.Array)]
        if any(leaf.is_deleted() for leaf in arrays):
            return False
        try:
            jax.block_until_ready(arrays)  # the error of a step that is still running comes up here
        except jax.errors.JaxRuntimeError:
            return False
        return True

    @override
    def invariant(self) -> JaxBackend:
        return self if self.deterministic else self.variants.invariant(self)

    @override
    def quantized(self, how: str) -> ArrayBackend:
        return self.variants.quantized(self, how) if how in self.quantizations else super().quantized(how)

    @override
    def memory(self) -> tuple[int, int] | None:
        stats = (self.device or jax.devices()[0]).memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        return stats["bytes_limit"] - stats["bytes_in_use"], stats["bytes_limit"]

    @override
    def utilization(self, processors: float) -> float | None:
        return processors if self.platform == "cpu" else None

    @override
    def suits(self, dtype: str, arch: Any) -> bool:
        return dtype == "float32" or (self.platform != "cpu" and dtype in ("float16", "bfloat16"))

    @override
    def remarks(self) -> list[str]:
        kept = self._kept or programs.configured("jax_compilation_cache_dir")
        where = kept if kept and programs.in_use() else f"nowhere ({programs.SWITCH}=0, or no folder to write to)"
        lines = [f"compiled programs are kept in: {where}"]
        if self.platform != "cpu":
            return lines
        lines.append(f"hibachi's kernels: {'' if self.native else 'not in use here; '}{self.variants.native_state()}")
        if self.native:
            return lines
        return [*lines, "without them float32 is the dtype to take: XLA computes bfloat16 six times as slowly on a CPU"]

    @override
    def versions(self) -> dict[str, str]:
        return {"library": f"jax {jax.__version__}", "device": str(self.device or jax.devices()[0])}
