"""`TorchBackend` with the kernels of hibachi: `TorchBackend("cpu", native=True)`."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.native import Int4Backend, Int8Backend, NativeBackend
from hibachi_torch.backend import TorchBackend
from hibachi_torch.invariant_backend import InvariantTorchBackend


class NativeTorchBackend(NativeBackend, InvariantTorchBackend):
    """float32 and bfloat16 on the CPU; other dtypes as in the last class above.

    Raises NativeUnavailable where there are no kernels.
    """

    def __init__(self, device: Any = "cpu", native: bool | None = None) -> None:
        super().__init__("cpu")
        self.begin()

    @override
    def address(self, t: Array) -> int:
        at: int = t.data_ptr()
        return at

    @override
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return torch.empty(shape, dtype=dtype, device="cpu")

    @override
    def from_host(self, t: HostArray, dtype: Any) -> Array:
        found = torch.from_numpy(t)
        return found if found.dtype == dtype else found.view(dtype)

    @override
    def strides(self, t: Array) -> tuple[int, ...]:
        found: tuple[int, ...] = t.stride()
        return found

    @override
    def library_threads(self) -> int | None:
        return torch.get_num_threads()

    @override
    def plain(self) -> ArrayBackend:
        found = TorchBackend("cpu", native=False)
        found.undecided = True
        return found

    @override
    def guard(self) -> AbstractContextManager[Any]:
        self.follow_threads()
        return super().guard()


class ApartTorchBackend(NativeTorchBackend):
    """Attention reads for each token by itself: what `cascade` is compared with."""

    cascade = False


class Int8TorchBackend(Int8Backend, NativeTorchBackend):
    """`TorchBackend("cpu").quantized("int8")`."""


class Int4TorchBackend(Int4Backend, NativeTorchBackend):
    """`TorchBackend("cpu").quantized("int4")`."""


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
