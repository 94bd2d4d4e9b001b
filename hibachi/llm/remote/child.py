"""An engine in a process of its own: what runs in there. `hibachi.llm.remote.engine` starts it and talks to it.

    parent -> child    ("run", number) ("ask", call, what), each followed by the pickled rest of the request;
                       ("cancel" | "pause" | "resume", number) ("stop",)
    child -> parent    ("ready", Ready) ("failed", error) ("beat", health, stats, meters) ("answer", call, fine, value)
                       ("facts", Facts), if they have changed
                       ("log", logger, level, message, traceback, time)
                       ("step", starts, tokens, guesses, ends, *headings), followed by an array for each heading: see
                       `hibachi.llm.remote.rows`

All that a step brings goes in one message. The child ends when the parent does, as nobody holds the other end then.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from hibachi.backend.array_backend import HostArray
from hibachi.backend.infer import mapped
from hibachi.common.phases import showing_phases
from hibachi.engine.batchengine import Facts
from hibachi.engine.conversions import output_row, to_host
from hibachi.engine.runners.job import Job
from hibachi.engine.streams.channel import Channel, Wakeups
from hibachi.engine.streams.stream import native_row
from hibachi.errors import ConfigError, EngineFailed, HibachiError, InvalidRequest, ModelError, restored, text_of
from hibachi.llm.own import open_model
from hibachi.llm.remote.rows import Gathered, Rows, headings, send
from hibachi.request import Finish, SamplingParams

MOST_LOGGED = 20_000  # characters of a message or a traceback
BEAT = 0.25  # seconds from one sign of life to the next
Told: TypeAlias = (
    "tuple[int | None, dict[int, float] | None, float | None]"  # with an end: stop token, its scores; score
)


@dataclass(frozen=True, slots=True)
class EngineReady:
    """What the parent must know once the model is loaded. tokenizer: pickled, of a model of one's own, which has no
    files. default_params: of a request that brings none."""

    facts: Facts
    eos_ids: tuple[int, ...]
    tokenizer: bytes | None
    default_params: SamplingParams = field(default_factory=SamplingParams)


class Outbox:
    """Collects what the streams get in a step, and sends it when their consumers would be woken.

    The collected items belong to the engine's thread; other threads `send` messages of their own. A full pipe blocks
    the sender, the engine's thread as well. But the parent has a thread that does nothing but read, so the pipe is full
    only while the parent is stopped (Ctrl-Z), when no consumer needs the tokens. The wait ends when the parent goes on,
    or ends.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()  # no destructor sends anything
        self.starts: list[tuple[int, float | None, int, Any]] = []
        self.tokens: list[tuple[int, Any, Any]] = []
        self.guesses: dict[int, tuple[int, int]] = {}  # of predictions, by request: all so far, right and wrong
        self.ends: list[tuple[int, Finish, BaseException | None, Told]] = []
        self.rows = Gathered(sendable, self._no_row)
        self.beat: Callable[[], None] = lambda: None  # tells how the engine is
        self.drop: Callable[[int], object] = lambda number: None  # ends a request

    def send(self, *message: Any, arrays: Sequence[Rows] = ()) -> None:
        with self._lock, suppress(OSError):  # the parent is gone: `serve` returns
            self._pipe.send(message)
            send(self._pipe, arrays)

    # To `Wakeups` this is a consumer, and the loop that it waits in.

    def get_loop(self) -> Outbox:
        return self

    def done(self) -> bool:
        return False

    def set_result(self, _: None) -> None:
        pass

    def run_sync_soon(self, *_: Any) -> None:
        rows = self.rows.taken()  # first: what cannot come to the host is an end
        starts, tokens, guesses, ends = self.starts, self.tokens, self.guesses, self.ends
        self.starts, self.tokens, self.guesses, self.ends = [], [], {}, []
        if any(isinstance(error, EngineFailed) for _, _, error, _ in ends):
            self.beat()  # first: a caller that learns that the engine has failed finds it so
        self.send("step", starts, tokens, guesses, ends, *headings(rows), arrays=rows)

    def _no_row(self, number: int, error: BaseException) -> None:
        self.drop(number)
        self.ends.insert(
            0, (number, Finish.ERROR, no_array(error), (None, None, None))
        )  # what it ended with comes too late


