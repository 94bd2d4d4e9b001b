"""What one request brings ends that request only: the engine's thread survives, and others get their tokens.

Numbered as the findings that they were: C critical, H high, M medium, L low.
"""

import asyncio
import logging
import math
import os
import sys
import threading
import time
import types

import pytest

import hibachi
from hibachi import (
    AutoregressiveBatchInference,
    ConfigError,
    EngineClosed,
    EngineFailed,
    InternalError,
    InvalidModelOutput,
    InvalidRequest,
    ModelError,
    OutOfCapacity,
    SamplingParams,
    StopRule,
    Terms,
)
from hibachi.common.shapes import CallShapes
from hibachi.engine.recording.replay import read, replay
from hibachi.engine.runners import inputs
from hibachi.engine.runners.calls import MOST_TEXT
from hibachi.engine.scheduler.policy import Fcfs
from hibachi.request import MOST_SECONDS, Finish
from hibachi.testing.toys import SumLogits, SumPaged, expected

from ..engine.models import Background, Gate, GatedNumpy, Next, ints, until
from ..lib.inside import built, core, thread
from .drawn import EXCEPTIONS

GREEDY = SamplingParams(temperature=0, max_tokens=None)
BAD = 7  # the token of a hostile request


def after(engine, prompt=(1, 2), n=4, params=GREEDY):
    """The engine still serves, and gives what it gives alone."""
    stream = engine.run(list(prompt), params, max_tokens=n)
    return Background(stream.collect).result() == expected(list(prompt), n)


# ---- numbers -----------------------------------------------------------------------------------------------------

HUGE = (2**31 - 1, 2**31, 2**63, 2**64, 10**400)


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("name", ["top_k", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "seed"])
def test_c1_huge_integers_end_nobody(serve, name, number):
    engine = serve(SumPaged(hibachi.load_backend("numpy")), max_num_seqs=4, stop_token=3)
    good = engine.run([1, 2], GREEDY, max_tokens=9)
    params = SamplingParams(temperature=0, max_tokens=None).with_(**{name: number})
    found = Background(engine.run([4, 5], params).collect).result()
    assert found == expected([4, 5], len(found)), "it keeps its meaning"
    tokens = good.collect()
    assert tokens == expected([1, 2], len(tokens)) and (len(tokens) == 9 or tokens[-1] == 3)
    assert engine.health().state != "failed"


def test_c1_min_tokens_beyond_what_fits_keeps_stop_tokens_away_up_to_the_end():
    with AutoregressiveBatchInference(SumLogits(hibachi.load_backend("numpy")), max_model_len=12) as engine:
        every = tuple(range(SumLogits(hibachi.load_backend("numpy")).vocab_size))
        params = SamplingParams(temperature=0, max_tokens=None, min_tokens=2**40, stop_token_ids=every[:-1])
        found = Background(engine.run([1, 2], params).collect).result()
        assert len(found) == 10 and set(found) == {every[-1]}


def test_l_long_words_of_a_model_are_cut(serve):
    stream = serve(raiser(ValueError("x" * 10**6))).run([BAD], max_tokens=1)
    with pytest.raises(ModelError, match="1000000 characters") as e:
        Background(stream.collect).result()
    assert len(str(e.value)) < 3000


@pytest.mark.parametrize("temperature", [1e39, 1e300, 1e-320, 5e-324, 1e-30])
def test_l_extreme_temperatures_draw_only_what_is_allowed(serve, temperature):
    """In float32 1e39 is infinite, and -inf / inf was NaN: token 0 came, which was not allowed."""
    engine = serve(SumLogits(hibachi.load_backend("numpy")))
    params = SamplingParams(temperature=temperature, allowed_token_ids=[3, 4, 5], max_tokens=8, seed=1)
    assert set(Background(engine.run([1], params).collect).result()) <= {3, 4, 5}


# ---- deadlines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [1e11, 1e300, 2**62, 1e-320])
def test_c2_any_timeout_with_a_slow_reader(serve, timeout):
    engine = serve(Next(), pause_after=1)
    slow = engine.run([3], max_tokens=50, terms=Terms(timeout=timeout, queue_timeout=timeout))
    if timeout > 1:
        until(lambda: engine.health().paused == 1)
    assert ints(Background(engine.run([5], max_tokens=1).collect).result()) == [6]
    assert engine.health().state == "idle"
    slow.close()


def test_c2_a_century_is_the_longest_time():
    assert Terms(timeout=1e300, queue_timeout=2**80) == Terms(timeout=MOST_SECONDS, queue_timeout=MOST_SECONDS)


