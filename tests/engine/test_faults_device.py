"""Failures of a whole step: memory runs out, the device is lost, no output can be used. And rows that share blocks."""

import logging
import time

import numpy as np
import pytest

import hibachi
from hibachi import (
    EngineFailed,
    InvalidModelOutput,
    ModelError,
    NonFiniteOutput,
    NumpyBackend,
    OutOfCapacity,
    SamplingParams,
)
from hibachi.request import Finish
from hibachi.testing.toys import SumBoth, SumLogits, SumPaged, SumState, SumTokens, expected

from .models import GatedNumpy, Next, ints, step_with_nan, until

GREEDY = SamplingParams(temperature=0, max_tokens=None)
POISON = 7
PROMPTS = [[1, 2], [3, 3, 3, 3], [5], [1, 2, 3, 4, 5, 6], [8, 9], [2], [0] * 11, [4]]
TOYS = [SumTokens, SumLogits, SumPaged, SumState, SumBoth]
every_toy = pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.__name__)
paged = pytest.mark.parametrize("toy", [SumPaged, SumBoth], ids=lambda toy: toy.__name__)


class Lost(Exception):
    """The device of these tests is gone."""


class Breakable(GatedNumpy):
    """fail(error): so many of the next forward passes raise it. Notes how many caches were made."""

    def __init__(self):
        super().__init__()
        self.errors, self.caches, self.passes = [], 0, 0

    def fatal(self, error):
        return isinstance(error, Lost)

    def guard(self):
        out = super().guard()
        self.passes += 1
        if self.errors:
            raise self.errors.pop(0)
        return out

    def make_cache(self, *args, **sizes):
        self.caches += 1
        return super().make_cache(*args, **sizes)


def start(serve, model, prompts, *, limit=5, **options):
    """The streams of prompts that all start in one step; the step is not let through yet."""
    backend = model.backend
    engine = serve(model, backend=backend, max_num_seqs=len(prompts), **options)
    params = None if isinstance(model, SumTokens) and not isinstance(model, SumLogits) else GREEDY
    plug = engine.run(prompts[0][:1], params, max_tokens=1)
    backend.wait()
    streams = [engine.run(p, params, max_tokens=limit) for p in prompts]
    plug.close()
    backend.let()
    backend.wait()
    return engine, streams


def check(streams, prompts=PROMPTS, n=5):
    for s, p in zip(streams, prompts, strict=True):
        assert ints(s.collect()) == expected(p, n), p


# ---- memory ------------------------------------------------------------------------------------------------------


def too_much(backend):
    """Ask the library for more than any machine has; its own error comes back."""
    if backend.name == "torch":
        import torch

        return torch.empty(2**50)
    return backend.xp.zeros(2**49, dtype=backend.xp.float32)


def hungry(backend, most):
    """A backend on which a compiled step of more than `most` tokens runs out of memory. `sizes`: tokens of each."""
    cls = type(backend)

    class Hungry(cls):
        def compile(self, fn, *, donate=()):
            compiled = super().compile(fn, donate=donate)
            if getattr(fn, "__name__", "") != "step":
                return compiled

            def step(params, cache, x):
                self.sizes.append(int(x.pos.shape[0]))
                if self.sizes[-1] > most:
                    too_much(self)
                return compiled(params, cache, x)

            return step

    out = Hungry()
    out.sizes = []
    return out


@pytest.mark.parametrize("name, most", [("numpy", 6), ("torch", 6), ("jax", 64)])
def test_memory_that_runs_out_halves_the_budget_for_a_while(serve, caplog, monkeypatch, name, most):
    """The library's own error. On JAX steps are padded to powers of two, so its limit is a larger one."""
    monkeypatch.setattr("hibachi.engine.budget.GROW_AFTER", 10**6)
    monkeypatch.setattr("hibachi.engine.budget.MOST_GROW_AFTER", 10**6)
    backend = hungry(hibachi.load_backend(name), most)
    rows = 8 if name == "jax" else 2
    prompts = [[i % 7, *[1] * 23] for i in range(8)]
    engine = serve(SumPaged(backend), backend=backend, max_num_seqs=rows, block_size=4, enable_prefix_caching=False)
    with caplog.at_level(logging.WARNING, "hibachi.engine"):
        streams = [engine.run(p, GREEDY, max_tokens=5) for p in prompts]
        check(streams, prompts)
    budget = engine.core.scheduler.budget
    assert budget < 8 * 24 and engine.stats().failed == 0
    failures = [n for n in backend.sizes if n > most]
    assert 1 <= len(failures) <= 16, "halving needs few tries"
    assert f"at most {budget} tokens in a step from now on" in caplog.text
    for _ in range(3):  # the first requests may not have come all at once
        seen = len(backend.sizes)
        check([engine.run(p, GREEDY, max_tokens=5) for p in prompts], prompts)
        assert engine.core.scheduler.budget <= budget, "the budget stays halved for as long"
        if max(backend.sizes[seen:]) <= most:
            return
    pytest.fail("each load runs out of memory again")


