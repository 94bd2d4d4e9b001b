"""JAX with weights of eight bits without hibachi's kernels, as on a TPU: `JaxBackend().quantized("int8")`.

A matrix is rounded to integers from -127 to 127, with one scale for each of its rows. Activations are rounded when they
are multiplied, with one scale for each token, to sixteen bits: of eight, the few large numbers that language models
have would leave too few steps to the others. Sixteen bits are two bytes, so a product is one of bytes with twice as
many rows, added up in int32, which is exact: how a device adds up makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from hibachi.backend.array_backend import Array, HostArray
from hibachi_jax.backend import JaxBackend

_LARGEST = 127
_LARGEST_PAIR = 127 * 256  # so that both bytes of a number fit
_DEEPEST = 2**16  # columns of a matrix, so that no sum of products of bytes leaves int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Weight:
    """A matrix [out, in] of int8, with a scale for each row. dtype: of rows that are looked up."""

    values: Array
    scales: Array
    dtype: str = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


class Int8JaxBackend(JaxBackend):
    """`JaxBackend` with matrices in eight bits."""

    quantization = "int8"
    kernels = "int8"

    @override
    def put_weight(self, w: HostArray, dtype: str) -> Any:
        if w.shape[1] > _DEEPEST:
            return super().put_weight(w, dtype)
        w = np.asarray(w, dtype=np.float32)
        scales = np.abs(w).max(axis=1, initial=0) / np.float32(_LARGEST)
        values = np.rint(w / np.where(scales > 0, scales, np.float32(1))[:, None])
        with np.errstate(invalid="ignore"):  # of a damaged model: the scale is NaN, and so is what comes of it
            return Int8Weight(self.put(values.astype(np.int8)), self.put(scales), dtype)

    @override
    def put_precise(self, w: HostArray, dtype: str) -> Any:
        return super().put_weight(w, dtype)

    @override
    def weight_rows(self, w: Any, idx: Array) -> Array:
        if not isinstance(w, Int8Weight):
            return super().weight_rows(w, idx)
        rows = self.take(w.values, idx).astype(jnp.float32) * self.take(w.scales, idx)[..., None]
        return rows.astype(self.dtype(w.dtype))

    @override
    def linear(self, x: Array, w: Any, b: Array | None = None) -> Array:
        if not isinstance(w, Int8Weight):
            return super().linear(x, w, b)
        y = _product(x.reshape(-1, x.shape[-1]), w.values, w.scales)
        y = y if b is None else y + b
        return y.astype(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


@jax.jit
def _product(x: Array, values: Array, scales: Array) -> Array:
    """x [m, in] times values [out, in] times scales [out]: float32 [m, out]."""
    f = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(f), axis=-1, keepdims=True)
    whole = jnp.rint(f * jnp.where(most > 1e-30, _LARGEST_PAIR / most, 0)).astype(jnp.int32)
    high = (whole + 128) >> 8
    bytes_ = jnp.concatenate([high, whole - (high << 8)]).astype(jnp.int8)
    both = jax.lax.dot_general(bytes_, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    high, low = jnp.split(both.astype(jnp.float32), 2)
    return (256 * high + low) * (most / _LARGEST_PAIR) * scales
