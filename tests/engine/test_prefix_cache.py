"""Requests share the cache of what they have in common, and nobody gets what is not theirs; preempted ones go on."""

import numpy as np
import pytest

from hibachi import (
    LLM,
    AutoregressiveBatchInference,
    ConfigError,
    InvalidRequest,
    NumpyBackend,
    SamplingParams,
    Terms,
)
from hibachi.testing.toys import SumPaged

from .models import Turnstile

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=2)


LIBRARIES = ["numpy", "torch", pytest.param("jax", marks=pytest.mark.slow)]


def ids(n, seed=0, vocab=2000):
    return np.random.default_rng(seed).integers(5, vocab, n).tolist()


def same(a, b):
    """Equal tokens, and log-probabilities within rounding: a hit changes the shapes that are computed."""
    assert a.choices[0].token_ids == b.choices[0].token_ids
    for x, y in zip(a.choices[0].logprobs, b.choices[0].logprobs, strict=True):
        for token in x.keys() & y.keys():
            assert x[token] == pytest.approx(y[token], abs=1e-4)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_v08_a_second_identical_prompt_of_40_tokens_hits_32(library):
    with LLM("tiny", backend=library) as llm:
        first = llm.generate(ids(40), GREEDY)[0]
        assert llm.stats().prefix_hits == 0
        again = llm.generate(ids(40), GREEDY)[0]
        assert llm.stats().prefix_hits == 32
        same(first, again)


def test_v10_another_salt_hits_nothing():
    with LLM("tiny") as llm:
        for salt in ("a", "b", None):
            llm.generate(ids(40), GREEDY, terms=Terms(cache_salt=salt))
        assert llm.stats().prefix_hits == 0
        llm.generate(ids(40), GREEDY, terms=Terms(cache_salt="b"))
        assert llm.stats().prefix_hits == 32


def test_what_was_generated_is_reused_by_the_next_turn():
    with LLM("tiny") as llm:
        turn = llm.generate(ids(20), GREEDY.with_(max_tokens=30, ignore_eos=True))[0]
        llm.generate(ids(20) + turn.choices[0].token_ids + ids(9, 3), GREEDY)
        assert llm.stats().prefix_hits == 48  # of 49 that were computed: the last token was never fed back


def test_switched_off_it_finds_nothing_and_says_the_same():
    with LLM("tiny", enable_prefix_caching=False) as off, LLM("tiny") as on:
        outs = [[llm.generate(ids(50), GREEDY)[0] for _ in range(2)] for llm in (off, on)]
        assert (off.stats().prefix_queries, on.stats().prefix_hits) == (0, 48)
        assert off.stats().cached_blocks == 0 < on.stats().cached_blocks
    for a, b in zip(*outs, strict=True):
        same(a, b)


def test_prompt_logprobs_are_of_all_tokens_even_if_they_are_cached():
    with LLM("tiny") as llm:
        llm.generate(ids(40), GREEDY)
        out = llm.generate(ids(40), GREEDY.with_(prompt_logprobs=1))[0]
        assert len(out.prompt_logprobs) == 40 and all(out.prompt_logprobs[1:])


def test_embedded_prompts_are_not_cached():
    with LLM("tiny") as llm:
        rows = np.random.default_rng(0).normal(size=(40, llm.model.embed_size)).astype(np.float32)
        outs = [llm.generate({"prompt_embeds": rows * k}, GREEDY)[0] for k in (1, 1, 2)]
        assert llm.stats().prefix_queries == 0
        same(outs[0], outs[1])
        assert outs[2].choices[0].logprobs != outs[0].choices[0].logprobs


@pytest.mark.parametrize("library", LIBRARIES)
def test_v05_who_is_preempted_goes_on_as_if_nothing_had_happened(library):
    prompts = [ids(30, i) for i in range(6)]
    params = GREEDY.with_(max_tokens=60, ignore_eos=True)
    with LLM("tiny", backend=library) as llm:
        alone = llm.generate(prompts, params)
        assert llm.stats().preemptions == 0
        position = sum(2 * s.kv_heads * s.k_dim for s in llm.model.cache_spec()) * 4
    with LLM("tiny", backend=library, kv_cache_memory_bytes=20 * 16 * position) as llm:
        tight = llm.generate(prompts, params)
        stats = llm.stats()
        assert stats.preemptions > 0
        assert stats.free_blocks == stats.blocks and stats.running == stats.waiting == 0
    for a, b in zip(alone, tight, strict=True):
        same(a, b)


class Starts(Turnstile):
    """Notes the first tokens of requests in the order in which they start, and how many rows a step has."""

    vocab_size = 64

    def __init__(self):
        super().__init__()
        self.order, self.rows = [], []

    def logits(self, tokens, lengths):
        self.arrive()
        first = tokens[range(len(tokens)), tokens.shape[1] - lengths]
        self.order += [t for t in first.tolist() if t not in self.order]
        self.rows.append(len(tokens))
        return np.eye(64, dtype=np.float32)[first]


def starts(serve, policy, terms):
    """The order in which requests with these terms start, which have come while one before them had the only row."""
    model = Starts()
    engine = serve(model, scheduling_policy=policy, max_num_seqs=1, padding_token=0)
    streams = [engine.run([63], GREEDY)]
    model.wait()
    streams += [engine.run([i], GREEDY, terms=t) for i, t in enumerate(terms)]
    model.open()
    for stream in streams:
        stream.collect()
    return model.order[1:]


CLASSES = [Terms(priority=p) for p in (0, -1, 1, -2, 0)]
TENANTS = [Terms(tenant=t) for t in "aaabb"]


@pytest.mark.parametrize(
    "policy, classes, tenants",
    [
        ("fcfs", [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ("priority", [3, 1, 0, 4, 2], [0, 1, 2, 3, 4]),
        ("fair", [3, 1, 0, 4, 2], [0, 3, 1, 4, 2]),
        ("shares", [3, 1, 0, 4, 2], [0, 3, 1, 4, 2]),
        ("waiting-served", [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ],
)
def test_policies_by_name(serve, policy, classes, tenants):
    assert starts(serve, policy, CLASSES) == classes
    assert starts(serve, policy, TENANTS) == tenants


def test_an_unknown_policy_is_refused_with_the_names():
    with pytest.raises(ConfigError, match="expected one of fair, fcfs, priority, shares, waiting-served"):
        LLM("tiny", scheduling_policy="best")
    with pytest.raises(ConfigError, match=r"without .*rank"):
        LLM("tiny", scheduling_policy=object())


@pytest.mark.parametrize(
    "wrong",
    [
        *({"priority": p} for p in (1.5, True, 2**63, -(2**63) - 1, 10**400)),
        *({"tenant": 3}, {"timeout": 0}, {"queue_timeout": "1"}, {"cache_salt": 7}),
    ],
    ids=lambda wrong: f"{wrong}"[:30],
)
def test_wrong_terms_are_refused(wrong):
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        Terms(**wrong)


def test_terms_for_each_or_for_all():
    with LLM("tiny") as llm, pytest.raises(InvalidRequest, match="one Terms, or one for each of 1"):
        llm.generate([ids(4)], GREEDY, terms=[Terms(), Terms()])


@pytest.mark.parametrize("size", [0, 1, -1])
def test_k22_a_cache_of_nothing_is_an_error_and_no_default(size):
    with pytest.raises(ConfigError, match=f"got kv_cache_memory_bytes={size}. Allow more"):
        AutoregressiveBatchInference(SumPaged(NumpyBackend()), max_model_len=64, kv_cache_memory_bytes=size)