# ---- the policy and other commands -------------------------------------------------------------------------------


class Odd(Fcfs):
    """A policy of somebody's own that cannot rank some requests, or hears badly of their end."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    def rank(self, seq):
        if self.method == "rank" and seq.priority == BAD:
            raise ZeroDivisionError("no rank")
        return super().rank(seq)

    def push(self, seq):
        if self.method == "push" and seq.priority == BAD:
            raise ZeroDivisionError("no place")
        super().push(seq)


@pytest.mark.parametrize("method", ["rank", "push"])
def test_c1_a_policy_that_cannot_rank_a_request_ends_that_one(serve, method):
    gate = Gate()
    engine = serve(gate, scheduling_policy=Odd(method), max_num_seqs=2)
    running = engine.run([1], max_tokens=3)
    gate.wait()
    bad = engine.run([2], terms=Terms(priority=BAD, timeout=60.0))
    waits = engine.run([20], max_tokens=2)
    gate.open()
    with pytest.raises(InternalError, match=r"could not handle this request: ZeroDivisionError: no"):
        Background(bad.collect).result()
    assert ints(running.collect()) == [2, 3, 4] and ints(waits.collect()) == [21, 22]
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.failed) == (0, 0, 1)
    core(engine).scheduler.check()


@pytest.mark.parametrize("error", [MemoryError("no more"), OverflowError("too large"), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("fails", ["admit", "suspend"])
def test_c1_a_request_that_the_runner_cannot_take_ends_alone(serve, monkeypatch, error, fails):
    """Beside requests that share its prompt's blocks, which it was to compute; or too few blocks for all."""
    backend = GatedNumpy()
    options, prompts, n = dict(block_size=4), [[1, 2, 3, 4, 5, 6, 8, 9, i] for i in range(4)], 4
    if fails == "suspend":
        options, prompts, n = dict(block_size=2, kv_cache_memory_bytes=12 * 2 * 20), [[i, 1, i] for i in range(4)], 20
    engine = serve(SumPaged(backend), backend=backend, max_num_seqs=4, **options)
    first = engine.run([5], GREEDY, max_tokens=1)
    backend.wait()
    runner = core(engine).runner
    inner, failing = getattr(runner, fails), [error]
    monkeypatch.setattr(runner, fails, lambda *args: fail(failing.pop()) if failing else inner(*args))
    streams = [engine.run(p, GREEDY, max_tokens=n) for p in prompts]
    backend.open()
    first.collect()
    ended, expectation = 0, OutOfCapacity if isinstance(error, MemoryError) else InternalError
    for p, s in zip(prompts, streams, strict=True):
        try:
            assert Background(s.collect).result() == expected(p, n)
        except expectation as e:
            ended += 1
            assert e.__cause__ is error and error.__traceback__ is None
    stats = engine.stats()
    assert ended == 1 == stats.failed and stats.free_blocks == stats.blocks
    core(engine).scheduler.check()


# ---- foreign code that raises what is no Exception ----------------------------------------------------------------


RAISED = (
    *(
        "ValueError",
        "MemoryError",
        "RecursionError",
        "KeyboardInterrupt",
        "SystemExit",
        "CancelledError",
        "GeneratorExit",
    ),
    *("StopIteration", "a BaseException of its own", "one without a text", "a group"),
)
names = pytest.mark.parametrize("error", [EXCEPTIONS[name]() for name in RAISED], ids=RAISED)


def raiser(error):
    """A model, level 0, that raises for hostile requests."""

    class Raises(Next):
        def forward(self, tokens):
            if (tokens == BAD).any():
                raise error
            return super().forward(tokens)

    return Raises()


@names
@pytest.mark.parametrize("how", ["sync", "async"])
def test_h1_whatever_a_model_raises_ends_its_request(serve, error, how):
    model = raiser(error)
    if how == "async":
        inner = model.forward

        async def forward(tokens):
            await asyncio.sleep(0)
            return inner(tokens)

        model.forward = forward
        if isinstance(error, (StopIteration, GeneratorExit)):
            pytest.skip("a coroutine cannot raise it")
    engine = serve(model, max_num_seqs=3)
    good = [engine.run([100 * i], max_tokens=9) for i in (1, 2)]
    bad = engine.run([BAD], max_tokens=2)
    with pytest.raises(OutOfCapacity if isinstance(error, MemoryError) else ModelError):
        Background(bad.collect).result()
    for i, s in zip((1, 2), good, strict=True):
        assert ints(Background(s.collect).result()) == [100 * i + k for k in range(1, 10)]
    assert engine.health().state == "idle"


