"""An engine in a process of its own, seen from here: what `LLM` needs of one, and texts by it."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.engine.admission import check_ids, check_params
from hibachi.engine.child import Facts
from hibachi.engine.closing import Closing
from hibachi.engine.custom import is_own, module_of
from hibachi.engine.engine import Stats
from hibachi.engine.health import STALL_AFTER, Health
from hibachi.engine.loops import Wakeups
from hibachi.engine.meters import Meters
from hibachi.engine.stream import Channel, ItemStream
from hibachi.engine.texts import Texts
from hibachi.errors import ConfigError, EngineClosed, EngineFailed, InvalidRequest, QueueFull
from hibachi.model.files import locate, open_files
from hibachi.model.generation import generation_defaults
from hibachi.model.pooling import Pooling
from hibachi.request import Finish, SamplingParams, as_params, as_terms
from hibachi.tensor.array_backend import HostArray

log = logging.getLogger("hibachi.engine")
MOST_RESTARTS = 3  # in a row, without a token in between


class RemoteEngine(Closing):
    """Starts the process, sends it requests and fills their streams. Its death reaches every stream.

    options: for `open_texts`. max_waiting, pause_after: as for `Service`; they are kept on this side. restart: begin
    again in a new process when it dies; its requests fail all the same. A lost device is begun anew in the same one.
    Raises what making the model raises.
    """

    def __init__(
        self,
        model: str,
        *,
        max_waiting: int | None = None,
        pause_after: int | None = None,
        restart: bool = False,
        stall_after: float | None = STALL_AFTER,
        **options: Any,
    ) -> None:
        anew = "on_failure" if restart else None
        self._spec = {"model": model, "stall_after": stall_after, "restart": anew, **options}
        self._max_waiting, self._pause_after, self._restart = max_waiting, pause_after, restart
        self._stall_after = stall_after
        self._numbers = itertools.count()
        self._channels: dict[int, Channel[Any]] = {}
        self._answers: dict[int, list[Any]] = {}  # [event, fine, value]
        self._changed = threading.Condition(threading.RLock())
        self._sending = threading.Lock()
        self._refusal: Callable[[], Exception] | None = None
        self._closing = False
        self._health, self._stats, self._heard = Health("idle", "No request has come yet."), Stats(), time.monotonic()
        self._meters = Meters()
        self.restarts, self._lost = 0, 0
        self.facts = self._begin()

    # ---- the process -------------------------------------------------------------------------------------------

    def _begin(self) -> Facts:
        """Start a process and wait until it is ready."""
        self._pipe, theirs = Pipe()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            deaf = "from signal import *; signal(SIGINT, SIG_IGN); signal(SIGTERM, SIG_IGN)"  # as the parent decides
            script = f"{deaf}; from hibachi.engine.child import main; main({theirs.fileno()})"
            command = [sys.executable, "-c", script]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        try:
            self._pipe.send(self._spec)
            word, value = self._pipe.recv()
        except (EOFError, OSError) as e:
            raise EngineFailed(
                f"The engine's process ended before it was ready, with status {self._process.wait()}. Look at what it "
                f"wrote; was it killed for want of memory?"
            ) from e
        except BaseException:  # Ctrl-C while it loads
            self._process.kill()
            self._process.wait()
            raise
        if word == "failed":
            self._process.wait()
            raise value
        self._heard = time.monotonic()
        threading.Thread(target=self._listen, args=(self._pipe,), name="hibachi-remote", daemon=True).start()
        facts: Facts = value
        return facts

    @property
    def pid(self) -> int:
        return self._process.pid

    def _listen(self, pipe: Connection) -> None:
        wakeups = Wakeups()
        while True:
            try:
                word, *rest = pipe.recv()
            except (EOFError, OSError):
                break
            self._heard = time.monotonic()
            if word == "step":
                self._deliver(*rest, wakeups)
                wakeups.post()
            elif word == "beat":
                self._health, self._stats, self._meters = rest
            elif word == "answer":
                call, fine, value = rest
                if (waiting := self._answers.pop(call, None)) is not None:
                    waiting[1:] = fine, value
                    waiting[0].set()
        self._over()

    def _deliver(self, starts: Any, tokens: Any, ends: Any, wakeups: Wakeups) -> None:
        channels = self._channels
        for number, started, reused, scores in starts:
            if (channel := channels.get(number)) is not None:
                channel.started, channel.reused, channel.prompt_logprobs = started, reused, scores
        if tokens:
            self._lost = 0
        for number, token, scores in tokens:
            if (channel := channels.get(number)) is None:
                continue  # it was cancelled here, and the process has not heard of it yet
            if scores is not None:
                channel.logprobs.append(scores)
            channel.push(token, wakeups)
            if channel.full and channel.pause(partial(self._tell, "resume", number)):
                self._tell("pause", number)
        for number, reason, error, scores in ends:
            if (channel := channels.pop(number, None)) is not None:
                channel.stop_logprob = scores
                channel.end(reason, error, wakeups)
        if ends:
            with self._changed:
                self._changed.notify_all()

    def _over(self) -> None:
        """The process has ended."""
        status = self._process.wait()
        if self._closing:
            self._end_all(Finish.CLOSED, _closed)
            return
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        failure = f"The engine's process (pid {self._process.pid}) ended {how}, and its requests are lost."
        log.error("%s", failure)
        again = self._restart and self._lost < MOST_RESTARTS
        failed = partial(EngineFailed, f"{failure} {'It is being started again.' if again else 'Start it again.'}")
        with self._changed:
            if self._refusal in (None, _draining):
                self._refusal = failed
        self._end_all(Finish.ERROR, failed)
        for waiting in list(self._answers.values()):
            waiting[1:] = False, failed()
            waiting[0].set()
        self._answers.clear()
        if again:
            self._begin_again()

    def _begin_again(self) -> None:
        self._lost += 1
        try:
            self.facts = self._begin()
        except Exception as e:
            why = f"{e}"
            log.error("the engine's process could not be started again: %s", why)
            with self._changed:
                self._refusal = lambda: EngineFailed(f"The engine's process could not be started again: {why}")
            return
        with self._changed:
            self.restarts += 1
            if self._closing:
                self._tell("stop")
            else:
                self._refusal = None

    def _end_all(self, reason: Finish, error: Callable[[], Exception]) -> None:
        wakeups = Wakeups()
        while self._channels:
            _, channel = self._channels.popitem()
            channel.end(reason, error() if reason is Finish.ERROR else None, wakeups)
        wakeups.post()
        with self._changed:
            self._changed.notify_all()

    def _tell(self, *message: Any) -> None:
        try:
            with self._sending:
                self._pipe.send(message)
        except OSError:
            pass  # it has ended, and `_listen` notices

    def _ask(self, what: str, *rest: Any) -> Any:
        """What the process answers. Raises its error, or EngineFailed."""
        if self._refusal is not None and self._refusal is not _draining:
            raise self._refusal()
        call, waiting = next(self._numbers), [threading.Event(), False, None]
        self._answers[call] = waiting
        self._tell("ask", call, what, *rest)
        while not waiting[0].wait(1.0):
            if self._process.poll() is not None and call in self._answers:
                raise EngineFailed("The engine's process has ended.")
        if not waiting[1]:
            raise waiting[2]
        return waiting[2]

    # ---- what `Texts` needs ------------------------------------------------------------------------------------

    @property
    def deterministic(self) -> bool:
        return self.facts.deterministic

    def _prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        include_stop: bool,
        bad_words: tuple[tuple[int, ...], ...] = (),
        embeds: Any = None,
        terms: Any = None,
    ) -> tuple[Any, ...]:
        """Everything about a request that can be wrong; nothing is sent yet."""
        facts = self.facts
        if embeds is not None:
            prompt, embeds = None, np.asarray(embeds, np.float32)
            length = len(embeds)
        else:
            prompt = np.asarray(prompt, np.int64)
            if prompt.ndim != 1 or not len(prompt):
                raise InvalidRequest(f"A prompt must hold at least one token id; got shape {prompt.shape}.")
            check_ids(prompt, facts.vocab_size or 2**31 - 1)
            length = len(prompt)
        params = as_params(params, SamplingParams(max_tokens=None))
        check_params(params, params.max_tokens, vocab=facts.vocab_size or 2**31 - 1, cached=facts.cached)
        facts.limits.fit(length, params.max_tokens)
        return prompt, params, include_stop, bad_words, embeds, as_terms(terms)

    def _submit(self, job: tuple[Any, ...]) -> ItemStream[int]:
        """Raises QueueFull, EngineClosed or EngineFailed."""
        channel: Channel[int] = Channel(self._pause_after)
        with self._changed:
            if self._refusal is not None:
                raise self._refusal()
            rows, here = self.facts.limits.rows, len(self._channels)
            if self._max_waiting is not None and here >= rows + self._max_waiting:
                raise QueueFull(
                    f"The queue is full: expected fewer than {rows + self._max_waiting} requests here ({rows} that run "
                    f"at once and max_waiting={self._max_waiting} that wait); got {here}. Try again later, or raise "
                    f"max_waiting."
                )
            number = next(self._numbers)
            self._channels[number] = channel
        self._tell("run", number, *job)
        return ItemStream(channel, partial(self._cancel, number), int)

    def _cancel(self, number: int) -> None:
        if self._channels.pop(number, None) is not None:
            self._tell("cancel", number)
            with self._changed:
                self._changed.notify_all()

    def vectors(self, ids: list[list[int]], pooling: Pooling | None, normalize: bool | None) -> list[HostArray]:
        found: list[HostArray] = self._ask("vectors", ids, pooling, normalize)
        return found

    # ---- how it is ---------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """As of the last sign of life, at most a moment ago."""
        return self._stats

    def meters(self) -> Meters:
        """Likewise."""
        return self._meters

    def health(self) -> Health:
        refusal, silent = self._refusal, time.monotonic() - self._heard
        if refusal is _closed:
            return Health("closed", "The engine is closed.")
        if refusal is not None and refusal is not _draining:
            return Health("failed", str(refusal()), restarts=self.restarts)
        if self._stall_after is not None and silent >= self._stall_after:
            return Health("stalled", f"The engine's process has not been heard of for {silent:.3g} s.")
        return self._health

    def dump(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("dump")
        return found

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for the others; False if `timeout` seconds were not enough."""
        with self._changed:
            if self._refusal is None:
                self._refusal = _draining
            return self._changed.wait_for(lambda: not self._channels, timeout)

    def close(self) -> None:
        """End all streams and the process. Closing twice is fine."""
        with self._changed:
            self._closing, self._refusal = True, _closed
        self._tell("stop")
        self._end_all(Finish.CLOSED, _closed)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _closed() -> EngineClosed:
    return EngineClosed("The engine is closed. Make a new one.")


