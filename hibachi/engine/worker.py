"""The thread that steps an engine. No other thread touches the engine: they leave commands in its inbox."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from queue import Empty
from typing import Any

from hibachi.engine.admission import check_room
from hibachi.engine.engine import MOST_RESTARTS, TOLD_AFTER, Command, Engine
from hibachi.engine.health import STALL_AFTER, Health, State
from hibachi.engine.runners.calls import drop_frames
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.meters import Meters
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.stats import Stats
from hibachi.engine.streams.channel import Channel
from hibachi.engine.streams.closeable import CLOSE_WITHIN
from hibachi.errors import EngineClosed, EngineError, EngineFailed, HibachiError
from hibachi.request import Finish, Request

log: logging.Logger = logging.getLogger("hibachi.engine")
MOST_PATIENCE = 3600.0  # longest sleep of the thread in seconds; longer ones overflow some clocks
LOOK = 0.5  # seconds from one look at a draining engine's health to the next
AFTER_INTERRUPT = 1.0  # seconds, likewise, once its `async def` model was cancelled
COMPILING = 20  # a step that compiles a program may take this many times as long as another before it counts as stalled


class Worker:
    """Steps `engine` while there is work and sleeps while there is none (no polling). If its thread dies, every stream
    ends.

    A dropped stream cancels its request wherever the garbage collector runs, perhaps in a thread that is inside one of
    these methods. So the inbox is a SimpleQueue, whose `put` may be entered twice, and the lock is reentrant.
    """

    def __init__(
        self, engine: Engine, *, max_num_queued_reqs: int | None = None, stall_after: float | None = STALL_AFTER
    ) -> None:
        """max_num_queued_reqs: requests accepted beyond those that run at once. stall_after: seconds, see `Health`."""
        self.engine = engine
        self._max_waiting = max_num_queued_reqs
        self._comers: list[Channel[Any]] = []  # of requests that were added; ended ones are dropped now and then
        self._stall_after = stall_after
        self._watchdog: Watchdog | None = None
        self._woke = 0.0  # when the thread last woke up to work
        self._told = -1  # number of the step after which the stall was logged
        self._inbox = engine.inbox
        self._changed = threading.Condition(threading.RLock())
        # loops that failed in a row; counter of new tokens when the last one failed
        self._failures, self._tokens = 0, 0
        # requests that were added, and that had ended, when the engine last came to rest
        self._accepted = self._served = 0
        self._refusal: Callable[[], HibachiError] | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def stats(self) -> Stats:
        return self.engine.stats()

    def meters(self) -> Meters:
        return self.engine.meters()

    def add(self, job: Job) -> None:
        """Queue a request. Raises QueueFull, EngineClosed or EngineFailed."""
        with self._changed:
            if self._refusal is not None:
                raise self._refusal()
            jobs = [each for each in job.group if not each.silent]
            self.check_room(job.seq.tenant, len(jobs))
            here = self._accepted - self.engine.finished
            if self._thread is None:
                thread = threading.Thread(target=self._loop, name="hibachi-engine", daemon=True)
                thread.start()
                self._thread = thread
                _workers.add(self)
                if self._stall_after is not None:
                    self._watchdog = Watchdog(self.health, self._stall_after / 4)
            if not here:
                self._woke = time.monotonic()
            if self._watchdog is not None:
                self._watchdog.work()
            self._accepted += len(jobs)
            for each in jobs:
                each.channel.thread, each.channel.tenant = self._thread.ident, each.seq.tenant
            if self._max_waiting is not None:
                self._comers += [each.channel for each in jobs]
                if len(self._comers) > 2 * (here + 32):
                    self._comers = [c for c in self._comers if c.finish is None]
            self._inbox.put((self.engine.add, job))

    def check_room(self, tenant: Hashable, new: int) -> None:
        """Raise QueueFull if there is no room for this many more requests."""
        here = self._accepted - self.engine.finished
        check_room(tenant, new, here, self.engine.scheduler.limits, self._max_waiting, self._tenants)

    def _tenants(self) -> list[Hashable]:
        return [c.tenant for c in self._comers if c.finish is None]

    def cancel(self, job: Job) -> None:
        self._inbox.put((self.engine.cancel, job))

    def feed(self, job: Job, tokens: Any) -> None:
        """See `Engine.feed`."""
        self._inbox.put((partial(self.engine.feed, tokens=tokens), job))

    def reset_cache(self) -> None:
        """See `BatchEngine`."""
        with self._changed:
            if self._refusal not in (None, _draining):
                assert self._refusal is not None
                raise self._refusal()
            done: Channel[Any] = Channel()
            job = Job(Seq(0, None, finish=Finish.STOP), done, Request(None))
            if self._thread is None:  # tiers may have something though nothing was computed
                self.engine.drop_prefixes(job)
            else:
                done.thread = self._thread.ident
                self._inbox.put((self.engine.drop_prefixes, job))
        done.wait_end()
        if done.finish is not Finish.STOP:
            raise done.error or _closed()

    def _loop(self) -> None:
        while True:
            try:
                self._serve()
            except BaseException as e:
                log.exception("the engine's loop failed")
                if self._begin_again(e):
                    continue
                self._end(Finish.ERROR, partial(_failed, e))
            else:
                self._end(Finish.CLOSED, _closed)
            return

    def _begin_again(self, cause: BaseException) -> bool:
        """End the requests of a loop that failed, and serve new ones; False if restarts are not wanted or not
        possible.
        """
        engine = self.engine
        # EngineFailed is the engine's own verdict: restarts are off, or were tried often enough (`Engine._lose`).
        if self._closing or isinstance(cause, EngineFailed) or not engine.can_begin_again():
            return False
        tokens = engine.stats().new_tokens
        self._failures = self._failures + 1 if tokens == self._tokens else 1
        self._tokens = tokens
        if self._failures > MOST_RESTARTS:
            return False
        engine.end_all(Finish.ERROR, partial(_failed, cause))
        drop_frames(cause)
        try:
            engine.begin_again()
        except BaseException:
            log.exception("the engine could not begin again")
            return False
        log.warning("the engine begins again, %d of %d", self._failures, MOST_RESTARTS)
        return True

    def _serve(self) -> None:
        engine, inbox = self.engine, self._inbox
        busy = False
        while True:
            while not busy or not inbox.empty():
                patience = None if busy else self._patience()
                try:
                    self._obey(inbox.get(timeout=patience))  # sleeps while there is nothing to do
                except Empty:
                    break  # a request's time is over
                busy = True
            if self._closing:
                return
            busy = engine.step()
            if not busy:
                self._rest()
            busy |= engine.try_model()

    def _patience(self) -> float | None:
        """Seconds until the engine must look after a deadline, even if no request arrives; None means for ever."""
        deadline = self.engine.next_deadline()
        return None if deadline is None else min(max(deadline - time.monotonic(), 0.0), MOST_PATIENCE)

    def _rest(self) -> None:
        with self._changed:
            self._served = self.engine.finished
            if self._watchdog is not None and self._served == self._accepted:
                self._watchdog.rest()
            self._changed.notify_all()

    def _obey(self, command: Command) -> None:
        if command is not None:
            self.engine.obey(*command)

    def _end(self, reason: Finish, refusal: Callable[[], HibachiError]) -> None:
        engine = self.engine
        with self._changed:
            self._refusal = refusal  # first: `add` reads it under this lock, so none is added behind the loop below
        while not self._inbox.empty():
            with suppress(Exception):  # after a failure the scheduler may be in any state
                self._obey(self._inbox.get())
        engine.end_all(reason, refusal if reason is Finish.ERROR else None)
        self._rest()
        if self._watchdog is not None:
            self._watchdog.stop()
        engine.close()

    # ---- health ------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        return self.engine.recorder.dump()

    def health(self) -> Health:
        """The engine's health, callable from any thread, also while the engine's own thread hangs. The first call that
        finds it stalled logs that.
        """
        engine, refusal, now = self.engine, self._refusal, time.monotonic()
        steps, running, paused = engine.stats().steps, engine.scheduler.running, engine.paused
        pending = self._accepted - engine.finished
        waiting = max(pending - running, 0)
        still = now - max(engine.moved or 0.0, self._woke)
        state: State
        patience = (self._stall_after or 0.0) * (COMPILING if engine.compiles else 1)
        if refusal is _forked:
            return Health("closed", str(_forked()))
        if refusal is _closed:
            state, message = "closed", "The engine is closed."
        elif refusal is not None and refusal is not _draining:
            state, message = "failed", str(refusal())
        elif pending <= paused:
            state, message = (
                "idle",
                f"Requests that wait for their consumers: {paused}." if paused else "Nothing to do.",
            )
        elif self._stall_after is None or still < patience:
            state, message = "running", f"Waiting: {waiting}, running: {running}."
            if engine.compiles:
                message += " A step of a new shape is being compiled."
        else:
            state = "stalled"
            message = f"No step for {still:.3g} s while work waits (waiting: {waiting}, running: {running})."
            if self._told != steps:
                self._told = steps
                last = engine.recorder.last(5)
                log.error("%s Its thread is at\n%sThe last steps:\n%s", message, where(self._thread), last)
        if engine.invalid >= TOLD_AFTER and state in ("idle", "running"):
            message += f" Every output of the last {engine.invalid} steps was invalid: {engine.invalid_why}"
        since = None if engine.moved is None else now - engine.moved
        return Health(state, message, since, steps, waiting, running, paused, engine.restarts)

    # ---- the end -----------------------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until the others have ended.

        False if `timeout` seconds were not enough, or if the engine stalled or failed meanwhile. Raises EngineError in
        the engine's own thread.
        """
        if self._thread is threading.current_thread():
            raise EngineError("The engine's own thread cannot wait for its requests to end. Drain it from another one.")
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            if self._refusal is None:
                self._refusal = _draining
            while self._served != self._accepted:
                left = LOOK if end is None else min(end - time.monotonic(), LOOK)
                if left <= 0 or self.health().state == "stalled":
                    return False
                self._changed.wait(left)
            return self._refusal in (_draining, _closed)

    def stop(self) -> None:
        """Ask the thread to finish the running step, end all streams and leave; does not wait."""
        with self._changed:
            if self._thread is None and not self._closing:  # there is no thread that would
                self.engine.close()
            if self._refusal in (None, _draining):
                self._refusal = _closed
            self._closing = True
            self._inbox.put(None)

    def close(self, timeout: float | None = CLOSE_WITHIN) -> None:
        """`stop`, then wait for the thread, at most `timeout` seconds (None means no limit). Closing twice is fine.

        After the timeout a model that hangs is abandoned: its `async def` call is cancelled, all streams end, and the
        log says where the thread stands. A timeout of 0 asks for this, so it is told of a thread that still runs then.
        """
        self.stop()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if not thread.is_alive():
            return
        stands = where(thread)
        for channel in self._channels():
            channel.end(Finish.CLOSED)
        self.engine.runner.interrupt()
        self._inbox.put(None)  # for the thread, should it ever come back
        thread.join(AFTER_INTERRUPT)
        if timeout or thread.is_alive():
            waited = timeout or AFTER_INTERRUPT
            log.error("the engine's step did not end within %s s; it is let go at\n%s", waited, stands)

    def _channels(self) -> list[Channel[Any]]:
        """The channels of all requests, for a thread other than the engine's, which hangs or is gone. Empties the
        inbox.
        """
        jobs = self.engine.live()
        while not self._inbox.empty():  # requests that the thread has not seen
            with suppress(Empty):
                if (command := self._inbox.get_nowait()) is not None:
                    jobs += command[1].group
        return [job.channel for job in jobs]

    def forked(self) -> None:
        """Called in a fork of the process that owns the thread: end everything that waits for the thread here."""
        if self._thread is None:
            return
        # the old lock may have been held by a thread that does not exist here
        self._changed = threading.Condition(threading.RLock())
        self._refusal, self._closing = _forked, True
        for channel in self._channels():
            channel.renew()
            channel.end(Finish.ERROR, _forked())


