"""A soak: the shipped model on PyTorch's CPU for minutes, with random faults; every stream against its solo run.

Clients share prefixes, leave, read slowly and set deadlines; the cache is too small for all who run. Steps run out of
memory, lose the device, raise, or bring NaN for one row, in its output and in what it writes to the cache. At the end
all blocks are free again. Exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import logging
import random
import resource
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import torch

import hibachi
from hibachi import DeadlineExceeded, ModelError, NonFiniteOutput, QueueFull, SamplingParams, Terms
from hibachi_torch.invariant_backend import InvariantTorchBackend

ROWS, BLOCKS, BLOCK_SIZE = 8, 22, 16
BEGINNINGS = (
    "Once upon a time there was a little girl who lived in a small house at the edge of a big, dark wood.",
    "The family had been long settled in Sussex. Their estate was large, and their residence was in the centre of it.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
)


class Lost(RuntimeError):
    """The device is gone, as far as the engine knows."""


class Troubled(InvariantTorchBackend):
    """Steps fail at random while `on`; a prompt with the token `guilty` always raises."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self.on, self.guilty = False, -1
        self.rng = random.Random(seed)
        self.injected: Counter[str] = Counter()
        self._rest = 0  # calls until something may fail again: who fails twice is taken to be guilty

    def fatal(self, error: BaseException) -> bool:
        return isinstance(error, Lost)

    def compile(self, fn: Any, *, donate: Any = ()) -> Any:
        compiled = super().compile(fn, donate=donate)
        if getattr(fn, "__name__", "") != "step":
            return compiled

        def step(params: Any, cache: Any, x: Any) -> Any:
            if bool((x.tok == self.guilty).any()):
                self.injected["rows that raise, calls"] += 1
                self._rest = 20  # the search for the guilty row is not disturbed
                raise ValueError("a poisoned prompt")
            if not self.on:
                return compiled(params, cache, x)
            self._rest -= 1
            luck = self.rng.random() if self._rest < 0 else 1.0
            if luck < 0.02:
                self._rest = 12
            if len(x.tok) > 64 and self.rng.random() < 0.05:
                self.injected["out of memory"] += 1
                raise torch.OutOfMemoryError("no more (simulated)")
            if luck < 0.003:
                self.injected["device lost"] += 1
                raise Lost("off the bus (simulated)")
            if luck < 0.01:
                self.injected["calls that raise"] += 1
                raise RuntimeError("a bad moment (simulated)")
            out, cache = compiled(params, cache, x)
            if luck < 0.02 and len(x.last):
                out = self._poison(out, cache, x)
            return out, cache

        return step

    def _poison(self, out: Any, cache: Any, x: Any) -> Any:
        """NaN in one row's output, and in all that it has just written, as `attend` writes it."""
        self.injected["rows of NaN"] += 1
        j = self.rng.randrange(len(x.last))
        slots = x.slot[x.seg == x.seg[x.last[j]]].long()
        for layer in cache:
            halves = [half.view(-1, *half.shape[2:]) for half in layer]
            for half, rows in zip(halves, self.storable(*(h[slots] * float("nan") for h in halves)), strict=True):
                half[slots] = rows
        out = out.clone()
        out[j] = float("nan")
        return out


