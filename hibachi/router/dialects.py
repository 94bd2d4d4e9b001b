"""Errors of the router in the words of the API that a path belongs to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hibachi.api.dialects import ANTHROPIC, OPENAI, TGI, Dialect
from hibachi.api.errors import Refused
from hibachi.router.routes import TGI as TGI_PATHS


def _as_tgi(refused: Refused) -> dict[str, Any]:
    """In our own words: no upstream has looked at the input."""
    return {**TGI.error(refused), "error": str(refused)}


_TGI = replace(TGI, error=_as_tgi)


def dialect_of(path: str) -> Dialect:
    """The dialect of a path: OpenAI's, unless the path belongs to another API."""
    if path in TGI_PATHS:
        return _TGI
    return ANTHROPIC if path.startswith("/v1/messages") else OPENAI
