"""Calls to a model's own `read` and `write`, which convert bodies beside the steps; and other facts that a model
declares.
"""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.backend.discover import backend_for
from hibachi.backend.infer import mapped
from hibachi.errors import (
    EngineFailed,
    HibachiError,
    InvalidRequest,
    ModelError,
    QueueFull,
    UnsupportedOperation,
    shown,
    text_of,
)

ANSWER = 10.0  # longest time of a conversion in seconds, the wait for its turn included
AT_ONCE = 4  # conversions of one engine that run at once
CALLERS = 64  # conversions that run or wait for their turn
_WORD = r"[\w!#$&^.+-]{1,127}"
_MEDIA = re.compile(rf'{_WORD}/{_WORD}( *; *{_WORD}=("[ !#-~]*"|{_WORD}))*', re.ASCII)


def said_by(model: Any) -> dict[str, Any]:
    """The entries of `Facts` that a model declares itself: labels, reads, writes."""
    labels = getattr(model, "labels", ())
    fine = isinstance(labels, (list, tuple)) and all(isinstance(label, str) for label in labels)
    return {
        "labels": tuple(map(str.__str__, labels)) if fine else (),  # of members of an enum: their values
        "probabilities": getattr(model, "probabilities", False) is True,
        "reads": callable(getattr(model, "read", None)),
        "writes": callable(getattr(model, "write", None)),
    }


def to_host(item: Any) -> HostArray:
    """Copy an item of any stream, or a batch of items, to the host; what is no array is converted by NumPy. Raises
    BackendNotFound for an array of an unknown library.
    """
    if isinstance(item, (np.ndarray, np.generic)) or not hasattr(type(item), "dtype"):
        return np.asarray(item)
    if (backend := _backends.get(type(item))) is None:
        backend = _backends[type(item)] = backend_for(item)
    return backend.get(item)


def output_row(item: Any) -> Any:
    """Convert a place in an output of a feed-forward model, an array or several, to its row, when it is read."""
    out, i = item
    return mapped(lambda _, array: array[i, ...], out)


_backends: WeakKeyDictionary[type, ArrayBackend] = WeakKeyDictionary()
"""By the type of their arrays: to look for one takes a while, and `get` is the same on all devices."""


class Conversions:
    """Calls `read` and `write` of one model, at most AT_ONCE at a time, each in a thread of its own. A call that hangs
    is abandoned, and keeps its place until it ends. At most CALLERS may run or wait.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._places, self._callers = threading.BoundedSemaphore(AT_ONCE), threading.BoundedSemaphore(CALLERS)

    def read(self, data: bytes, kind: str) -> HostArray:
        """See `BatchEngine`."""
        found: HostArray = self._called("read", _numbers, data, kind)
        return found

    def write(self, tokens: HostArray) -> tuple[bytes, str]:
        """See `BatchEngine`."""
        data, kind = self._called("write", _body, tokens)
        return data, kind

    def _called(self, name: str, made: Callable[[str, Any], Any], *args: Any) -> Any:
        model = type(self._model).__name__
        do = getattr(self._model, name, None)
        if not callable(do):
            raise lacks(model, name)
        if not self._callers.acquire(blocking=False):
            raise QueueFull(f"{CALLERS} calls of read and write are here already. Try again later.")
        try:
            return self._in_turn(f"{model}.{name}", partial(do, *args), made, time.monotonic() + ANSWER)
        finally:
            self._callers.release()

    def _in_turn(self, call: str, do: Callable[[], Any], made: Callable[[str, Any], Any], until: float) -> Any:
        if not self._places.acquire(timeout=max(0.0, until - time.monotonic())):
            raise QueueFull(f"{AT_ONCE} calls run already, and none has ended for {ANSWER:.3g} s. Try {call} later.")
        done, out = threading.Event(), list[Any]()

        def run() -> None:
            try:
                out.append(made(call, do()))
            except BaseException as e:  # of a class of the user's own; no signal comes to this thread
                out.append(_refused(call, e))
            finally:
                self._places.release()
                done.set()

        try:
            threading.Thread(target=run, name="hibachi-conversion", daemon=True).start()
        except RuntimeError as e:  # the system has no more threads
            self._places.release()
            raise QueueFull(f"There is no thread for {call}: {text_of(e)}. Try again later.") from e
        if not done.wait(max(0.0, until - time.monotonic())):
            raise EngineFailed(f"{call} took more than {ANSWER:.3g} s, and was let go. Make it faster.")
        if isinstance(out[0], BaseException):
            raise out[0]
        return out[0]


def lacks(model: str, name: str) -> UnsupportedOperation:
    method = {"read": "read(bytes, type) -> array", "write": "write(tokens) -> bytes, type"}[name]
    return UnsupportedOperation(f"{model} has no `{name}`: expected a method `{method}`; got none. Use numbers.")


def _refused(call: str, error: BaseException) -> HibachiError:
    if isinstance(error, (InvalidRequest, ModelError)):
        return error.with_traceback(None)  # its frames hold the body
    if isinstance(error, ValueError):
        said = text_of(error).removeprefix(type(error).__name__).removeprefix(": ")  # no more than the beginning
        return InvalidRequest(said.encode("utf-8", "backslashreplace").decode() or f"{call} refused it.")
    return ModelError(f"{call} raised {text_of(error)}")


def _numbers(call: str, made: Any) -> HostArray:
    if inspect.iscoroutine(made):
        made.close()
        raise ModelError(f"{call} must return an array of numbers; got a coroutine. Write it as a plain function.")
    try:
        found = to_host(made)
    except Exception as e:
        raise ModelError(f"{call} must return an array of numbers; got {shown(made)} ({text_of(e)}).") from None
    if found.dtype.kind not in "iufb":
        raise ModelError(f"{call} must return an array of numbers; got the dtype {found.dtype}.")
    return found


def _body(call: str, made: Any) -> tuple[bytes, str]:
    if inspect.iscoroutine(made):
        made.close()
        raise ModelError(f"{call} must return (bytes, media type); got a coroutine. Write it as a plain function.")
    if isinstance(made, tuple) and len(made) == 2:
        data, kind = made
        if isinstance(data, (bytes, bytearray, memoryview)) and isinstance(kind, str) and _MEDIA.fullmatch(kind):
            return bytes(data), str.__str__(kind)  # no member of an enum, which only this process may know
    raise ModelError(f"{call} must return (bytes, media type), such as (b'...', 'audio/wav'); got {shown(made)}.")
