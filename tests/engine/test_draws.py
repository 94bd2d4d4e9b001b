"""Random numbers for models that draw themselves, and seeds of their requests."""

import numpy as np
import pytest

from hibachi import ConfigError, InvalidRequest, ModelError, SamplingParams
from hibachi.engine.sampling.uniforms import draws, uniforms

from ..decode.reference import fits
from .frames import DrawnState, DrawnWhole, WholeFrames
from .models import until

PROMPTS = [np.full((n, 2), n, np.float32) for n in (1, 5, 3, 9, 4)]


def rows(stream):
    return np.array([np.asarray(item) for item in stream.collect()])


def together(engine, **how):
    streams = [engine.run(p, SamplingParams(seed=i, max_tokens=6, **how)) for i, p in enumerate(PROMPTS)]
    return [rows(stream) for stream in streams]


def right(i):
    """By seed, position and index: uniform number 0, and normal number 1."""
    n = len(PROMPTS[i])
    uniform, normal = draws(np.full(6, i), np.arange(n, n + 6), 2)
    return np.stack([uniform[:, 0], normal[:, 1]], axis=1)


@pytest.mark.parametrize("model", [DrawnState, DrawnWhole], ids=lambda m: m.__name__)
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_numbers_are_by_seed_position_and_index_on_every_library(model, library, serve):
    engine = serve(model(library), backend=library, max_num_seqs=3)
    for i, got in enumerate(together(engine)):
        assert got.dtype == np.float32 and np.array_equal(got, right(i))


def test_chunks_change_nothing(serve):
    engine = serve(DrawnState(), max_num_seqs=2, max_num_batched_tokens=2)
    assert all(np.array_equal(got, right(i)) for i, got in enumerate(together(engine)))


def test_a_request_without_a_seed_gets_a_fresh_one(serve):
    engine = serve(DrawnState())
    one, two = (rows(engine.run(PROMPTS[0], max_tokens=4)) for _ in range(2))
    assert not np.array_equal(one, two)
    assert len(rows(engine.run(PROMPTS[0], SamplingParams(max_tokens=4), max_tokens=2))) == 2


@pytest.mark.parametrize(
    ("how", "name"),
    [
        (dict(temperature=0.5), "temperature"), (dict(top_k=3), "top_k"), (dict(logprobs=1), "logprobs"),
        (dict(min_tokens=2), "min_tokens"), (dict(stop_token_ids=[1]), "stop_token_ids"),
        (dict(codebooks=[{}]), "codebooks"), (dict(repetition_penalty=2.0), "repetition_penalty"),
    ],
    ids=str,
)  # fmt: skip
def test_other_parameters_are_refused_by_name(how, name, serve):
    with pytest.raises(InvalidRequest, match=f"takes seed, max_tokens, include_stop; got {name}"):
        serve(DrawnState()).run(PROMPTS[0], SamplingParams(**how))


def test_without_draws_no_seed_is_taken(serve):
    class Plain:
        def forward(self, tokens):
            return tokens[:, -1]

    with pytest.raises(InvalidRequest, match=r"A model that declares `draws` takes a seed"):
        serve(Plain()).run([1.0], SamplingParams(seed=1))


@pytest.mark.parametrize("n", [-1, 2.0, True, "3", 2**20, None], ids=str)
def test_a_wrong_number_of_draws_is_refused(n, serve):
    class Wrong(DrawnWhole):
        draws = n

    with pytest.raises(ConfigError, match=r"Wrong\.draws must be the number of random numbers for a token"):
        serve(Wrong())


def test_numbers_that_were_not_declared_are_refused(serve):
    class Undeclared:
        def forward(self, tokens, uniform):
            return tokens[:, -1] + uniform[:, 0]

    with pytest.raises(ConfigError, match=r"takes uniform, random numbers that the model does not declare.*draws = n"):
        serve(Undeclared())


@pytest.mark.parametrize("library", ["numpy", "torch"])  # JAX takes the last one there is, in any array
def test_numbers_beyond_what_was_declared_are_an_error_of_the_model(library, serve):
    class Beyond(DrawnWhole):
        def forward(self, tokens, uniform):
            return tokens[:, -1, :] + uniform[:, 2:3][:, 0, None]

    class BeyondState(DrawnState):
        def step(self, params, cache, x):
            out, cache = super().step(params, cache, x)
            return out + x.normal[:, 7][:, None], cache

    for model in (Beyond, BeyondState):
        with pytest.raises(ModelError):
            serve(model(library), backend=library).run(PROMPTS[0], max_tokens=2).collect()


def test_logits_and_draws_go_together(serve):
    """A model that gives logits may draw besides; the engine's own draw does not use these numbers."""

    class Noisy(WholeFrames):
        draws = 1

        def logits(self, tokens, lengths, normal):
            return super().logits(tokens, lengths) + 0 * normal[:, :, None]

    params, prompt = SamplingParams(seed=3, max_tokens=9), np.zeros((2, 3), int)
    one, other = (rows(serve(model).run(prompt, params)) for model in (Noisy(), WholeFrames()))
    assert np.array_equal(one, other)


def test_a_request_that_fails_costs_the_others_no_number(serve):
    class Fails(DrawnState):
        def step(self, params, cache, x):
            if (np.asarray(x.tok) == 9).any():
                raise RuntimeError("a nine")
            return super().step(params, cache, x)

    engine = serve(Fails(), max_num_seqs=5)
    streams = [engine.run(p, SamplingParams(seed=i, max_tokens=6)) for i, p in enumerate(PROMPTS)]
    for i, stream in enumerate(streams):
        if i == 3:
            with pytest.raises(ModelError):
                stream.collect()
        else:
            assert np.array_equal(rows(stream), right(i))
    until(lambda: engine.stats().running == 0)


# ---- the numbers -----------------------------------------------------------------------------------------------------


def test_uniform_and_normal_numbers_have_their_distributions():
    from scipy.stats import norm

    uniform, normal = draws(np.arange(40_000), np.full(40_000, 3), 3)
    assert uniform.dtype == normal.dtype == np.float32
    assert uniform.min() > 0 and uniform.max() < 1 and np.isfinite(normal).all()
    for column in (*uniform.T, *norm.cdf(normal).T):
        assert fits((column * 40).astype(int).tolist(), [1 / 40] * 40)
    both = np.concatenate([uniform.T, normal.T, uniforms(np.arange(40_000), np.full(40_000, 3))[None]])
    assert abs(np.corrcoef(both) - np.eye(7)).max() < 0.025


def test_a_number_depends_on_its_seed_position_and_index_only():
    seeds, positions = np.arange(500) % 17, np.arange(500) % 23
    uniform, normal = draws(seeds, positions, 9)
    for n in (1, 2, 3, 7, 8, 15, 16, 17, 33, 100):
        for first in (0, 1, 5):
            at = slice(first, first + n)
            for k in (1, 4, 9):
                some = draws(seeds[at], positions[at], k)
                assert np.array_equal(some[0], uniform[at, :k]) and np.array_equal(some[1], normal[at, :k])


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_any_seed_will_do(seed):
    uniform, normal = draws(np.array([seed], np.uint64), np.array([0]), 4)
    assert np.isfinite(normal).all() and len({*uniform[0].tolist(), *normal[0].tolist()}) == 8
