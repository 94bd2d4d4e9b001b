"""The profile: its parts add up to the time that passes, each is found, and an engine without one is untouched."""

import time

import numpy as np
import pytest

from benchmarks.bench.profile import FORWARD, PARTS, Profile, StepProfile, from_json, kinds, table
from hibachi import LLM, AutoregressiveBatchInference, SamplingParams
from hibachi.errors import ConfigError

from ..lib.inside import core

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def profiled(backend, rows=3):
    with LLM("tiny", backend=backend, max_num_seqs=4, max_model_len=64) as llm:
        before = llm.generate([[5, 6, 7]], GREEDY)[0].choices[0].token_ids
        profile = Profile(llm.engine)
        began = time.perf_counter()
        streams = [llm.engine.run(np.arange(5, 10 + i, dtype=np.int32), GREEDY) for i in range(rows)]
        for stream in streams:
            list(stream)
        tokens = sum(5 + i + GREEDY.max_tokens - 1 for i in range(rows))
        while sum(s.tokens for s in profile.steps) < tokens and time.perf_counter() < began + 30:
            time.sleep(0.001)  # a stream ends a moment before the step that ended it
        passed = time.perf_counter() - began
        steps = list(profile.steps)
        profile.clear()
        assert not profile.steps
        assert llm.generate([[5, 6, 7]], GREEDY)[0].choices[0].token_ids == before
        return steps, passed


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_every_part_is_found_and_they_add_up(library):
    steps, passed = profiled(library)
    assert sum(s.tokens for s in steps) == 5 + 6 + 7 + 3 * 7
    assert steps[-1].rows == steps[-1].tokens
    for part in set(PARTS) - {"between"}:
        assert all(s.seconds.get(part, 0) > 0 for s in steps), part
    assert 0.3 * passed < sum(s.total for s in steps) <= passed  # the rest: before the first step and after the last
    assert all(0 < s.host < 1 for s in steps)


def test_a_compiled_step_is_one_part():
    steps, _ = profiled("jax", rows=1)
    assert all(set(s.seconds) & set(FORWARD) == {"model"} for s in steps)
    assert all(s.seconds["model"] > 0 for s in steps)


def test_an_engine_without_a_profile_is_untouched():
    with LLM("tiny", max_model_len=64) as llm:
        step = core(llm.engine)
        watched = (step, step.scheduler, step.runner, llm.backend)
        before = [set(vars(each)) for each in watched]
        llm.generate([[5, 6, 7]], GREEDY)
        assert [set(vars(each)) - had for each, had in zip(watched, before, strict=True)] == [set()] * 4
        assert not {"schedule", "step", "linear", "attend"} & {name for each in watched for name in vars(each)}


def test_an_engine_that_is_not_built_cannot_be_profiled():
    class Adds:
        def forward(self, tokens):
            return tokens[:, -1] + 1

    with (
        AutoregressiveBatchInference(Adds(), max_model_len=8) as engine,
        pytest.raises(ConfigError, match="that is built"),
    ):
        Profile(engine)


def test_kinds_of_steps_by_hand():
    prompt = StepProfile(4, 64, {"linear": 0.08, "rest": 0.02})
    full = [StepProfile(4, 4, {"linear": 0.008, "sample": 0.002})] * 3 + [
        StepProfile(4, 4, {"linear": 0.5, "sample": 0.5})
    ]
    thin = [StepProfile(1, 1, {"linear": 0.002, "sample": 0.002})] * 2
    with_prompts, decode, most = kinds([prompt, *full, *thin])
    assert (with_prompts.name, with_prompts.steps, with_prompts.seconds) == ("with prompts", 1, pytest.approx(0.1))
    assert with_prompts.host == pytest.approx(0.2)
    assert decode.steps == 6 and (most.name, most.steps) == ("decode, 4 rows", 4)
    assert most.seconds == pytest.approx(0.01)
    assert most.parts["linear"] == pytest.approx(0.008)  # the interrupted one does not count
    assert most.host == pytest.approx(0.2)
    shown = table([prompt, *full, *thin])
    assert "decode, 4 rows" in shown and "not model" in shown and "80.0%" in shown


def test_json_and_back():
    steps = [StepProfile(2, 9, {"linear": 0.5})]
    profile = Profile.__new__(Profile)
    profile.steps = steps
    assert from_json(profile.as_json()) == steps
