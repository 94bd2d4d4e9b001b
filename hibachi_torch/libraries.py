"""Attention kernels of other libraries that people ask for: `hibachi doctor --model` says of each why it is not taken.

hibachi has no code for them. A package brings one by the entry-point group `hibachi.kernels`, with `Candidate(needs=)`.
"""

from __future__ import annotations

from dataclasses import replace

from hibachi.backend.candidates import Candidate, without_library
from hibachi_torch.backend import TorchBackend

_KNOWN = (  # name, module, is it for CUDA alone, why there is no code for it
    ("flash-attn", "flash_attn", True, "PyTorch's varlen_attn is the same kernel"),
    ("flashinfer", "flashinfer", True, "PyTorch's varlen_attn reads block tables too"),
    ("FlexAttention", "torch.nn.attention.flex_attention", False, "it would be compiled anew for each shape"),
)


def libraries(backend: TorchBackend) -> list[Candidate]:
    """Those on the CPU and on CUDA, none of which can be had; one whose library is missing says that."""
    device = backend.device.type
    if device not in ("cpu", "cuda"):
        return []
    out = []
    for name, module, cuda, why in _KNOWN:
        if cuda and device == "cpu":
            why = "for CUDA; this is the CPU"
        out.append(without_library(Candidate("attention", name, TorchBackend, needs=module)))
        if out[-1].why_not is None or (cuda and device == "cpu"):
            out[-1] = replace(out[-1], why_not=why)
    return out
