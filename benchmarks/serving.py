"""What serving costs: HTTP, JSON and server-sent events beside the engine alone; streams, connections, leaks.

overhead  64 streams on --model, in this order again and again: the engine alone, the server with the engine in its own
          process, the server with the engine in a child. Expected: at most 10 % less tokens/s than alone.
stream    128 connections, on the shipped model (NumPy, and --backend in --dtype), on one whose steps take 5 ms, and on
          one that costs nothing; the generator runs on the same cores. Expected: 8k tokens/s on the shipped model with
          --backend torch, 20k where it costs nothing. Tokens that come while a stream is being written share its next
          chunk.
dialects  processor time of the server's process a token, 128 streams with steps of 5 ms, in TGI's dialect (greedy, and
          drawn) and in OpenAI's, by turns. Expected: at most 1.15 of OpenAI's.
first     the time to the first token of one request at a time, beside the engine's own. Expected: 5 ms more at most.
idle      2,000 streams that get a token every half second: memory of each. Expected: 100 KB at most.
leak      10,000 requests, 30 % of which hang up in the middle: memory and free blocks, before and after.

Without names, all of them. Every part prints both kinds of server, --engine own and child.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.bench import work
from benchmarks.bench.watch import CONTENDED, Watch
from hibachi import Paged
from hibachi.server.web.client import BadAnswer, Client, Url
from hibachi.testing.bench import report, traffic
from hibachi.testing.bench.generator import AnswerReader, Generator, run
from hibachi.testing.bench.samples import Sample
from hibachi.testing.bench.traffic import Ask, RequestForm

LETTERS = "abcdefghijklmnopqrstuvwxyz ,.:;-"
KINDS = ("own", "child")


class Tokenizer:
    def encode(self, text):
        return [LETTERS.index(c) for c in text]

    def decode(self, ids):
        return "".join(LETTERS[i] for i in ids)


class Free:
    """A model that costs nothing: the next letter of the alphabet."""

    tokenizer = Tokenizer()
    vocab_size, max_model_len, eos_ids = len(LETTERS), 512, ()
    params = None
    _next = np.roll(np.eye(len(LETTERS), dtype=np.float32), 1, axis=1)

    def cache_spec(self):  # so that one step serves all rows; nothing is kept in it
        return [Paged(kv_heads=1, k_dim=1, v_dim=1)]

    def step(self, params, cache, x):
        return self._next[x.tok[x.last].reshape(-1)], cache


class Slow(Free):
    """The same, two steps a second."""

    def step(self, params, cache, x):
        time.sleep(0.5)
        return super().step(params, cache, x)


class Paced(Free):
    """The same, with a step of 5 ms, so that tokens of a stream come one by one."""

    def step(self, params, cache, x):
        time.sleep(0.005)
        return super().step(params, cache, x)


FREE, PACED, SLOW = (f"{Path(__file__)}:{kind.__name__}" for kind in (Free, Paced, Slow))

ALONE = """
import json, sys, time
from hibachi import SamplingParams
from hibachi.llm.own import open_texts
if __name__ == "__main__":
    texts = open_texts(sys.argv[1], **json.loads(sys.argv[2]))
    print("ready", flush=True)
    for line in sys.stdin:
        prompts, new = json.loads(line)
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in new]
        began = time.perf_counter()
        streams = [s for p, q in zip(prompts, params) for s in texts.submit([p], q)]
        pieces = iter(streams[0])
        next(pieces)
        first = time.perf_counter() - began
        for each in (pieces, *streams[1:]):
            for piece in each:
                pass
        print(json.dumps([first, time.perf_counter() - began]), flush=True)
