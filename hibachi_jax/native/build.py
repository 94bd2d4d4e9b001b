"""The kernels of this folder, compiled on first use (`hibachi.tensor.native.build`), as custom calls of XLA."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import jax
from jaxlib.version import __version__ as JAXLIB

from hibachi.tensor.native.build import NativeLibrary

HANDLERS = ("linear", "rows", "attend", "rms_norm", "layer_norm", "softmax", "rope", "activate", "best")


def _flags() -> tuple[list[str], list[str]]:
    return [f"-isystem{jax.ffi.include_dir()}", "-pthread"], ["-pthread"]


compiled = NativeLibrary(
    "jax-native",
    Path(__file__).parent,
    f"{__name__}.compiled",
    flags=_flags,
    facts=(jax.__version__, JAXLIB),
)


@cache
def library() -> ctypes.CDLL:
    """The compiled kernels, known to XLA by the names of `target`.

    Raises `hibachi.tensor.native.build.NativeUnavailable`.
    """
    found = compiled.loaded
    for name in HANDLERS:
        handler = jax.ffi.pycapsule(getattr(found, f"hibachi_{name}"))
        jax.ffi.register_ffi_target(target(name), handler, platform="cpu")
    return found


@cache
def target(name: str) -> str:
    """What a program calls. Programs are kept on disk, so the name says which build of the kernels it was made for."""
    return f"hibachi_{name}.{compiled.place().stem}"
