"""Stores that several servers share: Redis, and whatever fsspec reaches."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from hibachi.common.installed import need
from hibachi.errors import ConfigError

SECONDS = 5  # for Redis to connect, or to take or send some bytes, where its address says nothing else
_AT_ONCE = 1000  # keys
_THREADS = 16


class RedisStore:
    """Entries as strings under keys "hibachi:ROOT:NAME", in hexadecimal. How many are kept is for Redis to say
    (maxmemory, allkeys-lru).

    url: redis://, rediss:// or unix://, with the options of `redis.Redis.from_url`.
    """

    def __init__(self, url: str, root: bytes) -> None:
        """Raises ConfigError, MissingExtra."""
        redis = need("redis", "A store in Redis", "redis")
        try:
            self._redis: Any = redis.Redis.from_url(url, socket_timeout=SECONDS, socket_connect_timeout=SECONDS)
        except ValueError:  # which may repeat a part of the password
            raise ConfigError(
                "The address of Redis cannot be read: expected redis://user:password@host:6379/0, with % codes for "
                "whatever of the password is no letter and no digit."
            ) from None
        self._prefix = f"hibachi:{root.hex()}:"

    def has(self, names: Sequence[bytes]) -> list[bool]:
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(self._key(name))
            return [bool(found) for found in pipe.execute()]

    def get(self, names: Sequence[bytes]) -> list[bytes | None]:
        return list(self._redis.mget([self._key(name) for name in names])) if names else []

    def put(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        if entries:
            self._redis.mset({self._key(name): data for name, data in entries})

    def drop(self) -> None:
        keys = list(self._redis.scan_iter(f"{self._prefix}*", count=_AT_ONCE))
        for i in range(0, len(keys), _AT_ONCE):
            self._redis.unlink(*keys[i : i + _AT_ONCE])

    def close(self) -> None:
        self._redis.close()

    def _key(self, name: bytes) -> str:
        return self._prefix + name.hex()


class FsspecStore:
    """Entries as files URL/ROOT/NAME, in hexadecimal. None makes way: give the place a rule of its own, such as a
    bucket whose objects expire.

    url: what fsspec knows, such as s3://bucket/folder; credentials come from where its package looks for them.
    """

    def __init__(self, url: str, root: bytes) -> None:
        """Raises MissingExtra, ImportError without the package for these files, and what fsspec raises."""
        self._files, folder = need("fsspec.core", "A store at an URL", "fsspec").url_to_fs(url)
        self._folder = f"{folder.rstrip('/')}/{root.hex()}"

    def has(self, names: Sequence[bytes]) -> list[bool]:
        if not names:
            return []
        with ThreadPoolExecutor(min(len(names), _THREADS)) as pool:  # each may be a request over the network
            return [bool(found) for found in pool.map(self._files.exists, map(self._path, names))]

    def get(self, names: Sequence[bytes]) -> list[bytes | None]:
        paths = [self._path(name) for name in names]
        found = self._files.cat(paths, on_error="return") if paths else {}
        for error in found.values():
            if isinstance(error, Exception) and not isinstance(error, FileNotFoundError):
                raise error
        return [data if isinstance(data, bytes) else None for data in map(found.get, paths)]

    def put(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        files = {self._path(name): data for name, data in entries}
        try:
            self._files.pipe(files)
        except FileNotFoundError:  # where folders are made first
            self._files.makedirs(self._folder, exist_ok=True)
            self._files.pipe(files)

    def drop(self) -> None:
        with suppress(FileNotFoundError):
            self._files.rm(self._folder, recursive=True)

    def close(self) -> None:
        pass

    def _path(self, name: bytes) -> str:
        return f"{self._folder}/{name.hex()}"
