"""Dialects of routes: the shape and status of errors, how streams end; and where keys stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hibachi.errors import FieldPath, message_of, place_of
from hibachi.llm.dialects.errors import Refused, body_of

Headers = Mapping[bytes, bytes]
BY_ANTHROPIC = b"anthropic-version"  # the header that all clients of Anthropic's API send


def key_of(headers: Headers) -> bytes | None:
    """The key of a request as "Bearer KEY": what the header Authorization holds, or else x-api-key, which clients of
    Anthropic's API may send in its place; also beside another scheme, which is a proxy's. None means there is neither.
    """
    held, key = headers.get(b"authorization"), headers.get(b"x-api-key")
    if key is None or (held or b"").lower().startswith(b"bearer "):
        return held
    return b"Bearer " + key


def _own_status(refused: Refused) -> int:
    return refused.status


def _never(refused: Refused) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Dialect:
    """The dialect of a route. error: the body of an error, or the last event of a stream. status: of the error. end:
    sent after the last event of a stream. as_event: whether an error that comes before everything else is a stream of
    one event, with status 200. tells_id: errors have the field request_id, and all answers the header request-id.
    """

    name: str
    error: Callable[[Refused], dict[str, Any]]
    status: Callable[[Refused], int] = _own_status
    end: bytes = b""
    as_event: Callable[[Refused], bool] = _never
    tells_id: bool = False

    def told(self, refused: Refused, request: str) -> dict[str, Any]:
        """`error` of a request with this id."""
        return {**self.error(refused), "request_id": request} if self.tells_id else self.error(refused)


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

TOO_LONG = "prompt is too long: "  # by these words agents know that they must shorten the conversation
_ANTHROPICS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def _dotted(path: FieldPath) -> str:
    """As Anthropic's API writes it, such as "messages.3.content.0.tool_use_id"."""
    return place_of(tuple(map(str, path)) if path[0] in ("messages", "system", "tools") else path)


def _anthropic_status(refused: Refused) -> int:
    if refused.code == "deadline_exceeded":
        return 504
    return 529 if refused.status == 503 else refused.status


def _anthropic_error(refused: Refused) -> dict[str, Any]:
    """Our code stands where Anthropic's have theirs."""
    status = _anthropic_status(refused)
    kind = _ANTHROPICS.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    words = message_of(refused.words, _dotted)
    if refused.code == "context_length_exceeded":
        words = f"{TOO_LONG}{words}"
    more = {} if refused.code is None else {"details": {"error_code": refused.code}}
    return {"type": "error", "error": {"type": kind, "message": words, **more}}


ANTHROPIC = Dialect("anthropic", _anthropic_error, _anthropic_status, tells_id=True)


def spoken(path: str, headers: Headers, usual: Dialect) -> Dialect:
    """The dialect of a request. usual: of its path. Models are listed in two: clients of Anthropic's API name its
    version.
    """
    return ANTHROPIC if BY_ANTHROPIC in headers and f"{path}/".startswith("/v1/models/") else usual
