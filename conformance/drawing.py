"""The random numbers of hibachi, one at a time in Python's integers: what every backend is to get, bit by bit.

SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; constants of Vigna's
splitmix64.c. Normal numbers: Box and Muller, "A note on the generation of random normal deviates", 1958.
"""

from __future__ import annotations

import math

import numpy as np

_WORD = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_CODEBOOKS, _DRAWS = 0xA0761D6478BD642F, 0xE7037ED1A0B428DB


def uniform(seed: int, position: int) -> np.float32:
    """The number of the token at this position, in the open interval (0, 1)."""
    return _open(_number(seed, position))


def codebook_seeds(seed: int, n: int) -> list[int]:
    """Of the codebooks of a token."""
    return [seed, *(_other(seed, i, _CODEBOOKS) for i in range(1, n))]


def drawn(seed: int, position: int, n: int) -> np.ndarray:
    """What a model with `draws = n` is given for the token at this position: n uniform and n normal, float32 [2 n]."""
    bits = [_number(_other(seed, i, _DRAWS), position) for i in range(3 * n)]
    uniforms = [_open(z) for z in bits[::3]]
    normals = [_normal(*pair) for pair in zip(bits[1::3], bits[2::3], strict=True)]
    return np.array([*uniforms, *normals], np.float32)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def _number(seed: int, position: int) -> int:
    return _mix((seed + (position + 1) * _GAMMA) & _WORD)


def _other(seed: int, i: int, kind: int) -> int:
    return _mix((_mix(seed ^ kind) + i * _GAMMA) & _WORD)


def _open(z: int) -> np.float32:
    return np.float32(((z >> 41) + 0.5) * 2.0**-23)


def _normal(z: int, other: int) -> np.float32:
    u, turn = (((bits >> 12) + 0.5) * 2.0**-52 for bits in (z, other))
    return np.float32(math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * turn))
