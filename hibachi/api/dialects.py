"""Dialects of routes: the shape and status of errors, where the key stands, how streams end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hibachi.api.errors import DENIED, INVALID, LIMITED, Refused, body_of

Headers = Mapping[bytes, bytes]


def bearer(headers: Headers) -> bytes | None:
    """The header Authorization: "Bearer KEY"."""
    return headers.get(b"authorization")


def _own_status(refused: Refused) -> int:
    return refused.status


def _never(refused: Refused) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Dialect:
    """The dialect of a route. error: the body of an error, or the last event of a stream. status: of the error. key:
    the key in the form of the header Authorization. end: sent after the last event of a stream. as_event: whether an
    error that comes before everything else is a stream of one event, with status 200.
    """

    name: str
    error: Callable[[Refused], dict[str, Any]]
    status: Callable[[Refused], int] = _own_status
    key: Callable[[Headers], bytes | None] = bearer
    end: bytes = b""
    as_event: Callable[[Refused], bool] = _never


# ---- OpenAI ------------------------------------------------------------------------------------------------------

OPENAI = Dialect("openai", body_of, end=b"data: [DONE]\n\n")


# ---- TGI ---------------------------------------------------------------------------------------------------------

_TGI_KINDS = {"model_fault": "generation", "engine_failed": "generation", "out_of_memory": "overloaded"}
_TGI_KINDS |= {name: name for name in ("template_error", "tool_error")}
_TGI_KINDS |= {"no_chat_template": "template_error", "engine_stalled": "overloaded"}
_TGI_TYPES = {401: "authentication", 403: "authentication", 408: "timeout", 429: "overloaded"}
_TGI_STATUS = {"generation": 424, "validation": 422, "template_error": 422, "tool_error": 422}
_TGI_WORDS = {
    "generation": "Request failed during generation: ",
    "validation": "Input validation error: ",
    "template_error": "Template error: ",
    "tool_error": "Tool error: ",
}


def _tgi_type(refused: Refused) -> str:
    found = _TGI_KINDS.get(refused.code or "") or _TGI_TYPES.get(refused.status)
    return found or ("validation" if refused.status < 500 else "incomplete_generation")


def _tgi_status(refused: Refused) -> int:
    """TGI's own status where it says more than the type: 404, 413, 415 ..."""
    kind = _tgi_type(refused)
    return _TGI_STATUS.get(kind, refused.status) if refused.status in (400, 500) else refused.status


def _tgi_error(refused: Refused) -> dict[str, Any]:
    kind = _tgi_type(refused)
    return {"error": f"{_TGI_WORDS.get(kind, '')}{refused}", "error_type": kind}


_UNREAD = ("invalid_json", "invalid_http", "shutting_down", "engine_stalled")


def _after_reading(refused: Refused) -> bool:
    """Whether an error comes after the request was read. Not for a missing key, a body that is too large, late or no
    JSON, or a server that takes nothing new: then the client may try another server.
    """
    return refused.status not in (401, 403, 405, 408, 413, 415, 431) and refused.code not in _UNREAD


TGI = Dialect("tgi", _tgi_error, _tgi_status)
TGI_STREAM = Dialect("tgi", _tgi_error, _tgi_status, as_event=_after_reading)


# ---- Anthropic ---------------------------------------------------------------------------------------------------

_ANTHROPICS = {INVALID: "invalid_request_error", DENIED: "authentication_error", LIMITED: "rate_limit_error"}
_OF_STATUS = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


def _anthropic_error(refused: Refused) -> dict[str, Any]:
    told = _OF_STATUS.get(refused.status) or _ANTHROPICS.get(refused.kind, "api_error")
    return {"type": "error", "error": {"type": told, "message": str(refused)}}


def _x_api_key(headers: Headers) -> bytes | None:
    key = headers.get(b"x-api-key")
    return bearer(headers) or (None if key is None else b"Bearer " + key)


ANTHROPIC = Dialect("anthropic", _anthropic_error, key=_x_api_key)
