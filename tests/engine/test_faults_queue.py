"""Bounds of the queue: how many may wait, for how long, and how far a consumer may be behind."""

import threading
import time
from contextlib import suppress

import pytest

from hibachi import DeadlineExceeded, EngineClosed, Finish, NumpyBackend, QueueFull, SamplingParams, Terms
from hibachi.testing.toys import SumPaged, expected

from ..lib.inside import is_closing, refuses
from .models import PATIENCE, Background, Gate, GatedNumpy, Next, ints, until

GREEDY = SamplingParams(temperature=0, max_tokens=None)
NUMPY = NumpyBackend()


def count(n, start=1):
    return list(range(start + 1, start + 1 + n))


# ---- how many ----------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_at_the_call(serve):
    gate = Gate()
    engine = serve(gate, max_num_seqs=2, max_num_queued_reqs=3)
    streams = [engine.run([i], max_tokens=2) for i in range(5)]  # also before anybody has started
    for _ in range(2):
        with pytest.raises(
            QueueFull,
            match=r"at most 5 requests here \(2 that run at once and max_num_queued_reqs=3 that wait\); got 5",
        ):
            engine.run([9])
    gate.wait()
    streams.pop().close()  # one that waits
    gate.let()
    gate.wait()
    streams.append(engine.run([7], max_tokens=2))
    gate.open()
    assert [s.collect()[-1] for s in streams] == [2, 3, 4, 5, 9]
    assert ints(engine.run([1], max_tokens=1).collect()) == [2]
    assert engine.stats().failed == 0


def test_who_has_seen_the_end_of_a_stream_finds_room(serve):
    engine = serve(max_num_seqs=1, max_num_queued_reqs=0)
    for i in range(200):
        assert ints(engine.run([i], max_tokens=2).collect()) == [i + 1, i + 2]


def test_many_callers_never_get_in_more_than_fit(serve):
    gate = Gate()
    engine = serve(gate, max_num_seqs=2, max_num_queued_reqs=10)
    start, got = threading.Barrier(8), []

    def caller():
        start.wait(PATIENCE)
        for i in range(20):
            with suppress(QueueFull):
                got.append(engine.run([i], max_tokens=1))

    callers = [Background(caller) for _ in range(8)]
    for c in callers:
        c.result()
    assert len(got) == 12
    gate.open()
    for s in got:
        assert len(s.collect()) == 1


# ---- how long ----------------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_running_request_and_keeps_its_tokens(serve):
    gate = Gate()
    engine = serve(gate, max_num_seqs=2)
    late = engine.run([1], terms=Terms(timeout=0.05))
    other = engine.run([1], max_tokens=5)
    for _ in range(2):
        gate.wait()
        gate.let()
    gate.wait()
    time.sleep(0.06)
    gate.open()
    got = []
    with pytest.raises(DeadlineExceeded, match=r"should have ended .* s ago") as caught:
        for token in late:
            got.append(int(token))
    assert isinstance(caught.value, TimeoutError)
    assert got in ([2, 3], [2, 3, 4]) and late.finish_reason == Finish.ERROR
    assert ints(other.collect()) == count(5)
    assert engine.stats().failed == 1


@pytest.mark.parametrize("terms, word", [(Terms(timeout=0.05), "ended"), (Terms(queue_timeout=0.05), "started")])
def test_a_deadline_in_the_queue(serve, terms, word):
    gate = Gate()
    engine = serve(gate, max_num_seqs=1)
    first = engine.run([1], max_tokens=3)
    gate.wait()
    late = engine.run([5], terms=terms)
    time.sleep(0.06)
    gate.open()
    with pytest.raises(DeadlineExceeded, match=f"should have {word}"):
        late.collect()
    assert ints(first.collect()) == count(3) and engine.stats().waiting == 0


def test_who_has_started_may_go_on_after_its_time_in_the_queue(serve):
    gate = Gate()
    engine = serve(gate, max_num_seqs=1)
    stream = engine.run([1], max_tokens=3, terms=Terms(queue_timeout=0.05))
    gate.wait()
    time.sleep(0.06)
    gate.open()
    assert ints(stream.collect()) == count(3)


def test_the_engine_wakes_for_a_deadline_while_it_rests(serve):
    """Nothing is computed, as the consumer reads nothing; nobody sends a command."""
    engine, took = serve(pause_after=2), []
    for _ in range(3):
        began = time.perf_counter()
        stream = engine.run([1], terms=Terms(timeout=0.1))
        until(lambda stream=stream: stream.finish_reason is not None)
        took.append(time.perf_counter() - began)
        assert ints(stream.come()) == [2, 3]
        with pytest.raises(DeadlineExceeded):
            next(stream)
    assert 0.09 < min(took) < 0.6


def test_deadlines_of_requests_that_ended_wake_nobody(serve, monkeypatch):
    from hibachi.engine.engine import Engine

    engine = serve()
    for i in range(20):
        engine.run([i], max_tokens=1, terms=Terms(timeout=0.05)).collect()
    steps, step = [], Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: steps.append(1) or step(self))
    time.sleep(0.15)
    assert len(steps) <= 1 and engine.stats().failed == 0