def test_a_request_that_has_no_room_for_one_token(serve):
    """It alone fails, and afterwards the budget is what it was."""

    class Large(SumPaged):
        def step(self, params, cache, x):
            if (x.tok == POISON).any():
                raise MemoryError("8 PiB")
            return super().step(params, cache, x)

    backend = GatedNumpy()
    prompts = [*PROMPTS[:3], [1, POISON, 2], *PROMPTS[3:]]
    engine, streams = start(serve, Large(backend), prompts)
    backend.open()
    with pytest.raises(OutOfCapacity, match=r"even one token of this request \(MemoryError: 8 PiB\)") as caught:
        streams.pop(3).collect()
    assert isinstance(caught.value.__cause__, MemoryError)
    check(streams)
    assert engine.stats().failed == 1
    assert engine.core.scheduler.budget == 1024


def test_memory_that_runs_out_for_good_fails_all(serve):
    backend = Breakable()
    engine, streams = start(serve, SumPaged(backend), PROMPTS)
    backend.errors = [MemoryError("no more")] * 500
    backend.open()
    for s in streams:
        with pytest.raises(OutOfCapacity):
            s.collect()
    backend.errors = []
    assert engine.run([1, 2], GREEDY, max_tokens=3).collect() == expected([1, 2], 3)


def test_what_a_failed_step_had_computed_is_let_go_before_the_next_try(serve):
    """Otherwise the frames of the error would keep the very arrays that leave no room."""
    import gc
    from weakref import ref

    held = []

    class Big(np.ndarray):
        pass

    class Tries(SumPaged):
        def step(self, params, cache, x):
            assert not held or held[0]() is None, "it is still there"
            if not held:
                big = np.zeros(10).view(Big)
                held.append(ref(big))
                raise MemoryError("no more")
            return super().step(params, cache, x)

    gc.disable()
    try:
        engine = serve(Tries(NumpyBackend()))
        assert engine.run([1, 2], GREEDY, max_tokens=3).collect() == expected([1, 2], 3)
    finally:
        gc.enable()
    assert engine.stats().failed == 0


