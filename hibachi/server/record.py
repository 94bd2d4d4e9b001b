"""The record of a request, for metrics: when it came, started, got its tokens and ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hibachi.backend.array_backend import HostArray
from hibachi.engine.streams.stream import Item, ItemStream
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.textstream import Piece
from hibachi.request import Finish, SamplingParams


class Meter(Protocol):
    """Receives records and answers, to count them."""

    def begun(self, record: Record) -> None: ...

    def came(self, record: Record, tokens: int, now: float, since: float | None) -> None:
        """Tokens of one continuation came together. since: when others of it last came; None means these are its
        first.
        """
        ...

    def ended(self, record: Record) -> None: ...

    def answered(self, method: str, route: str, status: int, refused: Refused | None, record: Record | None) -> None:
        """A request over HTTP, of a known route, was answered. record: its record, if it was a request for text and got
        so far.
        """
        ...


class Work(Protocol):
    """The part of a `TextStream`, `Vectors` or `Generated` that a record reads."""

    @property
    def started(self) -> float | None:
        """When it joined the batch."""
        ...

    def reused(self, runs: int) -> int:
        """Tokens of its prompts that were found in the cache. runs: continuations of each."""
        ...

    @property
    def finish_reasons(self) -> list[Finish | None]: ...

    def close(self) -> None: ...


class Vectors:
    """The vectors that a request asked for."""

    def __init__(self, items: list[Item[HostArray]]) -> None:
        self.items = items

    @property
    def started(self) -> float | None:
        return min((s for item in self.items if (s := item.started) is not None), default=None)

    def reused(self, runs: int) -> int:
        return 0

    @property
    def finish_reasons(self) -> list[Finish | None]:
        return [item.finish_reason for item in self.items]

    def close(self) -> None:
        for item in self.items:
            item.cancel()


class Generated:
    """The tokens of one request, its samples, or its output."""

    def __init__(self, streams: Sequence[ItemStream[Any]]) -> None:
        self.streams = streams

    @property
    def started(self) -> float | None:
        return self.streams[0].started

    def reused(self, runs: int) -> int:
        return self.streams[0].reused

    @property
    def finish_reasons(self) -> list[Finish | None]:
        return [stream.finish_reason for stream in self.streams]

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


@dataclass(slots=True, eq=False)
class Record:
    """Times and counters of one request. Times are of time.monotonic()."""

    params: SamplingParams
    prompt_tokens: int
    meter: Meter
    tenant: str = ""
    arrival: float = field(default_factory=time.monotonic)
    queued: float = field(default_factory=time.monotonic)  # read, checked and tokenized
    stream: bool = False
    text: Work | None = None
    first: float | None = None  # when its first token came
    last: float | None = None
    end: float | None = None
    tokens: int = 0
    error: BaseException | None = None
    _latest: dict[int, float] = field(default_factory=dict)  # when each continuation last got tokens

    def came(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self.got(len(piece.token_ids), piece.index)

    def got(self, count: int, index: int = 0) -> None:
        """This many tokens of a continuation came together."""
        if count:
            now, latest = time.monotonic(), self._latest
            self.meter.came(self, count, now, latest.get(index))
            latest[index] = self.last = now
            self.tokens += count
            if self.first is None:
                self.first = now

    def failed(self, error: BaseException) -> None:
        self.error = error

    @property
    def continuations(self) -> int:
        """Number of continuations that have got tokens."""
        return len(self._latest)

    @property
    def started(self) -> float | None:
        """When it joined the batch."""
        return None if self.text is None else self.text.started

    @property
    def reused(self) -> int:
        """Tokens of its prompts that were found in the cache."""
        return 0 if self.text is None else self.text.reused(self.params.runs)

    @property
    def reasons(self) -> list[str]:
        """Why its continuations ended."""
        if self.text is None:
            return []
        return [str(reason) for reason in self.text.finish_reasons if reason is not None]

    def __enter__(self) -> Record:
        self.meter.begun(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.error = error
        self.end = time.monotonic()
        self.meter.ended(self)


class NoMeter:
    """A meter that counts nothing."""

    def begun(self, record: Record) -> None:
        pass

    def came(self, record: Record, tokens: int, now: float, since: float | None) -> None:
        pass

    def ended(self, record: Record) -> None:
        pass

    def answered(self, method: str, route: str, status: int, refused: Refused | None, record: Record | None) -> None:
        pass
