"""The ways in which JAX on the CPU computes the operations of a model, as candidates to be timed."""

from __future__ import annotations

import os

import jax

from hibachi.tensor.candidates import OPERATIONS, Candidate
from hibachi_jax.backend import JaxBackend

_KEPT_APART = "HIBACHI_NATIVE=0 is set"
_WIDE = "JAX computes in float64 here (jax_enable_x64)"


def candidates(backend: JaxBackend) -> list[Candidate]:
    """Those of a plain JaxBackend on the CPU; others have none. Native kernels that are not compiled yet are compiled
    in the background, for the next start: nobody waits for a compiler.

    Steps of fixed shape (`hibachi_jax.invariant`) are none: they are a way to make steps, and not one to compute them.
    """
    if type(backend) is not JaxBackend or backend.platform != "cpu":
        return []
    from hibachi_jax.native.build import compiled

    found = [Candidate(op, "xla", JaxBackend) for op in OPERATIONS]
    found += [Candidate("attention", "pallas", JaxBackend, why_not="for TPUs; this is the CPU")]
    why = _KEPT_APART if os.environ.get("HIBACHI_NATIVE") == "0" else _WIDE if jax.config.jax_enable_x64 else None
    why = why or compiled.why_not_yet()
    if why is not None:
        return found + [Candidate(op, "native", JaxBackend, why_not=why) for op in OPERATIONS]
    from hibachi_jax.native.backend import NativeJaxBackend

    return found + [Candidate(op, "native", NativeJaxBackend, invariant=True) for op in OPERATIONS]
