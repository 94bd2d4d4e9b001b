"""Chat templates are rendered in a process of their own.

A template comes with a model, from anywhere. minijinja counts its instructions (fuel) but not memory, and a template of
a few bytes overflows its stack: `{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}`. So they run where nothing is
lost: in a child process with little memory and little time, without a loader of other templates, on plain data. It
starts with the first template, which takes some 50 ms; the way there and back takes a fraction of one.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from hibachi.errors import ConfigError
from hibachi.model.extras import need

SECONDS = 10.0
MEMORY = 2**30
FUEL = 10_000_000  # instructions; a message takes about a hundred

_WORKER = Path(__file__).with_name("template_worker.py")


class Sandbox:
    """One child process: started when it is first needed, and again if a template was its end."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> tuple[str, str]:
        """("text", the text), or why not: "refused" by the template, "broken": it is none, "failed": it cannot run.

        Raises MissingExtra without the library minijinja, ConfigError if no process can be started.
        """
        library = need("minijinja", "Rendering a chat template")
        job = json.dumps([template, variables]).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.stop()
                self._process = _start(Path(library.__file__).parents[1])
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            answer = b""
            try:
                process.stdin.write(job)
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:  # it died while we wrote
                pass
            finally:
                if not answer.endswith(b"\n"):  # nor may an answer that we no longer wait for come later
                    self.stop()
        if not answer.endswith(b"\n"):
            return "failed", f"it crashed, or took more than {SECONDS:.0f} s or {MEMORY >> 20} MiB"
        kind, text = json.loads(answer)
        return kind, text

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(OSError):  # of what was not written yet
                process.communicate()


def _start(place: Path) -> subprocess.Popen[bytes]:
    """place: where the library minijinja is."""
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WORKER), str(place), str(SECONDS), str(MEMORY), str(FUEL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is ours
        )
    except OSError as e:
        raise ConfigError(
            f"Chat templates are rendered in a process of their own, and it cannot be started: {e}. "
            f"Render the conversation elsewhere, and pass the text."
        ) from e


_sandbox = Sandbox()
render = _sandbox.render
atexit.register(_sandbox.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_sandbox.__init__)  # the process belongs to the parent
