"""Errors of the router in the words of the API that a path belongs to."""

from __future__ import annotations

from hibachi.api.dialects import ANTHROPIC, OPENAI, TGI, Dialect
from hibachi.router.routes import TGI as TGI_PATHS


def dialect_of(path: str) -> Dialect:
    """OpenAI's, where the path belongs to nobody else."""
    if path in TGI_PATHS:
        return TGI
    return ANTHROPIC if path.startswith("/v1/messages") else OPENAI