@names
def test_h1_whatever_a_stop_predicate_or_a_processor_raises_ends_its_request(serve, error):
    def fails(*_):
        raise error

    engine = serve(SumLogits(hibachi.load_backend("numpy")), max_num_seqs=3)
    good = engine.run([1, 2], GREEDY, max_tokens=6)
    bad = [
        engine.run([3], GREEDY, max_tokens=6, stop_rule=StopRule(where=fails)),
        engine.run([4], GREEDY.with_(logits_processors=[fails]), max_tokens=6),
    ]
    for s in bad:
        with pytest.raises(InvalidRequest, match=type(error).__name__):
            Background(s.collect).result()
    assert Background(good.collect).result() == expected([1, 2], 6)


def test_h1_a_defect_of_ours_is_told_from_one_of_the_model(serve, monkeypatch):
    engine = serve(SumPaged(hibachi.load_backend("numpy")), max_num_seqs=2)
    assert after(engine)

    def lower(*args, **options):
        raise IndexError("a defect")

    lower = exec_in("hibachi.engine.scheduler.lower", lower)
    for name in ("lower", "lower_one"):
        monkeypatch.setattr(inputs, name, lower)
    with pytest.raises(InternalError, match=r"IndexError: a defect.*Please report it"):
        Background(engine.run([1, 2], GREEDY, max_tokens=2).collect).result()


def exec_in(module, function):
    """The function, as if it stood in that module."""
    return types.FunctionType(function.__code__, vars(sys.modules[module]), function.__name__)


def test_h1_a_wrong_signature_is_named_before_any_request(serve):
    class Two(Next):
        def forward(self, tokens, more):
            return tokens

    with pytest.raises(ConfigError, match=r"Two\.forward is called as `forward\(tokens\)`; got .*argument: 'more'"):
        serve(Two())


# ---- failures keep text ------------------------------------------------------------------------------------------


class Large:
    """An array of activations, in the words of this test."""

    alive = 0

    def __init__(self):
        Large.alive += 1

    def __del__(self):
        Large.alive -= 1


def test_h6_a_failure_keeps_the_words_of_its_traceback_and_no_frames(serve):
    class Holds(Next):
        def forward(self, tokens):
            hidden = Large()
            if (tokens == BAD).any():
                try:
                    raise KeyError("inner")
                except KeyError as e:
                    raise ValueError("bad row", id(hidden)) from e
            return super().forward(tokens)

    engine = serve(Holds(), max_num_seqs=4)
    streams = [engine.run([BAD], max_tokens=2) for _ in range(8)]
    errors = []
    for s in streams:
        with pytest.raises(ModelError, match=r"ValueError: .*bad row") as caught:
            Background(s.collect).result()
        errors.append(s.error)
        del caught
    assert Large.alive == 0, "frames are kept"
    notes = errors[0].__notes__[0]
    assert "in forward" in notes and len(notes) < MOST_TEXT + 100
    assert isinstance(errors[0].__cause__, ValueError) and isinstance(errors[0].__cause__.__cause__, KeyError)
    assert "fail" in {e["event"] for e in engine.dump()["events"]}


# ---- outputs that nobody can use ---------------------------------------------------------------------------------


def test_h7_health_and_log_say_that_every_output_is_invalid(serve, caplog):
    class Wrong(Next):
        right = False

        def forward(self, tokens):
            return super().forward(tokens) if self.right else tokens[:, -1] / 2

    engine = serve(Wrong(), max_num_seqs=1)
    with caplog.at_level(logging.ERROR, "hibachi.engine"):
        for _ in range(5):
            with pytest.raises(InvalidModelOutput):
                Background(engine.run([1], max_tokens=2).collect).result()
    health = engine.health()
    assert health.ok and "Every output of the last 5 steps was invalid: Wrong.forward must" in health.message
    assert len([r for r in caplog.records if "every output of the last" in r.message]) == 1
    engine.model.right = True
    assert ints(Background(engine.run([1], max_tokens=1).collect).result()) == [2]
    assert "invalid" not in engine.health().message


# ---- a loop that fails, and begins again -------------------------------------------------------------------------


DEFECT = RuntimeError("a defect")


