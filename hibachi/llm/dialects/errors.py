"""Errors in the form of OpenAI's API: an HTTP status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hibachi.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    EngineFailed,
    FieldPath,
    HibachiError,
    InternalError,
    InvalidRequest,
    KVStoreError,
    OutOfCapacity,
    PromptTooLong,
    QueueFull,
    RequestError,
    UnsupportedOperation,
    message_of,
    place_of,
    shown,
)
from hibachi.llm.chatformat.errors import UNSUPPORTED, BadField, TemplateFailed

INVALID, DENIED, LIMITED, SERVER = "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"
_KNOWN: tuple[tuple[type[BaseException], int, str, str | None], ...] = (
    (PromptTooLong, 400, INVALID, "context_length_exceeded"),
    (InvalidRequest, 400, INVALID, None),
    (QueueFull, 429, LIMITED, "queue_full"),
    (DeadlineExceeded, 408, "timeout_error", "deadline_exceeded"),
    (RequestError, 400, INVALID, None),
    (EngineClosed, 503, SERVER, "shutting_down"),
    (OutOfCapacity, 503, SERVER, "out_of_memory"),
    (KVStoreError, 503, SERVER, "store_failed"),
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
    (KVStoreError, "A store of the cache failed. Try again later."),
    (InternalError, "The engine could not handle this request, which is its own mistake. The server's log says more."),
    (EngineFailed, "The engine has failed, and the requests that it had are lost. The server's log says why."),
)
NO_RETRY = {"X-Should-Retry": "false"}
"""OpenAI's and Anthropic's clients try twice more after a 408 or a 504 without it: a late answer would cost its caller,
and the engine, three times the time that was allowed.
"""


class Refused(HibachiError):
    """A request that is answered with an error: `status`, `kind` (OpenAI's "type"), `code`, `headers`.

    words: the message. path: of the field that is at fault, as `param` is given; None means none. A field that stands
    in `words` as a path can be moved, and each dialect writes it in its own way.
    """

    status: int
    kind: str
    code: str | None

    def __init__(
        self,
        *words: str | FieldPath,
        status: int = 400,
        kind: str = INVALID,
        param: str | FieldPath | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message_of(words))
        self.words = words
        self.path: FieldPath | None = (param,) if isinstance(param, str) else param
        self.status, self.kind, self.code = status, kind, code
        self.headers: dict[str, str] = headers or {}

    @classmethod
    def at(cls, path: str | FieldPath, *words: str | FieldPath, code: str = "invalid_value") -> Refused:
        """What is wrong with a field, with which the message begins."""
        path = (path,) if isinstance(path, str) else path
        return cls(path, *words, param=path, code=code)

    @classmethod
    def of(cls, error: InvalidRequest) -> Refused:
        """The same about the field that the error is about."""
        return cls(*error.words, param=error.path, code="invalid_value")

    @property
    def param(self) -> str | None:
        return None if self.path is None else place_of(self.path)

    def moved(self, move: Callable[[FieldPath], FieldPath]) -> Refused:
        """The same about a body in which fields stand elsewhere. move: where each does."""
        words = [part if isinstance(part, str) else move(part) for part in self.words]
        found = Refused(*words, param=None if self.path is None else move(self.path))
        found.status, found.kind, found.code, found.headers = self.status, self.kind, self.code, dict(self.headers)
        return found


def as_refused(error: BaseException, retry_after: int = 1) -> Refused:
    """The answer to any exception. retry_after: seconds, where trying again may help."""
    if isinstance(error, Refused):
        return error
    for cls, status, kind, code in _KNOWN:
        if isinstance(error, cls):
            again = {"Retry-After": str(retry_after)} if status in (429, 503) else NO_RETRY if status == 408 else None
            about = error.path if isinstance(error, BadField) else None
            said = error.words if isinstance(error, RequestError) else (str(error),)
            hidden = next(((text,) for secret, text in _WORDS if isinstance(error, secret)), None)
            code = error.code if isinstance(error, BadField) else code
            headers = again and dict(again)
            return Refused(*(hidden or said), status=status, kind=kind, param=about, code=code, headers=headers)
    if isinstance(error, HibachiError):
        words = "The model did something wrong on this request. The server's log says what."
        return Refused(words, status=500, kind=SERVER, code="model_fault")
    return Refused("The server made a mistake; its log says more.", status=500, kind=SERVER, code="internal_error")


def body_of(refused: Refused) -> dict[str, Any]:
    about = {"message": str(refused), "type": refused.kind, "param": refused.param, "code": refused.code}
    return {"error": about}


def unsupported(name: str | FieldPath, why: str, value: Any = None) -> Refused:
    """value: the one that is not supported; None means no value of this field is."""
    which = "" if value is None else f" as {shown(value)}"
    return Refused.at(name, f" is not supported{which}: {why}.", code=UNSUPPORTED)


@contextmanager
def refusing(move: Callable[[FieldPath], FieldPath] | None = None) -> Iterator[None]:
    """What is wrong with a field of a chat is refused. move: where its fields stand in the body that the chat was made
    of: then all that is wrong with the chat is refused by these.
    """
    try:
        yield
    except TemplateFailed as e:
        raise Refused(str(e), param="messages", code="template_error") from e
    except (Refused, InvalidRequest, PromptTooLong) as e:
        if move is not None:
            raise as_refused(e).moved(move) from e
        if isinstance(e, BadField):
            raise as_refused(e) from None
        raise
