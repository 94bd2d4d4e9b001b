"""JAX with steps of fixed shape, and with native kernels: the bits of a request's tokens and log-probabilities, whoever
shares its batch."""

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, SamplingParams
from hibachi.common.shapes import size_for
from hibachi.engine.build import cached_runner
from hibachi.engine.runners.sampler import RowSampler
from hibachi.engine.runners.tokentable import IDS, Tables
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.step import Limits
from hibachi.llm.model.files import locate, open_files
from hibachi.llm.model.registry import load_model
from hibachi.testing.toys import SumState
from hibachi.testing.toys import expected as summed_from
from hibachi_jax import JaxBackend
from hibachi_jax.invariant import STEP_TOKENS

ROWS, MAX_LEN, NEW = 32, 256, 10
PROMPTS = [1, 2, 9, 150, 31, 64, 7, 100, 33, 16, 48, 3]  # lengths; longer than a piece of attention's loop, and than 32
SHARED = 48  # tokens that every third prompt begins with, as far as it goes


@pytest.fixture(scope="module")
def eight():
    """Steps of fixed shape."""
    return JaxBackend(native=False).invariant()


@pytest.fixture(scope="module", params=["fixed", pytest.param("native", marks=pytest.mark.slow)])
def fixed(eight, request):
    """All that are deterministic."""
    backend = eight if request.param == "fixed" else JaxBackend("cpu", native=True)
    assert backend.deterministic
    return backend


@pytest.fixture(scope="module")
def tiny(fixed):
    return load_model(open_files(locate("tiny")), fixed)


@pytest.fixture(scope="module")
def tiny_eight(eight):
    return load_model(open_files(locate("tiny")), eight)


def prompts(vocab):
    rng = np.random.default_rng(0)
    start = rng.integers(3, vocab, SHARED)
    own = [rng.integers(3, vocab, n) for n in PROMPTS]
    return [np.concatenate([start, p])[: len(p)] if i % 3 == 0 else p for i, p in enumerate(own)]


def params(i, **more):
    """Every way to draw, in turn."""
    kinds = [
        dict(temperature=0, logprobs=2),
        dict(temperature=0.9, top_p=0.9, seed=i, logprobs=0),
        dict(temperature=0, prompt_logprobs=3, logprobs=1),
        dict(temperature=1.0, seed=i, repetition_penalty=1.3, frequency_penalty=0.1, logprobs=20),
        dict(temperature=1.0, seed=i, logprobs=1),
        dict(temperature=0.8, min_p=0.02, typical_p=0.9, logit_bias={5: 2.0}, seed=i, logprobs=130),
    ]
    return SamplingParams(max_tokens=NEW, **kinds[i % len(kinds)] | more)


def engine(model, fixed, **options):
    options = dict(max_num_seqs=ROWS, max_model_len=MAX_LEN, max_num_batched_tokens=256) | options
    return AutoregressiveBatchInference(model, backend=fixed, **options)


def results(streams):
    """Everything that a request comes to, with all digits."""
    return [(list(s), repr(s.logprobs), repr(s.prompt_logprobs)) for s in streams]


def alone(model, fixed, **options):
    with engine(model, fixed, enable_prefix_caching=False, **options) as e:
        return [results([e.run(p, params(i))])[0] for i, p in enumerate(prompts(model.vocab_size))]


@pytest.fixture(scope="module")
def expected(tiny, fixed):
    return alone(tiny, fixed)


def test_embeddings_beside_tokens_change_nobody(tiny, fixed, expected):
    """A step with embeddings is another program, so tokens must not be in it."""
    rng = np.random.default_rng(2)
    given = rng.standard_normal((40, tiny.embed_size)).astype(np.float32)
    with engine(tiny, fixed) as e:
        solo = results([e.run(None, params(1), prompt_embeds=given)])
        streams = [e.run(p, params(i)) for i, p in enumerate(prompts(tiny.vocab_size))]
        again = e.run(None, params(1), prompt_embeds=given)
        assert results(streams) == expected
        assert results([again]) == solo


# ---- models for which larger steps are something else ----------------------------------------------------------------


class Altered:
    """A model whose logits are changed by `change(logits, x)`."""

    def __init__(self, model, change):
        self._model, self._change = model, change
        self.vocab_size, self.params, self.cache_spec = model.vocab_size, model.params, model.cache_spec

    def step(self, params, cache, x):
        logits, cache = self._model.step(params, cache, x)
        return self._change(logits, x), cache


def runner(model, fixed, rows=ROWS):
    limits = Limits(rows, 256, 256, MAX_LEN, rows * MAX_LEN // 16 + 1, 16)
    tables = Tables(rows, IDS)
    sampler = RowSampler(fixed, rows, model.vocab_size, tables.of(IDS))
    return cached_runner(model, fixed, Scheduler(limits), tables, sampler, "float32")


def test_larger_steps_are_made_only_where_they_give_the_same_bits(tiny_eight, eight):
    by_size = Altered(tiny_eight, lambda logits, x: logits * (1 + 2**-20 * x.tok.shape[0]))
    assert runner(tiny_eight, eight).inputs.shapes.sizes[0] == STEP_TOKENS
    assert runner(by_size, eight).inputs.shapes.sizes == (STEP_TOKENS,)


@pytest.mark.parametrize("rows, most", [(4, None), (9, 16), (16, 16), (200, 64)])
@pytest.mark.slow
def test_rows_with_states_share_calls_as_large_as_the_batch_where_that_gives_the_same_bits(eight, rows, most):
    summed = SumState(eight)
    by_size = Altered(summed, lambda logits, x: logits * (1 + 2**-20 * x.tok.shape[0]))
    larger = () if most is None else (most,)
    assert runner(summed, eight, rows).inputs.shapes.sizes == (STEP_TOKENS, *larger)
    assert runner(by_size, eight, rows).inputs.shapes.sizes == (STEP_TOKENS,)


@pytest.mark.slow
def test_prompts_of_rows_with_states_go_in_pieces_where_that_gives_the_same_bits(eight):
    summed = SumState(eight)
    by_piece = Altered(summed, lambda logits, x: logits * (1 + 2**-20 * (x.tok.shape[0] // x.row.shape[0] > 4)))
    assert runner(summed, eight).inputs.shapes.pieces == (1, 4, 16)
    assert runner(by_piece, eight).inputs.shapes.pieces == (1, 4)


def test_rows_with_states_in_calls_of_both_sizes_have_their_own_tokens(eight):
    with engine(SumState(eight), eight) as e:
        texts = [[1 + i % 5, 2, 3] for i in range(20)]
        streams = [e.run(text, SamplingParams(temperature=0, max_tokens=4)) for text in texts]
        for text, stream in zip(texts, streams, strict=True):
            assert [int(t) for t in stream.collect()] == summed_from(text, 4)


def test_the_larger_calls_are_made_when_more_than_half_full():
    assert [size_for(n, (8, 32)) for n in (1, 8, 16, 17, 32, 50)] == [8, 8, 8, 32, 32, 32]


def test_the_programs_are_compiled_before_the_first_request(tiny_eight, eight):
    """And no other ones of the model later, whatever comes."""
    seen = []
    counted = Altered(tiny_eight, lambda logits, x: seen.append(x.tok.shape[0]) or logits)  # called when it is traced
    with engine(counted, eight, max_prefill_tokens=24) as e:
        at_start = list(seen)
        results([e.run(p, params(i)) for i, p in enumerate(prompts(tiny_eight.vocab_size))])
    assert sorted(at_start) == [STEP_TOKENS, 32]
    assert seen == at_start
