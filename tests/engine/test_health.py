"""What an engine says of itself: its health, also while it hangs, and the flight recorder, played again."""

import copy
import json
import logging
import random
import threading
import time

import pytest

from hibachi import FeedforwardBatchInference, NumpyBackend, SamplingParams, Terms
from hibachi.engine.recording.replay import ReplayDiffers, read, replay
from hibachi.engine.scheduler.policy import Fair, Fcfs, Priority, Shares
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.request import Finish
from hibachi.testing.toys import SumPaged, expected

from .models import PATIENCE, Gate, Next, ints, until

GREEDY = SamplingParams(temperature=0, max_tokens=None)


def watchdogs():
    return [t for t in threading.enumerate() if t.name == "hibachi-watchdog"]


# ---- health ------------------------------------------------------------------------------------------------------


def test_health_through_a_life(serve):
    gate = Gate()
    engine = serve(gate, max_num_seqs=1)
    health = engine.health()
    assert (health.state, health.ok, health.steps, health.since_step) == ("idle", True, 0, None)
    streams = [engine.run([1], max_tokens=2) for _ in range(3)]
    gate.wait()
    health = engine.health()
    assert (health.state, health.ok, health.waiting, health.running) == ("running", True, 2, 1)
    assert health.message == "Waiting: 2, running: 1."
    gate.open()
    for s in streams:
        s.collect()
    until(lambda: engine.health().state == "idle")
    health = engine.health()
    assert health.steps == 6 and health.running == health.waiting == 0 and 0 <= health.since_step < PATIENCE
    engine.close()
    assert engine.health().state == "closed" and not engine.health().ok


def test_health_of_engines_that_were_never_used():
    engine = FeedforwardBatchInference(Next(), backend="numpy")
    assert engine.health().state == "idle" and engine.dump()["events"] == []
    engine.close()
    assert engine.health().state == "closed"


def test_an_engine_that_hangs_says_so_while_it_hangs(serve, caplog):
    gate = Gate()
    caplog.set_level(logging.ERROR, "hibachi.engine")
    engine = serve(gate, max_num_seqs=2, stall_after=0.2)
    stream = engine.run([1], max_tokens=3)
    gate.wait()
    gate.let()
    gate.wait()
    assert engine.health().state == "running"
    until(lambda: engine.health().state == "stalled")
    health = engine.health()
    assert not health.ok and 0.2 <= health.since_step < 2
    assert health.message.startswith("No step for 0.")
    assert health.message.endswith(" s while work waits (waiting: 0, running: 1).")
    for _ in range(3):
        engine.health()

    def told():
        return [r for r in caplog.records if "No step for" in r.getMessage()]

    until(told)  # by the watchdog, perhaps
    time.sleep(0.1)
    (record,) = told()
    text = record.getMessage()
    assert "in arrive" in text and "models.py" in text, "it does not say where the thread is"
    assert "step: 1 rows, 1 tokens, longest 1, 1 start\n  done in " in text
    assert text.endswith("step: 1 rows, 1 tokens, longest 2"), "the step at hand has not ended"
    gate.open()
    assert ints(stream.collect()) == [2, 3, 4]
    until(lambda: engine.health().state == "idle")


def test_an_idle_engine_is_never_stalled(serve, caplog):
    engine = serve(stall_after=0.02)
    engine.run([1], max_tokens=1).collect()
    until(lambda: engine.health().state == "idle")
    time.sleep(0.1)
    assert engine.health().state == "idle"
    slow = serve(stall_after=0.02, pause_after=1)
    stream = slow.run([1], max_tokens=5)
    time.sleep(0.1)
    assert slow.health().state == "idle" and "No step" not in caplog.text
    assert len(stream.collect()) == 5


def test_work_after_a_long_rest_is_not_taken_for_a_stall(serve):
    gate = Gate()
    engine = serve(gate, stall_after=0.2)
    first = engine.run([1], max_tokens=1)
    gate.let()
    first.collect()
    time.sleep(0.25)
    stream = engine.run([1], max_tokens=1)
    assert engine.health().state == "running"
    gate.open()
    stream.collect()


def test_a_scheduler_that_forgets_a_request_is_a_stall(serve, monkeypatch):
    """Work waits, and the engine rests: the watchdog does not trust the scheduler."""
    engine = serve(stall_after=0.05)
    engine.run([1], max_tokens=1).collect()
    with monkeypatch.context() as m:
        m.setattr(Scheduler, "schedule", lambda self, now=0.0: None)
        stream = engine.run([1], max_tokens=2)
        until(lambda: engine.health().state == "stalled")
    assert ints(engine.run([5], max_tokens=1).collect()) == [6]
    assert ints(stream.collect()) == [2, 3]


