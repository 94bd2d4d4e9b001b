"""Linked requests: each is what it is alone, on every rung, whoever is beside it, and a fault ends no one else.

Continuations of one prompt are those of `run` with their seeds, and their prompt is computed once.
"""

import threading
from functools import cache, partial

import numpy as np
import pytest

from hibachi import (
    AutoregressiveBatchInference,
    Beams,
    Guidance,
    NumpyBackend,
    OutOfCapacity,
    SamplingParams,
    load_model,
)
from hibachi.engine import build
from hibachi.engine.runners.memory import Memory
from hibachi.engine.sampling.uniforms import fork
from hibachi.engine.speculation.drafting import Direct, Drafting
from hibachi.llm.model.files import TINY
from hibachi.testing.toys import SumBoth, SumLogits, SumOwn, SumOwnState, SumPaged, SumState
from hibachi_jax import JaxBackend
from hibachi_torch import TorchBackend

from ..guide.toyguides import rule, toy_guides
from .frames import DrawnState
from .linking import NEW, PROMPTS, asked, drawn, said, searched, whole
from .models import GatedNumpy, until
from .test_equality_matrix import Preempting, Proposing

KINDS = list(PROMPTS)
HEAT = 400.0  # of the toys, whose margin is 1000


def tiny(backend):
    return load_model(TINY, backend.invariant(), max_model_len=64)


MODELS = {  # (make, temperature)
    "tiny, numpy": (lambda: tiny(NumpyBackend()), 1.0),
    "tiny, torch": (lambda: tiny(TorchBackend()), 1.0),
    "tiny, jax": (lambda: tiny(JaxBackend()), 1.0),
    "level 1": (lambda: SumLogits(NumpyBackend()), HEAT),
    "own cache": (lambda: SumOwn(NumpyBackend()), HEAT),
    "own state": (lambda: SumOwnState(TorchBackend()), HEAT),
    "state": (lambda: SumState(NumpyBackend()), HEAT),
    "both": (lambda: SumBoth(TorchBackend()), HEAT),
}
CONDITIONS = {
    "company": dict(max_num_seqs=16),
    "chunk": dict(max_num_seqs=16, max_num_batched_tokens=17, max_prefill_tokens=3, enable_prefix_caching=False),
    "parts": dict(max_num_seqs=4),
    "little memory": dict(max_num_seqs=12, cache_tokens=112, max_num_batched_tokens=16),
    "preempted": dict(max_num_seqs=16),
    "proposals": dict(max_num_seqs=13),
}


def engine_of(model, **options):
    deterministic = True if isinstance(model, SumOwn) else None  # each row by itself, if nothing else will do
    return AutoregressiveBatchInference(
        model, **{"max_model_len": 64, "block_size": 4, "deterministic": deterministic} | options
    )


@pytest.fixture(scope="module")
def alone():
    """The model, and what each kind of request answers with nobody beside it: the oracle."""

    @cache
    def get(name):
        make, heat = MODELS[name]
        model, want = make(), {}
        with engine_of(model, enable_prefix_caching=False) as engine:
            for kind in KINDS:
                want[kind] = said(asked(engine, kind, heat))
            each = (engine.run(PROMPTS["many"], drawn(heat, fork(7, i) if i else 7, logprobs=1)) for i in range(5))
            assert want["many"] == [said([stream])[0] for stream in each], "not those of their seeds"
            assert (
                len({str(tokens) for tokens, *_ in want["many"]}) > 2 and len({str(b[0]) for b in want["beams"]}) == 3
            )
        return model, want, heat

    return get


def conditions():
    for name in MODELS:
        for condition in CONDITIONS if "jax" not in name else ("company", "preempted"):
            pages = "tiny" in name or name == "both"
            if pages or condition not in ("little memory", "preempted") or (name, condition) == ("state", "preempted"):
                yield name, condition


