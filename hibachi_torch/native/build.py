"""The kernels of this folder, compiled on first use: see `hibachi.tensor.native.build`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from hibachi.tensor.native.build import NativeLibrary
from hibachi_torch.native.structs import Op, Sizes, Step


def _flags() -> tuple[list[str], list[str]]:
    from torch.utils.cpp_extension import include_paths, library_paths  # slow to import

    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    # OpenMP to compile only: linked is the one that libtorch_cpu brings, so that there is one pool of threads.
    to_compile = ["-fopenmp", abi, *(f"-isystem{p}" for p in include_paths())]
    to_link = [part for p in library_paths() for part in (f"-L{p}", f"-Wl,-rpath,{p}")]
    return to_compile, [*to_link, "-ltorch_cpu", "-lc10"]


compiled = NativeLibrary(
    "torch-native",
    Path(__file__).parent,
    f"{__name__}.compiled",
    flags=_flags,
    facts=(torch.__version__, torch.__file__),
    structs=(Sizes, Op, Step),
)


def library() -> ctypes.CDLL:
    """The compiled kernels. Raises `hibachi.tensor.native.build.NativeUnavailable`."""
    return compiled.loaded
