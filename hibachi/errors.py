"""Every error that hibachi raises, as one tree.

HibachiError
├── InvalidTensorOperation (ValueError)      a tensor operation was asked for something it cannot mean
├── ModelFault
│   ├── InvalidModelOutput (ValueError)      the model returned the wrong type, shape, dtype or row count
│   ├── NonFiniteOutput (ArithmeticError)    the model returned NaN or infinity for this request
│   └── ModelError                           the model raised; the original is in __cause__
├── RequestError
│   ├── InvalidRequest (ValueError)          a prompt, a parameter or a stop rule that cannot be served
│   │   └── InvalidCall (TypeError)          a parameter that there is not, or `await` of what is iterated
│   ├── PromptTooLong (ValueError)           prompt (plus what was asked for) exceeds the context or the cache
│   ├── QueueFull                            too many requests wait already; try again later
│   └── DeadlineExceeded (TimeoutError)      the request's own time is over; tokens before it stay readable
├── EngineError
│   ├── EngineClosed                         the engine was closed
│   ├── NotDeterministic                     with deterministic=True, the model's bits depend on the batch all the same
│   ├── InternalError                        a defect of hibachi ended this one request; see __cause__
│   ├── EngineFailed                         the device, the engine's loop or its process failed; see __cause__
│   └── OutOfCapacity                        no memory for even one token of this request; see __cause__
├── KVStoreError                             a store of cached blocks could not keep, find or forget something
├── BackendError
│   ├── BackendNotFound (LookupError)        no backend has this name, or none knows this array
│   ├── BackendNotInstalled (ImportError)    the backend is known, the library below it is missing
│   └── UnsupportedOperation (NotImplementedError)  the backend lacks an operation that the model needs
└── ConfigError (ValueError)
    ├── UnknownArchitecture                  config.json names an architecture that is not registered
    ├── InvalidModelFiles                    a file of the model is missing, truncated or contradicts another
    ├── InvalidTrace                         a trace of requests cannot be read or replayed
    └── MissingExtra (ImportError)           an optional dependency is needed and not installed

Messages say what was expected, what came, and how to mend it. Errors of one request are raised from its stream (or
from the call that made it) and never touch another request.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Self, TypeAlias

MOST_SHOWN = 200  # characters of a value that a message repeats
MOST_WORDS = 2000  # characters of another library's message
# Characters that steer a terminal (C0, DEL, C1), ends a line, or turns the order of what is shown around.
_STEERS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


FieldPath: TypeAlias = tuple[str | int, ...]
"""Where a field stands in a request, such as ("tools", 3, "name")."""
Words: TypeAlias = tuple[str | FieldPath, ...]
"""A message, in which fields are paths and everything else is text: what callers named is never taken for a field."""


def place_of(path: FieldPath) -> str:
    """A path as it is written, such as "tools[3].name". "..." is any key of a mapping."""
    steps = (f"[{step}]" if isinstance(step, int) or step == "..." else f".{step}" for step in path)
    return "".join(steps).removeprefix(".")


def message_of(words: Words, write: Callable[[FieldPath], str] = place_of) -> str:
    """A message as one text. write: writes paths."""
    return "".join(part if isinstance(part, str) else write(part) for part in words)


class HibachiError(Exception):
    """Root of all errors that hibachi raises. They can be pickled; `__cause__` is then kept as its text."""

    def __reduce__(self) -> tuple[Any, ...]:
        plain: Any = super().__reduce__()
        cause = None if self.__cause__ is None else text_of(self.__cause__)
        return restored, (type(self), plain[1], plain[2] if len(plain) > 2 else {}, cause)


def restored(kind: type[HibachiError], args: tuple[Any, ...], attributes: dict[str, Any], cause: str | None) -> Any:
    """Rebuild an error that was pickled, whatever arguments its class takes. cause: the text of its `__cause__`."""
    error = kind.__new__(kind, *args)
    super(HibachiError, error).__init__(*args)
    error.__setstate__(attributes)
    error.__cause__ = None if cause is None else RuntimeError(cause)
    return error


def shown(value: object) -> str:
    """A value that a caller gave, as a message repeats it: the beginning of its repr."""
    try:
        text = repr(value)
    except BaseException:  # of a class of the caller's own, or of an integer of more digits than Python writes
        return f"a value of type {type(value).__qualname__}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ... ({len(text)} characters)"


def printable(text: str, *, lines: bool = False) -> str:
    """Text of files, rows or servers made safe for a terminal: characters that would steer it become escapes such as
    \\x1b.

    lines: the text may have several lines, so line feeds are kept.
    """
    return _STEERS.sub(lambda m: m[0] if lines and m[0] == "\n" else m[0].encode("unicode_escape").decode(), text)


def text_of(error: BaseException) -> str:
    """Type and message of an exception, also of a foreign one whose message cannot be read."""
    try:
        words = str(error)
    except BaseException:  # whatever its author likes to raise
        words = "(its message could not be made)"
    if len(words) > MOST_WORDS:
        words = f"{words[:MOST_WORDS]} ... ({len(words)} characters)"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def panicked(error: BaseException) -> bool:
    """Is it what a library in Rust raises where its own code failed? It is no Exception, and has no name to catch."""
    return type(error).__name__ == "PanicException"


class InvalidTensorOperation(HibachiError, ValueError):
    """A tensor operation got arguments that have no meaning. Raised before the array library is called.

    Attributes: `op` (the operation), `expected`, `got`, `mend`: strings, sentences without a final stop. What is given
    as something else, such as a shape, is shown as Python writes it.
    """

    op: str
    expected: str
    got: str
    mend: str

    def __init__(self, op: str, *, expected: object, got: object, mend: str) -> None:
        self.op, self.mend = str(op), str(mend)
        self.expected, self.got = (part if isinstance(part, str) else shown(part) for part in (expected, got))
        super().__init__(f"{self.op}: expected {self.expected}; got {self.got}. {self.mend}.")


class ModelFault(HibachiError):
    """The model did something that ends this request."""


class InvalidModelOutput(ModelFault, ValueError):
    """The model returned the wrong type, shape, dtype or number of rows."""


class NonFiniteOutput(ModelFault, ArithmeticError):
    """The model returned NaN or infinity for this request."""


class ModelError(ModelFault):
    """The model raised while computing this request; the original exception is `__cause__`."""


class RequestError(HibachiError):
    """A request was refused by the call that made it, or ran out of time.

    path: of the field that is at fault; None means that it is not known. words: the message. parts: the same; () where
    it is one text.
    """

    path: FieldPath | None = None
    parts: Words = ()

    @classmethod
    def at(cls, path: FieldPath, *words: str | FieldPath) -> Self:
        """An error about a field. Its message begins with the field, and goes on with `words`."""
        return cls.about(path, path, *words)

    @classmethod
    def about(cls, path: FieldPath, *words: str | FieldPath) -> Self:
        """An error about a field, whose message is `words`."""
        error = cls(message_of(words))
        error.path, error.parts = path, words
        return error

    @property
    def words(self) -> Words:
        return self.parts or (str(self),)


class InvalidRequest(RequestError, ValueError):
    """A prompt, a parameter or a stop rule that cannot be served."""


class InvalidCall(InvalidRequest, TypeError):
    """A parameter of a name that there is not, or `await` of a stream, which is iterated."""


class PromptTooLong(RequestError, ValueError):
    """The prompt, or the prompt plus the tokens asked for, does not fit into the context or the cache."""


class QueueFull(RequestError):
    """The queue already holds as many requests as it may. Nothing was queued; try again later."""


class DeadlineExceeded(RequestError, TimeoutError):
    """The request's time is over, in the queue or while it ran. Tokens that came before stay readable."""


