"""gzip and zstd, read so that everything before a damage is had, and written so that equal rows give equal bytes."""

from __future__ import annotations

import io
import zlib
from typing import Any, BinaryIO, Literal, Protocol

from hibachi.common.installed import need
from hibachi.offline.files.rows import BATCH

Compression = Literal["gzip", "zstd"]

MAGIC: dict[bytes, Compression] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
BUFFER = 1 << 18  # bytes
GZIP = 31  # zlib's word for a gzip header and trailer around a window of 32 KiB


class Damaged(Exception):
    """Compressed data cannot be read on from here."""


def opened(path: str, compression: Compression | None) -> io.BufferedReader:
    """The file's content, decompressed. Reading raises Damaged, after all that could be decompressed was read."""
    if compression is None:
        return io.BufferedReader(io.FileIO(path), BUFFER)
    raw = Gunzipped(path) if compression == "gzip" else Unzstd(path)
    return io.BufferedReader(raw, BUFFER)


class _Decompressed(io.RawIOBase):
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.some(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def some(self, most: int) -> bytes:
        """1 to `most` bytes; none at the end."""
        raise NotImplementedError


class Gunzipped(_Decompressed):
    """A gzip file of any number of members."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with this object
        self._data = b""  # compressed, not yet used
        self._member: Any = None  # the decompressor of the member that is being read
        self._first = True

    def some(self, most: int) -> bytes:
        while True:
            if self._member is None:
                self._data = self._data or self._file.read(BUFFER)
                if not self._first:
                    self._data = self._data.lstrip(b"\0")  # a tape's padding between members and after the last
                if not self._data and not (more := self._file.read(BUFFER)):
                    return b""
                elif not self._data:
                    self._data = more
                    continue
                self._member, self._first = zlib.decompressobj(GZIP), False
            try:
                out = self._member.decompress(self._data, most)
            except zlib.error as e:
                raise Damaged(f"the gzip data is damaged ({e})") from e
            self._data = self._member.unconsumed_tail
            if self._member.eof:
                self._data, self._member = self._member.unused_data, None
            if out:
                return bytes(out)
            if self._member is not None and not self._data:
                self._data = self._file.read(BUFFER)
                if not self._data:
                    raise Damaged("the gzip data ends in the middle: the file was cut off")

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class Unzstd(_Decompressed):
    """A zstd file of any number of frames."""

    def __init__(self, path: str) -> None:
        self._pa = need("pyarrow", "reading zstd", BATCH)
        self._path, self._at, self._bytewise = path, 0, False
        self._stream = self._open()

    def _open(self) -> Any:
        return self._pa.CompressedInputStream(self._pa.OSFile(self._path), "zstd")

    def some(self, most: int) -> bytes:
        try:
            data = self._stream.read(1 if self._bytewise else most)
        except (self._pa.ArrowException, OSError) as e:
            if self._bytewise:
                raise Damaged(f"the zstd data is damaged or was cut off ({e})") from e
            # Arrow drops what it had of this read: read again up to here, and then on by single bytes.
            self._bytewise, self._stream, left = True, self._open(), self._at
            while left:
                left -= len(self._stream.read(min(left, BUFFER)))
            return self.some(most)
        self._at += len(data)
        return bytes(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


# ---- writing ---------------------------------------------------------------------------------------------------------


class Sink(Protocol):
    """Where a format's bytes go."""

    def write(self, data: bytes, /) -> object: ...

    def close(self) -> None:
        """End the format. The file below stays open."""


class Plain:
    """The file itself, for libraries that close what they write to, also when they are discarded half way.

    After an error every write raises it again; once `dead`, nothing more is written and no error is raised.
    """

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.dead = False
        self._failed: BaseException | None = None
        self._at = 0

    def write(self, data: bytes, /) -> int:
        size = memoryview(data).nbytes
        if not self.dead:
            self.check()
            try:
                self._file.write(data)
            except BaseException as e:
                self._failed = e
                raise
        self._at += size
        return size

    def check(self) -> None:
        """Raise what writing has raised, as libraries do not tell it twice."""
        if self._failed is not None:
            raise self._failed

    def tell(self) -> int:
        return self._at

    def flush(self) -> None: ...

    def close(self) -> None: ...


class _Gzip:
    def __init__(self, below: Plain) -> None:
        self._below = below
        self._with = zlib.compressobj(6, zlib.DEFLATED, GZIP)  # its header has no time and no name

    def write(self, data: bytes, /) -> None:
        if out := self._with.compress(data):
            self._below.write(out)

    def close(self) -> None:
        self._below.write(self._with.flush())


class _Zstd:
    def __init__(self, below: Plain) -> None:
        pa = need("pyarrow", "writing zstd", BATCH)
        self._to = pa.CompressedOutputStream(pa.PythonFile(below, mode="w"), "zstd")

    def write(self, data: bytes, /) -> None:
        self._to.write(data)

    def close(self) -> None:
        self._to.close()


def compressing(below: Plain, compression: Compression | None) -> Sink:
    """A sink that compresses into `below`."""
    if compression is None:
        return below
    return _Gzip(below) if compression == "gzip" else _Zstd(below)


def quietly_dead(below: Plain | None) -> None:
    """For destructors: what a library still writes goes nowhere."""
    if below is not None:
        below.dead = True
