"""Entries on disk: segment files that are only appended to, shared by processes and by models.

The format. A folder holds segments, named ROOT-SEQUENCE.kv: 32 and 16 hexadecimal digits. ROOT names the model and all
else that the bits of its entries depend on. A greater SEQUENCE is a later segment, across all roots; the gaps between
them are drawn at random, so that no name is met again. Other files are not ours.

A segment is a header, then records without gaps. A header is 64 bytes, integers little-endian:

    at  bytes  in front of a record                   in front of the segment
     0      8  b"HIBKVR01"                            b"HIBKVS01"
     8     16  the name of the entry                  the root
    24      8  n, the bytes of its data               the most bytes that the segment may have
    32     16  blake2b(bytes 0 to 31, key=root)       the same
    48     16  blake2b(name, then the data)           zeros

Digests have 16 bytes. The n bytes of data follow the header of a record. Of records of one name the last one counts:
that of the greatest sequence, and in it that of the greatest offset. A record that the end of the file cuts off was
being written when its process ended, and is not there. A header that is not as it should be ends its segment: what
follows is not there. Data that are not as they should be are not there, but the record behind them is.

Who makes a segment holds it by flock(LOCK_EX) while it may append; nobody else ever appends to it. Segments are made,
and old ones removed, by who holds the folder by flock(LOCK_EX), for a moment; only `drop` and `clear` remove segments
that are held, whose writers find that out by the name. The bytes of a folder are those of its segments, of which a held
one counts as the most that it may have.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from hibachi.common.locks import locked
from hibachi.errors import ConfigError, KVStoreError

SEGMENT, RECORD = b"HIBKVS01", b"HIBKVR01"
HEADER = 64  # bytes
MOST_SEGMENT = 256 << 20  # bytes of a segment, unless a single record has more
MOST_DATA = 1 << 30  # bytes of an entry: systems read at most 2 GiB at once
MOST_SEGMENTS = 8192  # that nobody holds: each start of a process leaves one, however small
_PARTS = 16  # segments that a folder is made of
_AHEAD = 32  # records, of whose headers the disk is told before they are read
_EVERY = 1.0  # seconds between two looks at what other processes wrote
_PATIENCE = 5.0  # seconds that a folder is waited for, which others hold for a moment
_FIELDS = struct.Struct("<8s16sQ")
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})\.kv")
_PLAIN = getattr(os, "O_NOFOLLOW", 0)  # no link is followed


class Header(NamedTuple):
    name: bytes
    length: int
    digest: bytes


class SegmentFile(NamedTuple):
    """A segment as the folder lists it. Sorted, the oldest comes first."""

    sequence: int
    root: bytes
    path: Path
    size: int

    def open(self) -> int:
        return os.open(self.path, os.O_RDONLY | _PLAIN)


class _Segment:
    """What is known of a segment of our root. end: of the records that were read. used: names that were asked for."""

    def __init__(self, file: SegmentFile) -> None:
        self.file, self.end, self.seen = file, 0, -1
        self.used: set[bytes] = set()


class _Place(NamedTuple):
    segment: _Segment
    offset: int  # of the data
    length: int
    digest: bytes


def digest_of(name: bytes, data: bytes) -> bytes:
    found = blake2b(name, digest_size=16)
    found.update(data)
    return found.digest()


def written(kind: bytes, header: Header, root: bytes) -> bytes:
    """A header as it stands in a segment. kind: SEGMENT or RECORD."""
    fields = _FIELDS.pack(kind, header.name, header.length)
    return fields + _check(fields, root) + header.digest


def _check(fields: bytes, root: bytes) -> bytes:
    return blake2b(fields, digest_size=16, key=root).digest()


def header_of(kind: bytes, raw: bytes, root: bytes) -> Header | None:
    """What a header says; None: it is damaged, or of another kind or root."""
    if raw[32:48] != _check(raw[:32], root):
        return None
    found, name, length = _FIELDS.unpack_from(raw)
    return Header(name, length, raw[48:HEADER]) if found == kind else None


def listing(folder: Path) -> list[SegmentFile]:
    """The segments in a folder that belong to this user or to who owns the folder, the oldest first. Raises OSError."""
    found, trusted = [], {os.geteuid(), os.stat(folder).st_uid}
    with os.scandir(folder) as entries:
        for entry in entries:
            if name := _NAME.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    is_ = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(is_.st_mode) and is_.st_uid in trusted:
                        root, sequence = bytes.fromhex(name[1]), int(name[2], 16)
                        found.append(SegmentFile(sequence, root, Path(entry.path), is_.st_size))
    return sorted(found)


def records(file: SegmentFile, at: int = 0) -> Iterator[tuple[int, Header | str, int]]:
    """Where each record of a segment begins, what its header says, and the open file. Instead of a header, last comes
    "torn" if the file ends within the record, or "damaged". Raises OSError.
    """
    try:
        opened = file.open()
    except FileNotFoundError:  # removed meanwhile
        return
    try:
        while file.size - at >= HEADER:
            found = header_of(RECORD if at else SEGMENT, os.pread(opened, HEADER, at), file.root)
            if found is None:
                yield at, "damaged", opened
                return
            end = at + HEADER + (found.length if at else 0)
            if end > file.size:
                break
            if hasattr(os, "posix_fadvise"):  # headers are read one by one: those to come are fetched meanwhile
                os.posix_fadvise(opened, end + _AHEAD * (end - at), HEADER, os.POSIX_FADV_WILLNEED)
            if at:
                yield at, found, opened
            at = end
        if file.size > at:
            yield at, "torn", opened
    finally:
        os.close(opened)


def room_of(file: SegmentFile) -> tuple[int, bool]:
    """The bytes that a segment has, and False; or if somebody holds it, the most that it may have, and True."""
    try:
        opened = file.open()
    except FileNotFoundError:
        return 0, False
    try:
        held = locked(opened, shared=True) is False
        size = os.fstat(opened).st_size  # who let go of it in between has written since it was listed
        found = header_of(SEGMENT, os.pread(opened, HEADER, 0), file.root) if held else None
        return max(size, found.length if found else 0), held
    finally:
        os.close(opened)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else makes or removes segments meanwhile. Raises OSError, and KVStoreError if the folder stays held."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + _PATIENCE
        while locked(opened) is False:
            if time.monotonic() > end:
                raise KVStoreError(f"Another process has held {folder} for {_PATIENCE:g} seconds; is it stopped?")
            time.sleep(0.01)
        yield
    finally:
        os.close(opened)


class DiskStore:
    """Keeps entries in segments of a folder, within a number of bytes; a `KVStore`.

    folder: is made if need be, and may be shared with other processes and models. most_bytes: of all segments in it,
    of which the oldest are removed. root: 16 bytes that name the model and all else that the bits depend on.
    entry_bytes: of the largest data that will be put. Raises ConfigError for a folder that cannot be written, fewer
    bytes than one entry takes, and more than the disk has.
    """

    def __init__(self, folder: str | os.PathLike[str], most_bytes: int, root: bytes, entry_bytes: int = 1) -> None:
        if os.name == "nt":
            raise ConfigError("A cache on disk needs locks of files that Windows does not have. Leave it out.")
        if len(root) != 16:
            raise ConfigError(f"The root of a cache on disk has 16 bytes, got {len(root)}. Digest what it names.")
        if most_bytes < (least := 2 * HEADER + entry_bytes):
            raise ConfigError(
                f"A cache on disk of {most_bytes} bytes was asked for, and one entry takes {least}. Give it as many at "
                "least, or leave it out."
            )
        self.folder, self.root, self.most = Path(os.path.abspath(folder)), root, most_bytes
        self._index: dict[bytes, _Place] = {}
        self._segments: dict[Path, _Segment] = {}
        self._own: _Segment | None = None  # that is appended to, open as `_file`, up to `_most` bytes
        self._file = self._most = self._last = 0
        self._next = 0.0  # when to look again
        self._closed = False
        self._lock = threading.Lock()  # of index and segments; for moments
        self._writing = threading.Lock()  # of what is appended to; taken before the other
        try:
            os.makedirs(self.folder, 0o700, exist_ok=True)
            own, _ = self._begin(0, 0)  # and away with what a smaller bound has no room for
            mine = own.file.path in {file.path for file in listing(self.folder)}
            self._leave()
            if not mine:
                raise PermissionError(f"what is written in {self.folder} belongs to neither this user nor its owner")
            disk = os.statvfs(self.folder)
            has = disk.f_bavail * disk.f_frsize + sum(file.size for file in listing(self.folder))
        except KVStoreError as e:
            raise ConfigError(str(e)) from e
        except (OSError, ValueError) as e:  # the latter: it can be no name of a folder
            raise ConfigError(
                f"The folder {self.folder} of the cache on disk must be one that this user may write to: {e}. Mend "
                "that (where it is missing, it is made with mode 0700), or name another folder."
            ) from e
        if most_bytes > has:
            raise ConfigError(
                f"A cache on disk of {most_bytes} bytes was asked for, and the disk of {self.folder} has {has} for it. "
                "Give it fewer, or name a folder elsewhere."
            )

    # ---- reading -----------------------------------------------------------------------------------------------------

    def has(self, names: Sequence[bytes]) -> list[bool]:
        self._look()
        return [name in self._index for name in names]

    def get(self, names: Sequence[bytes]) -> list[bytes | None]:
        self._look()
        return [self._get(name) for name in names]

    def latest(self, most: int) -> list[bytes]:
        """The names of the entries that were written last, the last one first, of so many bytes together."""
        self._look()
        with self._lock:
            places = sorted(self._index.items(), key=lambda one: (one[1].segment.file.sequence, one[1].offset))
        found: list[bytes] = []
        for name, place in reversed(places):
            if (most := most - place.length) < 0:
                break
            found.append(name)
        return found

    def _get(self, name: bytes) -> bytes | None:
        while place := self._index.get(name):
            try:
                data = self._read(place, name)
            except FileNotFoundError:
                data = None
            except OSError:  # perhaps it can be read later
                return None
            if data is not None:
                place.segment.used.add(name)
                return data
            with self._lock:
                if self._index.get(name) is place:  # else it has been moved meanwhile
                    del self._index[name]
        return None

    def _read(self, place: _Place, name: bytes) -> bytes | None:
        """The data, if they are sound."""
        file = place.segment.file.open()
        try:
            data = os.pread(file, place.length, place.offset)
        finally:
            os.close(file)
        return data if digest_of(name, data) == place.digest else None

    def _look(self, *, now: bool = False) -> list[SegmentFile]:
        """Read what others wrote and removed, if a second has passed. now: in any case, and return all segments of the
        folder; raises OSError.
        """
        with self._lock:
            if not now and time.monotonic() < self._next:
                return []
            self._next = time.monotonic() + _EVERY
            try:
                files = listing(self.folder)
            except OSError:
                if now:
                    raise
                files = []  # nothing is there until it can be read again
            ours = {file.path: file for file in files if file.root == self.root}
            if gone := {self._segments.pop(path) for path in self._segments.keys() - ours.keys()}:
                for name in [name for name, place in self._index.items() if place.segment in gone]:
                    del self._index[name]
            for path, file in ours.items():
                segment = self._segments.setdefault(path, _Segment(file))
                if segment is not self._own and file.size != segment.seen:
                    with suppress(OSError):
                        for at, found, _ in records(file, segment.end):
                            if isinstance(found, Header):
                                self._add(segment, at, found)
                        segment.seen = file.size
            return files

    def _add(self, segment: _Segment, at: int, header: Header) -> None:
        known = self._index.get(header.name)
        if known is None or known.segment.file.sequence <= segment.file.sequence:
            self._index[header.name] = _Place(segment, at + HEADER, header.length, header.digest)
        segment.end = at + HEADER + header.length

    # ---- writing -----------------------------------------------------------------------------------------------------

    def put(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Append what is not there; other data of a name that is there replace it. Raises KVStoreError: it could not be
        written, or was too large; entries before it, and all others that were not too large, are there.
        """
        most = min(self.most - 2 * HEADER, MOST_DATA)
        with self._writing:
            try:
                self._look()
                for name, data in entries:
                    if len(data) <= most:
                        self._put(name, data)
            except OSError as e:
                raise KVStoreError(f"The cache on disk cannot be written: {e}") from e
        if larger := [len(data) for _, data in entries if len(data) > most]:
            raise KVStoreError(f"An entry of the cache on disk can have {most} bytes; {max(larger)} were refused.")

    def _put(self, name: bytes, data: bytes) -> None:
        if self._closed:
            raise KVStoreError(f"The cache on disk in {self.folder} is closed.")
        known = self._index.get(name)
        if known is not None and known.digest == digest_of(name, data):
            return
        own, need = self._own, HEADER + len(data)
        if (
            own is None
            or own.end + need > self._most
            or not self._there(own)
            or (known is not None and known.segment.file.sequence > own.file.sequence)  # others': ours must come last
        ):
            own = self._roll(need)
        self._append(own, name, data)

    def _append(self, own: _Segment, name: bytes, data: bytes) -> None:
        header = Header(name, len(data), digest_of(name, data))
        try:
            _write(self._file, written(RECORD, header, self.root) + data, own.end)
        except BaseException:
            try:
                os.ftruncate(self._file, own.end)
            except OSError:  # a torn record stays: nothing may follow it
                self._leave()
            raise
        with self._lock:
            self._add(own, own.end, header)

    def _there(self, own: _Segment) -> bool:
        """Does our segment still have its name? Others may have removed it."""
        try:
            return os.path.samestat(os.lstat(own.file.path), os.fstat(self._file))
        except OSError:
            return False

    def _roll(self, need: int) -> _Segment:
        """Begin a segment with room for `need` bytes behind its header."""
        self._leave()
        least = HEADER + need
        own, kept = self._begin(max(least, min(self.most // _PARTS, MOST_SEGMENT)), least)
        for name, data in kept:
            self._append(own, name, data)
        return own

    def _begin(self, size: int, least: int) -> tuple[_Segment, list[tuple[bytes, bytes]]]:
        """Begin a segment of `size` bytes, or of `least` where others hold the room; the oldest are removed for it.

        Returns it, and what was read in the removed ones since it was written: at most half of each, and `size` bytes.
        """
        kept: list[tuple[bytes, bytes]] = []
        with alone(self.folder):
            files = self._look(now=True)
            takes = {file: room_of(file) for file in files}
            room = self.most - sum(size for size, held in takes.values() if held)
            if room < least:
                raise KVStoreError(
                    f"The cache on disk has no room for {least} bytes: of its {self.most}, other processes hold "
                    f"{self.most - room}. Give it more; all that share a folder should say the same."
                )
            size = min(size, room)
            free = [file for file in files if not takes[file][1]]
            while size + sum(takes[file][0] for file in free) > room or len(free) > MOST_SEGMENTS:
                oldest = free.pop(0)
                kept += self._used(oldest, size - least - sum(HEADER + len(data) for _, data in kept))
                oldest.path.unlink(missing_ok=True)
                files = self._look(now=True)  # what was in it is not there now
            return self._create(size, files), kept

    def _used(self, file: SegmentFile, room: int) -> Iterator[tuple[bytes, bytes]]:
        """What was read in a segment since it was written, up to half of it, and `room` bytes."""
        with self._lock:
            segment = self._segments.get(file.path)
            places = [(n, p) for n, p in self._index.items() if p.segment is segment and n in p.segment.used]
        room = min(room, file.size // 2)
        for name, place in places:
            with suppress(OSError):
                if HEADER + place.length <= room and (data := self._read(place, name)) is not None:
                    room -= HEADER + place.length
                    yield name, data

    def _create(self, size: int, files: list[SegmentFile]) -> _Segment:
        """Make and hold a segment that is later than these and all of ours; the folder is held."""
        gap = 1 + int.from_bytes(os.urandom(3))  # else the name of one that was removed may come again
        self._last = max([self._last, *(file.sequence for file in files)]) + gap
        path = self.folder / f"{self.root.hex()}-{self._last:016x}.kv"
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAIN, 0o600)
        own = _Segment(SegmentFile(self._last, self.root, path, HEADER))
        own.end = HEADER
        with self._lock:
            self._file, self._most, self._own, self._segments[path] = opened, size, own, own
        try:
            locked(opened)
            _write(opened, written(SEGMENT, Header(self.root, size, bytes(16)), self.root), 0)
        except BaseException:
            self._leave()
            raise
        return own

    def _leave(self) -> None:
        """Let go of the segment that was appended to; without records it need not stay."""
        own, self._own = self._own, None
        if own is not None:
            if own.end == HEADER and self._there(own):
                with suppress(OSError):
                    own.file.path.unlink()
            os.close(self._file)

    def drop(self) -> None:
        """Remove all segments of this root, also those that other processes hold; they begin others. Raises
        OSError and KVStoreError.
        """
        with self._writing:
            self._leave()
            try:
                with alone(self.folder):
                    for file in listing(self.folder):
                        if file.root == self.root:
                            file.path.unlink(missing_ok=True)
            finally:
                with self._lock:
                    self._index.clear()
                    self._segments.clear()

    def close(self) -> None:
        """Let go of the segment that was appended to. `put` raises from then on."""
        with self._writing:
            self._leave()
            self._closed = True


def _write(file: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        done = os.pwrite(file, rest, at)
        rest, at = rest[done:], at + done