"""


@contextmanager
def alone(model: str, options: dict[str, Any]):
    """The engine without a server, in a process of its own. Gives a function: prompts, new -> seconds to the first
    token and to the last."""
    command = [sys.executable, "-c", ALONE, model, json.dumps(options)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(prompts, new):
        process.stdin.write(json.dumps([prompts, new]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    assert process.stdout.readline() == "ready\n"
    try:
        yield ask
    finally:
        process.stdin.close()
        process.wait()


class Server:
    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def load(self, asks, **options):
        """(figures, processor seconds of the server) of a run. Says so if others used the machine meanwhile."""

        async def inner():
            client = Client(Url.of(self.url), agent="hibachi-bench")
            try:
                return await Generator(client, RequestForm("completions", None), **options).run(asks)
            finally:
                await client.close()

        watch = Watch(self.pid)
        loaded = run(inner())
        use = watch.use()
        others = use.others - loaded.cpu / use.seconds / os.cpu_count()
        if use.seconds > 1 and others > 3 * CONTENDED:
            print(f"  (others used {others:.0%} of the machine in the next run)", flush=True)
        return report.figures(loaded), use.cpu_seconds

    def gauge(self, name: str) -> float:
        return sum(float(x) for x in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self.get("/metrics"), re.M))

    def held(self) -> float:
        """Requests that run, and blocks of the cache that are not free."""
        blocks, free = self.gauge("hibachi_cache_blocks"), self.gauge("hibachi_cache_free_blocks")
        assert blocks > 0
        return self.gauge("hibachi_requests_running") + blocks - free

    def resident(self) -> float:
        """Of the process that has the connections, bytes."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize()


@contextmanager
def server(model: str, kind: str, *flags: str):
    port = _free_port()
    command = [sys.executable, "-m", "hibachi", "serve", model, "--engine", kind, "--port", str(port), *flags]
    process = subprocess.Popen([*command, "--log-level", "warning"])
    found = Server(f"http://127.0.0.1:{port}", process.pid)
    try:
        for _ in range(600):
            try:
                found.get("/ready")
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with status {process.returncode}") from None
                time.sleep(0.1)
        yield found
    finally:
        process.terminate()
        process.wait(60)


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def asks_of(requests):
    return [Ask(r.id, None, r.prompt, r.max_tokens) for r in requests]


def same(n: int, prompt: int, new: int, vocab: int, seed: int):
    made = traffic.Random(prompt, new, vocab_size=vocab, seed=seed)
    return list(islice(made.asks(traffic.arrivals("constant", None, 0)), n))


# ---- the parts -----------------------------------------------------------------------------------------------------


def overhead(args) -> None:
    flags = ["--backend", args.backend, "--dtype", args.dtype, "--max-num-seqs", "64", "--max-model-len", "512"]
    options = {"backend": args.backend, "dtype": args.dtype, "max_num_seqs": 64, "max_model_len": 512}
    rates: dict[str, list[float]] = {"alone": [], "own": [], "child": []}
    cpu: dict[str, list[float]] = {k: [] for k in KINDS}
    with ExitStack() as stack:
        engine = stack.enter_context(alone(args.model, options))
        servers = {k: stack.enter_context(server(args.model, k, *flags)) for k in KINDS}
        for turn in range(args.repeat + 1):  # the first is to warm up
            requests = work.make("W1", args.vocab_size, turn=turn)
            count = work.totals(requests)[1]
            _, seconds = engine([r.prompt for r in requests], [r.max_tokens for r in requests])
            found = {"alone": count / seconds}
            for kind, one in servers.items():
                of, _ = one.load(asks_of(requests))
                assert of["ok"] == len(requests) and of["new_tokens"] == count, of["errors"]
                found[kind] = of["tokens_per_second"]
                if turn:
                    cpu[kind].append(of["cpu_seconds"] / of["chunks"])
            for kind, rate in found.items() if turn else ():
                rates[kind].append(rate)
            print("  " + ", ".join(f"{kind} {rate:.1f}" for kind, rate in found.items()), flush=True)
    print(
        f"overhead: W1 (64 streams) on {Path(args.model).name}, {args.backend} {args.dtype}, medians of {args.repeat}"
    )
    for kind, values in rates.items():
        ratio = median(v / a for v, a in zip(values, rates["alone"], strict=True))
        said = f"; the generator: {1e6 * median(cpu[kind]):.0f} µs a chunk" if kind in cpu else ""
        print(f"  {kind:6} {median(values):8.1f} tokens/s  {ratio:6.3f} of the engine alone{said}")


