"""Names of full blocks that are the same in every process: each is a hash of all tokens up to the block's end.

A name is 128 bits of BLAKE2b (Aumasson et al. 2013) over the name of the block before it and the block's own key. The
root names all else that bits depend on, so entries of another model, dtype or salt have other names. In a process the
trie of `BlockPool`, which compares tokens, stays the judge; names are for what outlives it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from hashlib import blake2b

NAME_BYTES = 16


def chained(before: bytes, *parts: Hashable) -> bytes:
    """The name of what comes after `before`: 16 bytes. parts: bytes, or others that look the same in every process."""
    of = blake2b(before, digest_size=NAME_BYTES)
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass")
        of.update(len(data).to_bytes(8, "little") + data)
    return of.digest()


def state_name(name: bytes) -> bytes:
    """Of the recurrent state after the block of this name."""
    return chained(name, b"state")


def extended(names: list[bytes], root: bytes, salt: Hashable, keys: Sequence[Hashable], n: int) -> list[bytes]:
    """`names` with the names of a sequence's first n blocks, or of as many as have keys. keys: of its blocks."""
    before = names[-1] if names else chained(root, salt)
    for key in keys[len(names) : n]:
        before = chained(before, key)
        names.append(before)
    return names
