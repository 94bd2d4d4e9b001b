"""The thread that steps an engine. It alone touches the engine; everybody else leaves commands in its inbox."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from hibachi.engine.engine import Engine, Stats
from hibachi.engine.job import Job
from hibachi.errors import EngineClosed, EngineFailed
from hibachi.request import Finish

log = logging.getLogger("hibachi.engine")


class Worker:
    """Steps `engine` while there is work, sleeps while there is none (no polling). Its death reaches every stream.

    Streams that are dropped cancel, wherever the garbage collector finds them: perhaps in a thread that is in the midst
    of a method of ours. So the inbox is a SimpleQueue, whose `put` may be entered twice, and the lock is reentrant.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: SimpleQueue[tuple[Callable[[Job], None], Job] | None] = SimpleQueue()  # None: just wake up
        self._changed = threading.Condition(threading.RLock())
        self._accepted = self._served = 0  # requests that came, and that had ended when the engine last came to rest
        self._refusal: Callable[[], Exception] | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def stats(self) -> Stats:
        return self._engine.stats()

    def add(self, job: Job) -> None:
        """Queue a request. Raises EngineClosed or EngineFailed."""
        with self._changed:
            if self._refusal is not None:
                raise self._refusal()
            if self._thread is None:
                thread = threading.Thread(target=self._loop, name="hibachi-engine", daemon=True)
                thread.start()
                self._thread = thread
                _workers.add(self)
            self._accepted += 1
            self._inbox.put((self._engine.add, job))

    def cancel(self, job: Job) -> None:
        self._inbox.put((self._engine.cancel, job))

    def _loop(self) -> None:
        try:
            self._serve()
        except BaseException as e:
            log.exception("the engine's loop failed")
            self._end(Finish.ERROR, partial(_failed, e))
        else:
            self._end(Finish.CLOSED, _closed)

    def _serve(self) -> None:
        engine, inbox = self._engine, self._inbox
        busy = False
        while True:
            while not busy or not inbox.empty():
                self._obey(inbox.get())  # sleeps while there is nothing to do
                busy = True
            if self._closing:
                return
            busy = engine.step()
            if not busy:
                self._rest()

    def _rest(self) -> None:
        with self._changed:
            self._served = self._engine.finished
            self._changed.notify_all()

    def _obey(self, command: tuple[Callable[[Job], None], Job] | None) -> None:
        if command is not None:
            do, job = command
            do(job)

    def _end(self, reason: Finish, refusal: Callable[[], Exception]) -> None:
        engine = self._engine
        with self._changed:
            self._refusal = refusal
        while not self._inbox.empty():
            with suppress(Exception):  # after a failure the scheduler may be in any state
                self._obey(self._inbox.get())
        engine.end_all(reason, refusal if reason is Finish.ERROR else None)
        self._rest()
        engine.close()

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until the others have ended; False if `timeout` seconds were not enough."""
        with self._changed:
            if self._refusal is None:
                self._refusal = _draining
            return self._changed.wait_for(lambda: self._served == self._accepted, timeout)

    def stop(self) -> None:
        """Ask the thread to finish the running step, end all streams and leave; does not wait."""
        with self._changed:
            if self._refusal in (None, _draining):
                self._refusal = _closed
            self._closing = True
            self._inbox.put(None)

    def close(self) -> None:
        """`stop`, and wait for it. Closing twice is fine."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _failed(cause: BaseException) -> EngineFailed:
    error = EngineFailed(
        f"The engine's loop failed with {type(cause).__name__}: {cause}. Its requests are lost; make a new engine. "
        f"This is a defect of hibachi, or the process ran out of memory: please report it."
    )
    error.__cause__ = cause
    return error


def _closed() -> EngineClosed:
    return EngineClosed("The engine is closed. Make a new one.")


def _draining() -> EngineClosed:
    return EngineClosed("The engine is draining and takes no new requests. Make a new one.")


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A thread inside an array library while the interpreter goes down can crash the process.
    for worker in list(_workers):
        worker.close()
