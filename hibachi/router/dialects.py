"""Errors of the router in the words of the API that a path belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hibachi.llm.dialects.dialects import ANTHROPIC, OPENAI, TGI, Dialect, Headers, spoken
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.messages import answers as anthropic
from hibachi.router.routes import TGI as TGI_PATHS


def _as_tgi(refused: Refused) -> dict[str, Any]:
    """In our own words: no upstream has looked at the input."""
    return {**TGI.error(refused), "error": str(refused)}


_TGI = replace(TGI, error=_as_tgi)


def dialect_of(path: str, headers: Headers | None = None) -> Dialect:
    """The dialect of a path: OpenAI's, unless the path belongs to another API, or the headers name one."""
    if path in TGI_PATHS:
        return _TGI
    return spoken(path, headers or {}, ANTHROPIC if path.startswith("/v1/messages") else OPENAI)


def as_anthropic(listed: Sequence[dict[str, Any]]) -> anthropic.AnthropicModels:
    """Models in Anthropic's form. listed: in OpenAI's, as upstreams say it, which may be anything but the id."""
    return anthropic.models([anthropic.model(m["id"], _number(m, "created") or 0, _most(m)) for m in listed])


def _most(entry: dict[str, Any]) -> int | None:
    found = _number(entry, "max_model_len")
    return None if found is None else int(found)


def _number(entry: dict[str, Any], name: str) -> float | None:
    """A number that a date can be made of."""
    found = entry.get(name)
    return found if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found < 1 << 35 else None
