"""The thread that steps an engine. It alone touches the engine; everybody else leaves commands in its inbox."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from hibachi.engine.engine import Engine, Stats
from hibachi.engine.job import Job
from hibachi.errors import EngineClosed, EngineFailed
from hibachi.request import Finish

log = logging.getLogger("hibachi.engine")


class Worker:
    """Steps `engine` while there is work, sleeps while there is none (no polling). Its death reaches every stream."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: deque[tuple[Callable[[Job], None], Job]] = deque()
        self._wake = threading.Event()
        self._idle = threading.Condition()
        self._refusing: Exception | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def stats(self) -> Stats:
        return self._engine.stats()

    def add(self, job: Job) -> None:
        """Queue a request. Raises EngineClosed or EngineFailed."""
        with self._starting:
            if self._refusing is not None:
                raise self._refusing
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="hibachi-engine", daemon=True)
                _workers.add(self)
                self._thread.start()
            self._inbox.append((self._engine.add, job))
        self._wake.set()

    def cancel(self, job: Job) -> None:
        self._inbox.append((self._engine.cancel, job))
        self._wake.set()

    def _loop(self) -> None:
        engine, inbox = self._engine, self._inbox
        try:
            while not self._closing:
                self._wake.clear()
                while inbox:
                    command, job = inbox.popleft()
                    command(job)
                if not engine.step():
                    if not engine.busy and not inbox:
                        with self._idle:
                            self._idle.notify_all()
                    self._wake.wait()
        except BaseException as e:
            log.exception("the engine's loop failed")
            failed = EngineFailed(
                f"The engine's loop failed with {type(e).__name__}: {e}. Its requests are lost; make a new engine. "
                f"This is a defect of hibachi, or the process ran out of memory: please report it."
            )
            failed.__cause__ = e
            self._end(Finish.ERROR, failed)
        else:
            self._end(Finish.CLOSED, EngineClosed("The engine is closed. Make a new one."))

    def _end(self, reason: Finish, refusal: Exception) -> None:
        with self._starting:
            self._refusing = refusal
        while self._inbox:
            command, job = self._inbox.popleft()
            command(job)
        self._engine.end_all(reason, refusal if reason is Finish.ERROR else None)
        with self._idle:
            self._idle.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until the others have ended; False if `timeout` seconds were not enough."""
        with self._starting:
            if self._refusing is None:
                self._refusing = EngineClosed("The engine is draining and takes no new requests. Make a new one.")
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._idle:
            while self._inbox or self._engine.busy:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def stop(self) -> None:
        """Ask the thread to finish the running step, end all streams and leave; does not wait."""
        with self._starting:
            if self._refusing is None:
                self._refusing = EngineClosed("The engine is closed. Make a new one.")
            self._closing = True
        self._wake.set()

    def close(self) -> None:
        """`stop`, and wait for it. Closing twice is fine."""
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A thread inside an array library while the interpreter goes down can crash the process.
    for worker in list(_workers):
        worker.close()
