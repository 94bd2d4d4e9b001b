"""An engine in a process of its own, seen from here: what `LLM` needs of one, and texts by it."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.engine.admission import check_room, checked, embeddings
from hibachi.engine.batchengine import Facts
from hibachi.engine.conversions import ANSWER as CONVERSION
from hibachi.engine.conversions import lacks
from hibachi.engine.feedforward import checked_plain, fitting
from hibachi.engine.forms import Forms
from hibachi.engine.health import STALL_AFTER, Health, State
from hibachi.engine.prompts import check_tokens, kind_of_ids
from hibachi.engine.runners.meters import Meters
from hibachi.engine.runners.tokentable import TokenKind
from hibachi.engine.stats import Stats
from hibachi.engine.streams.channel import Channel, Wakeups
from hibachi.engine.streams.closeable import Closing, waited
from hibachi.engine.streams.stream import ItemStream, as_it_is
from hibachi.errors import EngineClosed, EngineFailed, InvalidRequest, UnsupportedOperation, text_of
from hibachi.llm.options import TextOptions
from hibachi.llm.remote.child import EngineReady
from hibachi.llm.remote.process import CLOSING, EngineProcess, relog
from hibachi.llm.remote.rows import Rows, each, receive
from hibachi.llm.remote.sender import MOST_UNSENT
from hibachi.llm.tokens import asked
from hibachi.request import Finish, Request

log: logging.Logger = logging.getLogger("hibachi.engine")
MOST_RESTARTS = 3  # in a row, without a token in between
LOOKS = 5  # so often a process must be found stalled before it is ended
LOOK = 0.1  # seconds: `drain` looks so often whether streams were closed
ANSWER = 10.0  # seconds in which a process must answer a call
LATER = 1.0  # seconds that a conversion may be over its own time here, so that it is the process that says so
LEAST_START = 60.0  # seconds that a process which is started again has for it, or ...
START_TIMES = 4  # ... so many times what the first one took, if that is more


class RemoteEngine(Closing):
    """Starts the process, sends it requests and fills their streams. Its death reaches every stream.

    feedforward, options: for `open_model`. max_num_queued_reqs, pause_after: as for `BatchInference`; they are kept on
    this side. restart: "on_failure": begin again in a new process when it dies, or its engine has failed for good; its
    requests fail all the same. A lost device is begun anew in the same one. Raises what making the model raises.
    """

    restarts: int

    def __init__(
        self,
        model: str,
        *,
        feedforward: bool = False,
        **options: Unpack[TextOptions],
    ) -> None:
        self._max_waiting, self._pause_after = (
            options.pop("max_num_queued_reqs", None),
            options.pop("pause_after", None),
        )
        self._stall_after = options.get("stall_after", STALL_AFTER)
        self._restart = restart = options.get("restart") == "on_failure"
        self._spec = {"model": model, "feedforward": feedforward, **options}
        self.forms: Forms = Forms()  # of what is served here, whose tokenizer is on this side
        self._numbers = itertools.count()
        self._channels: dict[int, Channel[Any]] = {}
        self._answers: dict[int, list[Any]] = {}  # [event, fine, value]
        self._changed = threading.Condition(threading.RLock())
        self._refusal: Callable[[], Exception] | None = None
        self._closing = self._draining = False
        self._health, self._stats, self._heard = Health("idle", "No request has come yet."), Stats(), time.monotonic()
        self._meters = Meters()
        self.restarts, self._lost = 0, 0
        before = time.monotonic()
        self.ready: EngineReady = self._begin(None)  # the user sees how long that takes, and may press Ctrl-C
        self._starts_within = max(LEAST_START, START_TIMES * (time.monotonic() - before))
        self._listener = threading.Thread(target=self._listen, name="hibachi-remote", daemon=True)
        self._listener.start()
        _engines.add(self)
        if restart and self._stall_after is not None:
            threading.Thread(target=self._watch, name="hibachi-remote-watch", daemon=True).start()

    # ---- the process -------------------------------------------------------------------------------------------

    def _begin(self, seconds: float | None) -> EngineReady:
        """Start a process and wait until it is ready; it is killed if that takes longer than this many seconds."""
        self._process = EngineProcess(self._spec)
        if self._closing:  # `close` may have waited for the process before this one
            self._process.kill()
        ready, self._sender = self._process.until_ready(seconds)
        self._health, self._heard = Health("idle", "No request has come yet."), time.monotonic()
        return ready

    @property
    def pid(self) -> int:
        return self._process.pid

    def _listen(self) -> None:
        """Hear what the process says, and that it has ended; then what the next one says."""
        while True:
            wakeups = Wakeups()
            try:
                while True:
                    self._hear(wakeups, *self._process.pipe.recv())
            except (EOFError, OSError):
                pass
            except Exception:
                log.exception("what the engine's process says cannot be read; it is ended")
                self._process.kill()
            if not self._over():
                return

    def _hear(self, wakeups: Wakeups, word: str, *said: Any) -> None:
        self._heard = time.monotonic()
        if word == "step":
            starts, tokens, guesses, ends, *told = said
            for number, counts in guesses.items():
                if (channel := self._channels.get(number)) is not None:
                    channel.accepted, channel.rejected = counts
            self._deliver(starts, tokens, ends, wakeups, receive(self._process.pipe, told))
            wakeups.post()
        elif word == "beat":
            self._health, self._stats, self._meters = said
            if self._health.state == "failed" and self._restart:
                self._process.kill()  # it cannot begin again by itself
        elif word == "facts":
            self.ready = replace(self.ready, facts=said[0])
        elif word == "answer":
            self._answer(*said)
        elif word == "log":
            relog(*said)

    def _answer(self, call: int, fine: bool, value: Any) -> None:
        if (waiting := self._answers.pop(call, None)) is not None:
            waiting[1:] = fine, value
            waiting[0].set()

    def _deliver(self, starts: Any, tokens: Any, ends: Any, wakeups: Wakeups, rows: Sequence[Rows] = ()) -> None:
        channels = self._channels
        for number, started, reused, scores in starts:
            if (channel := channels.get(number)) is not None:
                channel.started, channel.reused, channel.prompt_logprobs = started, reused, scores
        if tokens or rows:
            self._lost = 0
        for number, token, scores in tokens:
            if (channel := channels.get(number)) is None:
                continue  # it was cancelled here, and the process has not heard of it yet
            if scores is not None:
                channel.logprobs.append(scores)
            if token is not None:  # else it is among the rows
                self._push(number, channel, token, wakeups)
        for number, row in each(rows):
            if (channel := channels.get(number)) is not None:
                self._push(number, channel, row, wakeups)
        for number, reason, error, told in ends:
            if (channel := channels.pop(number, None)) is not None:
                channel.stop_token, channel.stop_logprobs, channel.score = told
                channel.end(reason, error, wakeups)
        if ends:
            with self._changed:
                self._changed.notify_all()

    def _push(self, number: int, channel: Channel[Any], item: Any, wakeups: Wakeups) -> None:
        channel.push(item, wakeups)
        if channel.full:
            self._tell("pause", number)  # first: once we have paused, the reader may say "resume" at any time
            resume = partial(self._tell, "resume", number)
            if not channel.pause(resume):
                resume()

    @property
    def begins_again(self) -> bool:
        """Is a process that fails replaced?"""
        return self._restart and self._listener.is_alive()

    def _watch(self) -> None:
        """End a process that stalls, so that another begins."""
        stalled = 0
        while self.begins_again and not self._closing:
            before = time.monotonic()
            time.sleep(LOOK)
            if time.monotonic() - before > 10 * LOOK:  # this process was stopped itself, and has read no message
                self._heard, stalled = time.monotonic(), 0
            stalled = stalled + 1 if (health := self.health()).state == "stalled" else 0
            if stalled >= LOOKS:
                stalled = 0
                log.error("the engine's process (pid %d) is ended: %s", self.pid, health.message)
                self._process.kill()
                self._heard = time.monotonic()
                self._health = Health("failed", health.message)

    def _over(self) -> bool:
        """The process has ended. True if there is a new one."""
        self._sender.end()
        status = self._process.end(CLOSING)
        how = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
        failure = f"The engine's process (pid {self.pid}) {how}, and its requests are lost."
        if self._health.state == "failed":
            failure = f"The engine in process {self.pid} has failed. {self._health.message}"
        with self._changed:
            if self._closing:
                return False
            again = self._restart and self._refusal is None and self._lost < MOST_RESTARTS
            failure += " It is being started again." if again else " Start it again."
            # Before `_end_all`: `submit` looks at it under this lock, so no stream is added that would never end.
            self._refusal = partial(EngineFailed, failure)
        log.error("%s", failure)
        self._end_all(Finish.ERROR)
        return again and self._begin_again()

    def _begin_again(self) -> bool:
        """Also where the next process dies while it starts, as when memory is short for a while."""
        while True:
            self._lost += 1
            try:
                self.ready = self._begin(self._starts_within)
                break
            except Exception as e:
                failure = f"The engine's process could not be started again: {e}"
                log.error("%s", failure)
                if self._closing:
                    return False
                if self._lost >= MOST_RESTARTS:
                    with self._changed:
                        if not self._closing:
                            self._refusal = partial(EngineFailed, failure)
                    return False
                time.sleep(self._lost)
        with self._changed:
            self.restarts += 1
            if self._closing:
                self._sender.end("stop")
            else:
                self._refusal = _draining if self._draining else None
        return True

    def _end_all(self, reason: Finish) -> None:
        """End all streams and calls, with the error that new ones get."""
        error, wakeups = self._refusal, Wakeups()
        assert error is not None
        for number in list(self._channels):
            if (channel := self._channels.pop(number, None)) is not None:
                channel.end(reason, error() if reason is Finish.ERROR else None, wakeups)
        wakeups.post()
        for call in list(self._answers):
            self._answer(call, False, error())
        with self._changed:
            self._changed.notify_all()

    def _tell(self, *message: Any) -> None:
        self._sender.tell(*message)

    def _post(self, places: dict[int, Any], place: Any, contents: bytes, what: str, *rest: Any) -> int:
        """Send a request whose answer goes to `place`; the caller holds `_changed`. Raises QueueFull."""
        self._sender.check(len(contents))
        number = next(self._numbers)
        places[number] = place  # before the answer can come
        self._sender.post(contents, what, number, *rest)
        return number

    def _ask(self, what: str, *rest: Any, within: float | None = None) -> Any:
        """What the process answers. Raises its error, EngineClosed, or EngineFailed if it is lost or silent: for
        `within` seconds (None: ANSWER)."""
        within = ANSWER if within is None else within
        contents = _packed(rest)
        waiting: list[Any] = [threading.Event(), False, None]
        with self._changed:
            if self._refusal is not None and self._refusal is not _draining:
                raise self._refusal()
            call = self._post(self._answers, waiting, contents, "ask", what)
        if not waiting[0].wait(within):
            self._answers.pop(call, None)
            self._sender.withdraw(call)
            raise EngineFailed(f"The engine's process has not answered for {within:.3g} s. {self.health().message}")
        if not waiting[1]:
            raise waiting[2]
        return waiting[2]

    # ---- requests ----------------------------------------------------------------------------------------------

    @property
    def facts(self) -> Facts:
        return self.ready.facts

    def check(self, request: Request) -> PackedRequest:
        """See `BatchEngine`. What cannot cross the pipe is refused here; what only the model's library can tell is
        found there, and is the stream's error."""
        sent, facts = _checked(request, self.facts, self.forms), self.facts
        return PackedRequest(sent.terms.tenant, _packed(sent), arrays=facts.arrays or bool(sent.pooling))

    def check_room(self, tenant: Hashable, new: int) -> None:
        """Raise QueueFull if there is no room for this many more requests."""
        check_room(tenant, new, len(self._channels), self.facts.limits, self._max_waiting, self._tenants)

    def _tenants(self) -> list[Hashable]:
        return [channel.tenant for channel in list(self._channels.values())]

    def submit(self, ready: PackedRequest) -> ItemStream[Any]:
        """See `BatchEngine`."""
        return self.submit_many(ready, 1)[0]

    def submit_many(self, ready: PackedRequest, n: int) -> list[ItemStream[Any]]:
        """See `BatchEngine`."""
        first, *others = channels = [Channel[Any](self._pause_after) for _ in range(n)]
        for channel in channels:
            channel.tenant = ready.tenant
        with self._changed:
            if self._refusal is not None:
                raise self._refusal()
            self.check_room(ready.tenant, n)
            numbers = [next(self._numbers) for _ in others]
            self._channels |= dict(zip(numbers, others, strict=True))  # before an answer can come
            try:
                numbers.insert(0, self._post(self._channels, first, ready.contents, "run", tuple(numbers)))
            except BaseException:
                for number in numbers:
                    del self._channels[number]
                raise
        read, cancel = as_it_is if ready.arrays else int, self._cancel if n == 1 else self._cancel_one
        return [ItemStream(c, partial(cancel, number), read) for c, number in zip(channels, numbers, strict=True)]

    def _cancel(self, number: int) -> None:
        """Takes no lock, as a destructor may call it in any thread, at any time."""
        if self._channels.pop(number, None) is not None and not self._sender.withdraw(number):
            self._tell("cancel", number)

    def _cancel_one(self, number: int) -> None:
        """`_cancel` for one of several that were sent at once."""
        if self._channels.pop(number, None) is not None:
            self._tell("cancel", number)

    # ---- how it is ---------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """As of the last sign of life, at most a moment ago."""
        return self._stats

    def meters(self) -> Meters:
        """Likewise."""
        return self._meters

    def health(self) -> Health:
        refusal, silent = self._refusal, time.monotonic() - self._heard
        if refusal is not None and refusal is not _draining:
            error = refusal()
            state: State = "closed" if isinstance(error, EngineClosed) else "failed"
            return Health(state, str(error), restarts=self.restarts)
        if self._stall_after is not None and silent >= self._stall_after:
            return Health("stalled", f"The engine's process has not been heard of for {silent:.3g} s.")
        return replace(self._health, restarts=self._health.restarts + self.restarts)

    def dump(self) -> dict[str, Any]:
        return dict(self._ask("dump"))

    def read(self, data: bytes, kind: str) -> HostArray:
        """See `BatchEngine`."""
        if not self.facts.reads:
            raise lacks(self.facts.model, "read")
        found: HostArray = self._ask("read", data, kind, within=CONVERSION + LATER)
        return found

    def write(self, tokens: HostArray) -> tuple[bytes, str]:
        """See `BatchEngine`."""
        if not self.facts.writes:
            raise lacks(self.facts.model, "write")
        data, kind = self._ask("write", tokens, within=CONVERSION + LATER)
        return data, kind

    def reset_cache(self) -> None:
        self._ask("reset_cache")

    def keep(self, ready: PackedRequest, *, pin: bool | None = None, importance: float | None = None) -> int:
        found: int = self._ask("keep", ready.contents, pin, importance)
        return found

    def cache_events(self, since: int = 0) -> list[tuple[int, str, str, str]]:
        found: list[tuple[int, str, str, str]] = self._ask("cache_events", since)
        return found

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for the others; False after `timeout` seconds, or once the process stalls or is
        lost.
        """
        timeout = waited(timeout)
        until = float("inf") if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._draining = True  # a process that takes the place of this one takes no requests either
            if self._refusal is None:
                self._refusal = _draining
            while self._channels:
                left = until - time.monotonic()
                if left <= 0 or self.health().state in ("stalled", "failed"):
                    return False
                self._changed.wait(min(left, LOOK))  # a stream that is closed does not notify: see `_cancel`
            return self.health().state != "failed"

    def close(self, timeout: float | None = CLOSING) -> None:
        """End all streams and the process, which is killed after `timeout` seconds. Closing twice is fine."""
        timeout = waited(timeout)
        if self._refusal is _forked:
            return
        with self._changed:
            self._closing, self._refusal = True, _closed
        self._sender.end("stop")
        self._end_all(Finish.CLOSED)
        self._process.end(timeout)
        self.forms.close()

    def disown(self) -> None:
        """Called in a fork of our process, which has none of the threads; locks that they held are never released."""
        self._refusal, self._changed = _forked, threading.Condition(threading.RLock())
        for channel in list(self._channels.values()):
            channel.error, channel.finish = _forked(), Finish.ERROR
        self._channels, self._answers = {}, {}
        self._process.pipe.close()  # as the engine's process ends when no pipe leads to it any more


@dataclass(frozen=True, slots=True)
class PackedRequest:
    """A request that was checked, as it is sent. arrays: its items are arrays, not ids."""

    tenant: Hashable
    contents: bytes
    arrays: bool


_engines: weakref.WeakSet[RemoteEngine] = weakref.WeakSet()


def _disown_all() -> None:
    for engine in list(_engines):
        engine.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)


def kind_of(facts: Facts) -> TokenKind | None:
    """Of all tokens or inputs; None means it is not fixed, or of a dtype that this process does not know."""
    if facts.vocab_size is not None:
        return kind_of_ids(facts.codebooks)
    try:
        return facts.token and TokenKind(facts.token[0], np.dtype(facts.token[1]))
    except TypeError:
        return None


def _closed() -> EngineClosed:
    return EngineClosed("The engine is closed. Make a new one.")


def _draining() -> EngineClosed:
    return EngineClosed("The engine is draining and takes no new requests. Make a new one.")


def _forked() -> EngineClosed:
    return EngineClosed("The engine was made before a fork, and stays with the other process. Make a new one here.")


def _checked(request: Request, facts: Facts, forms: Forms) -> Request:
    """What is sent of a request. Raises what `check` does."""
    if facts.feedforward:
        terms = checked_plain(request, facts.model)
        sent = replace(request, prompt=fitting(asked(request.prompt, MOST_UNSENT), kind_of(facts)), terms=terms)
    elif request.embeds is not None:
        embeds = embeddings(asked(request.embeds, MOST_UNSENT), request.prompt, facts.embed_size, facts.model)
        sent = checked(request, np.zeros(len(embeds), np.int32), len(embeds), facts, forms)
        sent = replace(sent, prompt=None, embeds=embeds)
    else:
        prompt = asked(request.prompt, MOST_UNSENT)
        check_tokens(prompt, kind_of(facts), facts.vocab_size, facts.vocab_sizes)
        sent = checked(request, prompt, len(prompt), facts, forms)
    _check_sendable(sent)
    return sent


def _check_sendable(request: Request) -> None:
    """Raise InvalidRequest or UnsupportedOperation for what does not go through the pipe."""
    if request.kept is not None:
        raise InvalidRequest(
            "Keys and values stay in the engine's process: expected kept=None; got a list for them. Run the engine in "
            "this process (hibachi.LLM)."
        )
    if request.fed:
        raise UnsupportedOperation(
            "A request that waits for its caller (fed=True) needs the engine in this process; this one is in another. "
            "Make an AutoregressiveBatchInference here, or leave fed out."
        )
    if (size := sum(array.nbytes for array in (request.inputs or {}).values())) > MOST_UNSENT:
        raise InvalidRequest.at(
            ("inputs",), f" must have at most {MOST_UNSENT} bytes in all; got {size}. Send smaller arrays."
        )
    if request.allowed is not None and request.allowed.nbytes > MOST_UNSENT:
        raise InvalidRequest.at(
            ("allowed",), f" must take at most {MOST_UNSENT} bytes; got {request.allowed.nbytes}. Give fewer paths."
        )


def _packed(request: object) -> bytes:
    """Raises InvalidRequest, which names the part that cannot be sent."""
    try:
        return pickle.dumps(request)
    except Exception as e:
        raise InvalidRequest(
            f"A request must be one that pickle takes, as the engine runs in another process; got {_guilty(request)}, "
            f"{type(e).__name__}: {text_of(e)}. Write logits_processors as functions or classes of a module, not as "
            f"lambdas or within a function, or run the engine in this process (hibachi.LLM; --engine own)."
        ) from e


def _guilty(request: object) -> str:
    """The name of the first part that cannot be sent."""
    for part in (getattr(request, "params", None), request):
        names: list[str] = list(getattr(type(part), "__dataclass_fields__", ()))
        for name in names:
            try:
                pickle.dumps(getattr(part, name))
            except Exception:
                return name
    return "something else"
