"""Around a call of the model: it is awaited where it is a coroutine, what it returns of a cache is checked, and what it
raises becomes a typed error that keeps its text and no arrays.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import is_
from typing import Any

from hibachi.backend.array_backend import Array, ArrayBackend, LayerCache
from hibachi.backend.layout import StepInputs
from hibachi.engine.scheduler.sequence import Seq
from hibachi.errors import (
    BackendError,
    DeadlineExceeded,
    EngineClosed,
    HibachiError,
    InternalError,
    InvalidModelOutput,
    InvalidRequest,
    ModelError,
    ModelFault,
    OutOfCapacity,
    text_of,
)

OURS = "hibachi.engine"
MOST_TEXT = 4000  # characters of a traceback that are kept


class Theirs:
    """`with theirs:` around a call of the model records what it raised, to tell it from a defect of hibachi.

    warned: the log already has the warning that rows which fail together succeed apart.
    """

    __slots__ = ("raised", "warned")

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self.warned = False

    def __enter__(self) -> None:
        self.raised = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.raised = error


def mend_shape(call: str, expected: tuple[int | None, ...], shape: tuple[int, ...], *, logits: bool = False) -> str:
    """How to mend an output of this shape, in a sentence. logits: of tokens that the engine draws."""
    rows, step = shape[:1] == expected[:1], call.endswith(".step")
    if logits and rows and len(shape) == len(expected) + 1 and shape[2:] == expected[1:]:
        more = "; over the engine's cache, of the tokens `x.last`" if step else ""
        return f"It has an axis of time too many: return the logits of each row's last token, `logits[:, -1]`{more}."
    if logits and shape == expected[:-1]:
        how = "set `vocab_size = None`: `step` returns tokens then" if step else "name the method `forward(tokens)`"
        return f"If these are token ids, {how}."
    if logits and len(shape) > 1 and shape[:-1] == expected[:-1]:
        size = "vocab_size` (or `vocab_sizes`, of a codebook)" if ".depth" in call else "vocab_size`"
        return f"`{size} says {expected[-1]} ids, and the model gives {shape[-1]} numbers: make both the same."
    if call.endswith(".forward") and len(expected) == 1 and len(shape) > 1 and rows:
        return (
            "If these are logits, call the method `logits(self, tokens, lengths)` and set `vocab_size`: then the "
            "engine draws the token. `forward` returns the next token of each row."
        )
    return "Return one row for each input row."


def holds(judge: Callable[[BaseException], bool], error: BaseException) -> bool:
    """The backend's answer to a question about an error; False if it cannot read it."""
    try:
        return judge(error)
    except BaseException:
        return False


def is_signal(error: BaseException) -> bool:
    """Is this Ctrl-C? It comes in the main thread only, where a model is tried before its engine has a thread."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def as_fault(error: BaseException, theirs: Theirs) -> HibachiError:
    """The error that ends a request of which one call raised `error`. theirs: what the model raised last."""
    # raised by hibachi about a fault of the model or library
    if isinstance(error, (ModelFault, InvalidRequest, BackendError)):
        drop_frames(error)
        return error
    if theirs.raised is not error and _ended_in_ours(error):
        return internal(error)
    return _because(ModelError(f"The model raised {text_of(error)}"), error)


def internal(error: BaseException) -> HibachiError:
    """The error that ends a request which the engine could not handle: `error` itself if it has a type of hibachi's."""
    if isinstance(error, HibachiError):
        return error
    if isinstance(error, MemoryError):
        return _because(
            OutOfCapacity(f"There is no memory for this request ({text_of(error)}). Make it shorter."), error
        )
    text = f"The engine could not handle this request: {text_of(error)}. It is a defect of hibachi, or of the policy."
    return _because(InternalError(f"{text} Please report it."), error)


def _because(fault: HibachiError, error: BaseException) -> HibachiError:
    """`fault` with its cause, as text: the traceback's words are kept, its frames are not."""
    fault.__cause__ = error
    fault.add_note(_where(error))
    drop_frames(error)
    return fault


def drop_frames(error: BaseException | None) -> None:
    """Drop the frames of an error, its causes and contexts: they hold the arrays of the call that failed."""
    seen: set[int] = set()
    found = [error]
    while found:
        e = found.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        e.__traceback__ = None
        found += [e.__cause__, e.__context__, *(e.exceptions if isinstance(e, BaseExceptionGroup) else ())]


