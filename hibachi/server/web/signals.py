"""Handling of signals while no request runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def end(number: int, frame: object) -> NoReturn:
    """An exception, so that nothing is left behind: neither process nor file."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextmanager
def ending() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C: it raises an exception in this block."""
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
