"""Everything at once: shared prefixes, few blocks, slow and leaving consumers, deadlines, and faults of every kind."""

import random
import threading
import time

import pytest

from hibachi import (
    DeadlineExceeded,
    Finish,
    ModelError,
    NonFiniteOutput,
    NumpyBackend,
    OutOfCapacity,
    SamplingParams,
    Terms,
)
from hibachi.engine.recording.replay import replay
from hibachi.engine.speculation.drafting import Direct, Drafting
from hibachi.testing.toys import SumBoth, SumPaged, SumState, expected

from .models import PATIENCE, Background, step_with_nan, until

GREEDY = SamplingParams(temperature=0, max_tokens=None)


class Lost(Exception):
    """The device is gone."""


class Trouble(NumpyBackend):
    def fatal(self, error):
        return isinstance(error, Lost)


def troubled(toy, seed):
    """A toy for which every tenth step or so goes wrong; a 7 raises and a 5 makes NaN, in prompts or drawn."""
    rng = random.Random(seed)

    class Troubled(toy):
        luck = 1.0

        def step(self, params, cache, x):
            before, self.luck = self.luck, rng.random()
            luck = self.luck if before > 0.07 else 1.0  # who fails twice is taken to be guilty
            if luck < 0.03:
                raise MemoryError("no more")
            if luck < 0.05:
                raise Lost("off the bus")
            if luck < 0.07:
                raise RuntimeError("a bad moment")
            if (x.tok == 7).any():
                raise ValueError("poisoned")
            return step_with_nan(super().step, x.tok == 5, params, cache, x)

    return Troubled(Trouble())


def right(prompt, n):
    """What comes before the error, and whether there is one."""
    every = [*prompt, *expected(prompt, n)]
    bad = [i for i, token in enumerate(every) if token in (5, 7)]
    # A bad token fails the step that computes it, unless it is the last, which nobody computes.
    first = min(bad, default=len(every))
    return every[len(prompt) : max(first + 1, len(prompt))], first < len(every) - 1


class Guesses:
    """Proposes nothing, right tokens and wrong ones; on some of these the model fails."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def propose(self, keys, tokens, most):
        return [self.one(row, n) if self.random.random() < 0.7 else [] for row, n in zip(tokens, most, strict=True)]

    def one(self, row, n):
        right = expected(row, n)[: self.random.randrange(n + 1)]
        return [*right, *(self.random.randrange(10) for _ in range(n - len(right)))]


SPECULATES = "SumPaged with proposals"  # (a state cannot go back)


@pytest.mark.parametrize("kind", ["SumPaged", SPECULATES, "SumState", "SumBoth"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 25))])
def test_whatever_happens_each_gets_its_own_tokens(serve, kind, seed):
    toy = {"SumState": SumState, "SumBoth": SumBoth}.get(kind, SumPaged)
    engine = serve(
        troubled(toy, seed), backend=Trouble(), max_num_seqs=6, max_num_batched_tokens=24, block_size=4,
        kv_cache_memory_bytes=12 * 4 * 18, pause_after=5, restart="on_failure", max_num_queued_reqs=200,
        scheduling_policy="fair",
    )  # fmt: skip
    if kind == SPECULATES:
        engine._worker.engine.drafting = Drafting(Direct(Guesses(seed), 10), 4)
    ended, n = [], 60

    def client(k):
        rng = random.Random(100 * seed + k)
        for _ in range(n // 4):
            prefix = rng.choice([[], [1, 2, 3, 4], [1, 2, 3, 4, 6, 6, 8, 8], [9, 5, 1, 1]])
            prompt = [*prefix, *(rng.choice([0, 1, 2, 3, 4, 6, 8, 9, 9, 7]) for _ in range(rng.randrange(1, 5)))]
            limit = rng.randrange(1, 16)
            terms = Terms(tenant=f"{k}", priority=rng.randrange(2), timeout=0.01 if rng.random() < 0.1 else PATIENCE)
            stream = engine.run(prompt, GREEDY, max_tokens=limit, terms=terms)
            patience = rng.randrange(1, 30) if rng.random() < 0.2 else None
            want, fails = right(prompt, limit)
            got, error = [], None
            try:
                for token in stream:
                    got.append(token)
                    if len(got) == patience:
                        break
                    if rng.random() < 0.1:
                        time.sleep(0.001)
            except (ModelError, NonFiniteOutput, DeadlineExceeded, OutOfCapacity) as e:
                error = e
            ended.append(stream)
            assert got == want[: len(got)], (prompt, got, want)
            if len(got) == patience:
                continue
            if stream.finish_reason == Finish.LENGTH:
                assert not fails and got == want, (prompt, got, want)
            elif isinstance(error, NonFiniteOutput) or isinstance(error.__cause__, ValueError):
                assert fails and got == want, (prompt, got, want, error)
            else:
                # Bad luck, twice: who fails in the company of a guilty one and then alone is taken to be guilty.
                assert isinstance(error, DeadlineExceeded) or isinstance(error.__cause__, (RuntimeError, MemoryError))

    clients = [Background(client, k) for k in range(4)]
    for c in clients:
        c.result()
    until(lambda: engine.stats().finished == n)
    stats, inner = engine.stats(), engine._worker.engine
    assert len(ended) == n and stats.running == stats.waiting == 0 and stats.free_blocks == stats.blocks
    inner.scheduler.check()
    if kind == SPECULATES:
        assert inner.drafting.drafted.accepted > 10
    assert engine.health().state == "idle" and engine.health().paused == 0
    if (dump := engine.dump())["complete"]:
        replay(dump)
    assert threading.active_count() < 50