class Watchdog:
    """Calls `look` at intervals while there is work; sleeps while there is none. It does not depend on any engine's
    thread.

    `work` may be called again and again; `rest` when all work is done; `stop` once.
    """

    def __init__(self, look: Callable[[], object], seconds: float) -> None:
        self._look, self._seconds = look, min(seconds, MOST_PATIENCE)
        self._work, self._over = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="hibachi-watchdog", daemon=True).start()

    def work(self) -> None:
        if not self._work.is_set():
            self._work.set()

    def rest(self) -> None:
        self._work.clear()

    def stop(self) -> None:
        self._over.set()
        self._work.set()

    def _watch(self) -> None:
        while True:
            self._work.wait()
            if self._over.wait(self._seconds):
                return
            if self._work.is_set():
                self._look()


def where(thread: threading.Thread | None) -> str:
    """Where a thread stands: the innermost lines of its stack; empty if it is not running."""
    frame = sys._current_frames().get(thread.ident) if thread is not None and thread.ident is not None else None
    return "".join(traceback.format_stack(frame)[-6:]) if frame is not None else "(its thread is not running)"


def _failed(cause: BaseException) -> EngineFailed:
    if isinstance(cause, EngineFailed):  # one of its own for each stream
        error = EngineFailed(str(cause))
        error.__cause__ = cause.__cause__
        return error
    error = EngineFailed(
        f"The engine's loop failed with {type(cause).__name__}: {cause}. Its requests are lost; make a new engine. "
        f"This is a defect of hibachi or of the policy, or the process ran out of memory: please report it."
    )
    error.__cause__ = cause
    return error


def _closed() -> EngineClosed:
    return EngineClosed("The engine is closed. Make a new one.")


def _forked() -> EngineClosed:
    return EngineClosed(
        "The engine was made before a fork, and its thread runs in the parent only. Make a new one here."
    )


def _draining() -> EngineClosed:
    return EngineClosed("The engine is draining and takes no new requests. Make a new one.")


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A thread inside an array library while the interpreter goes down can crash the process.
    end = time.monotonic() + CLOSE_WITHIN
    for worker in list(_workers):
        worker.close(max(end - time.monotonic(), 0.0))


def _after_fork() -> None:
    for worker in list(_workers):
        worker.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