def _draining() -> EngineClosed:
    return EngineClosed("The engine is draining and takes no new requests. Make a new one.")


def _unpickled(tokenizer: bytes | None, model: str) -> Any:
    """Its class may stand in the module of the model, which only the engine's process has read so far."""
    assert tokenizer is not None
    try:
        return pickle.loads(tokenizer)
    except ModuleNotFoundError:
        module_of(model)
        return pickle.loads(tokenizer)


class RemoteLLM(Texts):
    """`LLM`, or a model of one's own, with its engine in another process. Texts are made here.

    model, options: as for `open_texts` and `RemoteEngine`. Raises what making the model raises.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        model = str(model)
        if "backend" in options and not isinstance(options["backend"], (str, type(None))):
            raise ConfigError("For an engine in another process a backend is given by its name.")
        engine = RemoteEngine(model, **options)
        facts = engine.facts
        try:
            if is_own(model):
                tokenizer, params = _unpickled(facts.tokenizer, model), SamplingParams()
            else:
                files = open_files(locate(model))
                tokenizer = files.tokenizer(vocab_size=facts.vocab_size)
                params = SamplingParams(**generation_defaults(files.path))
        except BaseException:
            engine.close()
            raise
        super().__init__(engine, tokenizer, vocab_size=facts.vocab_size, eos_ids=facts.eos_ids, default_params=params)

    def _vectors(self, ids: list[list[int]], pooling: Pooling | None, normalize: bool | None) -> list[HostArray]:
        found: list[HostArray] = self.engine.vectors(ids, pooling, normalize)
        return found
