"""Health of an engine: its state, and the thread that watches for stalls while requests are served."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
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


class Watchdog:
    """Calls `look` at intervals while there is work; sleeps while there is none. It does not depend on any engine's
    thread.

    `work` may be called again and again; `rest` when all work is done; `stop` once.
    """

    def __init__(self, look: Callable[[], object], seconds: float) -> None:
        self._look, self._seconds = look, seconds
        self._work, self._over = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="hibachi-watchdog", daemon=True).start()

    def work(self) -> None:
        if not self._work.is_set():
            self._work.set()

    def rest(self) -> None:
        self._work.clear()

    def stop(self) -> None:
        self._over.set()
        self._work.set()

    def _watch(self) -> None:
        while True:
            self._work.wait()
            if self._over.wait(self._seconds):
                return
            if self._work.is_set():
                self._look()


def where(thread: threading.Thread | None) -> str:
    """Where a thread stands: the innermost lines of its stack; empty if it is not running."""
    frame = sys._current_frames().get(thread.ident) if thread is not None and thread.ident is not None else None
    return "".join(traceback.format_stack(frame)[-6:]) if frame is not None else "(its thread is not running)"
