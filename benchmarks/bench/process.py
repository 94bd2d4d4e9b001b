"""An engine in a process of its own: started, given work, watched, ended."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.bench.watch import Use, Watch
from benchmarks.bench.work import write
from hibachi.errors import ConfigError, EngineFailed
from hibachi.testing.bench.work import TimedRequest

FOLDER = Path(__file__).parent / "peers"
OURS = "hibachi"
_FIRST = TimedRequest(0, 0.0, [3] * 16, 1)  # the request whose token says that an engine has started
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_TAIL = 12  # lines of what a process said, in an error


def engines() -> list[str]:
    """Engines that there is a script for."""
    return sorted(p.stem for p in FOLDER.glob("*.py") if p.stem != "drive")


@dataclass(frozen=True)
class EngineSetup:
    """Which engine, and how. python: the interpreter that has it; None means this one. backend: of hibachi. model: a
    folder, or a file where the engine wants one. rows: requests at once. max_model_len: most tokens of a request.
    title: the model's name in tables; "": that of its folder."""

    engine: str
    model: str
    dtype: str
    rows: int
    max_model_len: int
    threads: int
    enable_prefix_caching: bool = False
    backend: str = "torch"
    python: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    title: str = ""

    @property
    def label(self) -> str:
        return f"{self.engine} ({self.backend.rpartition(':')[2]})" if self.engine == OURS else self.engine


@dataclass(slots=True)
class Answered:
    """What became of a request. due, times: in seconds after the start; times: of each token."""

    id: int
    due: float
    times: list[float]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Ran:
    """One run. use: of processors and memory; more: what only this engine says, such as a profile."""

    answers: list[Answered]
    use: Use
    more: dict[str, Any]


class Process:
    """Starts the engine and waits until its first token. Raises ConfigError, EngineFailed.

    version, about: of the engine. label: its name in tables. start_up: seconds: import (of the libraries below), load,
    and total, from the start of the process to the first token.
    """

    setup: EngineSetup
    version: str
    about: Any

    def __init__(self, setup: EngineSetup, timeout: float = 600.0) -> None:
        if setup.engine not in engines():
            raise ConfigError(f"An engine must be one of {', '.join(engines())}; got {setup.engine!r}.")
        self.setup, self._timeout = setup, timeout
        self._log: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed in close)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        settings = {**asdict(setup), "first": asdict(_FIRST)}
        command = [setup.python or sys.executable, str(FOLDER / "drive.py"), json.dumps(settings)]
        began = time.time()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=_environment(setup),
                start_new_session=True,  # to end it with what it starts
            )
        except OSError as e:
            self._log.close()
            raise ConfigError(f"{setup.label}: cannot run {command[0]} ({e}). Name its interpreter.") from e
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            ready = self._next()
        except BaseException:
            self._kill()
            self.close()
            raise
        self.version, self.about = str(ready["version"]), ready["about"]
        kernels = self.about.get("kernels", "default")
        self.label: str = setup.label if kernels == "default" else f"{setup.label[:-1]}, {kernels})"
        self.start_up: dict[str, Any] = {
            "total": ready["first_token"] - began,
            "import": ready["import_seconds"],
            "load": ready["load_seconds"],
        }

    def run(self, requests: Sequence[TimedRequest]) -> Ran:
        """Do the work. Arrivals in seconds. Raises EngineFailed."""
        assert self._process.stdin is not None
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "work.jsonl"
            write(requests, file)
            watch = Watch(self._process.pid)
            self._process.stdin.write(json.dumps({"run": str(file)}) + "\n")
            self._process.stdin.flush()
            start = self._next()["start"]
            use = watch.use()
        answers = []
        while "event" not in (line := self._next()):
            times = [t - start for t in line["times"]]
            answers.append(Answered(line["id"], line["due"] - start, times, line["tokens"]))
        return Ran(answers, use, line["more"])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _next(self) -> dict[str, Any]:
        """The next line of the process."""
        try:
            line = self._lines.get(timeout=self._timeout)
        except queue.Empty:
            raise EngineFailed(f"{self.setup.label}: no answer within {self._timeout:g} s{self._said()}") from None
        if not line:
            status = self._process.wait()
            raise EngineFailed(f"{self.setup.label}: its process ended with status {status}{self._said()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _said(self) -> str:
        """The last thing that the process said, and the lines before it."""
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()][-_TAIL:]
        return f": {lines[-1].strip()}\n  " + "\n  ".join(lines) if lines else "."

    def _kill(self) -> None:
        """The process and those that it has started."""
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()

    def close(self) -> None:
        """End the process. Closing twice is fine."""
        process = self._process
        if process.stdin is not None and not process.stdin.closed:
            with suppress(OSError):  # it has ended
                process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        self._kill()
        process.wait()
        self._reader.join(10)
        if process.stdout is not None:
            process.stdout.close()
        self._log.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _environment(setup: EngineSetup) -> dict[str, str]:
    env = os.environ | {name: str(setup.threads) for name in _THREADS} | {"HF_HUB_OFFLINE": "1"}
    if setup.engine == OURS:  # this very hibachi, also where it is not installed
        here = str(Path(__file__).parents[2])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [here, env.get("PYTHONPATH")]))
    return env