class EngineError(HibachiError):
    """The engine as a whole cannot serve."""


class EngineClosed(EngineError):
    """The engine was closed; make a new one."""


class EngineFailed(EngineError):
    """The device was lost, or the engine's own loop or process failed; the original is `__cause__`."""


class InternalError(EngineError):
    """A defect of hibachi ended this one request; the original is `__cause__`. Other requests go on. Please report
    it.
    """


class NotDeterministic(EngineError):
    """The loaded model computes other bits for a request when other requests share its batch; see
    docs/determinism.md.
    """


class OutOfCapacity(EngineError):
    """The device has no memory for even one token of this request; the library's error is `__cause__`."""


class BackendError(HibachiError):
    """A backend is missing or lacks something."""


class BackendNotFound(BackendError, LookupError):
    """No backend has this name, or none knows this array."""


class BackendNotInstalled(BackendError, ImportError):
    """The backend is known, but the library below it is not installed."""


class UnsupportedOperation(BackendError, NotImplementedError):
    """The backend lacks an operation that the model needs."""


class KVStoreError(HibachiError):
    """A store of cache blocks failed, took too long, or is left alone for a while. What it was asked for counts as not
    there; a request fails by it only where `KVTiers.load_failure` is "fail".
    """


class ConfigError(HibachiError, ValueError):
    """A model's files or settings cannot be used."""


class UnknownArchitecture(ConfigError):
    """config.json names an architecture that is not registered."""


class InvalidModelFiles(ConfigError):
    """A file of the model is missing, truncated or contradicts another."""


class InvalidTrace(ConfigError):
    """A trace of requests cannot be read, or cannot be replayed with these sizes."""


class MissingExtra(ConfigError, ImportError):
    """An optional dependency is needed and not installed."""
