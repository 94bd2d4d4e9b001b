"""Random numbers from the host: by seed, position and index, the same in every process and at any time."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

HostArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_MASK = 2**64 - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_CODEBOOKS, _DRAWS = np.uint64(0xA0761D6478BD642F), np.uint64(0xE7037ED1A0B428DB)  # tell these generators from others
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
    return _open(_number(seed, position))


def uniform(seed: int, position: int) -> float:
    """`uniforms` for one number, in a tenth of the time."""
    z = (seed + (position + 1) * int(_GAMMA)) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & _MASK
    return (((z ^ (z >> 31)) >> 41) + 0.5) * 2.0**-23


def _number(seed: HostArray, position: HostArray) -> HostArray:
    return _mix(np.asarray(seed, np.uint64) + (np.asarray(position, np.uint64) + np.uint64(1)) * _GAMMA)


def _open(z: HostArray) -> HostArray:
    # 23 bits and a half: the middles of 2^23 equal cells, exact in float32, and never 0 or 1.
    u: HostArray = ((z >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return u


def _others(seed: HostArray, i: HostArray, kind: np.uint64) -> HostArray:
    """Seeds of further generators of a kind, that share no numbers with the first: number i of one that starts at the
    mixed seed, as in `fork`.
    """
    z = _mix(np.asarray(seed, np.uint64) ^ kind)
    return _mix(z + np.asarray(i, np.uint64) * _GAMMA)


def of_codebooks(seed: int, n: int) -> HostArray:
    """The seeds for the codebooks of a token, uint64 [n]; the first one's is `seed` itself."""
    found = _others(np.full(n, seed & _MASK, np.uint64), np.arange(n), _CODEBOOKS)
    found[0] = seed & _MASK
    return found


def draws(seed: HostArray, position: HostArray, n: int) -> tuple[HostArray, HostArray]:
    """seed [m] and position [m], integers >= 0 -> uniform and normal numbers, float32 [m, n] each, which are
    independent of each other and of `uniforms`.
    """
    lanes = _others(np.asarray(seed, np.uint64)[:, None], np.arange(3 * n)[None, :], _DRAWS)
    z = _number(lanes, np.asarray(position, np.uint64)[:, None])
    return _open(z[:, ::3]), _normal(z[:, 1::3], z[:, 2::3])


def _normal(z: HostArray, other: HostArray) -> HostArray:
    """Two arrays of bits, uint64 -> standard normal numbers, float32: Box and Muller, "A note on the generation of
    random normal deviates", 1958. In float64, so that what is rounded last is equal on nearly every machine.
    """
    u, turn = (((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52 for bits in (z, other))
    found: HostArray = (np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * turn)).astype(np.float32)
    return found


def fork(seed: int, i: int) -> int:
    """The seed of the i-th of several continuations of one prompt; the first one's is `seed` itself.

    Number i of the SplitMix64 generator that starts at the mixed seed. The seed is mixed first, so that no continuation
    reads on in the numbers of another.
    """
    if i == 0:
        return seed
    start = _mix(np.array([seed & _MASK], np.uint64))
    return int(_mix(start + np.array([i], np.uint64) * _GAMMA)[0])
