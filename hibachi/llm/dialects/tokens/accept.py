"""In which form an answer goes out, by the header Accept (RFC 9110, 12.5.1)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hibachi.llm.dialects.errors import Refused

_RANGE = re.compile(r"[\w!#$%&'*+.^`|~-]+/[\w!#$%&'*+.^`|~-]+", re.ASCII)
_Q = re.compile(rb"[01](\.[0-9]{0,3})?")
MOST = 64  # types that are looked at
ALIASES = {"application/x-msgpack": "application/msgpack", "application/vnd.msgpack": "application/msgpack"}
ALIASES |= {"application/octet-stream": "application/x-npy"}  # of an answer: of a body its first bytes tell


def media_type(header: bytes) -> str:
    """Of a header Content-Type or a part of Accept: without its parameters, "" for none."""
    return header.partition(b";")[0].strip().lower().decode("latin-1")


class Accept:
    """What a client takes. Without such a header: anything."""

    def __init__(self, header: bytes | None) -> None:
        self._ranges: dict[str, float] = {}
        for part in (header or b"*/*").split(b",")[:MOST]:
            kind = media_type(part)
            if _RANGE.fullmatch(kind) or kind == "*/*":
                name = ALIASES.get(kind, kind)
                self._ranges[name] = max(_quality(part), self._ranges.get(name, 0.0))

    def quality(self, kind: str) -> float:
        """From 0 to 1; the most specific range counts."""
        main = kind.partition("/")[0]
        for named in (kind, f"{main}/*", "*/*"):
            if named in self._ranges:
                return self._ranges[named]
        return 0.0

    def best(self, ours: Sequence[str]) -> str | None:
        """Of these, in order of our preference; None means none is taken."""
        found = max(ours, key=self.quality)
        return found if self.quality(found) > 0 else None

    def prefers_another(self, ours: Sequence[str]) -> bool:
        """Is a type named that none of these is, before all of these?"""
        most = max(map(self.quality, ours))
        return any(q > 0 and q >= most and not self._is_of(name, ours) for name, q in self._ranges.items())

    def names(self, ours: Sequence[str]) -> bool:
        """Is one of these asked for, other than by */*?"""
        return any(q > 0 and name != "*/*" and self._is_of(name, ours) for name, q in self._ranges.items())

    def _is_of(self, named: str, ours: Sequence[str]) -> bool:
        main, _, sub = named.partition("/")
        return named == "*/*" or any(kind == named or (sub == "*" and kind.startswith(f"{main}/")) for kind in ours)


def refused(ours: Sequence[str], hint: str = "") -> Refused:
    return Refused(
        f"Accept names no form of this answer: expected {', '.join(ours)}{hint}.", status=406, code="not_acceptable"
    )


def _quality(part: bytes) -> float:
    for parameter in part.split(b";")[1:]:
        name, _, value = parameter.partition(b"=")
        if name.strip().lower() == b"q":
            return min(float(value), 1.0) if _Q.fullmatch(value.strip()) else 0.0
    return 1.0
