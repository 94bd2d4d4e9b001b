"""The engine's thread: when it starts, sleeps and ends, and who learns of it."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from weakref import ref

import pytest

from hibachi import AutoregressiveBatchInference, EngineClosed, Finish
from hibachi.engine import worker
from hibachi.engine.engine import Engine

from ..lib.inside import is_closing, refuses, thread
from .models import PATIENCE, Background, Gate, Next, ints, until

before: set[threading.Thread] = set()  # threads of engines that other tests keep for all of theirs


@pytest.fixture(autouse=True)
def _others():
    before.update(threading.enumerate())
    yield
    before.clear()


def engine_threads():
    return [t for t in threading.enumerate() if t.name == "hibachi-engine" and t not in before]


# ---- idle --------------------------------------------------------------------------------------------------------


def test_no_thread_before_the_first_request(serve):
    engine = serve()
    assert not engine_threads()
    for _ in range(3):
        engine.run([1], max_tokens=1).collect()
        assert len(engine_threads()) == 1
    assert engine_threads()[0].daemon


def test_an_idle_engine_serves_at_once(serve):
    """H-39: a request after idle is served without waiting a poll tick (100 ms in the crate)."""
    engine = serve()
    took = []
    for _ in range(5):
        assert engine.run([1], max_tokens=1).collect()
        began = time.perf_counter()
        engine.run([1], max_tokens=1).collect()
        took.append(time.perf_counter() - began)
    assert min(took) < 0.05


def test_an_idle_engine_does_nothing(serve, monkeypatch):
    steps = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: steps.append(1) or step(self))
    engine = serve()
    engine.run([1], max_tokens=1).collect()
    until(lambda: len(steps) == 2)  # the second finds nothing to do
    threading.Event().wait(0.25)
    assert len(steps) == 2


# ---- close -------------------------------------------------------------------------------------------------------


def test_close(serve):
    """H-40: close(): the running step finishes, streams end, within 300 ms; close twice is fine."""
    assert min(seconds_to_close(serve) for _ in range(3)) < 0.3  # one of which nothing else held up


def seconds_to_close(serve):
    gate = Gate()
    engine = serve(gate, max_num_seqs=1)
    a, b = engine.run([1]), engine.run([2])
    gate.wait()
    closing = Background(engine.close)
    until(lambda: is_closing(engine))
    began = time.perf_counter()
    gate.let()
    assert ints(a.collect()) == [2]  # what the running step gave
    assert b.collect() == []
    closing.result()
    took = time.perf_counter() - began
    assert (a.finish_reason, b.finish_reason) == (Finish.CLOSED, Finish.CLOSED)
    assert len(gate.shapes) == 1 and not engine_threads()
    engine.close()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.finished, stats.failed) == (0, 0, 2, 0)
    return took


def test_run_after_close(serve):
    used, fresh = serve(), serve()
    used.run([1], max_tokens=1).collect()
    for engine in (used, fresh):
        engine.close()
        for _ in range(2):
            with pytest.raises(EngineClosed, match="Make a new one"):
                engine.run([1])
    assert thread(fresh) is None, "it was started to be refused"


def test_leaving_a_with_block_closes(serve):
    gate = Gate()
    with serve(gate) as engine:
        stream = engine.run([1])
        gate.open()
        next(stream)
    assert stream.finish_reason == Finish.CLOSED


def test_leaving_an_async_with_block_does_not_block_the_loop(serve):
    gate = Gate()

    async def main():
        async def later():
            gate.open()

        async with serve(gate) as engine:
            stream = engine.run([1])
            await asyncio.to_thread(gate.wait)
            other = asyncio.create_task(later())  # runs only if the loop is free while we close
        await other
        return stream.finish_reason

    assert asyncio.run(main()) == Finish.CLOSED


def test_close_from_the_engines_own_thread(serve):
    engine = serve()

    def where(batch):
        engine.close()
        return batch == 3

    stream = engine.run([1], stop_rule=where)
    assert ints(stream.collect()) == [2] and stream.finish_reason == Finish.CLOSED
    engine.close()


# ---- drain -------------------------------------------------------------------------------------------------------


def test_drain_finishes_what_was_accepted_and_takes_nothing_new(serve):
    gate = Gate()
    engine = serve(gate, max_num_seqs=1)
    streams = [engine.run([i], max_tokens=3) for i in range(3)]
    gate.wait()
    draining = Background(engine.drain)
    until(lambda: refuses(engine))
    with pytest.raises(EngineClosed, match="draining"):
        engine.run([1])
    gate.open()
    assert draining.result() is True
    assert [s.finish_reason for s in streams] == [Finish.LENGTH] * 3
    engine.close()
    with pytest.raises(EngineClosed, match="is closed"):
        engine.run([1])


def test_drain_with_a_timeout(serve):
    gate = Gate()
    engine = serve(gate)
    stream = engine.run([1], max_tokens=2)
    gate.wait()
    for timeout in (0, 0.01):
        assert engine.drain(timeout) is False
    gate.open()
    assert engine.drain(PATIENCE) is True and stream.finish_reason == Finish.LENGTH
    assert engine.drain(0) is True


def test_drain_knows_of_requests_that_the_engine_has_not_seen_yet(serve):
    for _ in range(50):
        engine = serve()
        streams = [engine.run([1], max_tokens=2) for _ in range(3)]
        assert engine.drain(PATIENCE)
        assert [s.finish_reason for s in streams] == [Finish.LENGTH] * 3
        engine.close()


def test_drain_after_cancelled_requests_and_twice_at_once(serve):
    gate = Gate()
    engine = serve(gate, max_num_seqs=1)
    a, b = engine.run([1]), engine.run([2])
    gate.wait()
    drains = [Background(engine.drain) for _ in range(2)]
    b.close()
    del a
    gate.open()
    assert [d.result() for d in drains] == [True, True]


def test_close_ends_a_drain(serve):
    gate = Gate()
    engine = serve(gate)
    stream = engine.run([1])
    gate.wait()
    draining = Background(engine.drain)
    until(lambda: refuses(engine))
    closing = Background(engine.close)
    until(lambda: is_closing(engine))
    gate.open()
    closing.result()
    assert draining.result() is True and stream.finish_reason == Finish.CLOSED


# ---- being dropped -----------------------------------------------------------------------------------------------


def fresh(model=None):
    return AutoregressiveBatchInference(model or Next(), max_model_len=1000, backend="numpy")


def test_an_engine_that_is_dropped_while_idle_leaves_no_thread():
    engine = fresh()
    engine.run([1], max_tokens=1).collect()
    gone = ref(engine)
    del engine
    assert gone() is None
    until(lambda: not engine_threads())


def test_an_open_stream_keeps_its_engine_alive():
    engine = fresh()
    gone = ref(engine)
    stream = engine.run([1], max_tokens=500)
    del engine
    assert gone() is not None
    assert ints(stream.collect()) == list(range(2, 502))
    assert gone() is None, "a stream that has ended does not"
    until(lambda: not engine_threads())


def test_engine_and_stream_dropped_in_the_midst():
    gate = Gate()
    stream = fresh(gate).run([1])
    gate.wait()
    del stream
    gate.open()
    until(lambda: not engine_threads())


def test_an_engine_in_a_circle_with_its_stream_is_found_by_the_garbage_collector():
    engine = fresh()
    engine.stream = engine.run([1], max_tokens=500)
    del engine
    gc.collect()
    until(lambda: not engine_threads())


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "del engine",
        "raise SystemExit(0)",
        "import threading; threading.Thread(target=next, args=(stream,)).start()",
        "import asyncio; asyncio.run(anext(stream.__aiter__()))",
    ],
)
def test_the_interpreter_exits_cleanly_with_an_open_engine(ending):
    code = f"""
