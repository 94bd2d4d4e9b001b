"""Recurrent states are kept at certain places of a prompt, so that another one can begin there."""

import numpy as np
import pytest

import hibachi
from hibachi import AutoregressiveBatchInference, SamplingParams, Terms
from hibachi.testing.toys import VOCAB, SumBoth, SumState

GREEDY = SamplingParams(temperature=0, max_tokens=5)


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, n).astype(np.int32)


def answer(tokens, n=5):
    """What the toys say: the sum of all tokens and 1, by the size of their vocabulary."""
    out, total = [], int(np.sum(tokens))
    for _ in range(n):
        out.append((total + 1) % VOCAB)
        total += out[-1]
    return out


def cases(*libraries):
    return [pytest.param((toy, name), id=f"{toy.__name__}-{name}") for name in libraries for toy in (SumState, SumBoth)]


@pytest.fixture(params=cases("numpy", "torch"))
def engine(request):
    toy, name = request.param
    backend = hibachi.load_backend(name)

    def make(**options):
        return AutoregressiveBatchInference(
            toy(backend), backend=backend, max_model_len=600, block_size=4, max_num_seqs=8, **options
        )

    return make


@pytest.mark.parametrize("engine", cases("numpy", "torch", "jax"), indirect=True)
def test_a_second_prompt_begins_where_the_first_was_kept(engine):
    with engine() as e:
        tokens = prompt(41)
        assert e.run(tokens, GREEDY).collect() == answer(tokens)
        assert e.stats().prefix_hits == 0
        assert e.run(tokens, GREEDY).collect() == answer(tokens)
        assert e.stats().prefix_hits == 40
        longer = np.concatenate([tokens[:40], prompt(9, 1)])
        assert e.run(longer, GREEDY).collect() == answer(longer)
        assert e.stats().prefix_hits == 80


def test_long_prompts_are_kept_in_between_as_well(engine):
    with engine() as e:
        tokens = prompt(300)
        assert e.run(tokens, GREEDY).collect() == answer(tokens)
        other = np.concatenate([tokens[:280], prompt(20, 1)])
        assert e.run(other, GREEDY).collect() == answer(other)
        assert e.stats().prefix_hits == 256


def test_salts_do_not_meet_and_switched_off_nothing_is_kept(engine):
    with engine() as e:
        for salt in "ab":
            assert e.run(prompt(41), GREEDY, terms=Terms(cache_salt=salt)).collect() == answer(prompt(41))
        assert e.stats().prefix_hits == 0
    with engine(enable_prefix_caching=False) as e:
        for _ in range(2):
            assert e.run(prompt(41), GREEDY).collect() == answer(prompt(41))
        assert e.stats().prefix_queries == 0


def test_few_checkpoints_for_many_prompts(engine):
    with engine() as e:
        for i in range(40):
            tokens = prompt(30 + i, i)
            assert e.run(tokens, GREEDY).collect() == answer(tokens)
        assert e.stats().evictions > 0
        assert e.run(tokens, GREEDY).collect() == answer(tokens)
        assert e.stats().prefix_hits > 0


def test_who_starts_on_blocks_waits_until_they_are_full():
    """One is computed again that had made way, in a step of two calls: its last token comes with the second one."""

    class Telling(SumBoth):
        then = None

        def step(self, params, cache, x):
            if self.then and x.pos.max() == 38:
                self.then, then = None, self.then
                then()
            return super().step(params, cache, x)

    model = Telling(hibachi.load_backend("numpy"))
    spec = model.cache_spec()[0]
    block = 4 * spec.kv_heads * (spec.k_dim + spec.v_dim) * 4
    options = dict(
        max_model_len=200, block_size=4, max_num_seqs=6, max_num_batched_tokens=13, kv_cache_memory_bytes=40 * block
    )
    with AutoregressiveBatchInference(model, backend=model.backend, **options) as e:
        for tokens in (prompt(44), prompt(150, 9)):  # of the first, the state is kept, and few of its blocks
            assert e.run(tokens, GREEDY).collect() == answer(tokens)
        first, second = (np.concatenate([prompt(44)[:40], prompt(4, i)]) for i in (1, 2))
        streams = []
        model.then = lambda: streams.append(e.run(second, GREEDY))
        assert e.run(first, GREEDY).collect() == answer(first)
        assert streams[0].collect() == answer(second)
        assert e.stats().prefix_hits == 40