def stream(args) -> None:
    print("stream: 128 connections, 16 tokens in, 128 out; generator and server on the same cores")
    letters = len(LETTERS)
    for model, how, vocab, title in (
        ("tiny", {"backend": "numpy"}, 1000, "tiny, numpy"),
        ("tiny", {"backend": args.backend, "dtype": args.dtype}, 1000, f"tiny, {args.backend} {args.dtype}"),
        (PACED, {}, letters, "5 ms steps"),
        (FREE, {}, letters, "no model"),
    ):
        flags = [word for name, value in how.items() for word in (f"--{name}", value)]
        with ExitStack() as stack:
            engine = stack.enter_context(alone(model, {"max_num_seqs": 128} | how))
            servers = {k: stack.enter_context(server(model, k, "--max-num-seqs", "128", *flags)) for k in KINDS}
            rates: dict[str, list[Any]] = {"alone": [], "own": [], "child": []}
            for turn in range(args.repeat):
                asks = same(128, 16, 128, vocab, turn)
                seconds = engine([a.prompt for a in asks], [a.new for a in asks])[1]
                rates["alone"].append((128 * 128 / seconds, 0.0, 0.0, 0.0))
                for kind, one in servers.items():
                    of, used = one.load(asks)
                    assert of["ok"] == 128, of["errors"]
                    chunks = of["chunks"]
                    rates[kind].append(
                        (of["tokens_per_second"], chunks / of["seconds"], used / chunks, of["cpu_seconds"] / chunks)
                    )
            for kind, values in rates.items():
                rate, chunks, used, own = (median(v) for v in zip(*values, strict=True))
                said = (
                    f" in {chunks:8.0f} chunks/s; CPU a chunk: server {1e6 * used:4.0f}, generator {1e6 * own:3.0f} µs"
                )
                print(f"  {title:20} {kind:6} {rate:8.0f} tokens/s{said if used else ''}", flush=True)


def dialects(args) -> None:
    print("dialects: 128 streams of 128 tokens, steps of 5 ms; microseconds of the server's process a token")
    drawn = {"temperature": 0.9, "seed": 1}
    forms = {
        "OpenAI, greedy": ("/v1/completions", {"prompt": "hello", "max_tokens": 128, "stream": True, "temperature": 0}),
        "TGI, greedy": ("/generate_stream", {"inputs": "hello", "parameters": {"max_new_tokens": 128}}),
        "OpenAI, drawn": ("/v1/completions", {"prompt": "hello", "max_tokens": 128, "stream": True} | drawn),
        "TGI, drawn": (
            "/generate_stream",
            {"inputs": "hello", "parameters": {"max_new_tokens": 128, "do_sample": True} | drawn},
        ),
    }
    for kind in KINDS:
        with server(PACED, kind, "--max-num-seqs", "128") as one:
            used: dict[str, list[float]] = {name: [] for name in forms}
            for turn in range(args.repeat + 1):  # the first is to warm up
                for name, (path, body) in forms.items():
                    before = _processor(one.pid)
                    run(_ask_all(one, path, json.dumps(body).encode(), 128))
                    if turn:
                        used[name].append(1e6 * (_processor(one.pid) - before) / 128**2)
            for name, values in used.items():
                base = used[f"OpenAI, {name.split()[1]}"]
                ratio = median(v / b for v, b in zip(values, base, strict=True))
                print(f"  {kind:6} {name:15} {median(values):6.1f}  {ratio:5.2f} of OpenAI's", flush=True)


async def _ask_all(one: Server, path: str, body: bytes, n: int) -> None:
    client = Client(Url.of(one.url), agent="hibachi-bench")

    def take(answer, part, now) -> None:
        assert answer.status == 200, part

    try:
        await asyncio.gather(*(client.post(path, body, take) for _ in range(n)))
    finally:
        await client.close()