def test_what_libraries_raise():
    import jax
    import torch

    numpy, of_torch, of_jax = (hibachi.load_backend(name) for name in ("numpy", "torch", "jax"))
    error = jax.errors.JaxRuntimeError
    memory = [
        (numpy, MemoryError()),
        (of_torch, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")),
        (of_torch, RuntimeError("CUDA error: out of memory")),
        (of_torch, MemoryError()),
        (of_jax, error("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")),
        (of_jax, error("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY; RESOURCE_EXHAUSTED: Out of memory")),
    ]
    lost = [
        (of_torch, torch.AcceleratorError("CUDA error: an illegal memory access was encountered")),
        (of_torch, RuntimeError("CUDA error: device-side assert triggered")),
        (of_jax, error("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")),
        (of_jax, error("UNAVAILABLE: connection to the device was reset")),
    ]
    for backend, e in memory:
        assert backend.out_of_memory(e) and not backend.fatal(e), e
    for backend, e in lost:
        assert backend.fatal(e) and not backend.out_of_memory(e), e
    for backend in (numpy, of_torch, of_jax):
        for e in (RuntimeError("shapes do not fit"), ValueError("no"), error("INVALID_ARGUMENT: no")):
            assert not backend.fatal(e) and not backend.out_of_memory(e), e


# ---- the device --------------------------------------------------------------------------------------------------


@every_toy
@pytest.mark.parametrize("restart", [None, "never"])
def test_a_lost_device_fails_every_stream_within_a_second(serve, toy, restart):
    assert min(seconds_to_fail(serve, toy, restart) for _ in range(2)) < 1


def seconds_to_fail(serve, toy, restart):
    backend = Breakable()
    engine, streams = start(serve, toy(backend), PROMPTS, restart=restart)
    params = None if toy is SumTokens else GREEDY
    waiting = engine.run([1], params)
    backend.errors = [Lost("off the bus")]
    began = time.perf_counter()
    backend.open()
    for s in [*streams, waiting]:
        with pytest.raises(EngineFailed, match=r"The device failed with Lost: off the bus.*restart=") as caught:
            s.collect()
        assert isinstance(caught.value.__cause__, Lost) and s.finish_reason == Finish.ERROR
    took = time.perf_counter() - began
    with pytest.raises(EngineFailed, match="off the bus"):
        engine.run([1], params)
    health = engine.health()
    assert health.state == "failed" and "off the bus" in health.message and not health.ok
    return took


@every_toy
@pytest.mark.parametrize("times", [1, 3])
def test_restart_after_a_lost_device(serve, toy, times, caplog):
    backend = Breakable()
    with caplog.at_level(logging.WARNING, "hibachi.engine"):
        engine, streams = start(serve, toy(backend), PROMPTS, restart="on_failure")
        params = None if toy is SumTokens else GREEDY
        waiting = engine.run([1], params, max_tokens=5)
        backend.let(2)
        backend.wait()
        backend.wait()
        made = backend.caches
        backend.errors = [Lost("off the bus")] * times
        backend.open()
        check([*streams, waiting], [*PROMPTS, [1]])
    assert backend.caches == made * (1 + times)
    assert engine.health().restarts == times and engine.stats().failed == 0
    assert f"beginning again, {times} of 3" in caplog.text


class Dies(Breakable):
    """The device is lost when a state is copied for the `at`-th time: to keep it, or to put it back."""

    def __init__(self, at):
        super().__init__()
        self.at, self.copies = at, 0

    def compile(self, fn, *, donate=()):
        if getattr(fn, "__name__", "") != "_copy_states":
            return fn

        def copy(*args):
            self.copies += 1
            if self.copies == self.at:
                raise Lost("off the bus")
            return fn(*args)

        return copy


@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize("toy", [SumState, SumBoth])
def test_a_device_that_is_lost_when_states_are_kept_or_put_back(serve, toy, at):
    backend = Dies(at)
    prompts = [[*PREFIX, *PREFIX, i] for i in range(6)]
    engine = serve(toy(backend), backend=backend, max_num_seqs=2, block_size=4, restart="on_failure")
    backend.open()
    streams = [engine.run(p, GREEDY, max_tokens=5) for p in prompts]
    check(streams, prompts)
    stats = engine.stats()
    assert stats.failed == 0 and stats.prefix_hits and engine.health().restarts == (backend.copies >= at)
    assert backend.copies >= 4


def test_restarts_are_bounded_and_a_step_that_succeeds_renews_them(serve):
    backend = Breakable()
    engine, streams = start(serve, SumPaged(backend), [[1, 2]], limit=20, restart="on_failure")
    for _ in range(4):
        backend.errors = [Lost("off the bus")] * 3
        backend.let(4)
        for _ in range(4):
            backend.wait()
    assert engine.health().restarts == 12
    backend.errors = [Lost("for good")] * 9
    backend.open()
    got = []
    with pytest.raises(EngineFailed, match=r"for good\. It did not help to begin again 3 times"):
        got.extend(streams[0])
    assert engine.health().restarts == 15 and len(backend.errors) == 5
    until(lambda: engine.health().state == "failed")


def test_a_device_that_does_not_even_give_a_new_cache(serve):
    class Dead(Breakable):
        def make_cache(self, *args, **sizes):
            if self.caches:
                self.caches += 1
                raise Lost("no context")
            return super().make_cache(*args, **sizes)

    backend = Dead()
    _, [stream] = start(serve, SumPaged(backend), [[1, 2]], restart="on_failure")
    backend.errors = [Lost("off the bus")]
    backend.open()
    with pytest.raises(EngineFailed, match=r"no context\. It did not help"):
        stream.collect()
    assert backend.caches == 4


# ---- outputs that nobody can use ---------------------------------------------------------------------------------


def test_invalid_outputs_now_and_then_harm_only_their_requests(serve):
    class Sometimes(Next):
        def forward(self, tokens):
            out = super().forward(tokens)
            return out / 2 if (tokens == POISON).any() else out

    engine = serve(Sometimes(), max_num_seqs=1)
    for _ in range(4):
        bad = [engine.run([POISON], max_tokens=2) for _ in range(2)]
        good = engine.run([1], max_tokens=2)
        for s in bad:
            with pytest.raises(InvalidModelOutput):
                s.collect()
        assert ints(good.collect()) == [2, 3]


# ---- rows that share blocks --------------------------------------------------------------------------------------


def poisoned(toy, how):
    """A toy on gated NumPy: rows with the poison raise, or have NaN for logits (and leave NaN in the cache)."""

    class Poisoned(toy):
        def step(self, params, cache, x):
            bad = x.tok == POISON
            if how == "raises" and bad.any():
                raise RuntimeError("poisoned")
            return step_with_nan(super().step, bad & (how == "nan"), params, cache, x)

    return Poisoned(GatedNumpy())


PREFIX = [1, 2, 3, 4, 5, 6, 8, 9]  # two blocks of four


@pytest.mark.parametrize("how", ["raises", "nan"])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_guilty_writer_of_shared_blocks(serve, how, place):
    """It computes what seven others read in the same step. They compute again, and only it fails."""
    prompts = [[*PREFIX, i % 7, i % 3] for i in range(8)]
    prompts[place] = [*PREFIX, POISON, 1]
    engine, streams = start(serve, poisoned(SumPaged, how), prompts, block_size=4)
    engine.model.backend.open()
    with pytest.raises(ModelError if how == "raises" else NonFiniteOutput):
        streams.pop(place).collect()
    check(streams, [p for i, p in enumerate(prompts) if i != place])
    stats = engine.stats()
    assert stats.failed == 1 and stats.prefix_hits >= 8 * 6
    assert stats.free_blocks == stats.blocks


@pytest.mark.parametrize("toy", [SumPaged, SumState, SumBoth])
@pytest.mark.parametrize("how", ["raises", "nan"])
@pytest.mark.parametrize("budget", [2048, 9])
def test_a_poison_in_the_shared_part_fails_all_who_share_it_and_nobody_else(serve, how, toy, budget):
    shared = [1, 2, POISON, 4, 5, 6, 8, 9]
    prompts = [[*shared, 1], [*shared, 2], PROMPTS[1], [*shared, 1], *PROMPTS[3:5]]
    engine, streams = start(serve, poisoned(toy, how), prompts, block_size=4, max_num_batched_tokens=budget)
    engine.model.backend.open()
    for i in (0, 1, 3):
        with pytest.raises(ModelError if how == "raises" else NonFiniteOutput):
            streams[i].collect()
    check([streams[i] for i in (2, 4, 5)], [prompts[i] for i in (2, 4, 5)])
    for _ in range(2):  # nothing bad is left for those who get its blocks, or ask for the same beginning
        assert engine.run([1, 2, 3, 4, 5], GREEDY, max_tokens=30).collect() == expected([1, 2, 3, 4, 5], 30)
    stats = engine.stats()
    assert stats.failed == 3 and stats.free_blocks == stats.blocks


@paged
@pytest.mark.parametrize("poison_at", [0, 4, 8])
def test_readers_of_one_step_come_after_their_writer_when_rows_are_run_apart(serve, toy, poison_at):
    """Equal prompts: one computes nine tokens, the others one each, and a plan has these first."""
    same = [*PREFIX, 5]
    prompts = [same] * 8
    prompts.insert(poison_at, [POISON])
    engine, streams = start(serve, poisoned(toy, "raises"), prompts, block_size=4)
    engine.model.backend.open()
    with pytest.raises(ModelError):
        streams.pop(poison_at).collect()
    check(streams, [same] * 8)
