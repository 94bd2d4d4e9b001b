"""Forms are checked in processes of their own, which may be ended (worker.py), and verdicts are kept."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from hibachi.engine.guide.protocol import Counted, FormRefused, Grammar
from hibachi.engine.guide.reasons import SIMPLER, explain
from hibachi.errors import ConfigError, EngineClosed
from hibachi.structured import StructuredOutputs

SECONDS = 2.0  # of computing that one form may take
WALL = 20.0  # that may pass, where others keep the cores busy or there are no alarms
START = 120.0  # until a process has read the vocabulary
MEMORY = 2**29  # bytes that one form may take
PROCESSES = 2
MOST_VERDICTS, MOST_BYTES = 1024, 2**24
WORKER = Path(__file__).with_name("worker.py")
# How it ends by what it was given: our alarm, its memory, its stack. Anything else was not the form.
BY_FORM = {
    -getattr(signal, name) for name in ("SIGPROF", "SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL") if hasattr(signal, name)
}


class Ended(Exception):
    """The process has ended. by_form: of what it was given."""

    def __init__(self, by_form: bool) -> None:
        super().__init__()
        self.by_form = by_form


class CheckProcess:
    """One process that checks: started when it is first needed, and again after its end. Used by one thread at a time.

    library: the package llguidance, imported. setup: its first line.
    """

    def __init__(self, library: Any, setup: Callable[[], bytes]) -> None:
        self._place, self._setup = str(Path(library.__file__).parents[1]), setup
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, form: bytes) -> dict[str, Any]:
        """The verdict on a form. Raises Ended, and ConfigError if no process can be started."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._start()
        answer = self._exchange(form, WALL)
        if answer.pop("last"):
            self.stop()
        return answer

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WORKER), self._place],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is ours
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # glibc's others reserve 64 MiB each, of the limit
            )
        except OSError as e:
            raise ConfigError(
                f"structured_outputs are checked in a process of their own, and it cannot be started: {e}."
            ) from e
        try:
            self._exchange(self._setup(), START)
        except Ended:
            raise ConfigError(
                "structured_outputs are checked in a process of their own, and it has ended before it was ready. Is "
                "there enough memory?"
            ) from None

    def _exchange(self, line: bytes, seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        late = Timer(seconds, process.kill)
        late.daemon = True
        late.start()
        answer = b""
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except (OSError, ValueError):  # it died while we wrote, or was stopped
            pass
        finally:
            over = late.finished.is_set()
            late.cancel()
            if not answer.endswith(b"\n"):  # nor may an answer that we no longer wait for come later
                self.stop()
        if not answer.endswith(b"\n"):
            raise Ended(over or process.returncode in BY_FORM)
        found: dict[str, Any] = json.loads(answer)
        return found

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(OSError, ValueError):  # of what was not written yet
                process.communicate()


class Verdicts:
    """Grammars and refusals by their forms; the least recently used go first. Not safe for threads."""

    def __init__(self, entries: int = MOST_VERDICTS, size: int = MOST_BYTES) -> None:
        self._most, self._most_bytes, self._bytes = entries, size, 0
        self._kept: OrderedDict[StructuredOutputs, Grammar | FormRefused] = OrderedDict()

    def find(self, form: StructuredOutputs) -> Grammar | FormRefused | None:
        found = self._kept.get(form)
        if found is not None:
            self._kept.move_to_end(form)
        return found

    def keep(self, form: StructuredOutputs, verdict: Grammar | FormRefused) -> None:
        self._kept[form] = verdict
        self._bytes += weight(form, verdict)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._bytes -= weight(*self._kept.popitem(last=False))

    def __len__(self) -> int:
        return len(self._kept)


def weight(form: StructuredOutputs, verdict: Grammar | FormRefused) -> int:
    """About the bytes that both take."""
    own = sum(64 + sys.getsizeof(c) for c in form.choice) if form.choice is not None else sys.getsizeof(form.text)
    return 1024 + own + sys.getsizeof(verdict.source if isinstance(verdict, Grammar) else str(verdict))


class Checks:
    """Checks forms in at most `PROCESSES` processes, in the order in which they come. Callable from any thread.

    library: the package llguidance, imported. setup: the first line of each process.
    """

    def __init__(self, library: Any, setup: Callable[[], bytes]) -> None:
        self._library, self._setup = library, setup
        self._verdicts = Verdicts()
        self.counted = Counted()
        self._processes: list[CheckProcess] = []
        self._stopped = False
        self.forget()
        _living.add(self)
        weakref.finalize(self, stop, self._processes)  # at the interpreter's exit at the latest

    def forget(self) -> None:
        """The processes are another's: those of the process that we were forked from."""
        self._lock = Lock()
        self._processes[:] = [CheckProcess(self._library, self._setup) for _ in range(PROCESSES)]
        self._idle: queue.LifoQueue[CheckProcess] = (
            queue.LifoQueue()
        )  # so that the second is started when both are needed
        for process in reversed(self._processes):
            self._idle.put(process)
        self._running: dict[StructuredOutputs, Future[Grammar | FormRefused]] = {}

    def knows(self, form: StructuredOutputs) -> bool:
        """Was it checked before?"""
        with self._lock:
            return self._verdicts.find(form) is not None

    def check(self, form: StructuredOutputs) -> Grammar:
        """Raises FormRefused, ConfigError if no process can be started, EngineClosed after `stop`."""
        with self._lock:
            found = self._verdicts.find(form)
            running = self._running.get(form)
            if found is not None or running is not None:
                self.counted.hits += 1
            else:
                mine = self._running[form] = Future[Grammar | FormRefused]()
        if found is None:
            found = running.result() if running is not None else self._run(form, mine)
        if isinstance(found, FormRefused):
            raise copy(found)
        return found

    def _run(self, form: StructuredOutputs, waited: Future[Grammar | FormRefused]) -> Grammar | FormRefused:
        try:
            verdict = self._ask(form)
        except BaseException as e:
            with self._lock:
                del self._running[form]
            waited.set_exception(e)
            raise
        with self._lock:
            self._verdicts.keep(form, verdict)
            self.counted.note(verdict)
            del self._running[form]
        waited.set_result(verdict)
        return verdict

    def _ask(self, form: StructuredOutputs) -> Grammar | FormRefused:
        words = {
            "kind": form.kind,
            "text": form.text,
            "whitespace_pattern": form.whitespace_pattern,
            "one_of_as_any_of": form.one_of_as_any_of,
        }
        line, idle = json.dumps(words).encode(), self._idle
        process = idle.get()
        try:
            if self._stopped:
                raise EngineClosed("structured_outputs cannot be checked: the engine was closed. Make a new one.")
            said = process.ask(line)
        except Ended as e:
            said = too_complex() if e.by_form else self._again(process, line)
        finally:
            idle.put(process)
        if "source" in said:
            return Grammar(said["source"], said["seconds"])
        if "error" in said:
            why, keyword, field = *explain(form.kind, said["error"]), None
        else:
            why, keyword, field = said["refused"], said["keyword"], said["field"]
        refused = FormRefused.at(("structured_outputs", field or form.kind), f": {why}.")
        refused.keyword = keyword
        return refused

    def _again(self, process: CheckProcess, line: bytes) -> dict[str, Any]:
        """Somebody else ended the process; twice is taken for an effect of the form."""
        if self._stopped:
            raise EngineClosed("The engine was closed while structured_outputs were checked. Make a new one.")
        try:
            return process.ask(line)
        except Ended:
            return too_complex()

    def stop(self) -> None:
        """End the processes. Only verdicts that are kept can be asked for."""
        self._stopped = True
        stop(self._processes)


def too_complex() -> dict[str, Any]:
    return {"refused": SIMPLER.format(seconds=SECONDS, mebibytes=MEMORY >> 20), "keyword": None, "field": None}


def stop(processes: list[CheckProcess]) -> None:
    for process in processes:
        process.stop()


_living: weakref.WeakSet[Checks] = weakref.WeakSet()


def _forget_all() -> None:
    for checks in list(_living):
        checks.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