def _processor(pid: int) -> float:
    """Seconds that a process has used, its children apart."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first(args) -> None:
    print("first: milliseconds to the first token, one request at a time on tiny, 16 tokens in; p50 of 100")
    with ExitStack() as stack:
        engine = stack.enter_context(alone("tiny", {}))
        servers = {k: stack.enter_context(server("tiny", k)) for k in KINDS}
        times: dict[str, list[float]] = {"alone": [], "own": [], "child": []}
        for ask in same(110, 16, 4, 1000, 0):
            found = {"alone": engine([ask.prompt], [ask.new])[0]}
            found |= {kind: one.load([ask])[0]["ttft"]["mean"] for kind, one in servers.items()}
            for kind, value in found.items():
                times[kind].append(1e3 * value)
    base = median(times["alone"][10:])
    for kind, values in times.items():
        print(f"  {kind:6} {median(values[10:]):6.2f}  (+{median(values[10:]) - base:.2f})")


def idle(args) -> None:
    n = args.streams
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    print(f"idle: {n:,} streams, a token each half second; memory of the process that has the connections")
    for kind in KINDS:
        with server(SLOW, kind, "--max-num-seqs", str(n), "--max-num-batched-tokens", str(4 * n)) as one:
            one.load(same(8, 2, 4, len(LETTERS), 0))
            before = one.resident()
            after = run(_open(one, same(n, 2, 500, len(LETTERS), 1)))
            time.sleep(3)
            left = one.resident()
            print(
                f"  {kind:6} {before / 2**20:6.0f} MiB before, {after / 2**20:6.0f} with them, "
                f"{(after - before) / n / 1e3:5.1f} KB each; {left / 2**20:.0f} MiB after they left"
            )


async def _open(one: Server, asks) -> float:
    """Opens all of them, waits until each has had some tokens, and looks at the memory."""
    client = Client(Url.of(one.url), agent="hibachi-bench")
    form = RequestForm("completions", None)
    start = time.perf_counter()
    samples = [Sample(a.id, None, a.new) for a in asks]
    tasks = [
        asyncio.ensure_future(client.post(form.path, form.body(a), AnswerReader(s, start, True)))
        for a, s in zip(asks, samples, strict=True)
    ]
    while min(len(s.chunks) for s in samples) < 3:
        await asyncio.sleep(0.5)
        failed = [t.exception() for t in tasks if t.done()]
        assert not failed and time.perf_counter() - start < 120, (failed[:3], min(len(s.chunks) for s in samples))
    size = one.resident()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return size


class Hangs(Exception):
    pass


class HangUp(AnswerReader):
    """Leaves after some chunks."""

    def __init__(self, *args: Any, after: int) -> None:
        super().__init__(*args)
        self._after = after

    def __call__(self, answer, body, now) -> None:
        super().__call__(answer, body, now)
        if len(self._sample.chunks) >= self._after:
            raise Hangs


def leak(args) -> None:
    n = args.hangups
    print(f"leak: {n:,} requests on tiny, 64 at a time, 16 tokens in, 12 out; 30 % hang up in the middle")
    for kind in KINDS:
        with server("tiny", kind, "--max-num-seqs", "64") as one:
            seen = []
            for part in range(5):  # after each, all blocks must be back
                done, hung = run(_hang_up(one, n // 5, part))
                for _ in range(50):
                    if (used := one.held()) == 0:
                        break
                    time.sleep(0.1)
                seen.append((done, hung, one.resident() / 2**20, used))
            sizes = ", ".join(f"{s[2]:.0f}" for s in seen)
            done, hung = (sum(s[i] for s in seen) for i in (0, 1))
            print(
                f"  {kind:6} {done:,} whole, {hung:,} hung up; MiB after each fifth: "
                f"{sizes}; requests and blocks still held: {[s[3] for s in seen]}"
            )


async def _hang_up(one: Server, n: int, seed: int) -> tuple[int, int]:
    client, form, rng = (
        Client(Url.of(one.url), agent="hibachi-bench"),
        RequestForm("completions", None),
        random.Random(seed),
    )
    places, start = asyncio.Semaphore(64), time.perf_counter()
    done = hung = 0

    async def one_of(ask: Ask) -> None:
        nonlocal done, hung
        async with places:
            sample = Sample(ask.id, None, ask.new)
            after = rng.randint(0, 8) if rng.random() < 0.3 else 10**9
            try:
                await client.post(form.path, form.body(ask), HangUp(sample, start, True, after=after))
                assert sample.status == 200 and sample.error is None, sample
                done += 1
            except Hangs:
                hung += 1
            except BadAnswer as e:
                raise SystemExit(f"a bad answer: {e}") from e

    await asyncio.gather(*map(one_of, same(n, 16, 12, 1000, seed)))
    await client.close()
    return done, hung


PARTS = {part.__name__: part for part in (overhead, stream, dialects, first, idle, leak)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--model", default="m135", help="of `overhead`: see `benchmarks.bench model`")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--hangups", type=int, default=10000)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and the servers with it
    for name in args.parts or PARTS:
        PARTS[name](args)