def _ended_in_ours(error: BaseException) -> bool:
    """Whether an exception was raised by hibachi's own code rather than by a library or a model below it."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")).startswith(OURS)


def _where(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_tb(error.__traceback__)[-20:])
    except Exception:  # of a source file that cannot be read, say
        text = "(no traceback)"
    return "It was raised at:\n" + text[-MOST_TEXT:]


def too_late(seq: Seq, now: float) -> DeadlineExceeded:
    ended = seq.deadline is not None and now >= seq.deadline
    due = (seq.deadline if ended else seq.start_by) or now
    return DeadlineExceeded(
        f"The request is late: it should have {'ended' if ended else 'started'} {now - due:.3g} s ago. Allow more "
        f"time, or {'read or feed it sooner, as it waited for that' if seq.paused else 'give the engine less to do'}."
    )


def no_room(cause: BaseException) -> OutOfCapacity:
    error = OutOfCapacity(
        f"There is no memory for even one token of this request ({type(cause).__name__}: {cause}). Give the engine "
        f"less kv_cache_memory_bytes, the model a smaller dtype, or the request a shorter prompt."
    )
    error.__cause__ = cause
    return error


def is_awaited(result: Any, owns: Callable[[Any], bool]) -> bool:
    """Whether a call's result is to be awaited. An array of the backend is not: those of some libraries could be."""
    return inspect.isawaitable(result) and (inspect.iscoroutine(result) or not owns(result))


class Awaiter:
    """Runs an `async def` method of a model to its end, on an event loop of the engine's own thread.

    owns: whether something is an array of the backend.
    """

    def __init__(self, owns: Callable[[Any], bool]) -> None:
        self._owns = owns
        self._loop: asyncio.Runner | None = None
        self._task: asyncio.Task[Any] | None = None
        self._over = False

    def __call__(self, result: Any) -> Any:
        if not is_awaited(result, self._owns):
            return result
        if self._over:
            if inspect.iscoroutine(result):
                result.close()
            raise EngineClosed("The engine is closed, and awaits its model no more. Make a new one.")
        if self._loop is None:
            self._loop = asyncio.Runner()
        try:
            return self._loop.run(self._await(result))
        finally:
            self._task = None

    async def _await(self, awaitable: Any) -> Any:
        self._task = asyncio.current_task()
        return await awaitable

    def interrupt(self) -> None:
        """Cancel the awaited call and accept no more. Callable from any thread."""
        self._over = True
        if (task := self._task) is not None:
            with suppress(RuntimeError):  # the loop has just been closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()


@dataclass(frozen=True)
class CheckedStep:
    """`model.step` with a check of the cache that it returns. Wrappers of one model are equal, so that it is compiled
    once.

    Raises InvalidModelOutput. Only types and shapes are checked; a compiled step is checked once, when it is traced.
    Lists are copied both ways: the model may keep and change its own.
    """

    step: Callable[..., Any]
    backend: ArrayBackend
    name: str

    @property
    def __name__(self) -> str:  # of the program, where a library compiles it
        return "step"

    def __call__(
        self, params: Any, cache: Sequence[LayerCache], x: StepInputs[Array]
    ) -> tuple[Array, list[LayerCache]]:
        result = self.step(params, list(cache), x)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise self._wrong("a pair (outputs, cache)", result)
        out, new = result
        if not isinstance(new, (tuple, list)) or len(new) != len(cache):
            raise self._wrong(f"the cache as a list of {len(cache)} layers, as it was given", new)
        if all(map(is_, new, cache)):  # written into where it lies
            return out, list(new)
        return out, [
            layer if layer is old or self._alike(old, layer) else self._like(old, layer, i)
            for i, (old, layer) in enumerate(zip(cache, new, strict=True))
        ]

    def _alike(self, old: LayerCache, new: LayerCache) -> bool:
        """Quick check that accepts nearly all layers: pairs of arrays of the same types and shapes."""
        if type(new) is not tuple or type(old) is not tuple or len(new) != 2 or len(old) != 2:
            return False
        (a, b), (c, d), unfit = new, old, self.backend.unfit
        try:
            return (a is c or (type(a) is type(c) and a.shape == c.shape and unfit(a) is None)) and (
                b is d or (type(b) is type(d) and b.shape == d.shape and unfit(b) is None)
            )
        except AttributeError:  # not even arrays: `_like` says what is wrong
            return False

    def _like(self, old: LayerCache, new: LayerCache, i: int) -> LayerCache:
        """Check that `new` has the kind and shape of `old`, and return it in the same kind of tuple."""
        if isinstance(old, (tuple, list)):
            if not isinstance(new, (tuple, list)) or len(new) != len(old):
                raise self._wrong(f"layer {i} of the cache as {len(old)} arrays, as it was given", new)
            return type(old)([self._like(a, b, i) for a, b in zip(old, new, strict=True)])
        if self.backend.owns(old):
            if not self.backend.owns(new) or self.backend.unfit(new) is not None or new.shape != old.shape:
                raise self._wrong(f"an array of {self.backend.name} of shape {tuple(old.shape)} in layer {i}", new)
        elif type(new) is not type(old) or getattr(new, "shape", None) != getattr(old, "shape", None):
            raise self._wrong(f"layer {i} of the cache as {type(old).__qualname__}, as it was given", new)
        return new

    def _wrong(self, expected: str, got: Any) -> InvalidModelOutput:
        what = type(got).__qualname__
        if hasattr(got, "shape"):
            what += f" of shape {tuple(got.shape)}"
        elif isinstance(got, (tuple, list)):
            what += f" of {len(got)}"
        return InvalidModelOutput(
            f"{self.name} must return {expected}; got {what}. Return (outputs, [what `attend` returned, or the new "
            f"state, for each layer])."
        )
