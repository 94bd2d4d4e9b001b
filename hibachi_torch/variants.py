"""All backends on PyTorch, and when each of them is taken: only this module knows them all. See `backend.Variants`."""

from __future__ import annotations

from typing import Any

import torch

from hibachi.backend.candidates import OPERATIONS, Candidate
from hibachi.backend.kernels.library import NUMERICS, state, why_missing
from hibachi.errors import UnsupportedOperation
from hibachi_torch.backend import TorchBackend
from hibachi_torch.cuda import CudaTorchBackend
from hibachi_torch.invariant_backend import InvariantTorchBackend
from hibachi_torch.libraries import libraries
from hibachi_torch.native import ApartTorchBackend, Int4TorchBackend, Int8TorchBackend, NativeTorchBackend, faster


def starts_as(device: Any, native: bool | None) -> type[TorchBackend]:
    """Of which class `TorchBackend(device, native)` makes an object."""
    cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    if cuda:
        return CudaTorchBackend
    if native is None:
        native = why_missing() is None
    on_cpu = device is None or torch.device(device).type == "cpu"
    return NativeTorchBackend if on_cpu and native else TorchBackend


def invariant(backend: TorchBackend) -> TorchBackend:
    """For a plain TorchBackend on the CPU."""
    return InvariantTorchBackend(backend.device)


def quantized(backend: TorchBackend, how: str) -> TorchBackend:
    """With weights of fewer bits, "int8" or "int4", for a backend on the CPU."""
    if (why := why_missing()) is not None:
        raise UnsupportedOperation(f"Weights in {how} take hibachi's kernels: {why}. Pass quantization=None.")
    return Int8TorchBackend() if how == "int8" else Int4TorchBackend()


def int8_is_faster(backend: TorchBackend, dtype: str) -> bool:
    """Are native kernels for eight bits there, and faster than the backend is with weights of this dtype?"""
    return why_missing() is None and faster(backend, dtype)


def native_state() -> str:
    """Are there native kernels, or why not? In words, without compiling any."""
    return state()


def candidates(backend: TorchBackend) -> list[Candidate]:
    """The ways in which PyTorch computes the operations of a model. On the CPU there are several to be timed."""
    if not backend.is_plain(TorchBackend) or backend.device.type != "cpu":
        return libraries(backend)
    steady = "oneDNN" if InvariantTorchBackend.kernels == "oneDNN" else "padded"
    found = [Candidate(op, "torch", TorchBackend) for op in OPERATIONS]
    found += [Candidate("linear", steady, InvariantTorchBackend, invariant=True)]
    found += [Candidate(op, "invariant", InvariantTorchBackend, invariant=True) for op in ("attention", "activations")]
    found += [Candidate("sampling", "chunks", InvariantTorchBackend, invariant=True)]
    why = why_missing()
    if why is not None:
        found += [Candidate(op, "native", TorchBackend, why_not=why) for op in OPERATIONS]
    else:
        found += [Candidate("attention", "native apart", ApartTorchBackend, invariant=True, bits=NUMERICS)]
        found += [Candidate(op, "native", NativeTorchBackend, invariant=True, bits=NUMERICS) for op in OPERATIONS]
        found += [Candidate("linear", "native int8", Int8TorchBackend, invariant=True, rounds=True)]
    return [*found, *libraries(backend)]
