"""Turns exceptions into typed errors that keep their text and no arrays."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

from hibachi.engine.scheduler.sequence import Seq
from hibachi.errors import (
    BackendError,
    DeadlineExceeded,
    HibachiError,
    InternalError,
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
        return f"`vocab_size` says {expected[-1]} ids, and the model gives {shape[-1]} numbers: make both the same."
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
        f"time, or give the engine less to do."
    )


def no_room(cause: BaseException) -> OutOfCapacity:
    error = OutOfCapacity(
        f"There is no memory for even one token of this request ({type(cause).__name__}: {cause}). Give the engine "
        f"less kv_cache_memory_bytes, the model a smaller dtype, or the request a shorter prompt."
    )
    error.__cause__ = cause
    return error
