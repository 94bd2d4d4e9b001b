"""PyTorch on the CPU and on CUDA: the array-API defaults, and what torch does better."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import array_api_compat.torch as xp
import numpy as np
import torch
import torch.nn.functional as F
from typing_extensions import override

from hibachi.backend import masks
from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.candidates import Candidate
from hibachi.backend.group import RankGroup
from hibachi.errors import UnsupportedOperation


class Variants(Protocol):
    """What the module `hibachi_torch.variants` does for `TorchBackend`, which does not know its heirs."""

    def starts_as(self, device: Any, native: bool | None) -> type[TorchBackend]: ...
    def candidates(self, backend: TorchBackend) -> list[Candidate]: ...
    def invariant(self, backend: TorchBackend) -> TorchBackend: ...
    def quantized(self, backend: TorchBackend, how: str) -> TorchBackend: ...
    def int8_is_faster(self, backend: TorchBackend, dtype: str) -> bool: ...
    def native_state(self) -> str: ...


class TorchBackend(ArrayBackend):
    """device: "cpu", "cuda", "cuda:1" or a torch.device; None means CUDA if there is one, else the CPU.

    native: False means that hibachi's kernels are not used on the CPU; None means that they are used where they load.
    With them no bit depends on the batch, so the backend is deterministic. See `hibachi.backend.kernels.library`.
    """

    name = "torch"
    native = False
    """hibachi's kernels are used."""
    variants: ClassVar[Variants]
    """Set in `hibachi_torch/__init__.py`, which Python runs before any other module of this package."""

    def __new__(cls, device: Any = None, native: bool | None = None) -> TorchBackend:
        return object.__new__(cls.variants.starts_as(device, native) if cls is TorchBackend else cls)

    def __getnewargs__(self) -> tuple[Any, bool]:
        return self.device, self.native  # a copy is of the same class

    def __init__(self, device: Any = None, native: bool | None = None) -> None:
        super().__init__(xp, device=torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
        self._array_type = torch.Tensor
        self.undecided = native is None
        self.prefers_invariant = self.device.type == "cpu" and type(self) is TorchBackend
        self.quantizations = ("int8", "int4") if self.device.type == "cpu" else ()

    @classmethod
    @override
    def for_array(cls, t: Any) -> TorchBackend | None:
        return cls(t.device) if isinstance(t, torch.Tensor) else None

    @override
    def unfit(self, t: Array) -> str | None:
        if t.layout is not torch.strided:
            return str(t.layout).removeprefix("torch.")
        return "without data" if t.is_meta else None

    # ---- movement ----------------------------------------------------------------------------------------------

    @override
    def put(self, a: HostArray, dtype: str | None = None) -> Array:
        a = np.asarray(a, order="C")  # np.ascontiguousarray would make an array of rank 0 one of rank 1
        refused = not a.flags.writeable or min(a.strides, default=0) < 0
        t = torch.from_numpy(a.copy() if refused else a)
        return t.to(self.device, self.dtype(dtype) if dtype else None)

    @override
    def put_all(self, arrays: Sequence[HostArray]) -> list[Array]:
        if self.device.type != "cpu":
            return super().put_all(arrays)
        return [torch.from_numpy(a.copy()) for a in arrays]

    @override
    def get(self, t: Array) -> HostArray:
        t = t.detach()
        there: HostArray = (t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy()  # NumPy has no bfloat16
        return there

    @override
    def bits(self, t: Array) -> Array:
        return t.view(torch.int16) if t.dtype == torch.bfloat16 else t

    @override
    def of_bits(self, t: Array, like: Array) -> Array:
        return t.view(like.dtype)

    @override
    def copy(self, t: Array) -> Array:
        return t.clone(memory_format=torch.contiguous_format)

    @override
    def row_major(self, t: Array) -> Array:
        return t.contiguous()

    @override
    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        if self.device.type != "cpu":
            return super().zeros(shape, dtype)
        # NumPy's zeros take memory only where they are written to: a cache of 1 GiB is there at once.
        wanted = self.dtype(dtype)
        bits = np.dtype(f"u{wanted.itemsize}") if wanted.is_floating_point else np.dtype(dtype)
        return torch.from_numpy(np.zeros(shape, bits)).view(wanted)

    @override
    def take(self, t: Array, idx: Array) -> Array:
        return t.index_select(0, idx.reshape(-1)).view((*idx.shape, *t.shape[1:]))  # three times as fast as t[idx]

    @override
    def scatter_rows(self, dst: Array, idx: Array, src: Array) -> Array:
        return dst.index_copy_(0, idx.long(), src)

    # ---- cache and attention -----------------------------------------------------------------------------------

    @override
    def storable(self, k: Array, v: Array, dtype: Any) -> tuple[Array, Array]:
        if self.device.type == "cpu" and math.isfinite(v.sum()):  # elsewhere, to look is to wait
            return k, v  # (PyTorch writes no other dtype than the cache's)
        return super().storable(k, v, dtype)

    # ---- math --------------------------------------------------------------------------------------------------

    @override
    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        return F.linear(x, w, b)

    @override
    def rms_norm(self, x: Array, w: Array, eps: float) -> Array:
        return F.rms_norm(x, (x.shape[-1],), w, eps)

    @override
    def layer_norm(self, x: Array, w: Array, b: Array | None, eps: float) -> Array:
        return F.layer_norm(x, (x.shape[-1],), w, b, eps)

    @override
    def gelu(self, x: Array) -> Array:
        return F.gelu(x)

    @override
    def gelu_tanh(self, x: Array) -> Array:
        return F.gelu(x, approximate="tanh")

    @override
    def silu(self, x: Array) -> Array:
        return F.silu(x)

    @override
    def softmax(self, x: Array) -> Array:
        return torch.softmax(x, -1)

    @override
    def top(self, x: Array, k: int) -> tuple[Array, Array]:
        values, places = torch.topk(x, k)
        return values, places

    @override
    def keep_bits(self, x: Array, bits: HostArray) -> Array:
        if self.device.type != "cpu":
            return super().keep_bits(x, bits)
        # In the same memory: PyTorch writes each of the steps to the bits to new memory, which takes ten times as long.
        np.copyto(x.detach().numpy(), -np.inf, where=masks.forbidden(bits, x.shape))
        return x

    # ---- execution ---------------------------------------------------------------------------------------------

    @override
    def join(self, size: int, stages: int, timeout: float | None, opening: bytes) -> RankGroup:
        from hibachi_torch.group import joined  # it takes a tenth of a second

        return joined(size, stages, self.device, timeout, opening)

    @override
    def in_leaves(self, leaves: int, group: RankGroup | None = None) -> Self:
        found = super().in_leaves(leaves, group)
        found.device = getattr(group, "device", self.device)
        return found

    @override
    def candidates(self) -> Sequence[Candidate]:
        return self.variants.candidates(self) if self.undecided else ()

    @override
    def invariant(self) -> ArrayBackend:
        if not self.is_plain(TorchBackend):  # operations of a user's own class are not replaced
            return super().invariant()
        if self.device.type != "cpu":
            raise self._not_invariant()
        return self.variants.invariant(self)

    def _not_invariant(self) -> UnsupportedOperation:
        return UnsupportedOperation(
            f"On {self.device} PyTorch has not been shown to compute the same bits whatever shares the batch. Pass "
            f"deterministic=False, or device='cpu'."
        )

    @override
    def quantized(self, how: str) -> ArrayBackend:
        if how not in self.quantizations:
            raise UnsupportedOperation(
                f"PyTorch on {self.device} has no kernels here for weights in {how}; expected int8 or int4 on the CPU. "
                f"Pass quantization=None, or device='cpu'."
            )
        return self.variants.quantized(self, how)

    @override
    def prefers(self, how: str, dtype: str) -> bool:
        return how == "int8" and self.device.type == "cpu" and self.variants.int8_is_faster(self, dtype)

    @override
    def out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        # The CPU's allocator, and CUDA's libraries beside PyTorch's own allocator, have no class for it.
        signs = "DefaultCPUAllocator: ", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
        return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)

    @override
    def fatal(self, error: BaseException) -> bool:
        # After one of these the process cannot use the device any more; older versions raise a plain RuntimeError.
        lost = getattr(torch, "AcceleratorError", ())
        broken = isinstance(error, RuntimeError) and str(error).startswith("CUDA error")
        return not self.out_of_memory(error) and (super().fatal(error) or isinstance(error, lost) or broken)

    @override
    def guard(self) -> AbstractContextManager[Any]:
        if torch.is_autocast_enabled(self.device.type) or torch.get_default_device().type != "cpu":
            return _as_in_a_new_thread(self.device.type)
        return torch.inference_mode()

    @override
    def foreign_model(self, path: Path, *, dtype: str, max_model_len: int | None) -> Any:
        from hibachi_torch.transformers_model import load  # what it needs is optional

        return load(path, self, dtype=dtype, max_model_len=max_model_len)

    @override
    def lent_model(self, module: Any, max_model_len: int) -> Any:
        from hibachi_torch.transformers_lent import lent

        return lent(module, self, max_model_len) if hasattr(module, "generation_config") else None

    @override
    def memory(self) -> tuple[int, int] | None:
        return torch.cuda.mem_get_info(self.device) if self.device.type == "cuda" else None

    @override
    def utilization(self, processors: float) -> float | None:
        if self.device.type == "cpu":
            return processors
        try:
            return torch.cuda.utilization(self.device) / 100  # by NVML, which the package nvidia-ml-py reads
        except Exception:
            return None

    @override
    def remarks(self) -> list[str]:
        if self.device.type != "cpu":
            return []
        return [f"hibachi's kernels: {'' if self.native else 'not in use here; '}{self.variants.native_state()}"]

    @override
    def versions(self) -> dict[str, str]:
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {
            "library": f"torch {torch.__version__}",
            "device": f"{device}, {torch.get_num_threads()} threads",
        }


@contextmanager
def _as_in_a_new_thread(device: str) -> Iterator[None]:
    """For the thread that makes an engine: the engine's own sees none of its caller's autocast and default device."""
    with torch.inference_mode(), torch.autocast(device, enabled=False), torch.device("cpu"):
        yield
