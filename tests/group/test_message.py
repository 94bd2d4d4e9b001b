"""What rank 0 tells the others of a step: few bytes, from which the whole arrays come."""

import numpy as np
import pytest

from hibachi.engine.group.message import Astray, Mirror, StepCall
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits


def steps(limits, n, *, vocab=50_000, draft=False, waiting=4):
    """Plans of a run with shared prefixes, cancels and, in a small pool, preemptions, as calls of the model."""
    rng, scheduler = np.random.default_rng(0), Scheduler(limits)
    for _ in range(n):
        while scheduler.waiting < waiting:
            seq = Seq(int(rng.integers(3, 200)), int(rng.integers(1, 200)))
            seq.keys = [("shared", i) if i < 3 else object() for i in range(seq.prompt_len // limits.block_size)]
            scheduler.add(seq)
        if rng.random() < 0.05 and scheduler.order:
            scheduler.cancel(scheduler.order[int(rng.integers(len(scheduler.order)))])
        if draft:
            for seq in scheduler.order:
                seq.draft = int(rng.integers(0, 4)) if seq.row >= 0 and not scheduler.prefilling(seq) else 0
        plan = scheduler.schedule()
        more = 0 if plan.draft is None else plan.draft
        q = plan.q + more
        wide = -(-int((plan.start + q).max()) // limits.block_size)
        last = [
            at for i, end in enumerate(np.cumsum(q)) if plan.emit[i] for at in range(end - 1 - (q - plan.q)[i], end)
        ]
        tok = rng.integers(0, vocab, int(q.sum())).astype(np.int32)
        rows = plan.rows.astype(np.int32)
        yield plan, StepCall(tok, rows, plan.start, q, scheduler.block_table[rows, :wide], np.array(last, np.int32))
        counts = 1 + (rng.integers(0, 9, len(rows)) % (1 + more)) if plan.draft is not None else np.ones(len(rows), int)
        scheduler.commit(plan, np.zeros(int(plan.emit.sum()), bool), counts.astype(np.int32)[plan.emit])


@pytest.mark.parametrize("blocks, draft", [(900, False), (160, False), (900, True)])
def test_the_other_side_has_the_arrays_of_every_step(blocks, draft):
    limits = Limits(64, 128, 64, 400, blocks=blocks, block_size=16)
    here, there = Mirror(limits), Mirror(limits)
    preempted, sizes = 0, []
    for step, (plan, call) in enumerate(steps(limits, 1200, draft=draft)):
        preempted += len(plan.preempted)
        data = here.encode(step, call)
        number, found = there.decode(data)
        assert number == step
        tok, want = call.packed(16, (1, 32), 64)
        got_tok, got = found.packed(16, (1, 32), 64)
        assert np.array_equal(tok, got_tok)
        for name in ("pos", "slot", "seg", "row", "start", "kv_len", "cu_q", "last"):
            assert np.array_equal(getattr(want, name), getattr(got, name)), (step, name)
        if plan.draft is None and call.q.max() == 1 and len(call.row) >= 40:
            sizes.append(len(data) * 64 / len(call.row))
    assert (preempted > 20) == (blocks == 160)
    if blocks == 900 and not draft:
        assert len(sizes) > 50 and np.median(sizes) < 200 and max(sizes) <= 400


def test_a_thousand_rows_take_eight_bytes_each():
    limits = Limits(1024, 4096, 256, 400, blocks=70_000, block_size=16)
    here = Mirror(limits)
    sizes = [
        (len(data) - 4 * int((call.q - 1).sum())) / len(call.row)  # without the tokens of prompts
        for step, (_, call) in enumerate(steps(limits, 300, vocab=120_000, waiting=64))
        if (data := here.encode(step, call)) and len(call.row) > 1000 and (call.q > 1).sum() < 16
    ]
    assert len(sizes) > 50 and max(sizes) <= 8


def test_a_side_that_went_astray_is_told_the_step():
    limits = Limits(8, 64, 64, 400, blocks=100, block_size=16)
    here, there = Mirror(limits), Mirror(limits)
    with pytest.raises(Astray, match="step 64 "):
        for step, (_, call) in enumerate(steps(limits, 100)):
            data = here.encode(step, call)
            if step == 20:  # a message that one side has not got
                continue
            there.decode(data)
