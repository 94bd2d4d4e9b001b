"""All backends on PyTorch, and which of them is taken when: nobody else knows them all. See `backend.Variants`."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from hibachi.tensor.candidates import OPERATIONS, Candidate
from hibachi_torch.backend import TorchBackend
from hibachi_torch.cuda import CudaTorchBackend
from hibachi_torch.int8 import Int8WeightsTorchBackend
from hibachi_torch.invariant_backend import InvariantTorchBackend
from hibachi_torch.libraries import libraries
from hibachi_torch.native import int8 as native_int8
from hibachi_torch.native.backend import ApartTorchBackend, NativeTorchBackend
from hibachi_torch.native.build import compiled
from hibachi_torch.native.int8 import Int8TorchBackend

_log = logging.getLogger("hibachi.torch")
_said: set[str] = set()  # why there are no native kernels, once each
_SWITCH = "HIBACHI_NATIVE"


def starts_as(device: Any, native: bool | None) -> type[TorchBackend]:
    """Of which class `TorchBackend(device, native)` makes an object. Where native kernels are wanted, but cannot be
    had, the log says why."""
    cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    if cuda:
        return CudaTorchBackend
    wanted = os.environ.get(_SWITCH) == "1" if native is None else native
    if not wanted or (device is not None and torch.device(device).type != "cpu"):
        return TorchBackend
    why = compiled.why_missing()
    if why is None:
        return NativeTorchBackend
    if why not in _said:
        _said.add(why)
        _log.warning("PyTorch goes without native kernels. %s", why)
    return TorchBackend


def invariant(backend: TorchBackend) -> TorchBackend:
    """For a plain TorchBackend on the CPU."""
    return InvariantTorchBackend(backend.device)


def int8(backend: TorchBackend) -> TorchBackend:
    """With weights of eight bits, for a backend on the CPU: by native kernels, or by PyTorch's own."""
    if not backend.native and (os.environ.get(_SWITCH) == "0" or compiled.why_missing() is not None):
        return Int8WeightsTorchBackend(backend.device)
    return Int8TorchBackend()


def int8_is_faster(backend: TorchBackend, dtype: str) -> bool:
    """Are native kernels for eight bits there, and faster than the backend is with weights of this dtype?"""
    return compiled.why_missing() is None and native_int8.faster(backend, dtype)


def native_state() -> str:
    """Are there native kernels, or why not? In words, without compiling any."""
    return "; ".join(_said) or compiled.state()


def candidates(backend: TorchBackend) -> list[Candidate]:
    """The ways in which PyTorch computes the operations of a model. On the CPU there are several to be timed; kernels
    that are not compiled yet are compiled in the background, for the next start: nobody waits for a compiler."""
    if not backend.is_plain(TorchBackend) or backend.device.type != "cpu":
        return libraries(backend)
    steady = "oneDNN" if InvariantTorchBackend.kernels == "oneDNN" else "padded"
    found = [Candidate(op, "torch", TorchBackend) for op in OPERATIONS]
    found += [Candidate("linear", steady, InvariantTorchBackend, invariant=True)]
    found += [Candidate(op, "invariant", InvariantTorchBackend, invariant=True) for op in ("attention", "activations")]
    found += [Candidate("sampling", "chunks", InvariantTorchBackend, invariant=True)]
    why = f"{_SWITCH}=0 is set" if os.environ.get(_SWITCH) == "0" else compiled.why_not_yet()
    if why is not None:
        found += [Candidate(op, "native", TorchBackend, why_not=why) for op in OPERATIONS]
    else:
        found += [Candidate("attention", "native apart", ApartTorchBackend, invariant=True)]
        found += [Candidate(op, "native", NativeTorchBackend, invariant=True) for op in OPERATIONS]
        found += [Candidate("linear", "native int8", Int8TorchBackend, invariant=True, rounds=True)]
    return [*found, *libraries(backend)]
