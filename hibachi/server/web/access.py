"""The access log: one line for each request, without prompts, texts or keys."""

from __future__ import annotations

import logging
import re
import time
from typing import Any, Protocol
from urllib.parse import quote

from hibachi.llm.dialects.errors import Refused
from hibachi.server.web.exchange import Exchange
from hibachi.server.web.logs import FIELDS

_LONGEST = 200  # characters of a path
_PLAIN = re.compile(r"[A-Za-z0-9_.~/:@+,=-]*")  # nothing that is to be quoted
log: logging.Logger = logging.getLogger("hibachi.request")


class Told(Protocol):
    """What the log says of a request for text."""

    prompt_tokens: int
    tokens: int
    arrival: float
    first: float | None
    error: BaseException | None


def tell(x: Exchange, refused: Refused | None = None, *, quiet: bool = False) -> None:
    """Log a request. quiet: for a request that comes every few seconds."""
    _log(logging.DEBUG if quiet else logging.INFO, lambda: fields(x, refused, time.monotonic()))


def tell_of_none(refused: Refused, client: Any, seconds: float) -> None:
    """Log what was refused before it became a request."""
    told = {"method": "-", "path": "-", "status": refused.status, "code": refused.code, "total": seconds}
    _log(logging.INFO, lambda: told | ({"client": _address(client)} if client else {}))


def _log(level: int, make: Any) -> None:
    if log.isEnabledFor(level):
        told = make()
        log.log(level, "%s", line(told), extra={FIELDS: told})


def fields(x: Exchange, refused: Refused | None, now: float) -> dict[str, Any]:
    """Times in seconds."""
    told: dict[str, Any] = {"method": x.method, "path": _quoted(x.path, "/:@+,=")[:_LONGEST], "status": x.status}
    record: Told | None = x.record
    if record is not None:
        told |= {"prompt": record.prompt_tokens, "new": record.tokens}
        if record.first is not None:
            told["ttft"] = record.first - record.arrival
        if record.error is not None:
            told["error"] = type(record.error).__name__
    told |= x.more
    if refused is not None:
        told["code"] = refused.code or refused.kind
    told |= {"total": now - x.came, "id": x.id}
    if x.tenant:
        told["tenant"] = x.tenant
    if x.client:
        told["client"] = _address(x.client)
    return told


def line(told: dict[str, Any]) -> str:
    """As words: the first three without their names, times in seconds."""
    words = [str(told[name]) for name in ("method", "path", "status")]
    for name, value in list(told.items())[3:]:
        shown = f"{value:.3f}s" if isinstance(value, float) else _quoted(str(value), "/:@+,=[]()")
        words.append(f"{name}={shown}")
    return " ".join(words)


def _quoted(text: str, safe: str) -> str:
    return text if _PLAIN.fullmatch(text) else quote(text, safe=safe)  # which is slow


def _address(client: Any) -> str:
    host, port = client[0], client[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
