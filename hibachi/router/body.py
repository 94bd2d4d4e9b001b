"""The body of a request, kept until it is answered, so that it can be sent twice: in memory, or in an unlinked file."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from hashlib import blake2b
from typing import IO, Any

from hibachi.llm.dialects.errors import SERVER, Refused
from hibachi.router.inspect_body import Named, goes_on_from, look
from hibachi.server.web.exchange import Gone

log: logging.Logger = logging.getLogger("hibachi.route")
IN_MEMORY = 1 << 20  # bytes
PIECE = 1 << 18  # bytes that are read of a file at once


class BodyRoom:
    """Bytes of bodies in files, of all requests together. looking: requests that unpack or search a body, which takes
    memory.
    """

    def __init__(self, most: int) -> None:
        self._most, self._used = most, 0
        self.looking = asyncio.Semaphore(2)

    def take(self, size: int) -> None:
        """Raises Refused."""
        if self._used + size > self._most:
            raise no_room()
        self._used += size

    def give_back(self, size: int) -> None:
        self._used -= size


class Body:
    """Either `data`, or a file of `size` bytes."""

    data: bytes
    size: int

    def __init__(
        self, data: bytes = b"", file: IO[bytes] | None = None, size: int | None = None, room: BodyRoom | None = None
    ) -> None:
        self.data, self._file, self._room = data, file, room
        self.size = len(data) if size is None else size

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._room is not None:
            self._room.give_back(self.size)
            self._room = None

    def to_send(self) -> Any:
        """For aiohttp: from the beginning, as often as it is asked."""
        return self.data if self._file is None else self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        at = 0
        while at < self.size:
            piece = await asyncio.to_thread(self._read, at)
            at += len(piece)
            yield piece

    def _read(self, at: int) -> bytes:
        assert self._file is not None
        return os.pread(self._file.fileno(), PIECE, at)  # another thread may still be reading for an attempt that ended

    async def look(
        self, kind: bytes, encoding: bytes, text: int, room: BodyRoom, *, strict: bool
    ) -> tuple[str | None, bytes]:
        """See `peek.look`."""
        if self._file is None and not encoding and b"form" not in kind.lower():
            return look(self.data, kind, encoding, text=text, strict=strict)
        async with room.looking:
            return await asyncio.to_thread(self._look, kind, encoding, text, strict)

    def _look(self, kind: bytes, encoding: bytes, text: int, strict: bool) -> tuple[str | None, bytes]:
        if self._file is None:
            return look(self.data, kind, encoding, text=text, strict=strict)
        return look(self._mapped(), kind, encoding, text=text, strict=strict)

    def _mapped(self) -> mmap.mmap:
        assert self._file is not None
        return mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_READ)  # an error may still refer to it

    async def named(self, encoding: bytes, room: BodyRoom) -> Named | None:
        """See `peek.goes_on_from`."""
        if self._file is None and not encoding:
            return goes_on_from(self.data, encoding)
        async with room.looking:
            return await asyncio.to_thread(self._named, encoding)

    def _named(self, encoding: bytes) -> Named | None:
        return goes_on_from(self.data if self._file is None else self._mapped(), encoding)

    async def digest(self, *more: bytes) -> bytes:
        """Of the body, and of what else makes the request the same."""
        hashed = blake2b(b"\0".join(more), digest_size=16)
        if self._file is None:
            hashed.update(self.data)
        else:
            async for piece in self._pieces():
                hashed.update(piece)
        return hashed.digest()


async def read(receive: Callable[[], Awaitable[Any]], most: int, announced: bytes, room: BodyRoom) -> Body:
    """announced: the header Content-Length. Raises Gone, and Refused for more than `most` bytes, or where there is no
    room.
    """
    if announced.isdigit() and int(announced) > most:
        raise too_large(most)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        if len(message.get("body", b"")) > most:
            raise too_large(most)
        return Body(message.get("body", b""))
    parts, size, taken = list[bytes](), 0, 0
    file: IO[bytes] | None = None
    try:
        while True:
            if message["type"] == "http.disconnect":
                raise Gone
            part = message.get("body", b"")
            parts.append(part)
            size += len(part)
            if size > most:
                raise too_large(most)
            if size > IN_MEMORY:
                room.take(size - taken)
                taken = size
            if size > IN_MEMORY and sum(map(len, parts)) >= PIECE:
                file = file or tempfile.TemporaryFile()  # noqa: SIM115  # closed with the body
                await asyncio.to_thread(file.writelines, parts)
                parts = []
            if not message.get("more_body"):
                break
            message = await receive()
        if file is None:
            return Body(b"".join(parts))
        await asyncio.to_thread(file.writelines, parts)
        await asyncio.to_thread(file.flush)
        return Body(file=file, size=size, room=room)
    except BaseException as e:
        if file is not None:
            file.close()
        room.give_back(taken)
        if isinstance(e, OSError):
            log.error("a body could not be written to a file: %s", e)
            raise no_room() from e
        raise


def no_room() -> Refused:
    return Refused(
        "The router has no room for this body now. Try again later.",
        status=503,
        kind=SERVER,
        code="router_full",
        headers={"Retry-After": "1", "Connection": "close"},
    )


def too_large(most: int) -> Refused:
    return Refused(
        f"The body is too large: at most {most} bytes are taken.",
        status=413,
        code="body_too_large",
        headers={"Connection": "close"},
    )