def breaks(engine, monkeypatch, times=1, *, by=DEFECT):
    """The next `times` plans are never made: the scheduler of the moment raises."""
    inner, left = type(built(engine).scheduler).schedule, [by] * times

    def schedule(self, now=0.0):
        if left and self.waiting + self.running:
            raise left.pop()
        return inner(self, now)

    monkeypatch.setattr(type(built(engine).scheduler), "schedule", schedule)
    return left


@pytest.mark.parametrize("by", [RuntimeError("a defect"), SystemExit(1), MemoryError("no more")])
@pytest.mark.parametrize("toy", [SumLogits, SumPaged])
def test_c1_after_a_failed_loop_new_requests_are_served_by_a_new_one(serve, monkeypatch, toy, by):
    engine = serve(toy(hibachi.load_backend("numpy")), restart="on_failure", scheduling_policy="fair", max_num_seqs=2)
    assert after(engine)
    before = engine.stats()
    breaks(engine, monkeypatch, by=by)
    lost = [engine.run([i], GREEDY, max_tokens=3) for i in range(1, 4)]
    ended = []
    for i, s in enumerate(lost, 1):
        try:
            ended.append(Background(s.collect).result() == expected([i], 3))
        except EngineFailed as e:
            ended.append(type(by).__name__ in str(e))
    assert all(ended)
    assert after(engine)
    stats, health = engine.stats(), engine.health()
    assert health.state == "idle" and health.restarts == 1
    assert stats.new_tokens > before.new_tokens and stats.free_blocks == stats.blocks
    core(engine).scheduler.check()


def test_c1_three_failed_loops_in_a_row_without_a_token_are_the_end(serve, monkeypatch):
    engine = serve(SumPaged(hibachi.load_backend("numpy")), restart="on_failure")
    breaks(engine, monkeypatch, times=100)
    for _ in range(4):
        with pytest.raises(EngineFailed, match="a defect"):
            Background(engine.run([1], GREEDY, max_tokens=2).collect).result()
    until(lambda: engine.health().state == "failed")
    with pytest.raises(EngineFailed):
        engine.run([1], GREEDY)
    assert engine.drain(5) is False


def test_c1_a_token_in_between_forgives(serve, monkeypatch):
    engine = serve(SumPaged(hibachi.load_backend("numpy")), restart="on_failure")
    left = breaks(engine, monkeypatch, times=0)
    for _ in range(5):
        left.append(RuntimeError("a defect"))
        with pytest.raises(EngineFailed):
            Background(engine.run([1], GREEDY, max_tokens=2).collect).result()
        assert after(engine)
    assert engine.health().restarts == 5


def test_c1_a_recording_goes_on_with_the_new_loop(serve, monkeypatch, tmp_path):
    engine = serve(
        SumPaged(hibachi.load_backend("numpy")), restart="on_failure", record=tmp_path / "record", max_num_seqs=2
    )
    assert after(engine)
    breaks(engine, monkeypatch)
    with pytest.raises(EngineFailed):
        Background(engine.run([1], GREEDY, max_tokens=2).collect).result()
    assert after(engine)
    engine.close()
    monkeypatch.undo()
    assert replay(read(tmp_path / "record")) >= 8


def fail(error):
    raise error


# ---- memory that runs out ----------------------------------------------------------------------------------------


class Hungry(SumPaged):
    """There is no memory for hostile requests, and a limit of tokens for all."""

    most = 10**9
    together = False

    def step(self, params, cache, x):
        if (x.tok == BAD).any() and (not self.together or len(x.last) > 1):
            raise MemoryError("8 PiB")
        if len(x.tok) > self.most:
            raise MemoryError("enough")
        return super().step(params, cache, x)


def test_l_memory_that_runs_out_for_one_request_slows_down_no_other(serve):
    """It has thousands of tokens; each step that fails halves its own share, and no other request's."""
    model = Hungry(hibachi.load_backend("numpy"))
    engine = serve(model, max_model_len=3000, block_size=16, max_num_seqs=8, max_num_batched_tokens=1024)
    good = [engine.run([0] * i, GREEDY, max_tokens=40) for i in range(1, 7)]  # whose sums are never the bad token
    bad = engine.run([BAD] * 2000, GREEDY, max_tokens=4)
    with pytest.raises(OutOfCapacity):
        Background(bad.collect).result()
    for i, s in enumerate(good, 1):
        assert Background(s.collect).result() == expected([0] * i, 40)
    assert core(engine).scheduler.budget == 1024


