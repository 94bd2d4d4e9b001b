"""How far apart arrays of two calls are that should be alike but for rounding."""

from __future__ import annotations

import numpy as np

from hibachi.backend.array_backend import HostArray

ALIKE, ALIKE_ROUGH = 1e-3, 0.05  # of the largest output: what those of a model that goes on from a past may differ by


def apart(one: HostArray, other: HostArray) -> float:
    """The largest difference; what is -inf in both is alike."""
    differ = one != other
    return float(np.abs(one[differ] - other[differ]).max()) if differ.any() else 0.0


def largest(array: HostArray) -> float:
    """The largest of the finite numbers, without their signs."""
    finite = np.isfinite(array)
    return float(np.abs(array[finite]).max()) if finite.any() else 0.0
