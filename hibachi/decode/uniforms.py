"""Random numbers from the host: one for each (seed, position), the same in every process and at any time."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

HostArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_MASK = 2**64 - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


def _mix(z: HostArray) -> HostArray:
    for shift, factor in _MIX:
        z = (z ^ (z >> shift)) * factor  # wraps, as it should
    z = z ^ (z >> np.uint64(31))
    return z


def uniforms(seed: HostArray, position: HostArray) -> HostArray:
    """seed [n] and position [n], integers >= 0 -> float32 [n] in the open interval (0, 1).

    Number `position` (from 0) of the SplitMix64 generator that starts at `seed`, computed directly: Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of Vigna's splitmix64.c.
    """
    z = _mix(np.asarray(seed, np.uint64) + (np.asarray(position, np.uint64) + np.uint64(1)) * _GAMMA)
    # 23 bits and a half: the middles of 2^23 equal cells, exact in float32, and never 0 or 1.
    u: HostArray = ((z >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return u


def fork(seed: int, i: int) -> int:
    """The seed of the i-th of several continuations of one prompt; the first one's is `seed` itself.

    Number i of the SplitMix64 generator that starts at the mixed seed. The seed is mixed first, so that no continuation
    reads on in the numbers of another.
    """
    if i == 0:
        return seed
    start = _mix(np.array([seed & _MASK], np.uint64))
    return int(_mix(start + np.array([i], np.uint64) * _GAMMA)[0])
