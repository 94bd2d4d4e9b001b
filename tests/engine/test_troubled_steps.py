"""`test_overlap` without threads: the same troubles in an order that a seed decides, so that what fails fails again."""

import random
import time
from types import SimpleNamespace

import pytest

from hibachi import Finish, NonFiniteOutput, SamplingParams, Terms
from hibachi.engine import autoregressive, engine
from hibachi.errors import PromptTooLong
from hibachi.request import Request

from .test_overlap import GREEDY, OTHERS, right, served, troubled

PREFIXES = ([], [1, 2, 3, 4], [1, 2, 3, 4, 6, 6, 8, 8], [9, 4, 1, 1])
REQUESTS = 60


class Asked:
    """What was asked for, what must come, and what has come so far."""

    def __init__(self, rng, toy_engine):
        last = [rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]) for _ in range(rng.randrange(1, 5))]
        self.prompt, limit = [*rng.choice(PREFIXES), *last], rng.randrange(1, 16)
        stop = rng.randrange(10) if rng.random() < 0.3 else None
        self.want, self.fails = right(self.prompt, limit)
        if stop in self.want:
            cut = self.want[: self.want.index(stop) + 1]
            self.fails, self.want = self.fails and cut == self.want and stop not in (5, 7), cut
        params: SamplingParams = GREEDY if rng.random() < 0.85 else rng.choice(OTHERS)
        late = 0.01 if rng.random() < 0.1 else None
        terms = Terms(tenant=str(rng.randrange(6)), priority=rng.randrange(2), timeout=late)
        self.job = toy_engine.check(Request(self.prompt, params, max_tokens=limit, stop_rule=stop, terms=terms))
        self.got = []

    def read(self):
        """Its new tokens; True if it has ended. They are its own, and it ends for a reason of its own."""
        channel = self.job.channel
        assert channel.pause_after is None or len(channel.buffer) <= channel.pause_after
        while channel.buffer:
            self.got.append(channel.buffer.popleft())
            channel.eased()
        assert self.got == self.want[: len(self.got)], (self.prompt, self.got, self.want)
        if channel.finish is None:
            return False
        guilty = isinstance(channel.error, NonFiniteOutput) or isinstance(
            getattr(channel.error, "__cause__", None), ValueError
        )
        if channel.finish is not Finish.CANCELLED and (guilty or channel.error is None):
            assert guilty == self.fails and self.got == self.want, (self.prompt, self.got, self.want, channel.error)
        return True


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 40))])
def test_whatever_happens_in_whatever_order_each_gets_its_own_tokens(serve, first, monkeypatch, caplog):
    caplog.set_level("CRITICAL")
    clock = SimpleNamespace(
        monotonic=lambda: clock.now, perf_counter=time.perf_counter, process_time=time.process_time, now=0.0
    )
    monkeypatch.setattr(engine, "time", clock)
    monkeypatch.setattr(autoregressive, "time", clock)
    for seed in range(first * 50, first * 50 + 50):
        rng = random.Random(seed)
        toy, backend = troubled(seed)
        faced = served(
            serve,
            backend,
            toy,
            max_num_seqs=rng.choice([2, 3, 6]),
            max_num_batched_tokens=rng.choice([6, 24]),
            kv_cache_memory_bytes=rng.choice([7, 9, 12]) * 4 * 10,
            restart="on_failure",
            scheduling_policy=rng.choice(["fair", "fcfs", "priority", "shares"]),
            pause_after=rng.choice([None, None, 2, 5]),
        )
        inner = faced.core
        asked, live = 0, []
        while asked < REQUESTS or live:
            clock.now += 0.001 * rng.random()
            while not inner.inbox.empty():
                do, job = inner.inbox.get()
                do(job)
            while asked < REQUESTS and rng.random() < 0.4:
                asked += 1
                try:
                    live.append(Asked(rng, faced))
                except PromptTooLong:
                    continue  # for so small a cache
                inner.add(live[-1].job)
            for request in live:
                if rng.random() < 0.004:
                    inner.cancel(request.job)
            inner.step()
            inner.scheduler.check()
            try:
                live = [request for request in live if rng.random() < 0.3 or not request.read()]
            except AssertionError as e:
                raise AssertionError(f"seed {seed}, step {inner.stats().steps}: {e}") from None
        faced.close()
