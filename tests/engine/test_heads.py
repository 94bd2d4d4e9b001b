"""Heads: what becomes of outputs. One that gives three tokens a step gives what one token a step gives."""

import numpy as np
import pytest

import hibachi
from hibachi import SamplingParams
from hibachi.engine.runners.heads import Sampled
from hibachi.engine.runners.runner import Part
from hibachi.engine.runners.tokentable import IDS
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.testing.toys import VOCAB, SumBoth, SumPaged, SumState

from .models import Background

GREEDY = SamplingParams(temperature=0, max_tokens=None)


class Thrice(Sampled):
    """After t the sum goes on with 2t and 4t, so three tokens are known at once. A stop token is the last."""

    def part(self, plan, idx, out, wanted, of=None):
        part = super().part(plan, idx, out, wanted, of)
        first = part.tokens.astype(np.int64)
        tokens = np.stack([first, 2 * first, 4 * first], axis=1) % VOCAB
        counts, stopped = np.full(len(idx), 3), np.zeros(len(idx), bool)
        for n, i in enumerate(idx.tolist()):
            if (rule := plan.seqs[i].owner.stop) is not None and (hit := rule.match(tokens[n])).any():
                counts[n], stopped[n] = hit.argmax() + 1, True
        flat = np.concatenate([row[:n] for row, n in zip(tokens, counts, strict=True)]).astype(np.int32)
        return Part(idx, flat, None, stopped, part.bad, faults=part.faults, counts=counts)


class Pair:
    """Two engines alike, of which one takes three tokens a step."""

    def __init__(self, serve, model, **options):
        options = {"backend": None, "max_num_seqs": 4, "max_model_len": 64, "block_size": 4} | options
        self.single, self.thrice = (serve(model(hibachi.NumpyBackend()), **options) for _ in range(2))
        runner = self.thrice.core.runner
        head = runner.main.head
        runner.main.head = Thrice(head.sampler, runner.tables.of(IDS), runner.tally, "Toy")

    def alike(self, *prompts, **options):
        """What both say, which must be the same."""
        options = {"max_tokens": 8} | options
        both = []
        for engine in (self.single, self.thrice):
            streams = [engine.run(p, GREEDY, **options) for p in prompts]
            both.append([(Background(s.collect).result(), s.finish_reason) for s in streams])
            engine.core.scheduler.check()
        assert both[0] == both[1]
        return both[1]


@pytest.mark.parametrize("model", [SumPaged, SumState, SumBoth])
def test_three_tokens_a_step_are_the_tokens_of_three_steps(serve, model):
    pair = Pair(serve, model)
    prompts = [[1], [2, 3], [4] * 9, [5, 6], [7] * 17, [8]]
    pair.alike(*prompts, max_tokens=24)
    assert pair.thrice.stats().steps < pair.single.stats().steps * 0.6
    assert pair.thrice.stats().new_tokens == pair.single.stats().new_tokens


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stop", range(VOCAB))
def test_a_stop_token_among_them(serve, stop, include):
    Pair(serve, SumPaged).alike([3], [1, 2], stop_rule=stop, include_stop=include)


# ---- the scheduler, alone --------------------------------------------------------------------------------------------


def committed(counts, stopped=None):
    scheduler = Scheduler(Limits(2, 64, 64, 64, 32, 4))
    for n in (3, 6):
        scheduler.add(Seq(n, 20))
    plan = scheduler.schedule()
    stopped = np.zeros(2, bool) if stopped is None else np.array(stopped)
    scheduler.commit(plan, stopped, np.array(counts, np.int32))
    scheduler.check()
    return scheduler, plan


def test_a_row_without_a_token_must_end():
    committed([0, 1], [True, False])
    with pytest.raises(AssertionError, match="goes on"):
        committed([0, 1])


def test_no_later_step_may_have_been_planned():
    scheduler = Scheduler(Limits(1, 64, 64, 64))
    scheduler.add(Seq(3, 20))
    plan = scheduler.schedule()
    scheduler.schedule()
    with pytest.raises(AssertionError, match="later step"):
        scheduler.commit(plan, np.zeros(1, bool), np.array([3], np.int32))