def test_l_a_budget_that_was_halved_recovers(serve):
    model = Hungry(hibachi.load_backend("numpy"))
    engine = serve(model, max_model_len=3000, block_size=16, max_num_seqs=8, max_num_batched_tokens=256)
    model.most = 40
    prompts = [[i, *[1] * 30] for i in range(6)]
    streams = [engine.run(p, GREEDY, max_tokens=3) for p in prompts]
    for p, s in zip(prompts, streams, strict=True):
        assert Background(s.collect).result() == expected(p, 3)
    scheduler = core(engine).scheduler
    assert scheduler.budget < 256
    model.most = 10**9
    for _ in range(40):
        assert after(engine, n=60)
        if scheduler.budget == 256:
            break
    assert scheduler.budget == 256


def test_l_rows_that_fail_only_together_cannot_stop_the_others(serve):
    model = Hungry(hibachi.load_backend("numpy"))
    model.together = True
    engine = serve(model, block_size=16, max_num_seqs=4, max_num_batched_tokens=64)
    streams = [engine.run([BAD if i == 0 else 1, i], GREEDY, max_tokens=30) for i in range(4)]
    for i, s in enumerate(streams):
        assert Background(s.collect).result() == expected([BAD if i == 0 else 1, i], 30)
    assert core(engine).scheduler.budget >= 4


class Donates(hibachi.NumpyBackend):
    """A call that fails has cost the cache, as where a library gives its memory to compiled calls (JAX)."""

    def usable(self, cache):
        return False


@pytest.mark.parametrize("place", [0, 4])
def test_l_a_request_that_costs_the_cache_again_and_again_is_found(serve, place):
    """Others compute what was lost again, and succeed, so they look innocent; it never comes past one length."""
    model = Hungry(hibachi.load_backend("numpy"))
    engine = serve(model, backend=Donates(), max_num_seqs=8, max_num_batched_tokens=64, block_size=4)
    prompts = [[0] * i for i in (1, 4, 5, 6)]
    prompts.insert(place, [0, 0, 0, BAD])
    streams = [engine.run(p, GREEDY, max_tokens=200) for p in prompts]
    with pytest.raises(OutOfCapacity):
        Background(streams.pop(place).collect).result()
    assert all(s.finish_reason is None for s in streams)  # they did not have to end first
    prompts.pop(place)
    for p, s in zip(prompts, streams, strict=True):
        assert Background(s.collect).result() == expected(p, 200)
    assert core(engine).scheduler.budget == 64


# ---- after a fork ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of JAX, if it was imported before
def test_m2_an_engine_used_after_a_fork_raises_at_the_call(serve):
    gate = Gate()
    engine = serve(gate, max_num_seqs=1)
    stream, waits = engine.run([1], max_tokens=2), engine.run([5], max_tokens=1)
    gate.wait()
    come, go = os.pipe()
    child = os.fork()
    if not child:
        said = []
        for what in (lambda: engine.run([3]), stream.collect, waits.collect):
            try:
                what()
                said.append("nothing")
            except EngineClosed as e:
                said.append("made before a fork" if "made before a fork" in str(e) else str(e))
            except BaseException as e:
                said.append(repr(e))
        said += [engine.health().state, str(engine.drain(1))]
        engine.close()
        os.write(go, ", ".join(said).encode())
        os._exit(0)
    os.close(go)
    gate.open()
    heard = Background(lambda: os.read(come, 10_000).decode()).result()
    os.waitpid(child, 0)
    os.close(come)
    assert heard == "made before a fork, made before a fork, made before a fork, closed, False"
    assert ints(stream.collect()) == [2, 3] and ints(waits.collect()) == [6]


# ---- the end comes -----------------------------------------------------------------------------------------------


class Hangs(Next):
    """A forward pass that takes until the test ends."""

    def __init__(self):
        super().__init__()
        self.inside, self.over = threading.Event(), threading.Event()

    def forward(self, tokens):
        self.inside.set()
        assert self.over.wait(30)
        return super().forward(tokens)


def test_m10_close_lets_a_hanging_forward_go(caplog):
    model = Hangs()
    engine = AutoregressiveBatchInference(model, max_model_len=100, max_num_seqs=1)
    running, waiting = engine.run([1]), engine.run([2])
    assert model.inside.wait(20)
    late = engine.run([3])
    Background(engine.close, 0.1).result()
    for s in (running, waiting, late):
        assert Background(s.collect).result() == [] and s.finish_reason == Finish.CLOSED
    assert "did not end within 0.1 s" in caplog.text and "self.over.wait(30)" in caplog.text
    with pytest.raises(EngineClosed):
        engine.run([1])
    model.over.set()
    thread(engine).join(20)
    assert not thread(engine).is_alive(), "it ends when its forward does"


