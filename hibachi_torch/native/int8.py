"""`NativeTorchBackend` with weights of eight bits: `TorchBackend("cpu").quantized("int8")`. See int8.h."""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from hibachi.errors import UnsupportedOperation
from hibachi.tensor.array_backend import Array, ArrayBackend, HostArray
from hibachi_torch.native.backend import NativeTorchBackend, PackedWeight
from hibachi_torch.native.build import library
from hibachi_torch.native.memory import Slabs
from hibachi_torch.native.program import Program, program

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_DEEPEST = 2**16  # columns of a matrix, so that no sum of products of bytes leaves int32


class _Kernels:
    """The compiled functions of one dtype of activations."""

    def __init__(self, suffix: str) -> None:
        p, n = ctypes.c_void_p, ctypes.c_int64
        lib = library()

        def find(name: str, *arguments: Any) -> Any:
            kernel = lib[f"hibachi_int8_{name}"]
            kernel.argtypes, kernel.restype = arguments, None
            return kernel

        self.linear = find(f"linear_{suffix}", p, n, p, p, p, p, n, n, n)
        self.linear_f32 = find("linear_bf16_f32" if suffix == "bf16" else "linear_f32", p, n, p, p, p, p, n, n, n)
        self.pack = find("pack", p, p, p, n, n)
        self.rows = find(f"rows_{suffix}", p, p, p, p, n, n)


class Int8Weight(PackedWeight):
    """A matrix [out, in] of bytes in the panels of int8.h, with a scale for each row.

    dtype: of what it is multiplied with.
    """

    __slots__ = ("scales",)

    def __init__(self, plain: HostArray, dtype: torch.dtype, kernels: _Kernels, slabs: Slabs) -> None:
        plain = np.ascontiguousarray(plain, dtype=np.float32)
        (n, k), panel = plain.shape, library().hibachi_int8_panel()
        rows = -(-n // panel) * panel
        self.shape, self.dtype = torch.Size(plain.shape), dtype
        self.data, self.scales = slabs.empty(rows * -(-k // 4) * 4, torch.uint8), slabs.empty(rows, torch.float32)
        self.pointer = self.data.data_ptr()
        self.kernels, self.pointers = kernels, (self.pointer, self.scales.data_ptr())
        kernels.pack(plain.ctypes.data, self.pointer, self.scales.data_ptr(), n, k)


class Int8TorchBackend(NativeTorchBackend):
    """Matrices of float32 and bfloat16 models in eight bits; the rest as in the class above.

    No result depends on the batch or on the number of threads: a row is rounded by itself, sums of a group are exact.
    """

    kernels = "native int8"
    quantization = "int8"

    def __init__(self, device: Any = "cpu", native: bool | None = None) -> None:
        super().__init__("cpu")
        self._int8 = {dtype: _Kernels(suffix) for dtype, suffix in _SUFFIX.items()}

    @override
    def put_weight(self, w: HostArray, dtype: str) -> Array:
        kernels = self._int8.get(self.dtype(dtype))
        if kernels is None:
            raise UnsupportedOperation(
                f"Weights in int8 go with activations in float32 or bfloat16; got {dtype}. Pass one of these as dtype."
            )
        if w.shape[1] > _DEEPEST:
            return super().put_weight(w, dtype)
        return Int8Weight(w, self.dtype(dtype), kernels, self._slabs)

    @override
    def put_precise(self, w: HostArray, dtype: str) -> Array:
        return super().put_weight(w, dtype)

    @override
    def fuse(self, decoder: Any) -> Program | None:
        return program(decoder, Int8Weight)


_ROWS = (1, 64)  # of the products that are timed
_SIZES, _COPIES = (1536, 1024), 16  # of each matrix; together they do not fit into most caches


def faster(plain: ArrayBackend, dtype: str) -> bool:
    """Does int8 take less time than `plain` with weights of this dtype, for a single row and for many?

    Measured when first asked, in a quarter of a second; the answer stays for the process.
    """
    family: Any = type(plain)
    return dtype in ("float32", "bfloat16") and _faster(family, dtype, torch.get_num_threads())


@cache
def _faster(plain: type[Any], dtype: str, threads: int) -> bool:
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal(_SIZES, np.float32)
    backends = [plain("cpu"), Int8TorchBackend()]
    weights = [[b.put_weight(matrix, dtype) for _ in range(_COPIES)] for b in backends]
    with torch.inference_mode():
        for rows in _ROWS:
            x = backends[0].put(rng.standard_normal((rows, _SIZES[1]), np.float32), dtype)
            best = [float("inf")] * 2
            for turn in range(4):  # the first one packs
                for i, b in enumerate(backends):
                    began = time.perf_counter()
                    for w in weights[i]:
                        b.linear(x, w)
                    if turn:
                        best[i] = min(best[i], time.perf_counter() - began)
            if best[1] >= best[0]:
                return False
    return True
