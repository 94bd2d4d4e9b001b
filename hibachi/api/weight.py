"""Weighs large bodies before they are read: while JSON of millions of values is read, nothing else runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from hibachi.api.errors import Refused

MOST = 1_250_000  # numbers of a body; reading so many holds up other requests for a tenth of a second at most
LIGHT = 1 << 18  # bytes of a body that need not be weighed: it cannot hold so many
_HOLDER, _TEXT, _NAME = 3, 4, 8  # numbers that take as long to read as one list or object, one text, or one name
_PIECE = 1 << 18  # bytes looked at at a time, so that other threads get their turn


def check_weight(body: bytes) -> None:
    """Check how many values a body of JSON has, by the time that they take to read. What stands within texts counts
    nothing. Raises Refused.
    """
    at = weight = within = 0  # within: 1 inside of a text, else 0
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
