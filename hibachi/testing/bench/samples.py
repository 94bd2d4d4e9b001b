"""What a load generator notes: the times of each request, and how the run went."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

REJECTED, CUT, INTERRUPTED = "rejected (429)", "cut off", "interrupted"


@dataclass(slots=True)
class Sample:
    """The result of a request. due, sent, end: seconds after the start; chunks: times of chunks with new text.

    due: when it should have been sent, where there is a rate; sent: when it was; waited: it was late because the most
    requests at a time were running. counted: tokens, as the server says. error: a kind, or None; message: its text.
    Times of the user count from `due`, so that a late generator does not make the server look fast; where there is no
    rate, from `sent`.
    """

    id: int
    due: float | None
    new: int  # tokens that it asked for
    sent: float = 0.0
    waited: bool = False
    end: float = 0.0
    status: int = 0
    error: str | None = None
    message: str = ""
    prompt_tokens: int | None = None
    counted: int | None = None
    chunks: array[float] = field(default_factory=lambda: array("d"))

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def tokens(self) -> int:
        return len(self.chunks) if self.counted is None else self.counted

    @property
    def begun(self) -> float:
        """When a user would have asked."""
        return self.sent if self.due is None else min(self.due, self.sent)

    @property
    def ttft(self) -> float | None:
        return self.chunks[0] - self.begun if self.chunks else None

    @property
    def itl(self) -> list[float]:
        return [b - a for a, b in pairwise(self.chunks)]

    @property
    def tpot(self) -> float | None:
        """Seconds a token, after the first."""
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1) if self.chunks and self.tokens > 1 else None

    @property
    def e2e(self) -> float:
        return self.end - self.begun

    def as_json(self) -> dict[str, Any]:
        names = (
            "id",
            "due",
            "sent",
            "end",
            "status",
            "error",
            "message",
            "prompt_tokens",
            "tokens",
            "ttft",
            "tpot",
            "itl",
        )
        return {name: getattr(self, name) for name in names} | {"e2e": self.e2e, "usage": self.counted is not None}


@dataclass(slots=True)
class Loaded:
    """What a run gave. seconds: from the start to the end of the last request. cpu: seconds of processor time that this
    process had. peak: most requests at a time. interrupted: it was stopped before its end."""

    samples: list[Sample]
    seconds: float
    cpu: float
    peak: int
    connections: int
    interrupted: bool
