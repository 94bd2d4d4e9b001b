"""A `hibachi serve` as a process: how it starts and ends, its engine, its log, and what it holds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hibachi.engine.guide.checks import WORKER

from ..watch import MALLOC

ROWS, QUEUED, ARRIVAL, DRAIN = 8, 24, 2.0, 3.0
HOSTILE_MOST = 30  # continuations of the hostile tenant at once: fewer than the queue holds, so both limits are met
KEYS = {"quiet": "key-of-quiet", "busy": "key-of-busy", "hostile": "key-of-hostile", "boss": "key-of-boss"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TENANTS = f"""
[quiet]
key = "{KEYS["quiet"]}"
[busy]
key = "{KEYS["busy"]}"
[hostile]
key = "{KEYS["hostile"]}"
max_requests = {HOSTILE_MOST}
[boss]
key = "{KEYS["boss"]}"
admin = true
"""
KILLED = re.compile(r"The engine's process \(pid \d+\) ended by signal 9, and its requests are lost\..*")
NUMBER = re.compile(r"[0-9a-f]{16,}|[0-9]+")


class House:
    """Listens once it is made."""

    def __init__(self, folder: Path) -> None:
        keys, self._log = folder / "keys.toml", folder / "log"
        keys.write_text(TENANTS)
        # The same kernels in each process of the engine, however fast the machine is just now.
        words = ["tiny", "--port", "0", "--restart", "--deterministic", "--autotune", "off", "--log-format", "json"]
        words += [
            "--api-keys",
            str(keys),
            "--chat-template",
            CHATML,
            "--tool-call-parser",
            "hermes",
            "--max-num-seqs",
            str(ROWS),
        ]
        words += ["--max-num-queued-reqs", str(QUEUED), "--arrival-timeout", f"{ARRIVAL:g}"]
        words += ["--drain-timeout", f"{DRAIN:g}", "--pause-after", "32", "--max-body-size", "4M"]
        env = {k: v for k, v in os.environ.items() if not k.startswith("HIBACHI_") or k.endswith("NATIVE")}
        env |= {name: str(value) for name, (_, value) in MALLOC.items()}
        with self._log.open("wb") as log:  # a file, which takes lines faster than any reader
            command = [sys.executable, "-m", "hibachi", "serve", *words]
            self._process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL, env=env)
        until, found = time.monotonic() + 60, None
        while found is None:
            if self._process.poll() is not None or time.monotonic() > until:
                self.clear()
                raise AssertionError(f"the server did not start: {self._log.read_text()}")
            time.sleep(0.02)
            found = re.search(
                r"^hibachi: serving .* on http://127\.0\.0\.1:(\d+) ", self._log.read_text(), re.MULTILINE
            )
        self.port, self.pid = int(found[1]), self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    @property
    def engine(self) -> int | None:
        """Its process; there may be none for the moment, and there is one that renders templates."""
        return next((pid for pid in self._children() if b"hibachi.llm.remote.child" in _command(pid)), None)

    def _children(self) -> Iterator[int]:
        for place in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, parent, *_ = place.read_text().rpartition(")")[2].split()
                if int(parent) == self.pid and state != "Z":
                    yield int(place.parent.name)

    def end(self, patience: float) -> tuple[int | None, float]:
        """SIGTERM: the status (None: it did not end), and the seconds it took."""
        began = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        return self._process.poll(), time.monotonic() - began

    def clear(self) -> None:
        engine = self.engine if self.lives else None
        for pid in (engine, self._process.pid if self.lives else None):
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    # ---- what it holds, and says -------------------------------------------------------------------------------

    def belongings(self) -> dict[str, int]:
        """Memory in bytes, descriptors and threads."""
        held = {"descriptors": _count(self.pid, "fd"), "threads": _count(self.pid, "task")}
        held["descriptors"] -= 2 * _checking(self.pid)
        held["memory of the server"] = _resident(self.pid)
        if (engine := self.engine) is not None:
            held["memory of the engine"] = _resident(engine)
            held["threads of the engine"] = _count(engine, "task")
        return held

    def starved(self) -> float:
        """Seconds that the server's event loop was ready to run and had no processor."""
        with suppress(OSError, IndexError):
            return int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    def look_at_log(self) -> tuple[Counter[str], list[str]]:
        """(what it holds, by level and kind; what must not be in it)"""
        told: Counter[str] = Counter()
        wrong: list[str] = []
        for text in self._log.read_bytes().decode("utf-8", "replace").splitlines():
            if text.startswith("hibachi: serving "):
                continue
            try:
                line: dict[str, Any] = json.loads(text)
                level, message = line["level"], line["message"]
            except (ValueError, KeyError, TypeError):
                wrong.append(f"the log has a line that is no JSON: {text[:300]}")
                continue
            kind = f"request {line.get('status')}" if line["logger"] == "hibachi.request" else message[:60]
            told[f"{level}: {kind if level == 'info' else NUMBER.sub('N', kind.strip())}"] += 1
            if "traceback" in line or (level in ("error", "critical") and not KILLED.fullmatch(message)):
                wrong.append(f"the log says: {message[:300]}\n{line.get('traceback', '')[-3000:]}")
            if any(key in text for key in KEYS.values()):
                wrong.append(f"the log tells a key: {text[:300]}")
        return told, wrong


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _count(pid: int, what: str) -> int:
    return len(os.listdir(f"/proc/{pid}/{what}"))


def _checking(pid: int) -> int:
    """How many processes check forms for this one, each at the other end of two pipes. A form may end one at any time,
    and the next is begun when it is needed.
    """
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # threads and children may end meanwhile
            for child in (task / "children").read_text().split():
                found += str(WORKER).encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
    return found


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