class OutChannel(Channel[Any]):
    """The engine's end of a stream whose consumer is in the parent."""

    __slots__ = ("_began", "_forget", "_held", "_outbox", "number", "read")

    def __init__(self, number: int, outbox: Outbox, forget: Callable[[int], object]) -> None:
        super().__init__(pause_after=1)  # so that the engine asks whether we are `full`
        self.number, self._outbox, self._forget = number, outbox, forget
        self._held = self._began = False
        self.read: Callable[[Any], Any] | None = int  # None means its items are rows of native batches

    def push(self, item: Any, wakeups: Wakeups) -> None:
        if not self._began:
            self._outbox.starts += self._opening()
        wakeups.add(self._outbox)  # type: ignore[arg-type]  # woken as a waiter is
        scores = self.logprobs.pop() if self.logprobs else None
        read = self.read
        if read is None and isinstance(item[0], (tuple, list, dict)):  # several arrays, of a feed-forward model
            read = _outputs
        if read is None:
            if scores is not None:
                self._outbox.tokens.append((self.number, None, scores))
            self._outbox.rows.add(self.number, *item)
            return
        try:
            token = read(item)
        except Exception as e:  # an array of the model's own; no other request's step may fail for it
            self._outbox.drop(self.number)
            self.end(Finish.ERROR, no_array(e), wakeups)
        else:
            self._outbox.tokens.append((self.number, token, scores))

    def predicted(self, accepted: int, rejected: int) -> None:
        super().predicted(accepted, rejected)
        self._outbox.guesses[self.number] = self.accepted, self.rejected

    def _opening(self) -> list[tuple[int, float | None, int, Any]]:
        """What the parent must hear before the first token or the end; [] if it has."""
        began, self._began = self._began, True
        return [] if began else [(self.number, self.started, self.reused, self.prompt_logprobs)]

    def end(self, reason: Finish, error: BaseException | None = None, wakeups: Wakeups | None = None) -> bool:
        if not super().end(reason, error, wakeups):
            return False
        self._forget(self.number)
        end = (self.number, reason, _portable(error), (self.stop_token, self.stop_logprobs, self.score))
        if wakeups is None:  # not of a step, so perhaps in another thread than the engine's
            self._outbox.send("step", self._opening(), [], {}, [end])
        else:
            self._outbox.starts += self._opening()
            self._outbox.ends.append(end)
            wakeups.add(self._outbox)  # type: ignore[arg-type]  # woken as a waiter is
        return True

    @property
    def full(self) -> bool:
        return self._held and not self.paused

    def takes(self, n: int) -> bool:
        return not self._held

    @property
    def _low(self) -> bool:
        return not self._held

    def hold(self) -> None:
        """The consumer is behind."""
        self._held = True

    def release(self) -> None:
        """It has caught up."""
        self._held = False
        self.eased()


def _portable(error: BaseException | None, other: type[HibachiError] = ModelError) -> BaseException | None:
    """The error, if the parent knows its type, else one that says the same: of a base that it knows, or an `other`."""
    if error is None:
        return None
    with suppress(BaseException):
        if isinstance(error, Exception) and _home(type(error)) in ("hibachi", "builtins"):
            _Elsewhere(io.BytesIO(pickle.dumps(error))).load()
            return error
    base = next((base for base in type(error).__mro__ if _home(base) == "hibachi"), other)
    found: BaseException = restored(base, (text_of(error),), {}, None)
    return found


class _Elsewhere(pickle.Unpickler):
    """An unpickler for the parent, which has none of the user's modules."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in ("hibachi", "builtins", "numpy", "copyreg"):
            raise pickle.UnpicklingError(f"{module}.{name} is not known there")
        return super().find_class(module, name)


def _home(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _pickled(tokenizer: Any) -> bytes | None:
    """Raises ConfigError."""
    try:
        return None if tokenizer is None else pickle.dumps(tokenizer)
    except Exception as e:
        raise ConfigError(
            f"The model's tokenizer cannot go to the process that reads prompts: {type(e).__name__}: {e}. Make it one "
            f"that pickle takes, or run the engine in the same process (--engine own)."
        ) from e


def sendable(item: Any) -> HostArray:
    """`to_host`. Raises TypeError for an array of objects, which the parent may not know."""
    found = to_host(item)
    if found.dtype.hasobject:
        raise TypeError(f"expected an array of numbers; got the dtype {found.dtype}")
    return found


def _outputs(item: Any) -> Any:
    return mapped(lambda _, array: sendable(array), output_row(item))


def no_array(error: BaseException) -> ModelError:
    """A model returned what cannot go through the pipe."""
    return ModelError(f"What the model returned cannot leave its process as an array: {text_of(error)}.")


class Telling(logging.Handler):
    """The parent logs what is logged here."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        try:
            trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else record.exc_text
            told = record.name, record.levelno, record.getMessage()[:MOST_LOGGED], trace and trace[-MOST_LOGGED:]
            self._outbox.send("log", *told, record.created)
        except Exception:
            self.handleError(record)


