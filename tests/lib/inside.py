"""What tests look at within an engine, a tokenizer or the processes that check forms: said here only, so that one file
changes with them."""

from __future__ import annotations

import subprocess
from typing import Any


def worker(engine: Any) -> Any:
    """The thread of an engine in this process, with its commands."""
    return engine._worker


def core(engine: Any) -> Any:
    """What the thread drives: scheduler, runner, recorder. None before the first request."""
    return engine._worker.engine


def thread(engine: Any) -> Any:
    return engine._worker._thread


def built(engine: Any) -> Any:
    """What requests are prepared with."""
    return engine._built


def underlying(tokenizer: Any) -> Any:
    """The tokenizer of the package tokenizers below ours."""
    return tokenizer._raw


def running(guides: Any) -> Any:
    """The forms that are being checked."""
    return guides._checks._running


def checking(guides: Any) -> list[subprocess.Popen[bytes]]:
    """The processes that check forms and have been started."""
    return [p._process for p in guides._checks._processes if p._process is not None]
