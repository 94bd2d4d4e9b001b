"""Sampling: the distribution, the filters, and the same draw on every library, whole rows or candidates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hibachi.engine.sampling.draw import greedy, row_finite, sample
from hibachi.engine.sampling.uniforms import uniforms
from hibachi.request import DRAWN, SamplingParams

from ..lib.filters import DEFAULTS, TRIED, nudged
from .libraries import INF, LIBRARIES, compiled, draw, draw_near, every_library, how
from .reference import distribution


def spread(n, seed=11):
    return uniforms(np.full(n, seed, np.uint64), np.arange(n))


def agrees(token, u, logits, **params):
    """Is `token` where the definition's distribution function passes u? Either is right where rounding decides."""
    for off in (0, -2e-6, 2e-6):
        near = nudged(SamplingParams(**params), off)
        p = distribution(logits, **{name: getattr(near, name) for name in DRAWN})
        before = sum(p[:token])
        if p[token] > 0 and before - 1e-5 < u < before + p[token] + 1e-5:
            return True
    return False


# ---- the distribution ----------------------------------------------------------------------------------------


rows_of_logits = st.lists(st.sampled_from([-INF, -4.0, -1.0, 0.0, 0.25, 0.5, 3.0]), min_size=2, max_size=12).filter(
    lambda row: max(row) > -INF
)


@settings(max_examples=300, deadline=None)
@given(
    row=rows_of_logits,
    **{name: st.sampled_from([*TRIED[name].right, *TRIED[name].some]) for name in DRAWN},
    u=st.integers(0, 2**23 - 1).map(lambda i: (i + 0.5) / 2**23),
    k=st.integers(1, 12),
)
def test_filters_keep_what_the_definition_keeps(row, u, k, **params):
    [token] = draw([row], u=u, **params)
    assert agrees(token, u, row, **params)
    if params["temperature"] > 0:
        [near], [inside] = draw_near([row], min(k, len(row)), u=u, **params)
        if inside and (k >= len(row) or params["top_k"] > 0 or params["min_p"] > 0):
            assert agrees(near, u, row, **params)


@every_library
def test_filters_keep_the_same_on_every_library(library):
    rng = np.random.default_rng(3)
    n = 150
    rows = rng.normal(0, 2, (n, 30)).astype(np.float32)
    params = {name: rng.choice([DEFAULTS[name], *TRIED[name].some], n) for name in DRAWN}
    params["temperature"] = rng.choice([0.5, 1.0, 2.0], n)
    u = spread(n)
    drawn = draw(rows, u=u, library=library, **params)
    near, _ = draw_near(rows, 30, u=u, library=library, **params)
    for i in range(n):
        mine = {name: values[i].item() for name, values in params.items()}
        assert agrees(drawn[i], u[i], rows[i], **mine), mine
        assert agrees(near[i], u[i], rows[i], **mine), mine


# ---- cases ---------------------------------------------------------------------------------------------------


def kept(row, **params):
    """The tokens that can come, by both ways."""
    u = (np.arange(512) + 0.5) / 512
    rows = np.tile(np.asarray(row, np.float32), (512, 1))
    whole = {*draw(rows, u=u, **params).tolist()}
    near, inside = draw_near(rows, len(row), u=u, **params)
    assert inside.all() and {*near.tolist()} == whole
    return whole


def test_ties_with_the_last_token_kept_are_kept():
    row = [0.0, 1.0, 0.0, 0.0, -5.0]
    for params in (dict(top_k=2), dict(top_p=0.5), dict(top_k=2, top_p=0.99), dict(min_p=0.3)):
        assert kept(row, **params) == {0, 1, 2, 3}, params
    assert kept([2.0, 0.0, 2.0, 0.0], top_k=1) == {0, 2}
    assert kept([1.0, 1.0, 1.0], top_k=1) == kept([1.0, 1.0, 1.0], typical_p=0.01) == {0, 1, 2}


def test_min_p_is_a_share_of_the_most_likely_token():
    row = np.log([0.4, 0.2, 0.3, 0.05, 0.05])
    assert kept(row, min_p=0.7) == {0, 2}
    assert kept(row, min_p=0.49) == {0, 1, 2}
    assert kept(row, min_p=1.0) == {0}
    assert kept([3.0, 3.0, 1.0], min_p=1.0) == {0, 1}
    assert kept(row, min_p=0.7, temperature=5.0) == {0, 1, 2}  # of the distribution at this temperature


