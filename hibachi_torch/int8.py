"""PyTorch's own product with weights of eight bits, for machines without a compiler: it saves memory, not time.

Activations are not rounded. `torch.ops.aten._weight_int8pack_mm` is private, and ends the process if a row is no
multiple of 64 numbers, so rows are filled up with zeros.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from typing_extensions import override

from hibachi.errors import UnsupportedOperation
from hibachi.tensor.array_backend import Array, HostArray
from hibachi_torch.invariant_backend import InvariantTorchBackend

_LARGEST = 127
_MULTIPLE = 64  # of columns
_DTYPES = (torch.float32, torch.bfloat16)


class Int8Matrix:
    """A matrix [out, in] of int8, columns filled up, with a scale for each row in the dtype of the activations."""

    __slots__ = ("dtype", "scales", "shape", "values")

    def __init__(self, plain: HostArray, dtype: torch.dtype) -> None:
        w = torch.from_numpy(np.array(plain, dtype=np.float32, ndmin=2))
        self.shape, self.dtype = w.shape, dtype
        self.scales = (w.abs().amax(1) / _LARGEST).to(
            dtype
        )  # rounded first, so that the values are those of this scale
        step = self.scales.float()[:, None]
        values = torch.where(step > 0, w / step, 0).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        self.values = F.pad(values, (0, -w.shape[1] % _MULTIPLE))


class Int8WeightsTorchBackend(InvariantTorchBackend):
    """`TorchBackend("cpu").quantized("int8")` without native kernels."""

    kernels = f"int8 weights, {InvariantTorchBackend.kernels}"
    quantization = "int8"

    @override
    def put_weight(self, w: HostArray, dtype: str) -> Array:
        if self.dtype(dtype) not in _DTYPES:
            raise UnsupportedOperation(
                f"Weights in int8 go with activations in float32 or bfloat16; got {dtype}. Pass one of these as dtype."
            )
        return Int8Matrix(w, self.dtype(dtype))

    @override
    def put_precise(self, w: HostArray, dtype: str) -> Array:
        return super().put_weight(w, dtype)

    @override
    def weight_rows(self, w: Array, idx: Array) -> Array:
        if not isinstance(w, Int8Matrix):
            return super().weight_rows(w, idx)
        rows = self.take(w.values, idx)[..., : w.shape[1]].float() * self.take(w.scales, idx).float()[..., None]
        return rows.to(w.dtype)

    @override
    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        if not isinstance(w, Int8Matrix):
            return super().linear(x, w, b)
        n, k = w.shape
        rows = F.pad(x.reshape(-1, k), (0, -k % _MULTIPLE)).contiguous()
        if not len(rows):
            return x.new_empty((*x.shape[:-1], n))
        y = torch.ops.aten._weight_int8pack_mm(rows, w.values, w.scales).view(*x.shape[:-1], n)
        return y if b is None else y + b