@pytest.mark.parametrize(("name", "condition"), [*conditions()])
def test_linked_requests_are_what_they_are_alone(name, condition, alone, monkeypatch):
    model, want, heat = alone(name)
    if condition == "preempted":
        monkeypatch.setattr(build, "RecordedScheduler", Preempting)
    with engine_of(model, **CONDITIONS[condition]) as engine:
        if condition == "proposals":
            engine.core.drafting = Drafting(Direct(Proposing(), 10), 3)
        for _ in range(2):  # the second time with what is cached
            streams = {kind: asked(engine, kind, heat) for kind in KINDS}
            assert {kind: said(each) for kind, each in streams.items()} == want
        whole(engine, replays=condition != "preempted")
        if condition in ("preempted", "little memory"):
            assert engine.stats().preemptions


def test_the_prompt_is_computed_once():
    with engine_of(tiny(NumpyBackend()), max_num_seqs=8, enable_prefix_caching=False) as engine:
        for kind, params in ("samples", drawn(1.0)), ("beams", searched(6, 6)):
            before = engine.meters().computed
            streams = engine.run_many([*range(40)], params, 6)
            assert len({tuple(s.collect()) for s in streams}) == 6, kind
            assert engine.meters().computed - before == 40 + 6 * (NEW - 1)
        before = engine.stats()
        assert before.prompt_tokens == 80 and before.finished == 12 and before.new_tokens == 12 * NEW
        streams = engine.run_many([*range(40)], drawn(1.0, max_tokens=1), 20)  # three parts
        assert [len(s.collect()) for s in streams] == [1] * 20 and engine.stats().prompt_tokens == 200


def test_a_model_that_draws_itself_computes_the_last_token_for_each():
    prompt = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
    with AutoregressiveBatchInference(DrawnState(), max_num_seqs=8, enable_prefix_caching=False) as engine:
        each = [
            engine.run(prompt, SamplingParams(seed=fork(7, i) if i else 7, max_tokens=NEW)).collect() for i in range(5)
        ]
        before = engine.meters().computed
        got = [s.collect() for s in engine.run_many(prompt, SamplingParams(seed=7, max_tokens=NEW), 5)]
        assert np.array_equal(got, each) and len(np.unique(np.array(each)[:, 0, 0])) == 5
        assert engine.meters().computed - before == 29 + 5 * NEW
        whole(engine)


# ---- who leaves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["queued", "before the fork", "after it"])
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", ["many", "beams"])
def test_a_reader_that_leaves_takes_no_other_along(kind, who, when):
    backend = GatedNumpy()
    with engine_of(SumPaged(backend), backend=backend, max_num_seqs=5, max_num_batched_tokens=6) as engine:
        backend.free = True
        want, other = said(asked(engine, kind, HEAT, 3)), said([engine.run([3, 1], drawn(HEAT))])
        engine.reset_cache()
        backend.free = False
        first = engine.run([4, 4, 4], drawn(HEAT)) if when == "queued" else None
        if first is not None:
            backend.wait()
        streams = asked(engine, kind, HEAT, 3)
        if first is None:
            backend.wait()
        if when == "after it":
            backend.let(3)
            until(lambda: engine.stats().new_tokens or engine.core.scheduler.waits)
        for i in who:
            streams[i].close()
        beside = engine.run([3, 1], drawn(HEAT))
        backend.open()
        rest = [i for i in range(3) if i not in who]
        assert said([streams[i] for i in rest]) == [want[i] for i in rest]
        assert said([beside]) == other and all(streams[i].finish_reason == "cancelled" for i in who)
        assert first is None or len(first.collect()) == NEW
        whole(engine)


def test_a_form_is_made_for_those_who_stay():
    """It waits in line behind others, and meanwhile the first reader leaves."""
    with engine_of(tiny(NumpyBackend()), max_num_seqs=8) as engine:
        toy_guides(engine)
        gate = engine.forms.guides.gate = threading.Event()

        def form(i, **more):
            return drawn(1.0, structured_outputs=rule(range(5, 20 + i), [7, 8], most=4, **more))

        plugs = [engine.run([1, 2], form(i, waits=True)) for i in range(2)]
        streams = engine.run_many([1, 2, 3], form(5), 3) + engine.run_many([1, 2, 3], form(6).with_(n=2, beams={}))
        gone = engine.run_many([1, 2, 3], form(7), 2)
        for stream in (streams[0], streams[3], *gone):
            stream.close()
        until(lambda: engine.stats().finished == 4)
        gate.set()
        for stream in (*streams[1:3], streams[4], *plugs):
            tokens = stream.collect()
            assert len(tokens) == 4 and {*tokens[1::2]} <= {7, 8} and {*tokens[::2]} <= {*range(5, 26)}
        assert engine.forms.guides.compiled == 4
        whole(engine)


