"""Linked requests: each is what it is alone, on every rung, whoever is beside it, and a fault ends no one else.

Continuations of one prompt are those of `run` with their seeds, and their prompt is computed once.
"""

import gc
import random
import threading
import time
import weakref
from functools import cache, partial

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hibachi import (
    AutoregressiveBatchInference,
    Beams,
    ConfigError,
    DeadlineExceeded,
    Guidance,
    InvalidRequest,
    NonFiniteOutput,
    NumpyBackend,
    OutOfCapacity,
    PromptTooLong,
    QueueFull,
    SamplingParams,
    Terms,
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
from .test_beams import own_cache
from .test_equality_matrix import Preempting, Proposing
from .test_faults_device import Breakable, Lost
from .test_own_encode import SOURCES, Translator

KINDS = list(PROMPTS)
HEAT = 400.0  # of the toys, whose margin is 1000


def tiny(backend):
    return load_model(TINY, backend.invariant(), max_model_len=64)


def small_gpt():
    torch.manual_seed(0)
    sizes = dict(vocab_size=60, n_positions=64, n_embd=64, n_layer=2, n_head=4, initializer_range=0.4)
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()


MODELS = {  # (make, temperature)
    "tiny, numpy": (lambda: tiny(NumpyBackend()), 1.0),
    "tiny, torch": (lambda: tiny(TorchBackend()), 1.0),
    "tiny, jax": (lambda: tiny(JaxBackend()), 1.0),
    "level 1": (lambda: SumLogits(NumpyBackend()), HEAT),
    "own cache": (lambda: SumOwn(NumpyBackend()), HEAT),
    "own cache, torch": (lambda: own_cache.Gpt(small_gpt()), 1.0),
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
    """Deterministic: own caches compute each row by itself, if nothing else will do."""
    own = isinstance(model, (SumOwn, own_cache.Gpt))
    how = dict(max_model_len=64, block_size=4, deterministic=True if own else None)
    return AutoregressiveBatchInference(
        model, **how | (dict(backend="torch") if not hasattr(model, "backend") else {}) | options
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
            each = (engine.run(PROMPTS["many"], drawn(heat, fork(7, i), logprobs=1)) for i in range(5))
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
            others = [("state", "preempted"), ("own cache, torch", "little memory")]
            if pages or condition not in ("little memory", "preempted") or (name, condition) in others:
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
        each = [engine.run(prompt, SamplingParams(seed=fork(7, i), max_tokens=NEW)).collect() for i in range(5)]
        before = engine.meters().computed
        got = [s.collect() for s in engine.run_many(prompt, SamplingParams(seed=7, max_tokens=NEW), 5)]
        assert np.array_equal(got, each) and len(np.unique(np.array(each)[:, 0, 0])) == 5
        assert engine.meters().computed - before == 29 + 5 * NEW
        whole(engine)


@pytest.mark.parametrize("apart", [False, True], ids=["shared calls", "each row by itself"])
@pytest.mark.parametrize("small", [False, True], ids=["ample", "little memory"])
def test_an_encoder_runs_once_for_many(small, apart, serve):
    """And once for each of the rows that are mixed, as their inputs differ."""
    model, (one, two) = Translator(), SOURCES[:2]
    memory = dict(cache_tokens=68, max_num_batched_tokens=10) if small else {}
    engine = serve(model, max_num_seqs=10, max_model_len=20, block_size=4, enable_prefix_caching=not apart, **memory)
    engine.core.runner.apart = apart
    how = drawn(6.0)

    def ask(kind):
        if kind == "many":
            return engine.run_many([1, 2, 3, 4], how, 4, inputs={"source": one})
        if kind == "beams":
            return engine.run_many([1, 2, 3], searched(), inputs={"source": two})
        guided = Guidance(0.5, inputs={"source": two}) if kind == "mixed" else None
        return [engine.run([5, 6], how, inputs={"source": one}, guidance=guided)]

    want = {}
    for kind, encoded in dict(many=1, beams=1, mixed=2, one=1).items():
        model.encoded.clear()
        want[kind] = said(ask(kind))
        assert len(model.encoded) == encoded, kind
    for _ in range(6):
        streams = {kind: ask(kind) for kind in want}
        assert {kind: said(each) for kind, each in streams.items()} == want
    assert len({str(tokens) for tokens, *_ in want["many"]}) == 4
    assert want["mixed"] != want["one"] and (engine.stats().preemptions or not small)
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


@pytest.mark.parametrize("kind", ["many", "mixed", "beams"])
def test_nothing_holds_a_request_that_is_over(kind):
    """Not even a circle, which only a garbage collection would break: requests may hold large arrays."""
    backend = GatedNumpy()
    with engine_of(SumPaged(backend), backend=backend, max_num_seqs=8) as engine:
        jobs, add = weakref.WeakSet(), engine.core.add

        def noted(job):
            jobs.update(job.group)
            add(job)

        engine.core.add = noted
        backend.free = True
        gc.collect()
        gc.disable()
        try:
            for leave in ((), (0,), (0, 1, 2)):
                streams = asked(engine, kind, HEAT, 3)
                for i in leave[: len(streams)]:
                    streams[i].close()
                for stream in streams:
                    if stream.finish_reason != "cancelled":
                        stream.collect()
                del streams, stream
                engine.run([1], drawn(HEAT, max_tokens=2)).collect()
                whole(engine)
                until(lambda: not jobs)
        finally:
            gc.enable()


@pytest.mark.parametrize("kind", ["many", "mixed", "beams"])
def test_a_lost_device_costs_time_only(kind):
    backend = Breakable()
    backend.free = True
    with engine_of(SumPaged(backend), backend=backend, max_num_seqs=8, restart="on_failure") as engine:
        want = said(asked(engine, kind, HEAT, 3))
        for at in range(1, 9):
            backend.passes = 0
            streams = asked(engine, kind, HEAT, 3)
            until(lambda at=at: backend.passes >= at or not engine.stats().running)
            backend.errors.append(Lost("gone"))
            assert said(streams) == want
            backend.errors.clear()
        assert engine.core.restarts
        whole(engine)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("kind", ["many", "mixed", "beams"])
def test_a_deadline_ends_all_of_a_link(kind, steps):
    backend = GatedNumpy()
    with engine_of(SumPaged(backend), backend=backend, max_num_seqs=8) as engine:
        terms, how = Terms(timeout=0.2), drawn(HEAT)
        if kind == "mixed":
            streams = [engine.run([1, 2], how, guidance=Guidance(2.0, prompt=[3]), terms=terms)]
        else:
            streams = engine.run_many([1, 2], how if kind == "many" else searched(), 3, terms=terms)
        other = engine.run([3], drawn(HEAT))
        backend.wait()
        if steps:
            backend.let(steps)
        time.sleep(0.25)
        backend.open()
        for stream in streams:
            with pytest.raises(DeadlineExceeded):
                stream.collect()
        assert len(other.collect()) == NEW
        whole(engine)


def test_others_go_on_while_one_is_not_read():
    with engine_of(SumPaged(NumpyBackend()), max_num_seqs=4, pause_after=2) as engine:
        how = drawn(HEAT, max_tokens=20)
        each = [engine.run(PROMPTS["many"], how.with_(seed=fork(7, i))).collect() for i in range(3)]
        streams = engine.run_many(PROMPTS["many"], how, 3)
        got = [stream.collect() for stream in streams[1:]]
        until(lambda: engine.core.paused == 1)
        guided = engine.run([1, 2], how, guidance=Guidance(2.0, prompt=[3]))
        until(lambda: engine.core.paused == 2)
        assert all(s.collect() for s in engine.run_many([1, 2], searched()))  # which have nothing unread till the end
        assert [streams[0].collect(), *got] == each and len(guided.collect()) == 20
        whole(engine)


def test_a_queue_counts_each_of_many():
    backend = GatedNumpy()
    with engine_of(SumPaged(backend), backend=backend, max_num_seqs=4, max_num_queued_reqs=3) as engine:
        first = engine.run([1], drawn(HEAT))
        backend.wait()
        with pytest.raises(QueueFull, match="got 1 and 7 more"):
            engine.run_many([1], drawn(HEAT), 7)
        streams = engine.run_many([1], drawn(HEAT), 6)
        with pytest.raises(QueueFull, match="got 7 and 1 more"):
            engine.run([1], drawn(HEAT))
        for stream in streams:
            stream.close()
        backend.open()
        until(lambda: engine.stats().finished >= 6)
        assert len(engine.run_many([1], searched())[0].collect()) == NEW  # (its silent row counts for nothing)
        assert len(first.collect()) == NEW
        whole(engine)


@pytest.mark.parametrize("when", ["hangs", "runs", "waits"])
@pytest.mark.parametrize("kind", ["many", "mixed", "beams"])
def test_closing_ends_every_stream(kind, when):
    gate = threading.Event()

    class Hangs(SumPaged):
        def step(self, params, cache, x):
            if (np.asarray(x.tok) == 0).any():
                gate.wait(20)
            return super().step(params, cache, x)

    engine = engine_of(Hangs(NumpyBackend()), max_num_seqs=4, deterministic=False)
    try:
        if when == "hangs":
            plug = engine.run([0], drawn(HEAT))
            until(lambda: engine.stats().running)
        streams = asked(engine, kind, HEAT, 3)
        if when == "runs" and kind != "beams":
            next(streams[0])
        engine.close(0.2)
        for stream in [*streams, *([plug] if when == "hangs" else [])]:
            assert stream.channel.wait(5) and stream.finish_reason in ("closed", "length")
    finally:
        gate.set()
        engine.close()


def test_what_cannot_be_many_is_refused():
    with engine_of(SumPaged(NumpyBackend()), max_num_seqs=4) as engine:
        for n in (0, -1, True, 2**20, 1.5, "2"):
            with pytest.raises(InvalidRequest, match="n must be an integer from 1 to 16384; got"):
                engine.run_many([1], drawn(HEAT), n)
        with pytest.raises(InvalidRequest, match="no best_of; got n=1, best_of=3"):
            engine.run_many([1], drawn(HEAT, best_of=3), 2)
        with pytest.raises(InvalidRequest, match="at least one token"):
            engine.run_many([], drawn(HEAT), 2)
        with pytest.raises(PromptTooLong):
            engine.run_many([1] * 64, drawn(HEAT), 2)
        with pytest.raises(ConfigError, match="run_many has no option 'guidance'"):
            engine.run_many([1], drawn(HEAT), 2, guidance=Guidance())
        assert engine.stats().waiting == engine.stats().running == 0
        assert [len(s.collect()) for s in engine.run_many([1], drawn(HEAT), np.int64(1).item())] == [NEW]


class Sick(SumLogits):
    """What has a token 9 is NaN."""

    def logits(self, tokens, lengths):
        out = super().logits(tokens, lengths)
        return np.where((tokens == 9).any(axis=1)[:, None], np.nan, out)


def test_a_fault_before_the_fork_is_of_all_and_after_it_of_one():
    with engine_of(Sick(NumpyBackend()), max_num_seqs=20, deterministic=False) as engine:
        each = []
        for i in range(12):
            stream = engine.run([1, 2, 3], drawn(HEAT, fork(7, i)))
            each.append((stream.take(NEW), stream.finish_reason))
        streams = engine.run_many([1, 2, 3], drawn(HEAT), 12)
        got = [(stream.take(NEW), stream.finish_reason) for stream in streams]
        assert got == each and {reason for _, reason in got} == {"error", "length"}
        for kind in ("many", "beams"):
            errors = []
            for stream in engine.run_many([1, 9, 3], drawn(HEAT) if kind == "many" else searched(), 3):
                with pytest.raises(NonFiniteOutput) as e:
                    stream.collect()
                errors.append(e.value)
            assert len({*map(id, errors)}) == 3, "each has an error of its own"
        whole(engine)


@pytest.mark.parametrize("preempts", [False, True])
def test_prompts_that_are_embeddings(preempts, monkeypatch):
    if preempts:
        monkeypatch.setattr(build, "RecordedScheduler", Preempting)
    embeds, others = np.random.default_rng(0).normal(size=(2, 9, 256)).astype(np.float32)
    with engine_of(tiny(NumpyBackend()), max_num_seqs=16) as engine:

        def ask(kind):
            if kind == "many":
                return engine.run_many(None, drawn(1.0, logprobs=1), 4, prompt_embeds=embeds)
            if kind == "beams":
                return engine.run_many(None, searched(), prompt_embeds=embeds)
            guided = Guidance(1.5, prompt_embeds=others[:4]) if kind == "mixed" else Guidance(1.5, prompt=[5, 6])
            return [engine.run(None, drawn(1.0, logprobs=1), prompt_embeds=embeds, guidance=guided)]

        kinds = ("many", "beams", "mixed", "mixed with ids")
        want = {kind: said(ask(kind)) for kind in kinds}
        streams = {kind: ask(kind) for kind in kinds}
        assert {kind: said(each) for kind, each in streams.items()} == want
        alone = (engine.run(None, drawn(1.0, fork(7, i), logprobs=1), prompt_embeds=embeds) for i in range(4))
        assert said(alone) == want["many"] and bool(engine.stats().preemptions) == preempts
        whole(engine, replays=not preempts)


# ---- everything at once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 30))])
def test_whatever_happens_each_is_what_it_is_alone(seed):
    """Small pools, few rows, readers that leave or are slow, and prompts that begin alike."""
    rng = random.Random(seed)
    make, heat = MODELS[("tiny, numpy", "own cache", "state", "both", "level 1")[seed % 5]]
    rows = rng.randint(4, 9)
    options = dict(max_num_seqs=rows, cache_tokens=rng.choice((64, 160)), pause_after=rng.choice((None, 3)))
    options |= dict(max_num_batched_tokens=rows + rng.randint(0, 9), scheduling_policy=rng.choice(("fcfs", "fair")))
    requests, answers, model = [], {}, make()
    for _ in range(60):
        prompt = [*rng.choice(([], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7])), *(rng.randrange(1, 10) for _ in range(4))]
        kind, n = rng.choice(("one", "many", "mixed", "beams")), rng.randint(1, 4)
        other = tuple(rng.randrange(1, 10) for _ in range(rng.randint(1, 6)))
        requests.append((tuple(prompt), kind, n, rng.randrange(9), other, rng.randint(1, 6)))

    def ask(engine, prompt, kind, n, number, other, new):
        how = drawn(heat, number, max_tokens=new, stop_token_ids=[number], include_stop=bool(number % 2))
        if kind == "many":
            return engine.run_many(prompt, how, n, terms=Terms(tenant=str(number % 3)))
        if kind == "beams":
            return engine.run_many(prompt, how.with_(n=n, beams=Beams(n, number / 4 - 1), presence_penalty=0.5))
        return [engine.run(prompt, how, guidance=Guidance(number / 3, prompt=other) if kind == "mixed" else None)]

    with engine_of(model, max_num_seqs=8, enable_prefix_caching=False) as engine:
        for request in requests:
            answers[request] = [tokens for tokens, *_ in said(ask(engine, *request))]
    with engine_of(model, **options) as engine:
        waiting = []
        for request in requests:
            for i, stream in enumerate(ask(engine, *request)):
                waiting.append((request, i, stream))
            while len(waiting) > rng.randint(4, 25):
                request, i, stream = waiting.pop(rng.randrange(len(waiting)))
                if rng.random() < 0.2:
                    got = stream.take(2) if rng.random() < 0.5 else []
                    stream.close()
                    assert got == answers[request][i][: len(got)]
                else:
                    assert stream.collect() == answers[request][i], (request, i)
        for request, i, stream in waiting:
            assert stream.collect() == answers[request][i], (request, i)
        whole(engine)
