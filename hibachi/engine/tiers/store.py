"""What a store of cache blocks does, and which one a name or an address means."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hibachi.common.installed import by_name, plugin, with_methods
from hibachi.engine.tiers.remote import FsspecStore, RedisStore
from hibachi.errors import ConfigError, HibachiError, MissingExtra, text_of

GROUP = "hibachi.kv_stores"
_METHODS = ("has", "get", "put", "drop", "close")


class KVStore(Protocol):
    """Keeps entries by their names, beyond this process.

    A name is 16 bytes, and says all that its data depends on: entries of other models, or of other tokens, have other
    names. Data is what an engine keeps of a block or of a state: 10 kB to 10 MB, and of equal names equal.

    Called from background threads; `get` and `put` may run at the same time. All methods may raise OSError or
    KVStoreError: the caller counts and logs it, and computes what it asked for. What a store keeps, and for how long,
    is its own affair.
    """

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each is there, as far as can be told without reading it: `get` may find none all the same."""
        ...

    def get(self, names: Sequence[bytes]) -> list[bytes | None]:
        """The data of each; None: it is not there, or not sound."""
        ...

    def put(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Keep these, each a name and its data. One that is there already may be left as it is."""
        ...

    def drop(self) -> None:
        """Forget what was written under this root, by whomever."""
        ...

    def close(self) -> None:
        """Let go of files and connections. No method is called afterwards."""
        ...


def open_store(given: Any, root: bytes) -> KVStore:
    """The store that an address means; an object is taken as it is.

    given: "NAME:..." where an installed package has a store of that name (entry-point group `hibachi.kv_stores`, a
    callable of this text and the root); redis://, rediss:// or unix://, as the package redis reads them; or an URL
    that fsspec knows, such as s3://bucket/folder. root: what the names of all entries begin from; stores of ours keep
    those of several roots apart. Nothing is connected yet.

    Raises ConfigError, MissingExtra.
    """
    if isinstance(given, str):
        name, others = given.partition(":")[0], by_name(GROUP)
        ours: dict[str, Callable[[str, bytes], Any]] = dict.fromkeys(("redis", "rediss", "unix"), RedisStore)
        if given.find("://") > 1 and name not in others:
            ours.setdefault(name, FsspecStore)
        what = f"The store {_without_secrets(given)!r}"
        unknown = f"{what}: expected an URL, such as redis://host or s3://bucket/folder, or NAME:... of {{known}}."
        make = plugin(GROUP, name if ":" in given else "", ours, what, unknown)
        try:
            given = make(given, root)
        except HibachiError:
            raise
        except ImportError as e:
            raise MissingExtra(f"{what} needs what is not installed: {text_of(e)}") from e
        except Exception as e:  # somebody else's code
            raise ConfigError(f"{what} cannot be made: {text_of(e)}") from e
    with_methods(given, _METHODS, "A store", "hibachi.engine.tiers.store.KVStore")
    store: KVStore = given
    return store


def _without_secrets(address: str) -> str:
    """Without user, password and options, as it may stand in a log."""
    return re.sub(r"(?<=:)//[^/]*@", "//", address.partition("?")[0])