def test_a_close_that_waits_for_nothing_tells_of_nothing_but_what_hangs(caplog):
    """The offline runs close so: on a full disk a user saw where an idle thread stood."""
    engine = AutoregressiveBatchInference(Next(), max_model_len=100)
    engine.run([1], max_tokens=2).collect()
    engine.close(0)
    assert "did not end" not in caplog.text
    model = Hangs()
    engine = AutoregressiveBatchInference(model, max_model_len=100)
    running = engine.run([1])
    assert model.inside.wait(20)
    engine.close(0)
    assert running.finish_reason == Finish.CLOSED
    assert "did not end within 1.0 s" in caplog.text and "self.over.wait(30)" in caplog.text
    model.over.set()
    thread(engine).join(20)


@pytest.mark.parametrize("what", ["close", "drain"])
def test_m10_any_number_of_seconds_to_wait(serve, what):
    for timeout in (-1, 0, 2**31, 2**63, 10**400, 1e300, math.inf, None):
        engine = serve(Next())
        assert ints(engine.run([1], max_tokens=2).collect()) == [2, 3]
        Background(getattr(engine, what), timeout).result()
    for wrong in (math.nan, "1", []):
        with pytest.raises(ConfigError, match="timeout must be a number of seconds"):
            getattr(serve(Next()), what)(wrong)


def test_m10_an_async_forward_is_cancelled_at_the_end():
    begun, cancelled = threading.Event(), threading.Event()

    class Awaits(Next):
        async def forward(self, tokens):
            begun.set()
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    engine = AutoregressiveBatchInference(Awaits(), max_model_len=100)
    stream = engine.run([1])
    assert begun.wait(20)
    Background(engine.close, 0.05).result()
    assert cancelled.wait(20) and not thread(engine).is_alive()
    assert stream.collect() == [] and stream.finish_reason == Finish.CLOSED


@pytest.mark.parametrize("how", ["exit", "ctrl-c"])
def test_m10_the_interpreter_ends_though_a_forward_hangs(how):
    import signal
    import subprocess

    script = f"""
import logging, threading, time, hibachi
logging.basicConfig()
from hibachi.engine import worker
worker.CLOSE_WITHIN = 0.3
inside = threading.Event()
class M:
    def forward(self, t):
        inside.set()
        time.sleep(60)
engine = hibachi.AutoregressiveBatchInference(M(), max_model_len=9, backend="numpy")
stream = engine.run([1])
inside.wait()
print("inside", flush=True)
{"stream.collect()" if how == "ctrl-c" else ""}
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "inside\n"
    if how == "ctrl-c":
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert "did not end within" in errors and "in forward" in errors
    assert ("KeyboardInterrupt" in errors) == (how == "ctrl-c")


def test_m10_drain_ends_where_the_engine_stalls(caplog):
    model = Hangs()
    engine = AutoregressiveBatchInference(model, max_model_len=100, stall_after=0.2)
    engine.run([1], max_tokens=1)
    stream = engine.run([1], max_tokens=1)
    assert model.inside.wait(20)
    assert Background(engine.drain).result() is False
    model.over.set()
    assert ints(stream.collect()) == [2]
    engine.close()


def test_m10_a_model_that_drains_its_own_engine_gets_an_error(serve):
    class Drains(Next):
        def forward(self, tokens):
            self.engine.drain()

    model = Drains()
    model.engine = serve(model)
    with pytest.raises(ModelError, match="cannot wait for its requests"):
        Background(model.engine.run([1], max_tokens=1).collect).result()


def test_m10_a_step_that_compiles_is_no_stall():
    """On a backend that compiles a program for each shape, the first call of a shape may take long."""

    class Compiles(hibachi.NumpyBackend):
        shapes = CallShapes(few="all")

    model = Hangs()
    engine = AutoregressiveBatchInference(model, max_model_len=100, stall_after=0.1, backend=Compiles())
    stream = engine.run([1], max_tokens=2)
    assert model.inside.wait(20)
    until(lambda: "is being compiled" in engine.health().message)
    assert engine.health().state == "running"
    model.over.set()
    assert len(stream.collect()) == 2
    model.over.clear()
    model.inside.clear()
    again = engine.run([1], max_tokens=1)
    assert model.inside.wait(20)
    until(lambda: engine.health().state == "stalled")
    model.over.set()
    again.collect()
    engine.close()
