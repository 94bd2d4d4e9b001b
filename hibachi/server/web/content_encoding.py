"""Bodies that a client has compressed, read with a bound on what comes out of them."""

from __future__ import annotations

import importlib.util
import mmap
import zlib
from functools import cache
from typing import Any

from hibachi.llm.dialects.errors import Refused

SLICE = 1 << 18  # bytes that are taken at once
MOST_MEMBERS = 64  # of a gzip, each of which costs a copy of what is behind it
BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 47}  # zlib's words for them; some send gzip as deflate


def coding_of(header: bytes) -> bytes | None:
    """The coding that Content-Encoding names; None means the body is as it is. Raises Refused for one that is not read
    here, or for several.
    """
    coding = header.strip().lower()
    if coding in (b"", b"identity"):
        return None
    taken = "gzip, deflate, zstd" if _reads_zstd() else "gzip, deflate"
    if coding in BITS or (coding == b"zstd" and _reads_zstd()):
        return coding
    raise Refused(
        f"Content-Encoding: {coding[:60].decode('latin-1')} is not taken: expected one of {taken}, or a body as it is.",
        status=415,
        code="unsupported_media_type",
        headers={"Accept-Encoding": taken},
    )


def decoded(body: bytes, coding: bytes, most: int) -> bytes:
    """The content of a body of this coding. Raises Refused for more than `most` bytes, and for one that is damaged or
    was cut off.
    """
    try:
        found, whole = inflate(body, BITS[coding], most) if coding in BITS else _of_zstd(body, most)
    except (zlib.error, OSError):
        whole = False
    if not whole:
        raise Refused(
            f"The body is no whole {coding.decode()}: it is damaged or was cut off. Send it again, or as it is.",
            code="invalid_value",
        )
    return found


def inflate(body: bytes | mmap.mmap, bits: int, most: int) -> tuple[bytes, bool]:
    """What zlib makes of a body, and whether it came to its end. bits: see `BITS`. Raises zlib.error for a damaged one,
    and Refused for more than `most` bytes.
    """
    out, unpacker, members = bytearray(), zlib.decompressobj(bits), 1
    with memoryview(body) as packed:
        for at in range(0, len(packed), SLICE):
            part: bytes | memoryview = packed[at : at + SLICE]
            while part:
                if unpacker.eof:  # a gzip may have several members, one behind the other
                    unpacker, members = zlib.decompressobj(bits), members + 1
                    if members > MOST_MEMBERS:
                        return bytes(out), False
                out += unpacker.decompress(part, most + 1 - len(out))
                if len(out) > most:
                    raise _too_large(most)
                part = unpacker.unused_data
    return bytes(out), unpacker.eof


def _of_zstd(body: bytes, most: int) -> tuple[bytes, bool]:
    """Raises OSError for a damaged body or one that was cut off."""
    pa: Any = importlib.import_module("pyarrow")  # here: it takes some tenths of a second, and this is a thread
    with pa.CompressedInputStream(pa.BufferReader(body), "zstd") as stream:
        out = bytearray()
        while part := stream.read(min(SLICE, most + 1 - len(out))):
            out += part
            if len(out) > most:
                raise _too_large(most)
    return bytes(out), bool(body)


@cache
def _reads_zstd() -> bool:
    """Is pyarrow there, which reads it (extra `batch`)?"""
    return importlib.util.find_spec("pyarrow") is not None


def _too_large(most: int) -> Refused:
    return Refused(f"The body is too large: unpacked it has more than {most} bytes.", status=413, code="body_too_large")
