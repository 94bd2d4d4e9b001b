"""What happened to one request, for the metrics: when it came, began, got its tokens and ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hibachi.engine.textstream import Piece, TextStream
from hibachi.request import SamplingParams


class Meter(Protocol):
    """What looks at records."""

    def begun(self, record: Record) -> None: ...

    def came(self, record: Record, tokens: int, now: float, since: float | None) -> None: ...

    def ended(self, record: Record) -> None: ...


@dataclass(slots=True, eq=False)
class Record:
    """Times are of time.monotonic()."""

    params: SamplingParams
    prompt_tokens: int
    meter: Meter
    tenant: str = ""
    arrival: float = field(default_factory=time.monotonic)
    text: TextStream | None = None
    first: float | None = None  # when its first token came
    last: float | None = None
    end: float | None = None
    tokens: int = 0
    error: BaseException | None = None

    def came(self, pieces: Sequence[Piece]) -> None:
        count = sum(len(p.token_ids) for p in pieces)
        if not count:
            return
        now = time.monotonic()
        self.tokens += count
        self.meter.came(self, count, now, self.last)
        if self.first is None:
            self.first = now
        self.last = now

    def failed(self, error: BaseException) -> None:
        self.error = error

    @property
    def started(self) -> float | None:
        """When it joined the batch."""
        return None if self.text is None else self.text.tokens.started

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
    """Looks away."""

    def begun(self, record: Record) -> None:
        pass

    def came(self, record: Record, tokens: int, now: float, since: float | None) -> None:
        pass

    def ended(self, record: Record) -> None:
        pass