# ---- how far behind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause_after", [1, 2, 5, 8])
def test_a_consumer_that_is_behind_is_waited_for(serve, pause_after):
    engine = serve(pause_after=pause_after)
    stream = engine.run([1], max_tokens=40)
    got = []
    for _ in range(3):
        until(lambda: engine.health().paused == 1 and len(stream.channel.buffer) == pause_after)
        time.sleep(0.002)
        assert len(stream.channel.buffer) == pause_after
        assert engine.health().state == "idle" and "wait for their consumers: 1" in engine.health().message
        got += [int(next(stream)) for _ in range((pause_after + 1) // 2)]
    got += ints(stream.collect())
    assert got == count(40)


@pytest.mark.parametrize("level", ["no cache", "paged"])
def test_slow_consumers_that_hold_all_rows_make_room(serve, level):
    """They lose their rows to those who wait, and go on where they were when they come back."""
    model = Next() if level == "no cache" else SumPaged(NUMPY)
    right = (lambda p, n: count(n, p[0])) if level == "no cache" else expected
    engine = serve(model, max_num_seqs=3, pause_after=2, block_size=4)
    params = None if level == "no cache" else GREEDY
    slow = [engine.run([i], params, max_tokens=12) for i in range(3)]
    until(lambda: engine.health().paused == 3)
    for i in range(4):
        assert ints(engine.run([i], params, max_tokens=9).collect()) == right([i], 9)
    assert engine.stats().preemptions
    for i, s in enumerate(slow):
        assert ints(s.collect()) == right([i], 12)


def test_slow_consumers_that_hold_all_blocks_make_room(serve):
    engine = serve(
        SumPaged(NUMPY),
        max_num_seqs=4,
        pause_after=8,
        block_size=4,
        kv_cache_memory_bytes=12 * 4 * 8,
        enable_prefix_caching=False,
    )
    slow = [engine.run([i, 1], GREEDY, max_tokens=20) for i in range(2)]
    until(lambda: engine.health().paused == 2)
    blocks = engine.stats().blocks
    big = [1] * (blocks * 4 - 4)
    assert engine.run(big, GREEDY, max_tokens=2).collect() == expected(big, 2)
    for i, s in enumerate(slow):
        assert s.collect() == expected([i, 1], 20)


def test_a_paused_request_is_cancelled_or_dropped(serve):
    engine = serve(SumPaged(NUMPY), max_num_seqs=2, pause_after=2)
    a, b = (engine.run([i], GREEDY, max_tokens=50) for i in (1, 2))
    until(lambda: engine.health().paused == 2)
    a.close()
    del b
    until(lambda: engine.stats().finished == 2)
    stats = engine.stats()
    assert stats.running == 0 and stats.free_blocks == stats.blocks and engine.health().paused == 0


# ---- the end, with requests in every state -----------------------------------------------------------------------


def every_state(serve):
    """An engine with paused, running, preempted and waiting requests, between two steps; and their streams."""
    backend = GatedNumpy()
    engine = serve(
        SumPaged(backend),
        backend=backend,
        max_num_seqs=3,
        pause_after=12,
        block_size=4,
        kv_cache_memory_bytes=12 * 4 * 9,
    )
    streams = [engine.run([i, 1, 1], GREEDY, max_tokens=24) for i in range(6)]
    for _ in range(11):
        backend.wait()
        backend.let()
    backend.wait()
    backend.let()
    backend.wait()
    stats = engine.stats()
    assert engine.health().paused and stats.preemptions and stats.waiting and stats.running
    return engine, backend, streams


def test_close_with_requests_in_every_state(serve):
    engine, backend, streams = every_state(serve)
    closing = Background(engine.close)
    until(lambda: is_closing(engine))
    backend.open()
    closing.result()
    assert {s.finish_reason for s in streams} == {Finish.CLOSED}
    for i, s in enumerate(streams):
        got = s.collect()
        assert got == expected([i, 1, 1], 24)[: len(got)]
    stats = engine.stats()
    assert stats.running == stats.waiting == 0 and stats.free_blocks == stats.blocks


def test_drain_with_requests_in_every_state(serve):
    engine, backend, streams = every_state(serve)
    draining = Background(engine.drain)
    until(lambda: refuses(engine))
    with pytest.raises(EngineClosed, match="draining"):
        engine.run([1], GREEDY, max_tokens=1)
    backend.open()
    assert engine.drain(0.05) is False, "consumers have not read"
    assert [s.collect() for s in streams] == [expected([i, 1, 1], 24) for i in range(6)]
    assert draining.result() is True
    stats = engine.stats()
    assert stats.running == stats.waiting == 0 and stats.free_blocks == stats.blocks


def test_cancelling_in_every_state_frees_all_at_the_next_step(serve):
    engine, backend, streams = every_state(serve)
    for s in streams:
        s.close()
    backend.let()  # the step at hand
    until(lambda: engine.stats().finished == 6)
    stats = engine.stats()
    assert stats.running == stats.waiting == 0 and stats.free_blocks == stats.blocks
    engine.core.scheduler.check()
