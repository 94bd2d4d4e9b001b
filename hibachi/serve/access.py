"""One line in the log for each request. Neither prompts nor texts nor keys are in it."""

from __future__ import annotations

import logging
import time
from urllib.parse import quote

from hibachi.serve.exchange import Exchange

_LONGEST = 200  # characters of a path
log = logging.getLogger("hibachi.request")


def tell(x: Exchange, *, quiet: bool = False) -> None:
    """quiet: of a request that comes every few seconds."""
    level = logging.DEBUG if quiet else logging.INFO
    if log.isEnabledFor(level):
        log.log(level, "%s", line(x, time.monotonic()))


def line(x: Exchange, now: float) -> str:
    words = [x.method, quote(x.path, safe="/:@+,=")[:_LONGEST], str(x.status)]
    record = x.record
    if record is not None:
        words.append(f"prompt={record.prompt_tokens} new={record.tokens}")
        if record.first is not None:
            words.append(f"ttft={record.first - record.arrival:.3f}s")
        if record.error is not None:
            words.append(f"error={type(record.error).__name__}")
    words.append(f"total={now - x.came:.3f}s id={x.id}")
    if x.tenant:
        words.append(f"tenant={quote(x.tenant)}")
    return " ".join(words)
