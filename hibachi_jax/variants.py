"""All backends on JAX, and which of them is taken when: nobody else knows them all. See `backend.Variants`."""

from __future__ import annotations

import logging
import os
from typing import Any

import jax

from hibachi.tensor.candidates import OPERATIONS, Candidate
from hibachi_jax.backend import JaxBackend
from hibachi_jax.int8 import Int8JaxBackend, InvariantInt8JaxBackend
from hibachi_jax.invariant import InvariantJaxBackend
from hibachi_jax.native.backend import NativeJaxBackend
from hibachi_jax.native.build import compiled
from hibachi_jax.programs import configured

_log = logging.getLogger("hibachi.jax")
_said: set[str] = set()  # why there are no native kernels, once each
_SWITCH = "HIBACHI_NATIVE"


def starts_as(device: Any, native: bool | None) -> type[JaxBackend]:
    """Of which class `JaxBackend(device, native)` makes an object. Where native kernels are wanted, but cannot be had,
    the log says why."""
    wanted = os.environ.get(_SWITCH) == "1" if native is None else native
    if not wanted or not _on_cpu(device):
        return JaxBackend
    why = compiled.why_missing()
    if why is None:
        return NativeJaxBackend
    if why not in _said:
        _said.add(why)
        _log.warning("JAX goes without native kernels. %s", why)
    return JaxBackend


def _on_cpu(device: Any) -> bool:
    if device is None:
        return jax.default_backend() == "cpu"
    return device == "cpu" or getattr(device, "platform", None) == "cpu"


def invariant(backend: JaxBackend) -> JaxBackend:
    """For a backend that is not deterministic."""
    return InvariantJaxBackend(backend.device)


def int8(backend: JaxBackend) -> JaxBackend:
    """With weights of eight bits; deterministic if the backend is."""
    return (InvariantInt8JaxBackend if backend.deterministic else Int8JaxBackend)(backend.device)


def native_state() -> str:
    """Are there native kernels, or why not? In words, without compiling any."""
    return "; ".join(_said) or compiled.state()


def candidates(backend: JaxBackend) -> list[Candidate]:
    """The ways in which a plain JaxBackend on the CPU computes the operations of a model, to be timed; others have
    none. Native kernels that are not compiled yet are compiled in the background, for the next start: nobody waits for
    a compiler.

    Steps of fixed shape (`hibachi_jax.invariant`) are none: they are a way to make steps, and not one to compute them.
    """
    if not backend.is_plain(JaxBackend) or backend.platform != "cpu":
        return []
    found = [Candidate(op, "xla", JaxBackend) for op in OPERATIONS]
    found += [Candidate("attention", "pallas", JaxBackend, why_not="for TPUs; this is the CPU")]
    why = _kept_apart() or compiled.why_not_yet()
    if why is not None:
        return found + [Candidate(op, "native", JaxBackend, why_not=why) for op in OPERATIONS]
    return found + [Candidate(op, "native", NativeJaxBackend, invariant=True) for op in OPERATIONS]


def _kept_apart() -> str | None:
    """Why native kernels are not to be used, whether they are there or not."""
    if os.environ.get(_SWITCH) == "0":
        return f"{_SWITCH}=0 is set"
    return "JAX computes in float64 here (jax_enable_x64)" if configured("jax_enable_x64") else None
