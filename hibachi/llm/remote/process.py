"""One process of an engine: how it is started, what its pipe carries, and its end."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from multiprocessing import Pipe
from typing import Any

from hibachi.common.phases import phases_shown
from hibachi.errors import EngineFailed
from hibachi.llm.remote.child import EngineReady
from hibachi.llm.remote.sender import PipeSender

log: logging.Logger = logging.getLogger("hibachi.engine")
CLOSING = 10.0  # seconds that a process has to end


class EngineProcess:
    """Starts it; `until_ready` then waits for the model. spec: options of `open_model`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self.pipe, theirs = Pipe()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            path = [place for place in sys.path if isinstance(place, str)]  # it imports what we import
            script = (
                f"import sys; sys.path[:] = {path}; "
                "from signal import *; signal(SIGINT, SIG_IGN); signal(SIGTERM, SIG_IGN); "  # as the parent decides
                f"from hibachi.llm.remote.child import main; main({theirs.fileno()})"
            )
            command = [sys.executable, "-P", "-c", script]  # -P: the working directory is not first on the path
            self._popen = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def until_ready(self, seconds: float | None) -> tuple[EngineReady, PipeSender]:
        """Wait until the process has loaded the model; returns its message, and the sender for its pipe. The process is
        killed if that takes longer than this many seconds.

        Raises what making the model raises, and EngineFailed.
        """
        try:
            self.pipe.send((self._spec, log.getEffectiveLevel(), phases_shown()))
            until = None if seconds is None else time.monotonic() + seconds
            while True:
                if until is not None and not self.pipe.poll(max(0.0, until - time.monotonic())):
                    raise EngineFailed(f"The engine's process was not ready within {seconds:.3g} s, and was killed.")
                word, *said = self.pipe.recv()
                if word != "log":
                    break
                relog(*said)
            (value,) = said
        except (EOFError, OSError) as e:
            raise EngineFailed(
                f"The engine's process ended before it was ready, with status {self.end(CLOSING)}. Look at what it "
                f"wrote; was it killed for want of memory?"
            ) from e
        except BaseException:  # Ctrl-C while it loads, or it takes too long
            self.kill()
            self._popen.wait()
            raise
        if word == "failed":
            self.end(CLOSING)
            raise value
        return value, PipeSender(self.pipe)

    def kill(self) -> None:
        self._popen.kill()

    def end(self, seconds: float | None) -> int:
        """Wait for its end; it is killed after `seconds`. Returns its status."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._popen.wait()


def relog(name: str, level: int, message: str, trace: str | None, created: float) -> None:
    """As the engine's process logged it."""
    logger = logging.getLogger(name)
    if logger.isEnabledFor(level):
        told = {"name": name, "levelno": level, "levelname": logging.getLevelName(level), "msg": message}
        logger.handle(logging.makeLogRecord(told | {"exc_text": trace, "created": created}))