def test_the_token_with_which_the_mass_meets_top_p_is_the_last():
    """Exactly so: weights of 1, 1/2, 1/4, and 1/8 twice have no rounding, nor have their sums."""
    row = np.log([4, 8, 1, 2, 1])
    assert kept(row, top_p=0.5) == {1}
    assert kept(row, top_p=0.75) == {0, 1}
    assert kept(row, top_p=0.875) == {0, 1, 3}


def test_typical_tokens_have_the_information_of_the_whole():
    """Entropy 1.09: the token of probability 0.3 has 1.2 and is the nearest, that of 0.5 has 0.69, the others 2.3."""
    row = np.log([0.5, 0.3, 0.1, 0.1])
    assert kept(row, typical_p=0.2) == {1}
    assert kept(row, typical_p=0.31) == {0, 1}
    assert kept(row, typical_p=0.79) == {0, 1}
    assert kept(row, typical_p=0.81) == {0, 1, 2, 3}  # tied
    assert kept(row, typical_p=0.2, top_k=1) == {0}  # of one token left


def test_temperature_zero_takes_the_first_maximum():
    rows = [[0, 2, 2, 1], [5, 1, 5, 5], [-INF, -INF, -1, -INF]]
    assert draw(rows, temperature=0.0, top_k=2, top_p=0.5, u=0.9).tolist() == [1, 0, 2]
    # not zero: drawn among the tied
    assert draw(rows, temperature=[0.0, 1e-6, 1e-6], top_k=1, u=0.9).tolist() == [1, 3, 2]


@every_library
def test_the_ends_of_the_interval_select_tokens_that_can_come(library):
    row = [[-INF, -INF, 0.0, -200.0, 1.0, -INF]]
    for u, token in ((0.5 / 2**23, 2), ((2**23 - 0.5) / 2**23, 4)):
        for filtered in (False, True):
            assert draw(row, u=u, filtered=filtered, library=library).tolist() == [token]
        assert draw(row, top_k=2, top_p=0.999, u=u, library=library).tolist() == [token]
        assert draw_near(row, 4, top_k=2, top_p=0.999, u=u, library=library)[0].tolist() == [token]


# ---- candidates ----------------------------------------------------------------------------------------------

VOCAB = 10_000  # enough for the candidates to be searched in blocks


def long_rows(n=60, seed=0):
    """Some steep, some flat."""
    rng = np.random.default_rng(seed)
    ranks = np.argsort(rng.random((n, VOCAB)), axis=1) + 1.0
    return (-np.log(ranks) * np.linspace(0.3, 3, n)[:, None] + 0.1 * rng.normal(size=(n, VOCAB))).astype(np.float32)


LONG = [
    dict(top_k=20),
    dict(top_k=63, temperature=2.0),
    dict(top_k=40, top_p=0.9),
    dict(min_p=0.05),
    dict(min_p=0.02, top_p=0.8, top_k=500),
    dict(top_p=0.9),
    dict(top_p=0.5, temperature=0.7),
    dict(top_k=30, typical_p=0.8),
    dict(top_p=0.6, typical_p=0.5),
]


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("params", LONG, ids=str)
def test_candidates_give_what_the_whole_row_gives(name, params):
    rows, u = long_rows(), spread(60)
    mass = "top_p" in params and not params.keys() & {"top_k", "min_p"}
    right = 0
    whole = draw(rows, u=u, library=LIBRARIES[name], **params)
    for k in (64, 1024):
        near, inside = draw_near(rows, k, u=u, mass=mass, library=LIBRARIES[name], **params)
        differ = np.flatnonzero((near != whole) & inside)
        for i in differ:  # but for rounding: a neighbour in the distribution function
            p = np.cumsum(distribution(rows[i], **params))
            assert abs(p - u[i]).min() < 1e-5
        assert len(differ) <= 2
        right += inside.sum()
        if params.get("top_k", 64) < 64:
            assert inside.all()
    assert right > 20


