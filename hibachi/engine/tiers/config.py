"""Which tiers an engine has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hibachi.engine.tiers.disk import DiskStore
from hibachi.engine.tiers.host import Event, HostTier
from hibachi.engine.tiers.keeping import Keeper
from hibachi.engine.tiers.sealed import Sealed, key_of
from hibachi.engine.tiers.store import KVStore, open_store
from hibachi.errors import ConfigError

STAGED = 1 << 28  # bytes of host memory, where there are stores and nobody says how many
TIMEOUT = 2.0  # seconds of a call of a store
LOAD_FAILURES = ("recompute", "fail")


@dataclass(frozen=True, kw_only=True)
class KVTiers:
    """Where prefixes are kept that the device's memory has no room for. Raises ConfigError.

    host_bytes: of host memory; None means 256 MiB where there is a disk or a store, which go through it.
    disk, disk_bytes: a folder and how much it may hold. It is found again after a restart.
    store: a `KVStore`, or its URL: `redis://`, and what fsspec knows. key_file: of a file with the secret by which
    entries of a store are told from others: who has it is trusted.
    load_failure: what becomes of a request for which a store failed: "recompute", or "fail".
    eviction: which entry of the host memory makes way: "lru", by "frequency", or by "importance": the mean norm of its
    keys, or what `hibachi.prefix.warm` was told. recency_window: the entries used last, so many, never make way.
    cache_id: names the model's weights, and changes with them; None means its attribute of that name. `LLM` makes it of
    all bytes of the model's files.
    on_event: called with "stored" or "removed", the tier and the entry's name, from another thread.
    """

    host_bytes: int | None = None
    disk: str | Path | None = None
    disk_bytes: int | None = None
    store: str | KVStore | None = None
    key_file: str | Path | None = None
    load_failure: str = "recompute"
    eviction: str = "lru"
    recency_window: int = 0
    cache_id: str | None = None
    on_event: Event | None = None

    def __post_init__(self) -> None:
        if (self.disk is None) != (self.disk_bytes is None):
            raise ConfigError(
                f"A disk tier is a folder and how many bytes it may hold: expected both or neither; got "
                f"disk={str(self.disk)!r}, disk_bytes={self.disk_bytes!r}."
            )
        if self.load_failure not in LOAD_FAILURES:
            raise ConfigError(f"load_failure must be one of {', '.join(LOAD_FAILURES)}; got {self.load_failure!r}.")
        for name in ("host_bytes", "disk_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be a number of bytes, 1 or more; got {value!r}.")
        for name in ("disk", "key_file"):
            if (path := getattr(self, name)) is not None and (not isinstance(path, (str, Path)) or path == ""):
                raise ConfigError(f"{name} must be a path; got {path!r}.")
        if self.cache_id is not None and (not isinstance(self.cache_id, str) or not self.cache_id):
            raise ConfigError(f"cache_id must be a text that names the model's weights; got {self.cache_id!r}.")
        if self.on_event is not None and not callable(self.on_event):
            raise ConfigError(f"on_event must be a function of three texts; got {self.on_event!r}.")
        Keeper(STAGED, self.eviction, self.recency_window)  # which checks them
        if self.host_bytes is None and self.disk is None and self.store is None:
            raise ConfigError("Tiers need a place: expected host_bytes, disk or store; got none.")
        if self.key_file is not None and self.store is None:
            raise ConfigError(f"key_file={str(self.key_file)!r} is of a store: add store, or leave it out.")

    def open(self, root: bytes, entry_bytes: int) -> HostTier:
        """The tiers, for entries of at most so many bytes. root: of the names of the first generation."""
        room = STAGED if self.host_bytes is None else self.host_bytes
        if room < entry_bytes:
            raise ConfigError(
                f"host_bytes must hold one entry, which has {entry_bytes} bytes; got {room}. Allow more, or make "
                f"block_size smaller."
            )
        stores: list[tuple[str, KVStore]] = []
        if self.disk is not None and self.disk_bytes is not None:
            stores.append((str(self.disk), DiskStore(self.disk, self.disk_bytes, root, entry_bytes)))
        if self.store is not None:
            key = key_of(None if self.key_file is None else str(self.key_file), root)
            stores.append(("in common", Sealed(open_store(self.store, root), key, root, TIMEOUT)))
        return HostTier(Keeper(room, self.eviction, self.recency_window), stores, self.on_event)