class Soak:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.backend = Troubled(seed)
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stop = threading.Event()
        self.lock = threading.Lock()
        honest = self.llm(BLOCKS, enable_prefix_caching=False, max_num_seqs=1)
        self.requests = self.make_requests(honest)
        self.solo = [self.alone(honest, ids, params) for ids, params in self.requests]
        honest.close()
        used = {token for ids, _ in self.requests for token in ids} | {token for out in self.solo for token in out}
        self.backend.guilty = next(token for token in range(100, 10_000) if token not in used)
        self.served = self.llm(
            BLOCKS,
            max_num_seqs=ROWS,
            max_num_queued_reqs=24,
            pause_after=6,
            restart="on_failure",
            scheduling_policy="fair",
        )
        self.engine = self.served.engine

    def llm(self, blocks: int, **options: Any) -> Any:
        model = hibachi.LLM("tiny", backend=self.backend, deterministic=True).model
        position = sum(layer.kv_heads * (layer.k_dim + layer.v_dim) * 4 for layer in model.cache_spec())
        return hibachi.LLM(
            "tiny",
            backend=self.backend,
            deterministic=True,
            max_model_len=160,
            max_num_batched_tokens=128,
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=position * BLOCK_SIZE * (blocks + 1),
            **options,
        )

    def make_requests(self, llm: Any) -> list[tuple[list[int], SamplingParams]]:
        out = []
        for n in range(48):
            text = self.rng.choice(BEGINNINGS)
            ids = llm.tokenizer.encode(text)[: self.rng.choice((8, 20, 33, 60))]
            ids = ids + llm.tokenizer.encode(self.rng.choice((" And then", " One day she", " But nobody knew", "")))
            params = SamplingParams(temperature=0, max_tokens=self.rng.choice((4, 16, 40)))
            out.append((ids, params if n % 2 else params.with_(temperature=0.8, top_k=40, seed=n)))
        return out

    @staticmethod
    def alone(llm: Any, ids: list[int], params: SamplingParams) -> list[int]:
        return list(llm.engine.run(ids, params))

    # ---- clients -------------------------------------------------------------------------------------------------

    def client(self, number: int) -> None:
        rng = random.Random(number)
        while not self.stop.is_set():
            n = rng.randrange(len(self.requests))
            ids, params = self.requests[n]
            kind = rng.choices(("reads", "leaves", "slow", "hurried", "guilty"), (60, 12, 8, 14, 6))[0]
            terms = Terms(
                priority=rng.choice((0, 0, 1)),
                tenant=rng.choice("abc"),
                timeout=rng.choice((0.05, 0.3, 1.0)) if kind == "hurried" else None,
                queue_timeout=rng.choice((None, 0.1)) if kind == "hurried" else None,
                cache_salt=rng.choice((None, None, "x")),
            )
            if kind == "guilty":
                ids = [*ids, self.backend.guilty]
            try:
                stream = self.engine.run(ids, params, terms=terms)
            except QueueFull:
                self.count("refused: the queue was full")
                time.sleep(0.05)
                continue
            self.read(kind, n, stream, rng)

    def read(self, kind: str, n: int, stream: Any, rng: random.Random) -> None:
        want, got = self.solo[n], []
        leave = rng.randrange(1, 6) if kind == "leaves" else None
        try:
            for token in stream:
                got.append(int(token))
                if kind == "slow":
                    time.sleep(0.05)
                if len(got) == leave:
                    stream.close()
                    break
        except (DeadlineExceeded, NonFiniteOutput, ModelError) as e:
            self.count(type(e).__name__)
            if isinstance(e, ModelError) and kind != "guilty":
                self.complain(f"an innocent request raised: {e!r} from {e.__cause__!r}")
            if isinstance(e, DeadlineExceeded) and kind != "hurried":
                self.complain("a request without a deadline was late")
        except BaseException as e:
            self.complain(f"an unexpected error: {e!r}")
        else:
            if kind == "guilty":
                self.complain("a guilty request did not fail")
            elif leave is None or len(got) < leave:
                self.count("finished")
                if got != want:
                    self.complain(f"request {n} is not its solo stream: {got} instead of {want}")
            else:
                self.count("left")
        if kind != "guilty" and got != want[: len(got)]:
            self.complain(f"request {n} does not begin as its solo stream does: {got}, {want}")

    def count(self, what: str) -> None:
        with self.lock:
            self.ended[what] += 1

    def complain(self, what: str) -> None:
        with self.lock:
            self.wrong.append(what)

    # ---- the whole -----------------------------------------------------------------------------------------------

    def run(self, seconds: float, clients: int) -> bool:
        list(self.engine.run(*self.requests[0]))  # whatever is made or checked with the first request is there
        self.backend.on = True
        threads = [threading.Thread(target=self.client, args=(n,), daemon=True) for n in range(clients)]
        began = time.monotonic()
        memory = 0
        for thread in threads:
            thread.start()
        while (passed := time.monotonic() - began) < seconds:
            time.sleep(min(15.0, seconds - passed) + 0.01)
            health = self.engine.health()
            if health.state not in ("running", "idle"):
                self.complain(f"health: {health.state}: {health.message}")
            if passed > seconds / 4:
                memory = memory or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            stats = self.engine.stats()
            print(
                f"{time.monotonic() - began:5.0f} s  {stats.finished:6} ended  {stats.new_tokens:7} tokens  "
                f"{stats.preemptions:5} preemptions  {sum(self.backend.injected.values()):5} faults  "
                f"{len(self.wrong)} wrong",
                flush=True,
            )
        self.stop.set()
        self.backend.on = False
        for thread in threads:
            thread.join(60)
            if thread.is_alive():
                self.complain("a client never got its end")
        if not self.engine.drain(60):
            self.complain("the engine did not drain within a minute")
        return self.report(time.monotonic() - began, memory)

    def report(self, seconds: float, memory: int) -> bool:
        stats, injected = self.engine.stats(), self.backend.injected
        worker = self.engine._worker
        assert worker is not None
        scheduler = worker.engine.scheduler
        scheduler.check()
        if stats.free_blocks != stats.blocks or stats.running or stats.waiting:
            self.complain(f"something was left behind: {stats}")
        if self.ended["NonFiniteOutput"] > injected["rows of NaN"]:
            self.complain("NaN of one row harmed another")
        now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"\n| soak of {seconds:.0f} s on {self.backend.versions()['library']} | |\n|---|---|")
        rows: list[tuple[str, Any]] = [
            ("steps", stats.steps),
            ("new tokens", stats.new_tokens),
            ("preemptions", stats.preemptions),
            ("prefix cache: hit tokens of", f"{stats.prefix_hits:,} of {stats.prefix_queries:,}"),
            ("evictions", stats.evictions),
            *((f"requests: {what}", n) for what, n in sorted(self.ended.items())),
            *((f"faults: {what}", n) for what, n in sorted(injected.items())),
            ("token budget at the end", f"{scheduler.budget} of {scheduler.limits.budget}"),
            ("free blocks at the end", f"{stats.free_blocks} of {stats.blocks}"),
            ("peak memory, after a quarter of the time and at the end", f"{memory // 1024} and {now // 1024} MiB"),
            ("**wrong**", f"**{len(self.wrong)}**"),
        ]
        for what, n in rows:
            print(f"| {what} | {f'{n:,}' if isinstance(n, int) else n} |")
        for what in self.wrong[:20]:
            print("WRONG:", what)
        self.served.close()
        return not self.wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.getLogger("hibachi.engine").setLevel(logging.CRITICAL)  # the faults are meant
    torch.set_num_threads(1)
    good = False
    with suppress(KeyboardInterrupt):
        good = Soak(args.seed).run(args.seconds, args.clients)
    sys.exit(not good)
