"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    """Return once true() is. AssertionError: it was not, for so many seconds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)