def test_candidates_that_are_too_few_say_so():
    rows = np.zeros((5, VOCAB), np.float32)
    rows[0, :64] = 5  # as many as candidates: nobody knows whether there are more like them
    rows[1, :63] = 5
    rows[2, :10] = 200
    rows[3, :] = -INF
    rows[3, :20] = 0
    u = np.full(5, 0.3, np.float32)
    assert draw_near(rows, 64, u=u, top_k=10)[1].tolist() == [False, True, True, True, False]
    assert draw_near(rows, 64, u=u, top_k=63)[1].tolist() == [False, True, True, True, False]
    assert draw_near(rows, 64, u=u, top_k=64)[1].tolist() == [False, False, True, True, False]
    assert draw_near(rows, 64, u=u, min_p=0.5)[1].tolist() == [False, True, True, True, False]
    # a share of the whole: 63 tokens of weight 1, and 9937 of 1/148
    assert draw_near(rows, 64, u=u, top_p=0.4, mass=True)[1].tolist() == [False, True, True, True, False]
    assert draw_near(rows, 64, u=u, top_p=0.6, mass=True)[1].tolist() == [False, False, True, True, False]
    assert draw_near(rows[:, :64], 64, u=u, top_k=50)[1].all()  # there are no others


# ---- rows and libraries --------------------------------------------------------------------------------------


def batch(n=400, vocab=300, seed=0):
    """Logits of n rows and their parameters; every third row has no filter, some are greedy."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (n, vocab)).astype(np.float32)
    free = np.arange(n) % 3 == 0
    params = dict(
        temperature=np.where(np.arange(n) % 7 == 0, 0.0, rng.uniform(0.2, 2.0, n)),
        top_k=np.where(free, 0, rng.integers(-1, vocab + 10, n)),
        top_p=np.where(free, 1.0, rng.uniform(0.05, 1.0, n)),
        u=uniforms(np.full(n, 5, np.uint64), np.arange(n)),
    )
    return logits, params, free


@pytest.mark.parametrize("name", ["torch", "jax", "array_api_strict"])
def test_libraries_agree_but_for_borders(name):
    logits, params, _ = batch()
    here, there = draw(logits, **params), draw(logits, library=LIBRARIES[name], **params)
    differ = np.flatnonzero(here != there)
    assert len(differ) <= 2
    for i in differ:
        p = np.cumsum(distribution(logits[i], **{k: params[k][i].item() for k in params.keys() - {"u"}}))
        assert abs(p - params["u"][i]).min() < 1e-5


@every_library
def test_a_result_is_int32_on_the_library(library):
    assert draw([[0.0, 1.0]], u=0.5, library=library).dtype == np.int32
    assert draw_near([[0.0, 1.0]], 2, u=0.5, library=library)[0].dtype == np.int32
    ids = greedy(library, library.put(np.array([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]], np.float32)))
    assert library.get(ids).tolist() == [1, 0] and library.get(ids).dtype == np.int32


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_half_precision_logits_are_fine(name):
    library = LIBRARIES[name]
    logits, params, _ = batch()
    rounded = library.put(logits, "bfloat16")
    run = compiled(library, sample, filtered=True, typical=True)
    ids = library.get(run(rounded, how(len(logits), library, **params)))
    assert (ids == draw(library.get(library.float32(rounded)), library=library, **params)).all()


@every_library
def test_rows_without_finite_logits_are_flagged(library):
    nan = float("nan")
    rows = [[0.0, 1.0], [nan, 1.0], [1.0, nan], [INF, 0.0], [-INF, -INF], [-INF, 0.0], [INF, -INF]]
    finite = library.get(row_finite(library, library.put(np.array(rows, np.float32))))
    assert finite.tolist() == [True, False, False, False, False, True, False]


@every_library
@pytest.mark.parametrize("vocab", [300, 10_000])
def test_a_bad_row_leaves_its_neighbours_alone(library, vocab):
    logits, params, _ = batch(n=20, vocab=vocab)
    params |= dict(temperature=1.0, top_k=50)
    good = draw(logits, library=library, **params), draw_near(logits, 64, library=library, **params)[0]
    logits[7], logits[8, 3], logits[9, 0] = -INF, float("nan"), INF
    rest = np.delete(np.arange(20), [7, 8, 9])
    got = draw(logits, library=library, **params), draw_near(logits, 64, library=library, **params)[0]
    for before, after in zip(good, got, strict=True):
        assert after[rest].tolist() == before[rest].tolist()
        assert ((after >= 0) & (after < vocab)).all()
