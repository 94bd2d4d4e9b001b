"""Runs one engine in a process of its own, for `hibachi bench`. Needs the standard library and that engine only.

    PYTHON drive.py SETTINGS

SETTINGS is JSON: engine (a file beside this one), model, dtype, rows, max_model_len, threads, enable_prefix_caching,
first (a request), and options for the engine. On the standard input come lines {"run": FILE of JSON lines}. On the
standard output go JSON lines: {"event": "ready", ...}; for each run {"event": "over", "start"}, a line for each
request, {"event": "done"}. Times are of time.perf_counter, except first_token, which is of time.time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Protocol


class Request:
    """due: when it comes. times: when each of its tokens came. tokens: their ids, where the engine tells."""

    id: int
    arrival: float
    prompt: list[int]
    max_tokens: int

    def __init__(self, id: int, arrival: float, prompt: list[int], max_tokens: int) -> None:
        self.id, self.arrival, self.prompt, self.max_tokens = id, arrival, prompt, max_tokens
        self.due: float = 0.0
        self.times: list[float] = []
        self.tokens: list[int] = []


class Engine(Protocol):
    """What each script beside this one has. It may also have `about`, a dictionary, `more()` and `close()`."""

    version: str
    import_seconds: float

    def run(self, requests: list[Request]) -> None: ...


def read(path: str) -> list[Request]:
    with open(path) as lines:
        return [Request(**json.loads(line)) for line in lines if line.strip()]


def run(engine: Engine, requests: list[Request]) -> float:
    """Returns when it began. An engine starts no request before it is due, and stamps every token."""
    start = time.perf_counter()
    for r in requests:
        r.due = start + r.arrival
    engine.run(requests)
    return start


def adapter(name: str) -> ModuleType:
    """The file of that name in this folder, under another name: it imports an engine that is called the same."""
    folder = os.path.dirname(os.path.abspath(__file__))
    # So that `import vllm` finds the engine.
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.curdir) != folder]
    spec = importlib.util.spec_from_file_location("hibachi_bench_" + name, os.path.join(folder, name + ".py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(engine: Engine, busy: threading.Event) -> Iterator[bytes]:
    """The lines of the standard input. If it ends while the engine works, the answer is not needed any more."""
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def listen() -> None:
        with open(0, "rb", buffering=0, closefd=False) as stdin:  # no buffer, whose lock the end would wait for
            for line in stdin:
                lines.put(line)
        if busy.is_set():
            close(engine)
            os._exit(1)
        lines.put(None)

    threading.Thread(target=listen, daemon=True).start()
    while (line := lines.get()) is not None:
        yield line


def close(engine: Engine) -> None:
    if hasattr(engine, "close"):
        engine.close()


def main() -> None:
    settings = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of engines must not be parsed

    def tell(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    began = time.perf_counter()
    engine: Engine = adapter(settings["engine"]).Engine(settings)
    load = time.perf_counter() - began - engine.import_seconds
    busy = threading.Event()
    first = Request(**settings["first"])
    run(engine, [first])
    first_token = time.time() - (time.perf_counter() - first.times[0])
    tell(
        event="ready",
        version=engine.version,
        import_seconds=engine.import_seconds,
        load_seconds=load,
        first_token=first_token,
        about=getattr(engine, "about", {}),
    )
    try:
        for line in commands(engine, busy):
            requests = read(json.loads(line)["run"])
            busy.set()
            start = run(engine, requests)
            busy.clear()
            tell(event="over", start=start)
            for r in requests:
                tell(id=r.id, due=r.due, times=r.times, tokens=r.tokens)
            tell(event="done", more=engine.more() if hasattr(engine, "more") else {})
    finally:
        close(engine)


if __name__ == "__main__":
    main()
