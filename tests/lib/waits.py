"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable

PATIENCE = 20  # seconds until a test that hangs fails


def until(true: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Return once true() is. AssertionError: it was not, for so many seconds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.001)
