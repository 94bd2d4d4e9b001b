"""Errors of the router in the words of the API that a path belongs to."""

from __future__ import annotations

from typing import Any

from hibachi.api.errors import DENIED, INVALID, LIMITED, Refused, body_of
from hibachi.router.routes import TGI

_ANTHROPICS = {INVALID: "invalid_request_error", DENIED: "authentication_error", LIMITED: "rate_limit_error"}


def said(refused: Refused, path: str) -> dict[str, Any]:
    """The body of the answer. OpenAI's, where the path belongs to nobody else."""
    if path in TGI:
        kind = {413: "validation", 422: "validation", 429: "overloaded", 404: "validation", 400: "validation"}
        return {"error": str(refused), "error_type": kind.get(refused.status, "generation")}
    if path.startswith("/v1/messages"):
        kind = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
        told = kind.get(refused.status) or _ANTHROPICS.get(refused.kind, "api_error")
        return {"type": "error", "error": {"type": told, "message": str(refused)}}
    return body_of(refused)
