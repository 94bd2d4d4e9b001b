"""What comes with a model and could run for ever runs in a process of its own: chat templates, rules of tokenizers.

Both come from anywhere. minijinja counts its instructions (fuel) but not memory, and a template of a few bytes
overflows its stack: `{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}`. A regular expression of five letters tries
for hours. So they run where nothing is lost: in a child process with little memory and little time, without a loader
of other templates, on plain data. Templates are rendered there; the rules of a tokenizer are tried there, once, as the
way there and back is more than most texts take. A process takes some 50 ms to start, and the way a fraction of one.
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

from hibachi.common.installed import need
from hibachi.errors import ConfigError

SECONDS = 10.0
MEMORY = 2**30
FUEL = 10_000_000  # instructions of a template; a message takes about a hundred


class Sandbox:
    """One child process: started when it is first needed, and again if what it ran was its end.

    worker: the script, a file beside this one. library: what it imports. what: for the message that it is missing.
    """

    def __init__(
        self,
        worker: str = "template_worker.py",
        library: str = "minijinja",
        what: str = "Rendering a chat template",
    ) -> None:
        self._worker, self._library, self._what = Path(__file__).with_name(worker), library, what
        self.forget()

    def forget(self) -> None:
        """The process is another's: that of the process that we were forked from."""
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: Any) -> Any:
        """The answer to a job, both plain data; None means the process died of it, or was ended.

        Raises MissingExtra without the library, ConfigError if no process can be started.
        """
        library = need(self._library, self._what)
        line = json.dumps(job).encode() + b"\n"
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.stop()
                self._process = self._start(Path(library.__file__).parents[1])
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            answer = b""
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:  # it died while we wrote
                pass
            finally:
                if not answer.endswith(b"\n"):  # nor may an answer that we no longer wait for come later
                    self.stop()
        return json.loads(answer) if answer.endswith(b"\n") else None

    def render(self, template: str, variables: Mapping[str, Any]) -> tuple[str, str]:
        """("text", the text), or why not: "refused" by the template, "broken": it is none, "failed": it cannot run."""
        kind, text = self.ask([template, variables]) or ("failed", _ended())
        return kind, text

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(OSError):  # of what was not written yet
                process.communicate()

    def _start(self, place: Path) -> subprocess.Popen[bytes]:
        """place: where the library is."""
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(self._worker), str(place), str(SECONDS), str(MEMORY), str(FUEL)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is ours
            )
        except OSError as e:
            raise ConfigError(
                f"Chat templates, and some rules of tokenizers, run in a process of their own, and it cannot be "
                f"started: {e}. Pass token ids, or render conversations elsewhere."
            ) from e


def try_rules(rules: Mapping[str, Any], expressions: str) -> str | None:
    """What is wrong with the rules of a tokenizer.json, as far as trying them on some texts shows; None means nothing.

    rules: its parts normalizer, pre_tokenizer and decoder. expressions: those whose letters the texts are made of.
    """
    box = Sandbox("rules_worker.py", "tokenizers", "Text")
    try:
        said = box.ask([rules, expressions])
        return _ended() if said is None else said["why"]
    finally:
        box.stop()


def _ended() -> str:
    return f"it crashed, or took more than {SECONDS:.0f} s or {MEMORY >> 20} MiB"


_sandbox = Sandbox()
render = _sandbox.render
atexit.register(_sandbox.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_sandbox.forget)  # the process belongs to the parent
