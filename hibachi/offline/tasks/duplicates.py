"""Which names have come before: 24 bytes a name, however many there are."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from hibachi.offline.files.rows import Row

_RECENT = 1 << 16  # names that are kept apart, until they are sorted in


class Seen:
    """Names are known by 64 bits of a digest. In a million names two share them with a chance of 1 to 37 million."""

    def __init__(self) -> None:
        self._files: list[str] = []
        self._numbers: dict[str, int] = {}
        self._recent: dict[int, tuple[int, int]] = {}
        self._digests: Any = np.zeros(0, np.uint64)  # sorted
        self._places: Any = np.zeros((0, 2), np.int64)  # of each, its file and line

    def add(self, name: str, row: Row) -> str | None:
        """Where the name stood before; None means nowhere, and it is known from now on."""
        digest = int.from_bytes(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "little")
        found = self._recent.get(digest)
        if found is None and len(self._digests):
            at = int(np.searchsorted(self._digests, np.uint64(digest)))
            if at < len(self._digests) and int(self._digests[at]) == digest:
                found = int(self._places[at, 0]), int(self._places[at, 1])
        if found is not None:
            return f"{self._files[found[0]]}, line {found[1]}"
        file = self._numbers.get(row.file)
        if file is None:
            file = self._numbers[row.file] = len(self._files)
            self._files.append(row.file)
        self._recent[digest] = file, row.line
        if len(self._recent) >= _RECENT:
            self._merge()
        return None

    def _merge(self) -> None:
        digests = np.concatenate([self._digests, np.fromiter(self._recent, np.uint64, len(self._recent))])
        places = np.concatenate([self._places, np.array(list(self._recent.values()), np.int64)])
        order = np.argsort(digests)
        self._digests, self._places = digests[order], places[order]
        self._recent.clear()
