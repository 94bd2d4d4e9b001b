"""All backends on JAX, and when each of them is taken: only this module knows them all. See `backend.Variants`."""

from __future__ import annotations

from typing import Any

import jax

from hibachi.backend.candidates import OPERATIONS, Candidate
from hibachi.backend.kernels.library import NUMERICS, state, why_missing
from hibachi.errors import UnsupportedOperation
from hibachi_jax.backend import JaxBackend
from hibachi_jax.int8 import Int8JaxBackend
from hibachi_jax.invariant import InvariantJaxBackend
from hibachi_jax.native import Int4NativeJaxBackend, Int8NativeJaxBackend, NativeJaxBackend
from hibachi_jax.programs import configured


def starts_as(device: Any, native: bool | None) -> type[JaxBackend]:
    """Of which class `JaxBackend(device, native)` makes an object."""
    if native is None:
        native = _why_not() is None
    return NativeJaxBackend if native and _on_cpu(device) else JaxBackend


def _on_cpu(device: Any) -> bool:
    if device is None:
        return jax.default_backend() == "cpu"
    return device == "cpu" or getattr(device, "platform", None) == "cpu"


def invariant(backend: JaxBackend) -> JaxBackend:
    """For a backend that is not deterministic."""
    return InvariantJaxBackend(backend.device)


def quantized(backend: JaxBackend, how: str) -> JaxBackend:
    """With weights of fewer bits: "int8", or "int4" by hibachi's kernels."""
    if isinstance(backend, NativeJaxBackend):
        return (Int8NativeJaxBackend if how == "int8" else Int4NativeJaxBackend)(backend.device)
    if backend.deterministic:
        raise UnsupportedOperation(
            f"int8 with the promise takes hibachi's kernels on JAX: {_why_not() or 'this is no CPU'}. Pass "
            f"deterministic=False, or quantization=None."
        )
    return Int8JaxBackend(backend.device)


def native_state() -> str:
    """Are there native kernels, or why not? In words, without compiling any."""
    return _x64() or state()


def candidates(backend: JaxBackend) -> list[Candidate]:
    """The ways in which a plain JaxBackend on the CPU computes the operations of a model, to be timed; others have
    none.

    Steps of fixed shape (`hibachi_jax.invariant`) are none: they are a way to make steps, and not one to compute them.
    """
    if not backend.is_plain(JaxBackend) or backend.platform != "cpu":
        return []
    found = [Candidate(op, "xla", JaxBackend) for op in OPERATIONS]
    found += [Candidate("attention", "pallas", JaxBackend, why_not="for TPUs; this is the CPU")]
    why = _why_not()
    if why is not None:
        return found + [Candidate(op, "native", JaxBackend, why_not=why) for op in OPERATIONS]
    return found + [Candidate(op, "native", NativeJaxBackend, invariant=True, bits=NUMERICS) for op in OPERATIONS]


def _why_not() -> str | None:
    """Why hibachi's kernels are not to be used, or cannot be had."""
    return _x64() or why_missing()


def _x64() -> str | None:
    return "JAX computes in float64 here (jax_enable_x64)" if configured("jax_enable_x64") else None
