"""The ways in which PyTorch on the CPU computes the operations of a model, as candidates to be timed."""

from __future__ import annotations

import os

from hibachi.tensor.candidates import OPERATIONS, Candidate
from hibachi_torch.backend import TorchBackend
from hibachi_torch.native.build import compiled

_KEPT_APART = "HIBACHI_NATIVE=0 is set"


def candidates(backend: TorchBackend) -> list[Candidate]:
    """Those of a plain TorchBackend on the CPU; others have none. Native kernels that are not compiled yet are compiled
    in the background, for the next start: nobody waits for a compiler."""
    if type(backend) is not TorchBackend or backend.device.type != "cpu":
        return []
    from hibachi_torch.invariant import InvariantTorchBackend

    steady = "oneDNN" if InvariantTorchBackend.kernels == "oneDNN" else "padded"
    found = [Candidate(op, "torch", TorchBackend) for op in OPERATIONS]
    found += [Candidate("linear", steady, InvariantTorchBackend, invariant=True)]
    found += [Candidate(op, "invariant", InvariantTorchBackend, invariant=True) for op in ("attention", "activations")]
    found += [Candidate("sampling", "chunks", InvariantTorchBackend, invariant=True)]
    why = _KEPT_APART if os.environ.get("HIBACHI_NATIVE") == "0" else compiled.why_not_yet()
    if why is not None:
        return found + [Candidate(op, "native", TorchBackend, why_not=why) for op in OPERATIONS]
    from hibachi_torch.native.backend import ApartTorchBackend, NativeTorchBackend
    from hibachi_torch.native.int8 import Int8TorchBackend

    found += [Candidate("attention", "native apart", ApartTorchBackend, invariant=True)]
    found += [Candidate(op, "native", NativeTorchBackend, invariant=True) for op in OPERATIONS]
    return [*found, Candidate("linear", "native int8", Int8TorchBackend, invariant=True, rounds=True)]