import hibachi
class Next:
    def forward(self, tokens): return tokens[:, -1] + 1
engine = hibachi.AutoregressiveBatchInference(Next(), max_model_len=3000)
stream = engine.run([1])
{ending}
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_running_step_finishes_before_the_interpreter_exits():
    """A thread inside an array library while the interpreter goes down can crash the process."""
    code = """
import threading, time, hibachi
begun = threading.Event()
class Slow:
    def forward(self, tokens):
        begun.set()
        time.sleep(0.3)
        print("the step is done")
        return tokens[:, -1] + 1
engine = hibachi.AutoregressiveBatchInference(Slow(), max_model_len=3000)
stream = engine.run([1])
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the step is done\n", "")


# ---- many callers ------------------------------------------------------------------------------------------------


def test_many_threads_start_one_engine(serve):
    engine = serve(max_num_seqs=8)
    start = threading.Barrier(8)

    def caller(i):
        start.wait(PATIENCE)
        return [ints(engine.run([i * k], max_tokens=3).collect()) for k in range(10)]

    callers = [Background(caller, i) for i in range(8)]
    assert [c.result() for c in callers] == [[[i * k + n for n in (1, 2, 3)] for k in range(10)] for i in range(8)]
    assert len(engine_threads()) == 1


def test_a_thread_that_cannot_start_is_the_callers_error(serve, monkeypatch):
    engine = serve()
    with monkeypatch.context() as m:

        def refuse(self):
            raise RuntimeError("can't start new thread")

        m.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            engine.run([1])
    assert ints(engine.run([1], max_tokens=1).collect()) == [2]
    assert engine.drain(PATIENCE)


def test_at_the_end_of_the_interpreter_all_engines_share_one_limit(monkeypatch):
    class Closes:
        def close(self, timeout):
            limits.append(timeout)
            time.sleep(0.01)

    limits, engines = [], [Closes() for _ in range(3)]
    monkeypatch.setattr(worker, "_workers", set(engines))
    monkeypatch.setattr(worker, "CLOSE_WITHIN", 0.015)
    worker._close_all()
    first, second, last = limits
    assert 0.01 < first <= 0.015 and second < first - 0.009 and last == 0
