"""Everything at once: shared prefixes, few blocks, slow and leaving consumers, deadlines, and faults of every kind."""

import random
import threading
import time

import pytest

from hibachi import DeadlineExceeded, Finish, ModelError, NonFiniteOutput, OutOfCapacity, Terms
from hibachi.engine.speculation.drafting import Direct, Drafting
from hibachi.testing.toys import SumBoth, SumPaged, SumState, expected

from .models import PATIENCE, Background, until
from .test_overlap import GREEDY, OTHERS, Late, finish, right, served, troubled


class Guesses:
    """Proposes nothing, right tokens and wrong ones; on some of these the model fails."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def propose(self, keys, tokens, most):
        return [self.one(row, n) if self.random.random() < 0.7 else [] for row, n in zip(tokens, most, strict=True)]

    def one(self, row, n):
        right = expected(row, n)[: self.random.randrange(n + 1)]
        return [*right, *(self.random.randrange(10) for _ in range(n - len(right)))]


KINDS = {  # (toy, which steps begin before the last one is read, are there faults)
    "paged": (SumPaged, False, True),
    "with proposals": (SumPaged, False, True),  # (a state cannot go back)
    "state": (SumState, False, True),
    "both": (SumBoth, False, True),
    "overlapping": (SumPaged, True, True),
    "overlapping, calm": (SumPaged, True, False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 40))])
def test_whatever_happens_each_gets_its_own_tokens(serve, kind, seed):
    toy, overlap, troubles = KINDS[kind]
    model, backend = troubled(seed, toy) if troubles else (toy, Late())
    engine = served(
        serve, backend, model, max_num_seqs=6, kv_cache_memory_bytes=12 * 4 * 14, overlap=overlap, pause_after=5,
        restart="on_failure", max_num_queued_reqs=200, scheduling_policy="fair",
    )  # fmt: skip
    if kind == "with proposals":
        engine.core.drafting = Drafting(Direct(Guesses(seed), 10), 4)
    n, bad = 90, [7, 5] if troubles else []

    def client(k):
        rng = random.Random(100 * seed + k)
        for _ in range(n // 6):
            prefix = rng.choice([[], [1, 2, 3, 4], [1, 2, 3, 4, 6, 6, 8, 8], [9, 4, 1, 1]])
            prompt = [*prefix, *(rng.choice([0, 1, 2, 3, 4, 6, 8, 9, 9, *bad]) for _ in range(rng.randrange(1, 5)))]
            limit = rng.randrange(1, 16)
            terms = Terms(tenant=f"{k}", priority=rng.randrange(2), timeout=0.01 if rng.random() < 0.1 else PATIENCE)
            params = GREEDY if rng.random() < 0.85 else rng.choice(OTHERS)
            stop = rng.randrange(10) if rng.random() < 0.3 else None
            stream = engine.run(prompt, params, max_tokens=limit, terms=terms, stop_rule=stop)
            patience = rng.randrange(1, 30) if rng.random() < 0.2 else None
            want, fails = right(prompt, limit) if troubles else (expected(prompt, limit), False)
            if stop in want:
                cut = want[: want.index(stop) + 1]
                fails, want = fails and len(cut) == len(want) and stop not in (5, 7), cut
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
            assert got == want[: len(got)], (prompt, got, want)
            if len(got) == patience:
                continue
            if stream.finish_reason in (Finish.LENGTH, Finish.STOP):
                assert not fails and got == want, (prompt, got, want)
            elif isinstance(error, NonFiniteOutput) or isinstance(error.__cause__, ValueError):
                assert fails and got == want, (prompt, got, want, error)
            else:  # bad luck, twice: who fails in the company of a guilty one and then alone is taken to be guilty
                assert isinstance(error, DeadlineExceeded) or isinstance(error.__cause__, (RuntimeError, MemoryError))

    clients = [Background(client, k) for k in range(6)]
    for c in clients:
        c.result()
    until(lambda: engine.stats().finished == n)
    finish(engine)
    if kind == "with proposals":
        assert engine.core.drafting.drafted.accepted > 10
    assert toy is SumState or engine.stats().preemptions
    assert (backend.ahead > 10) == overlap
    until(lambda: engine.health().state == "idle" and not engine.health().paused)
    assert threading.active_count() < 50