def test_the_watchdog_ends_with_its_engine(serve):
    before = set(watchdogs())
    engine = serve()
    engine.run([1], max_tokens=1).collect()
    (mine,) = set(watchdogs()) - before
    engine.close()
    mine.join(PATIENCE)
    assert not mine.is_alive()
    unwatched = serve(stall_after=None)
    unwatched.run([1], max_tokens=1).collect()
    assert set(watchdogs()) <= before and unwatched.health().state in ("running", "idle")


# ---- the flight recorder -----------------------------------------------------------------------------------------


def traffic(engine, seed, n=40):
    """Requests of all kinds that share prefixes, some of which are dropped or not read for a while."""
    rng = random.Random(seed)
    streams = []
    for _ in range(n):
        prompt = [1, 2, 3, 4, 5, 6, 8, 9][: rng.choice([1, 4, 8])] + [
            rng.randrange(10) for _ in range(rng.randrange(1, 8))
        ]
        terms = Terms(priority=rng.randrange(2), tenant=rng.choice("ab"), timeout=PATIENCE)
        streams.append((prompt, engine.run(prompt, GREEDY, max_tokens=rng.randrange(1, 20), terms=terms)))
        if rng.random() < 0.2:
            streams.pop(rng.randrange(len(streams)))[1].close()
        if rng.random() < 0.3:
            time.sleep(0.001)
    for prompt, s in streams:
        got = s.collect()
        assert got == expected(prompt, len(got))
    until(lambda: engine.stats().finished == n)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "shares"])
def test_a_recording_is_played_again(serve, tmp_path, policy):
    path = tmp_path / "plans.jsonl"
    engine = serve(
        SumPaged(NumpyBackend()), record=path, scheduling_policy=policy, max_num_seqs=4, block_size=4,
        kv_cache_memory_bytes=12 * 4 * 14,
        max_num_batched_tokens=16, pause_after=6,
    )  # fmt: skip
    traffic(engine, 1)
    stats = engine.stats()
    assert stats.preemptions and stats.prefix_hits
    engine.close()
    recording = read(path)
    kinds = {event["event"] for event in recording["events"]}
    assert {"add", "plan", "commit", "cancel", "pause", "unpause"} <= kinds
    steps = sum(event["event"] == "plan" and event["plan"] is not None for event in recording["events"])
    assert replay(recording) == steps == stats.steps
    assert recording["policy"] == {"fcfs": Fcfs, "priority": Priority, "fair": Fair, "shares": Shares}[policy].__name__
    if policy == "priority":  # another policy makes other plans
        with pytest.raises(ReplayDiffers):
            replay(recording, Fcfs())


def test_a_replay_finds_what_is_different(serve):
    engine = serve(SumPaged(NumpyBackend()), max_num_seqs=2, block_size=4)
    for i in range(4):
        engine.run([1, 2, 3, 4, i], GREEDY, max_tokens=3).collect()
    dump = engine.dump()
    assert replay(dump) == 12
    plans = [i for i, e in enumerate(dump["events"]) if e["event"] == "plan" and e["plan"]]
    for spoil in (
        lambda events: events[plans[5]]["plan"]["start"].__setitem__(0, 99),
        lambda events: events[plans[0]]["plan"]["seqs"].__setitem__(0, 7),
        lambda events: events.pop(plans[5] + 1),  # a commit
        lambda events: events[plans[0] + 1]["stopped"].append(0),
    ):
        other = copy.deepcopy(dump)
        spoil(other["events"])
        with pytest.raises(ReplayDiffers):
            replay(other)


def test_the_ring_forgets_the_beginning_and_says_so(serve):
    engine = serve(stall_after=None)
    engine.run([1], max_tokens=400).collect()
    until(lambda: engine.health().state == "idle")
    dump = engine.dump()
    assert not dump["complete"] and len(dump["events"]) == 512
    plans = [e["plan"]["start"][0] for e in dump["events"] if e["event"] == "plan" and e["plan"]]
    assert plans == list(range(plans[0], 400)) and len(plans) >= 250
    with pytest.raises(ValueError, match="lacks its beginning"):
        replay(dump)


def test_a_recording_holds_no_tokens(serve):
    """Which blocks are equal can be seen in it, but not what they hold: names differ from recording to recording."""
    dumps = []
    for _ in range(2):
        engine = serve(SumPaged(NumpyBackend()), block_size=4)
        for _ in range(2):
            engine.run([7, 7, 7, 7, 1, 2], GREEDY, max_tokens=3).collect()
        dumps.append(engine.dump())
    keys = [[e["keys"] for e in d["events"] if e["event"] == "add"] for d in dumps]
    for one, again in keys:
        assert len(one) == 1 and one == again
    assert keys[0] != keys[1]


def test_a_dump_while_the_engine_runs(serve):
    engine = serve(max_num_seqs=4)
    streams = [engine.run([i], max_tokens=900) for i in range(8)]
    n = 0
    while any(s.finish_reason is None for s in streams):
        assert len(json.dumps(engine.dump())) and engine.health().ok
        n += 1
    assert n > 2 and all(s.finish_reason == Finish.LENGTH for s in streams)
