"""A digest of all bytes of a model's files, computed in threads while the model loads, and kept for the next start."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hibachi.backend.kernels.threads import most_threads
from hibachi.backend.stored import AGAIN
from hibachi.common.cachefolder import cache_folder, keep
from hibachi.errors import InvalidModelFiles
from hibachi.llm.model.fields import read_text

log: logging.Logger = logging.getLogger("hibachi.engine")

PIECE = 1 << 26  # bytes of a file that one thread reads; a digest depends on it
_READ = 1 << 20
_THREADS = 8  # more than memory is fast enough for
_SETTLED = 2 * 10**9  # ns: a file that changed later than this could change again and look the same


class FilesDigest:
    """The digest of files by their names, without folders, and all their bytes, in this order.

    Threads begin to read with the constructor. Files that have device, inode, size and times of before are not read:
    their digests lie in the cache folder, if it can be written. Raises InvalidModelFiles.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths, self._now = list(paths), time.time_ns()
        self._seen = [_identity(path) for path in self._paths]
        self._known = _read(self._paths)
        self._pieces: dict[_Identity, list[bytes]] = {}
        self._todo: deque[tuple[Path, list[bytes], int]] = deque()
        self._wrong: Exception | None = None
        for path, seen in zip(self._paths, self._seen, strict=True):
            if seen not in self._known and seen not in self._pieces:
                pieces = self._pieces[seen] = [b""] * max(1, -(-seen.size // PIECE))
                self._todo += [(path, pieces, i) for i in range(len(pieces))]
        threads = range(min(len(self._todo), most_threads(), _THREADS))
        self._threads = [threading.Thread(target=self._work, name="hibachi-digest", daemon=True) for _ in threads]
        for thread in self._threads:
            thread.start()

    def result(self) -> str:
        """32 hexadecimal digits, when all is read. They are of what was read from the files between the constructor
        and now, by whomever. Raises InvalidModelFiles for files that cannot be read, or changed meanwhile.
        """
        for thread in self._threads:
            thread.join()
        if self._wrong is not None:
            raise InvalidModelFiles(f"The model's files cannot be read: {self._wrong}. {AGAIN}.") from self._wrong
        for path, seen in zip(self._paths, self._seen, strict=True):
            if _identity(path) != seen:
                raise InvalidModelFiles(f"{path} changed while the model was loaded. Load it again.")
        found = self._known | {seen: _hash(b"".join(pieces)) for seen, pieces in self._pieces.items()}
        if self._pieces:
            _write(self._paths, {s: found[s] for s in self._seen if s.changed + _SETTLED < self._now})
        whole = [f"{path.name}\0{s.size}\0{found[s]}\0" for path, s in zip(self._paths, self._seen, strict=True)]
        return _hash(os.fsencode("".join(whole)))

    def _work(self) -> None:
        with suppress(IndexError):  # nothing is left
            while self._wrong is None:
                path, pieces, i = self._todo.popleft()
                try:
                    pieces[i] = _piece(path, i * PIECE)
                except Exception as e:
                    self._wrong = e


class _Identity(NamedTuple):
    """Which file it is, and when its contents changed last, in ns, as it says and as the system does."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


def _identity(path: Path) -> _Identity:
    try:
        s = path.stat()
    except OSError as e:
        raise InvalidModelFiles(f"{path} cannot be read: {e}. {AGAIN}.") from e
    return _Identity(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)


def _piece(path: Path, start: int) -> bytes:
    digest, left, room = hashlib.blake2b(digest_size=16), PIECE, memoryview(bytearray(_READ))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (n := file.readinto(room[:left])):
            digest.update(room[:n])
            left -= n
    return digest.digest()


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# ---- kept: a line for each file, below a digest of all lines ---------------------------------------------------------


def _place(paths: list[Path]) -> Path:
    return cache_folder() / "digests" / _hash(os.fsencode("\0".join(map(os.path.abspath, paths))))


def _read(paths: list[Path]) -> dict[_Identity, str]:
    with suppress(OSError, ValueError):
        seal, _, lines = read_text(_place(paths)).partition("\n")
        if seal == _hash(lines.encode()):
            return {_Identity(*map(int, said)): digest for *said, digest in map(str.split, lines.splitlines())}
    return {}


def _write(paths: list[Path], found: dict[_Identity, str]) -> None:
    lines = "".join(f"{' '.join(map(str, seen))} {digest}\n" for seen, digest in found.items())
    try:
        place = _place(paths)
        place.parent.mkdir(parents=True, exist_ok=True)
        keep(place, f"{_hash(lines.encode())}\n{lines}")
    except OSError as e:
        log.info("the digest of the model's files is not kept for the next start: %s", e)
