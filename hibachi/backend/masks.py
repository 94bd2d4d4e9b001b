"""Which tokens may come, as packed bits on the host: uint32 [m, ceil(V / 32)], bit t % 32 of word t // 32 for token t.

What lies beyond the last token means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

WORD = 32  # tokens of a word
ALL = np.uint32(0xFFFFFFFF)  # a word whose tokens may all come
HostArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class _Library(Protocol):
    """What is needed of a backend."""

    xp: Any
    device: Any

    def take(self, t: Any, idx: Any) -> Any: ...
    def float32(self, x: Any) -> Any: ...


def words(vocab_size: int) -> int:
    """How many words the bits of a row have."""
    return -(-vocab_size // WORD)


def packed(ids: Iterable[int], vocab_size: int) -> HostArray:
    """The bits of a row of which only these tokens may come: uint32 [words]."""
    may = np.zeros(words(vocab_size) * WORD, bool)
    may[list(ids)] = True
    return np.packbits(may, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def forbid(row: HostArray, ids: Iterable[int]) -> None:
    """These tokens may not come: clears their bits of a row, uint32 [words]."""
    for token in ids:
        row[token // WORD] &= ~(np.uint32(1) << np.uint32(token % WORD))


def checked(bits: HostArray, shape: Sequence[int]) -> HostArray:
    """The bits of logits of a shape [m, V], row by row in memory. Raises ValueError for others."""
    wanted = shape[0], words(shape[1])
    if bits.dtype != np.uint32 or bits.shape != wanted:
        raise ValueError(
            f"keep_bits: expected bits uint32 {list(wanted)}, {WORD} tokens a word, as the logits are {list(shape)}; "
            f"got {bits.dtype} {list(bits.shape)}."
        )
    return np.require(bits, requirements=["C", "A"])


def as_bytes(bits: HostArray) -> HostArray:
    """Bits [m, words] as int8 [m, 4 * words], bit t % 8 of byte t // 8: all libraries shift it, but not uint32."""
    return bits.astype("<u4", copy=False).view(np.int8)


def forbidden(bits: HostArray, shape: Sequence[int]) -> HostArray:
    """The tokens of logits [m, V] that may not come: bool [m, V]. Raises ValueError as `checked` does."""
    inverse = as_bytes(~checked(bits, shape)).view(np.uint8)
    return np.unpackbits(inverse, axis=1, count=shape[1], bitorder="little").view(bool)


# ---- programs: functions of arrays of a library ----------------------------------------------------------------------


def keep(backend: _Library, x: Any, bits: Any) -> Any:
    """`keep_bits` with bits that are on the device, int8 as `as_bytes` has them."""
    xp, (m, n) = backend.xp, bits.shape
    places = xp.arange(8, dtype=xp.int8, device=backend.device)
    may = (bits[:, :, None] >> places) & 1  # that the sign is shifted in leaves each bit where it is
    may = xp.reshape(may, (m, n * 8))[:, : x.shape[1]]
    return xp.where(may != 0, x, xp.full_like(x, -math.inf))


def copied(backend: _Library, logits: Any, at: Any) -> tuple[Any, Any]:
    """`kept_rows` of which all tokens may come."""
    x = backend.float32(backend.take(logits, at))
    return x, backend.xp.isfinite(backend.xp.max(x, axis=-1))
