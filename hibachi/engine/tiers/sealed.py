"""A store that is not trusted: what comes from it is believed only if it is what was sent, and it holds nobody up."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import islice
from struct import Struct
from threading import Lock, Thread
from time import monotonic
from typing import Any, TypeVar

from hibachi.engine.tiers.store import KVStore
from hibachi.errors import ConfigError, KVStoreError, printable, text_of

log: logging.Logger = logging.getLogger("hibachi.engine")

HEADER = Struct("<4sB3x8sQ")  # magic, version, the root's first bytes, bytes of data
MAC = 16  # bytes
_MAGIC, _VERSION = b"hbkv", 1
_START = HEADER.size + MAC
FAILURES = 3  # in a row, and the store is left alone ...
SHORTEST, LONGEST = 1.0, 60.0  # ... for so many seconds, twice as long each time
_MOST_KEY = 1 << 16  # bytes of a file
_MADE = "Make one: head -c 32 /dev/urandom > FILE; chmod 600 FILE"

T = TypeVar("T")


def key_of(path: str | None, root: bytes) -> bytes:
    """The key of the MACs, 32 bytes: from all bytes of a file, which must be 16 or more and not open to all users.

    Who holds the key is trusted: whoever can write with it into the store decides what the model reads as its cache.
    None: the key is made of the root, which everyone can compute who has the model's files. It then protects from
    accidents only: damaged data, and entries under a wrong name or of another model.

    Raises ConfigError.
    """
    if path is None:
        return hashlib.blake2b(root, digest_size=32, person=b"hibachi kv root").digest()
    what = f"--kv-key-file {path}"
    try:
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read(_MOST_KEY + 1)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{what} cannot be read: {e}. {_MADE}.") from e
    if not stat.S_ISREG(mode) or not 16 <= len(key) <= _MOST_KEY:
        raise ConfigError(f"{what} is no key: expected a file of 16 to {_MOST_KEY} random bytes. {_MADE}.")
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"{what} is open to all users of this machine. Close it: chmod o-rw {path}")
    return hashlib.blake2b(key, digest_size=32, person=b"hibachi kv file").digest()


class Sealed:
    """Seals what goes into a store, and breaks no request by what comes out of it.

    An entry goes out as a header (magic, version, the root's first 8 bytes, length), a MAC over root, header, name and
    data (BLAKE2b, 16 bytes), and data. What comes back with anything else is a miss, and told of once.

    A call that fails, takes longer than `timeout` seconds, or gives another number of items than asked raises
    KVStoreError; what an overdue call brings later is dropped. After 3 failures in a row the store is left alone for a
    second, then twice as long after each further failure, up to a minute: all calls raise KVStoreError at once. No
    other exception leaves.

    key: as of `key_of`. root: what all names begin from. Callable from any thread.
    """

    def __init__(self, store: KVStore, key: bytes, root: bytes, timeout: float = 5.0) -> None:
        self._store, self._key, self._root, self._timeout = store, key, root, timeout
        self._lock = Lock()
        self._overdue: list[Future[Any]] = []
        self._told = False  # of what is not believed
        self._failures = 0  # in a row
        self._pause = self._until = 0.0  # seconds; by time.monotonic

    def has(self, names: Sequence[bytes]) -> list[bool]:
        came = self._call("has", lambda: _as_many(self._store.has(names), len(names)))
        return [found is True for found in came]

    def get(self, names: Sequence[bytes]) -> list[bytes | None]:
        came = self._call("get", lambda: _as_many(self._store.get(names), len(names)))
        return [None if data is None else self._opened(name, data) for name, data in zip(names, came, strict=True)]

    def put(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        sealed = [(name, self._closed(name, data)) for name, data in entries]
        self._call("put", lambda: self._store.put(sealed))

    def drop(self) -> None:
        self._call("drop", self._store.drop)

    def close(self) -> None:
        self._until = 0.0
        self._call("close", self._store.close)

    def _closed(self, name: bytes, data: bytes) -> bytes:
        header = self._header(data)
        return b"".join((header, self._mac(header, name, data), data))

    def _opened(self, name: bytes, came: object) -> bytes | None:
        if isinstance(came, bytes):
            header, mac, data = came[: HEADER.size], came[HEADER.size : _START], came[_START:]
            if header == self._header(data) and hmac.compare_digest(mac, self._mac(header, name, data)):
                return data
        if not self._told:
            self._told = True
            log.warning("the store of cache blocks has what is damaged, or was written with another key: it is ignored")
        return None

    def _header(self, data: bytes) -> bytes:
        return HEADER.pack(_MAGIC, _VERSION, self._root[:8], len(data))

    def _mac(self, header: bytes, name: bytes, data: bytes) -> bytes:
        mac = hashlib.blake2b(self._root + header + name, digest_size=MAC, key=self._key)
        mac.update(data)
        return mac.digest()

    def _call(self, what: str, call: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as e:  # of somebody else's code
                done.set_exception(e)

        with self._lock:
            left = self._until - monotonic()
            self._overdue = [late for late in self._overdue if not late.done()]
            stuck = bool(self._overdue)
        if left > 0:
            raise KVStoreError(f"The store of cache blocks failed, and is left alone for another {left:.0f} s.")
        error: BaseException | None
        try:
            if stuck:
                raise TimeoutError("a call of before has not come back yet")
            Thread(target=run, name="hibachi-kv-store", daemon=True).start()
            error = done.exception(self._timeout)
        except (TimeoutError, RuntimeError) as e:  # the latter: the system has no more threads
            error = e if str(e) else TimeoutError(f"no answer within {self._timeout:g} s")
        with self._lock:
            if error is None:
                if self._pause and what != "close":  # which may need nobody to answer
                    log.warning("the store of cache blocks answers again")
                self._failures, self._pause = 0, 0.0
                return done.result()
            if not stuck and not done.done():
                self._overdue.append(done)
            self._failures += 1
            why = f"The store of cache blocks failed to {what}: {printable(text_of(error))}"
            if self._failures >= FAILURES:
                self._pause = min(max(SHORTEST, 2 * self._pause), LONGEST)
                self._until = monotonic() + self._pause
                log.warning("%s; that was failure %d in a row: left alone for %.0f s", why, self._failures, self._pause)
        raise KVStoreError(why) from error


def _as_many(items: Iterable[object], n: int) -> list[object]:
    found = list(islice(items, n + 1))
    if len(found) != n:
        raise ValueError(f"expected {n} items; got {'fewer' if len(found) < n else 'more'}")
    return found