@pytest.mark.parametrize("what", ["many", "beams", "mixed"])
def test_a_slow_form_goes_in_turns(what):
    """Rows that are linked wait as one; others go on meanwhile."""
    with engine_of(tiny(NumpyBackend()), max_num_seqs=8) as engine:
        toy_guides(engine)
        ask = partial(rule, [5, 6, 7, 8], [9, 10], most=5)
        out = {}
        for dear in (0.0, 0.02):
            how = drawn(1.0, structured_outputs=ask(dear=dear) if dear else ask())
            if what == "mixed":
                streams = [engine.run([1, 2, 3], how, guidance=Guidance(2.0, prompt=[4]))]
            else:
                how = how if what == "many" else how.with_(n=3, beams={"width": 4})
                streams = engine.run_many([1, 2, 3], how, 3)
            others = [engine.run([1 + i], drawn(1.0, max_tokens=20)) for i in range(2)]
            out[dear] = [s.collect() for s in streams]
            assert [len(s.collect()) for s in others] == [20, 20]
        assert out[0.0] == out[0.02] and all(len(each) == 5 for each in out[0.0])
        whole(engine)


# ---- faults --------------------------------------------------------------------------------------------------------


def test_who_runs_in_the_last_row_keeps_its_parameters():
    """The rows of beams that end take up what they go on from no more."""
    with engine_of(tiny(NumpyBackend()), max_num_seqs=5) as engine:
        params = drawn(1.0, 3, max_tokens=40)
        want = engine.run([5, 3, 1, 4], params).collect()
        for k in range(4):
            stops = range(10 * k, 10 * k + 400)
            how = dict(repetition_penalty=1.5, stop_token_ids=stops, beams=Beams(early_stopping=True))
            streams = engine.run_many([*range(k, 40)], searched(4, **how))
            assert engine.run([5, 3, 1, 4], params).collect() == want
            assert all(s.collect() for s in streams)


@pytest.mark.parametrize("fails", [(1,), (2, 3), (1, 2)], ids=str)
def test_a_fork_that_fails_costs_time_only(fails, monkeypatch, caplog):
    """The cache is lost, and all compute again: also the tokens that came in that step."""
    with engine_of(tiny(NumpyBackend()), max_num_seqs=12) as engine:
        want, calls, real = {kind: said(asked(engine, kind, 1.0)) for kind in KINDS}, [], Memory.fork

        def fork_once(memory, *pairs):
            calls.append(pairs)
            if len(calls) in fails:
                raise MemoryError("in the midst of a fork")
            real(memory, *pairs)

        monkeypatch.setattr(Memory, "fork", fork_once)
        streams = {kind: asked(engine, kind, 1.0) for kind in KINDS}
        assert {kind: said(each) for kind, each in streams.items()} == want
        assert caplog.text.count("the cache was lost") == len(fails)
        whole(engine)


def test_what_a_step_left_that_ran_out_of_memory_is_not_drawn_from():
    """Rows of the beams were computed in it; at the next step they are at other places of the plan."""
    model, leaves = tiny(NumpyBackend()), []
    step = model.step

    def short(params, cache, x):
        out = step(params, cache, x)
        if (np.asarray(x.tok) == 99).any():
            for stream in leaves:
                stream.close()
            raise MemoryError("none is left")
        return out

    model.step = short
    with engine_of(model, max_num_seqs=8, enable_prefix_caching=False) as engine:
        want = said(asked(engine, "beams", 1.0))
        before = engine.run([3], drawn(1.0, max_tokens=50, allowed_token_ids=[7, 8]))
        next(before)
        streams = asked(engine, "beams", 1.0)
        leaves.append(before)
        with pytest.raises(OutOfCapacity):
            engine.run([99], drawn(1.0)).collect()
        assert said(streams) == want
        whole(engine)