class Child:
    """Obeys the parent. `serve` returns when there is nothing more to do."""

    def __init__(self, pipe: Connection, served: Any, outbox: Outbox | None = None) -> None:
        """served: what `open_model` returned."""
        self._pipe, self._served, self._engine = pipe, served, served.engine
        self._outbox = outbox or Outbox(pipe)
        self._outbox.beat, self._outbox.drop = self._tell_how, self._cancel
        self._jobs: dict[int, tuple[Job, OutChannel]] = {}
        self._told = self._engine.facts

    def ready(self) -> EngineReady:
        tokenizer = getattr(self._served, "portable_tokenizer", None)
        served = self._served
        eos_ids, params = getattr(served, "eos_ids", ()), getattr(served, "default_params", SamplingParams())
        return EngineReady(self._told, eos_ids, _pickled(tokenizer), params)

    def serve(self, ready: EngineReady) -> None:
        self._outbox.send("ready", ready)
        threading.Thread(target=self._beat, name="hibachi-beat", daemon=True).start()
        while True:
            try:
                command, *rest = self._pipe.recv()
                if command in ("run", "ask"):
                    rest.append(self._pipe.recv_bytes())
            except (EOFError, OSError):  # the parent is gone
                return
            if command == "stop":
                return
            getattr(self, f"_{command}")(*rest)

    def _run(self, number: int, others: Sequence[int], contents: bytes) -> None:
        """others: numbers of further continuations of the request."""
        channels = [OutChannel(each, self._outbox, self._forget) for each in (number, *others)]
        try:
            job = self._engine.check(_unpacked(contents), channels[0])
            for each, channel in zip(jobs := self._engine.copies(job, channels), channels, strict=True):
                if (read := self._engine.reader(job)) in (native_row, output_row):
                    channel.read = None
                elif job.request.pooling is not None:
                    channel.read = read
                elif self._engine.facts.arrays:
                    channel.read = sendable
                self._jobs[channel.number] = each, channel  # before the engine can end it
            self._engine.enqueue_many(jobs)
        except Exception as e:
            for channel in channels:
                channel.end(Finish.ERROR, e)

    def _forget(self, number: int) -> None:
        self._jobs.pop(number, None)

    def _cancel(self, number: int) -> None:
        if (held := self._jobs.pop(number, None)) is not None:
            self._engine.cancel(held[0])

    def _pause(self, number: int) -> None:
        if (held := self._jobs.get(number)) is not None:
            held[1].hold()

    def _resume(self, number: int) -> None:
        if (held := self._jobs.get(number)) is not None:
            held[1].release()

    def _ask(self, call: int, what: str, contents: bytes) -> None:
        # In a thread: it may take a while, and others must be able to leave meanwhile.
        tell = self._keep if what == "keep" else getattr(self._engine, what)
        threading.Thread(target=self._answer, args=(call, tell, contents), daemon=True).start()

    def _answer(self, call: int, tell: Callable[..., Any], contents: bytes) -> None:
        try:
            self._outbox.send("answer", call, True, tell(*_unpacked(contents)))
        except BaseException as e:
            self._outbox.send("answer", call, False, _portable(e))

    def _keep(self, contents: bytes, pin: bool | None, importance: float | None) -> Any:
        return self._engine.keep(self._engine.check(_unpacked(contents)), pin=pin, importance=importance)

    def _beat(self) -> None:
        while True:
            self._tell_how()
            time.sleep(BEAT)

    def _tell_how(self) -> None:
        engine = self._engine
        if (facts := engine.facts) != self._told:
            self._told = facts
            self._outbox.send("facts", facts)
        self._outbox.send("beat", engine.health(), engine.stats(), engine.meters())


def _unpacked(contents: bytes) -> Any:
    """Of a request. Raises InvalidRequest."""
    try:
        return pickle.loads(contents)
    except BaseException as e:  # it imports modules of the user's
        raise InvalidRequest(
            f"The request cannot be read in the engine's process: {text_of(e)}. Write logits_processors in a module "
            f"that it can import, not in the script that is run."
        ) from e


def _end_with(place: int) -> None:
    """End this process when the other end of the pipe is closed, whatever it does meanwhile: it may load a model, or be
    in a long step. Windows has no such thing; there the end is noticed by `serve`."""
    if not hasattr(select, "poll"):
        return
    poll = select.poll()
    poll.register(place, 0)  # that it was hung up is always told
    while not any(event & select.POLLHUP for _, event in poll.poll()):
        time.sleep(BEAT)
    os._exit(1)


def main(place: int) -> None:
    """place: the file descriptor of the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all of a terminal or a service; the parent decides
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(place)
    os.set_inheritable(place, False)  # no process that the model starts may outlive us as the pipe's end
    os.register_at_fork(after_in_child=pipe.close)
    threading.Thread(target=_end_with, args=(place,), name="hibachi-parent", daemon=True).start()
    outbox = Outbox(pipe)
    try:
        spec, level, shown = pipe.recv()
        logger = logging.getLogger("hibachi")
        logger.handlers, logger.propagate = [Telling(outbox)], False
        logger.setLevel(level)
        with showing_phases() if shown else nullcontext():
            served = open_model(**spec)
        child = Child(pipe, served, outbox)
        ready = child.ready()
    except (EOFError, KeyboardInterrupt):
        return
    except BaseException as e:
        outbox.send("failed", _portable(e, EngineFailed))
        raise SystemExit(1) from e
    status = 1
    try:
        child.serve(ready)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        served.close()
        sys.stdout.flush()
        os._exit(status)  # threads of array libraries may hold up a regular exit
