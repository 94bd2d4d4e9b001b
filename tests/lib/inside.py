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


def refuses(engine: Any) -> bool:
    """Does it take no more requests? Of an engine in this process or in another."""
    return (getattr(engine, "_worker", None) or engine)._refusal is not None


def is_closing(engine: Any) -> bool:
    return bool(engine._worker._closing)


def flights(engine: Any) -> Any:
    """The steps that have begun and whose tokens are not read yet."""
    return core(engine)._flights


def parked(engine: Any) -> Any:
    """Requests whose grammar is being made."""
    return core(engine).scheduler._parked


def unended(engine: Any) -> Any:
    """Streams of an engine in another process."""
    return engine._channels


def unanswered(engine: Any) -> Any:
    """Questions to an engine in another process."""
    return engine._answers


def built(engine: Any) -> Any:
    """What requests are prepared with."""
    return engine._built


def kept_inputs(engine: Any) -> Any:
    """What level 0 showed its model last, where the model computes."""
    return engine._built.runner._grown


def rules(engine: Any) -> Any:
    """Rules for the ends of requests that are here."""
    return engine._built.prompts._stoppers


def underlying(tokenizer: Any) -> Any:
    """The tokenizer of the package tokenizers below ours."""
    return tokenizer._raw


def running(guides: Any) -> Any:
    """The forms that are being checked."""
    return guides._checks._running


def checking(guides: Any, *, start: bool = False) -> list[subprocess.Popen[bytes]]:
    """The processes that check forms and have been started. start: all are."""
    for each in guides._checks._processes if start else ():
        if each._process is None:
            each._start()
    return [p._process for p in guides._checks._processes if p._process is not None]
