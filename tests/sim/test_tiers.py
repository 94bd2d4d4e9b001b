"""Replays with tiers: times that can be worked out by hand, and what holds for any trace."""

from dataclasses import replace

import numpy as np
import pytest

from hibachi.engine.scheduler.names import NAME_BYTES
from hibachi.engine.scheduler.policy import Fair, Fcfs, Priority
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.simulator.replay import TraceReplay
from hibachi.engine.simulator.simulate import Setup, simulate
from hibachi.engine.simulator.steptime import StepTime
from hibachi.errors import ConfigError

from .test_replay import PLAIN, conversations, trace_of

SIZE = 64  # tokens of a block
LOADS = {"kv_host_load": 0.1 / SIZE, "kv_disk_load": 0.2 / SIZE}  # a block: 0.1 s and 0.2 s


def turns(*names):
    """One request after the other, each of 4 blocks and a token: as much as the cache of `setup` holds."""
    keys = [tuple((name, i) for i in range(4)) for name in names]
    return trace_of(*((100.0 * i, 4 * SIZE + 1, 1) for i in range(len(names))), keys=keys, key_tokens=SIZE)


def setup(**more):
    return Setup(max_num_seqs=1, num_blocks=5, **(LOADS | more))


@pytest.mark.parametrize(
    ("tiers", "first", "host", "disk"),
    [
        ({}, [1, 1, 1, 1], 0, 0),
        ({"kv_host_blocks": 8}, [1, 1, 1.4, 1.4], 8, 0),
        ({"kv_host_blocks": 4}, [1, 1, 1, 1], 0, 0),  # of what it has, the other prompt takes all
        ({"kv_host_blocks": 4, "kv_disk_blocks": 8}, [1, 1, 2.2, 2.2], 0, 8),
        ({"kv_host_blocks": 8, "kv_disk_blocks": 8}, [1, 1, 1.4, 1.4], 8, 0),
    ],
)
def test_what_was_kept_is_loaded_in_the_step_and_waited_for(tiers, first, host, disk):
    run = simulate(turns("a", "b", "a", "b"), setup(**tiers), PLAIN, Fcfs)
    assert run.times("first").tolist() == pytest.approx(first, abs=1e-6)
    figures = run.summary()
    assert figures["hit_tokens"] == (host + disk) * SIZE
    assert (figures["host_hit_tokens"], figures["disk_hit_tokens"]) == (host * SIZE, disk * SIZE)
    assert (figures["loads"], figures["disk_loads"]) == (host + disk, disk)


def test_a_disk_that_is_slower_than_computing_is_waited_for_once_and_no_longer():
    """A step of 257 tokens takes a second, so 4 blocks about 0.997 s; the disk takes 1.2 s."""
    slow = setup(kv_host_blocks=4, kv_disk_blocks=99, kv_disk_load=0.3 / SIZE)
    run = simulate(turns("a", "b", "a", "b", "a"), slow, PLAIN, Fcfs)
    assert run.times("first").tolist() == pytest.approx([1, 1, 1.997, 1, 1], abs=0.001)
    assert run.summary()["hit_tokens"] == 0


class Checked(Scheduler):
    def commit(self, *given):
        done = super().commit(*given)
        self.check()
        return done


@pytest.mark.parametrize(("seed", "policy"), [(0, Fcfs), (1, Fair), (2, Priority), (3, Fcfs)])
def test_blocks_are_conserved_nobody_is_held_for_ever_and_tiers_find_more(seed, policy):
    """The same to the last block with and without leaps."""
    trace = conversations(200, seed=seed).faster(60.0).shared_by(3, 2, seed)
    trace = replace(trace, output=10 * trace.output)
    time = StepTime(step=0.01, token=1e-4, row=0, position=0, pair=0)
    plain = Setup(max_num_seqs=8, num_blocks=60, max_num_batched_tokens=256)
    host = {"kv_host_blocks": 40 + 20 * seed, "kv_host_load": 1e-5, "kv_eviction": ["lru", "frequency"][seed % 2]}
    disk = {**host, "kv_disk_blocks": 300, "kv_disk_load": [1e-5, 5e-5, 9e-5, 2e-4][seed]}
    hits = [simulate(trace, plain, time, policy).summary()["hit_tokens"]]
    for more in (host, disk):
        both = []
        for fast in (True, False):
            what = Setup(max_num_seqs=8, num_blocks=60, max_num_batched_tokens=256, **more)
            limits = what.limits(trace)
            scheduler = (Checked if fast else Scheduler)(limits, policy())
            tiers = what.tiers(scheduler)
            replay = TraceReplay(trace, scheduler, time)
            both.append(replay.run(fast, tiers=tiers))
            end = both[-1]
            assert scheduler.pool.free == scheduler.pool.usable and scheduler.held == 0
            assert tiers.used <= what.kv_host_blocks * NAME_BYTES and np.all(end.last > 0), "all have ended"
        for name in ("started", "first", "last"):
            assert getattr(both[0], name).tolist() == getattr(both[1], name).tolist()
        for name in ("clock", "steps", "hit_tokens", "host_hit_tokens", "disk_hit_tokens", "loads", "disk_loads"):
            assert getattr(both[0], name) == getattr(both[1], name), name
        assert end.planned > both[0].planned and end.preemptions and end.host_hit_tokens + end.disk_hit_tokens > 0
        assert end.host_hit_tokens + end.disk_hit_tokens == scheduler.counts.tier_hits <= end.loads * SIZE
        hits.append(end.hit_tokens)
    assert hits[0] < hits[1] <= hits[2]


def test_a_disk_needs_host_memory():
    with pytest.raises(ConfigError, match="expected kv_host_blocks with kv_disk_blocks=9; got none"):
        simulate(turns("a"), setup(kv_disk_blocks=9), PLAIN, Fcfs)
