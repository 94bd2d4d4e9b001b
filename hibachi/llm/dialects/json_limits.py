"""Weighs bodies before they are read: while JSON of millions of values is read, nothing else runs, and what is nested
very deep can be read, but not written again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

from hibachi.llm.dialects.errors import Refused

MOST = 1_250_000  # numbers of a body; reading so many holds up other requests for a tenth of a second at most
LIGHT = 1 << 18  # bytes of a body that need not be weighed: it cannot hold so many
DEEPEST = 200  # lists and objects within each other; a fifth of what overflows the stack of what reads and writes JSON
_HOLDER, _TEXT, _NAME = 3, 4, 8  # numbers that take as long to read as one list or object, one text, or one name
_PIECE = 1 << 18  # bytes looked at at a time, so that other threads get their turn
_SOME = 32  # brackets of JSON that are looked at one by one where there may be too many that open
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_AS_LISTS = bytes.maketrans(b"{}", b"[]")
_DEEPER = {ord("["): 1, ord("]"): -1}
_STEPS = 1 << 12  # values of msgpack after which the weight is looked at
# Of msgpack, by first byte. _FIXED: bytes of a number or small extension. _SIZED: bytes that say a length, bytes behind
# these, bytes for each of the length, weight.
_FIXED = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
_FIXED |= {0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}
_SIZED = {0xC4 + i: (1 << i, 0, 1, 1) for i in range(3)} | {0xC7 + i: (1 << i, 1, 1, 1) for i in range(3)}
_SIZED |= {0xD9 + i: (1 << i, 0, 1, _TEXT) for i in range(3)}
_SIZED |= {0xDC + i: (2 << i % 2, 0, 0, _HOLDER) for i in range(4)}


def check_weight(body: bytes) -> None:
    """Check how many values a body of JSON has, by the time that they take to read, and how deep they are nested. What
    stands within texts counts nothing. Raises Refused.
    """
    at = weight = depth = within = 0  # within: 1 inside of a text, else 0
    while at < len(body):
        end = at + _PIECE
        piece = body[at:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the last backslash escapes what comes next
            piece = body[at : end + 1]
        at += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[within::2])
        texts = (len(parts) - within) // 2  # that begin here
        weight += outside.count(b",") + _HOLDER * (outside.count(b"[") + outside.count(b"{"))
        weight += _TEXT * texts + (_NAME - _TEXT) * outside.count(b":")
        within = (within + len(parts) - 1) % 2
        _check(weight)
        depth = _check_depth(outside, depth)


def may_be_deep(body: bytes) -> bool:
    """Whether a body of JSON has so many brackets that `check_weight` must say how deep it is nested."""
    return body.count(b"[") + body.count(b"{") > DEEPEST


def _check_depth(outside: bytes, depth: int) -> int:
    """outside: what stands behind `depth` lists and objects that are open, without its texts. Returns how many are
    open at its end. Raises Refused.
    """
    brackets = outside.translate(_AS_LISTS, _NO_BRACKETS)
    for at in range(0, len(brackets), _SOME):
        some = brackets[at : at + _SOME]
        opened = some.count(b"[")
        if depth + opened > DEEPEST and depth + max(accumulate(map(_DEEPER.__getitem__, some))) > DEEPEST:
            raise Refused(
                f"The body is nested too deep: at most {DEEPEST} lists and objects may stand within each other, and "
                f"here are more. Make it flatter.",
                code="invalid_json",
            )
        depth += 2 * opened - len(some)
    return depth


def check_packed_weight(body: bytes) -> None:
    """`check_weight` for a body of msgpack, in which names count as texts. What is no msgpack is left to its reader.

    Each value begins with a byte that says what follows (spec.md of github.com/msgpack/msgpack), and a list or map is
    followed by what it holds: so one walk sees all.
    """
    at = weight = steps = 0
    while at < len(body):
        first = body[at]
        if first < 0x80 or first >= 0xE0 or first in (0xC0, 0xC2, 0xC3):  # a small number, null, false or true
            size, weight = 1, weight + 1
        elif first < 0xA0:  # a short map or list
            size, weight = 1, weight + _HOLDER
        elif first < 0xC0:  # a short text
            size, weight = 1 + first - 0xA0, weight + _TEXT
        elif first in _SIZED:
            head, more, each, weighs = _SIZED[first]
            length = int.from_bytes(body[at + 1 : at + 1 + head], "big")
            size, weight = 1 + head + more + each * length, weight + weighs
        else:
            size, weight = _FIXED.get(first, 1), weight + 1
        at, steps = at + size, steps + 1
        if steps % _STEPS == 0:
            _check(weight)
    _check(weight)


def _check(weight: int) -> None:
    if weight > MOST:
        raise Refused(
            f"The body has too many values: at most {MOST:,} numbers are taken in one, and a list or an object "
            f"counts as {_HOLDER} of them, a text as {_TEXT}, and a name as {_NAME}. Send several requests.",
            status=413,
            code="body_too_large",
        )


@contextmanager
def at_once(size: int) -> Iterator[None]:
    """What is read within is not looked through for garbage as it grows, which takes several times as long as reading
    it. size: bytes of it.
    """
    collects = size > LIGHT and gc.isenabled()
    if collects:
        gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
