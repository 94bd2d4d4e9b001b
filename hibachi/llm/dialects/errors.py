"""Errors in the form of OpenAI's API: an HTTP status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from hibachi.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    EngineFailed,
    HibachiError,
    InternalError,
    InvalidRequest,
    OutOfCapacity,
    PromptTooLong,
    QueueFull,
    RequestError,
    UnsupportedOperation,
    shown,
)

INVALID, DENIED, LIMITED, SERVER = "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"
_KNOWN: tuple[tuple[type[BaseException], int, str, str | None], ...] = (
    (PromptTooLong, 400, INVALID, "context_length_exceeded"),
    (InvalidRequest, 400, INVALID, None),
    (QueueFull, 429, LIMITED, "queue_full"),
    (DeadlineExceeded, 408, "timeout_error", "deadline_exceeded"),
    (RequestError, 400, INVALID, None),
    (EngineClosed, 503, SERVER, "shutting_down"),
    (OutOfCapacity, 503, SERVER, "out_of_memory"),
    (InternalError, 500, SERVER, "internal_error"),
    (EngineError, 503, SERVER, "engine_failed"),
    (UnsupportedOperation, 400, INVALID, "unsupported"),
    (ConfigError, 400, INVALID, "unsupported"),
)
_WORDS: tuple[tuple[type[BaseException], str], ...] = (
    # In the place of messages that repeat what the model, a library or the system said, which is for the log.
    # how full the queue is, and with whose requests, is not for other tenants
    (QueueFull, "The queue is full. Try again later."),
    (OutOfCapacity, "There is no memory for this request. Make it shorter, or try again later."),
    (InternalError, "The engine could not handle this request, which is its own mistake. The server's log says more."),
    (EngineFailed, "The engine has failed, and the requests that it had are lost. The server's log says why."),
)
NO_RETRY = {"X-Should-Retry": "false"}
"""OpenAI's and Anthropic's clients try twice more after a 408 or a 504 without it: a late answer would cost its caller,
and the engine, three times the time that was allowed.
"""


class Refused(HibachiError):
    """A request that is answered with an error: `status`, `kind` (OpenAI's "type"), `param`, `code`, `headers`."""

    status: int
    kind: str
    param: str | None
    code: str | None

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers: dict[str, str] = headers or {}

    def about(self, param: str | None, words: str) -> Refused:
        """The same, about another field, in other words."""
        return Refused(words, status=self.status, kind=self.kind, param=param, code=self.code, headers=self.headers)


def as_refused(error: BaseException, retry_after: int = 1) -> Refused:
    """The answer to any exception. retry_after: seconds, where trying again may help."""
    if isinstance(error, Refused):
        return error
    for cls, status, kind, code in _KNOWN:
        if isinstance(error, cls):
            again = {"Retry-After": str(retry_after)} if status in (429, 503) else NO_RETRY if status == 408 else None
            words = next((words for secret, words in _WORDS if isinstance(error, secret)), str(error))
            return Refused(words, status=status, kind=kind, code=code, headers=again and dict(again))
    if isinstance(error, HibachiError):
        words = "The model did something wrong on this request. The server's log says what."
        return Refused(words, status=500, kind=SERVER, code="model_fault")
    return Refused("The server made a mistake; its log says more.", status=500, kind=SERVER, code="internal_error")


def body_of(refused: Refused) -> dict[str, Any]:
    about = {"message": str(refused), "type": refused.kind, "param": refused.param, "code": refused.code}
    return {"error": about}


def unsupported(name: str, why: str, value: Any = None) -> Refused:
    """value: the one that is not supported; None means no value of this field is."""
    which = "" if value is None else f" as {shown(value)}"
    return Refused(f"{name} is not supported{which}: {why}.", param=name, code="unsupported_parameter")
