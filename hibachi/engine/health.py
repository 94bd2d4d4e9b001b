"""Health of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["idle", "running", "stalled", "failed", "closed"]
STALL_AFTER = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class Health:
    """State of an engine.

    state: "idle" (nothing to compute), "running", "stalled" (work waits, and no step has ended for `stall_after`
    seconds), "failed", "closed". message: the same in words.
    """

    state: State
    message: str
    since_step: float | None = None  # seconds since a step ended; None means none has
    steps: int = 0
    waiting: int = 0
    running: int = 0
    paused: int = 0  # requests whose consumers are behind
    restarts: int = 0  # restarts after a lost device

    @property
    def ok(self) -> bool:
        return self.state in ("idle", "running")
