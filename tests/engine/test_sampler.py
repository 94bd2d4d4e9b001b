"""The sampler of a step: everything that a request may ask for, in one batch, against the slow definition."""

from copy import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hibachi import InvalidRequest, NumpyBackend, SamplingParams
from hibachi.engine.sampling.draw import FAR, FULL, MASS, NEAR, PLAIN, TYPICAL, path_of
from hibachi.engine.sampling.uniforms import uniforms
from hibachi.request import DRAWN
from hibachi.testing.verify import Subject, verify
from hibachi_jax import JaxBackend
from hibachi_torch import TorchBackend

from ..decode.reference import distribution, edited, fits
from ..lib.filters import DEFAULTS, TRIED, nudged
from .sampling import Row, Rows

NUMPY = NumpyBackend()
BACKENDS = {"numpy": NUMPY, "torch": TorchBackend("cpu"), "jax": JaxBackend("cpu")}
INF = float("inf")
on_each = pytest.mark.parametrize("library", BACKENDS.values(), ids=BACKENDS)

LOGITS = np.array([0.3, -1.0, 2.0, 0.3, -INF, 1.2, -3.0, 0.0, 1.9, -0.4], np.float32)


def expected(logits, row):
    """The distribution of a row by the definition."""
    p = row.params
    changed = edited(
        logits,
        row.prompt,
        row.output,
        allowed_token_ids=p.allowed_token_ids,
        bad_words=[list(w) for w in row.bad_words],
        logit_bias=p.logit_bias,
        min_tokens=p.min_tokens,
        stop_tokens=row.stop_tokens,
        repetition_penalty=p.repetition_penalty,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
    )
    if max(changed) == -INF:
        return None
    return distribution(changed, **{name: getattr(p, name) for name in DRAWN})


def agrees(token, logits, row):
    """Does the definition give this token for the row's random number? Either does where rounding decides."""
    u = float(uniforms(np.array([row.seed]), np.array([len(row.prompt) + len(row.output)]))[0])
    params = row.params
    for off in (0, -2e-6, 2e-6):
        row.params = nudged(params, off)
        p = expected(logits, row)
        row.params = params
        before = sum(p[:token])
        if p[token] > 0 and before - 2e-5 < u < before + p[token] + 2e-5:
            return True
    if params.temperature == 0:  # of two that are equal but for rounding, either
        row.params = params.with_(**{name: DEFAULTS[name] for name in DRAWN} | {"temperature": 1e-6})
        p = expected(logits, row)
        row.params = params
        return p[token] > 0.1
    return False


# ---- by distribution -----------------------------------------------------------------------------------------

ALL_OF_IT = Row(
    SamplingParams(
        max_tokens=None,
        temperature=1.7,
        top_k=7,
        top_p=0.97,
        min_p=0.01,
        typical_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={0: 1.0, 8: -0.5},
        allowed_token_ids=[0, 1, 2, 3, 5, 7, 8, 9],
        min_tokens=9,
    ),
    **dict(prompt=[2, 2, 7], output=[8, 0, 8], stop_tokens=[5], bad_words=[[0, 8, 3], [8, 0]]),
)


@on_each
@pytest.mark.parametrize("row", [Row(SamplingParams(typical_p=0.7)), ALL_OF_IT], ids=["typical", "all of it"])
def test_draws_follow_the_distribution(library, row):
    """2,000 rows, each with a seed of its own."""
    rows = [copy(row) for _ in range(2000)]
    for seed, each in enumerate(rows):
        each.seed = seed
    drawn = Rows(library, 10, rows).draw(LOGITS)
    assert drawn.bad is None and not drawn.faults
    assert fits(drawn.tokens.tolist(), expected(LOGITS, row))


# ---- any parameters, any neighbours --------------------------------------------------------------------------

ids = st.integers(0, 9)
some_params = st.builds(
    SamplingParams,
    max_tokens=st.none(),
    **{name: st.sampled_from([DEFAULTS[name]] * 2 + [*tried.some]) for name, tried in TRIED.items()},
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.25, 0.0, 3.0]), max_size=3),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=8),
    min_tokens=st.sampled_from([0, 0, 2, 5]),
)
some_rows = st.builds(
    Row,
    some_params,
    prompt=st.lists(ids, min_size=1, max_size=4),
    output=st.lists(ids, max_size=6),
    seed=st.integers(0, 2**20),
    stop_tokens=st.lists(ids, max_size=2),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3),
)
some_logits = st.lists(st.sampled_from([-INF, -3.1, -1.0, 0.0, 0.4, 0.45, 2.0, 5.3]), min_size=10, max_size=10)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(some_rows, some_logits), min_size=1, max_size=5), st.sampled_from(["numpy", "torch"]))
def test_any_parameters_in_one_batch_give_what_the_definition_gives(batch, name):
    rows, logits = [row for row, _ in batch], np.array([x for _, x in batch], np.float32)
    drawn = Rows(BACKENDS[name], 10, rows).draw(logits)
    for i, (row, own) in enumerate(batch):
        if max(own) == -INF:
            assert drawn.bad[i]
        elif expected(own, row) is None:
            assert isinstance(drawn.faults[i], InvalidRequest)
        else:
            assert i not in drawn.faults and (drawn.bad is None or not drawn.bad[i])
            assert agrees(int(drawn.tokens[i]), own, row), (row.params, drawn.tokens[i])


VOCAB = 9_000  # candidates are searched in blocks, and may be too few


def mixed_rows(n=32):
    """Requests of all kinds, with logits from steep to flat."""
    rng = np.random.default_rng(5)
    kinds = [
        dict(temperature=0),
        dict(),
        dict(top_k=20),
        dict(top_k=200, top_p=0.9),
        dict(top_k=3000),
        dict(top_p=0.9),
        dict(top_p=0.95, temperature=3.0),
        dict(min_p=0.05, typical_p=0.8),
        dict(typical_p=0.5),
        dict(repetition_penalty=1.3, top_k=5),
        dict(frequency_penalty=0.5, temperature=0),
        dict(logit_bias={i: 4.0 for i in range(100)}, top_p=0.5),
        dict(allowed_token_ids=list(range(0, VOCAB, 7))),
        dict(allowed_token_ids=[1, 2, 3], temperature=0),
        dict(min_tokens=60, top_p=0.9),
        dict(presence_penalty=1.0, logprobs=3),
        *({name: TRIED[name].some[-1]} for name in DRAWN),
    ]
    rows = [
        Row(
            SamplingParams(max_tokens=None, **kinds[i % len(kinds)]),
            prompt=rng.integers(0, VOCAB, 5),
            output=rng.integers(0, VOCAB, i),
            seed=i,
            stop_tokens=[4, 5],
            bad_words=[[7], [8, 9]] if i % 5 == 0 else (),
        )
        for i in range(n)
    ]
    ranks = np.argsort(rng.random((n, VOCAB)), axis=1) + 1.0
    steep = np.linspace(0.2, 3, n)[rng.permutation(n), None]
    return rows, (-np.log(ranks) * steep).astype(np.float32)


slow_on_jax = pytest.mark.parametrize(
    "library", [NUMPY, BACKENDS["torch"], pytest.param(BACKENDS["jax"], marks=pytest.mark.slow)], ids=BACKENDS
)


@slow_on_jax
def test_a_row_gets_the_same_whoever_shares_its_batch(library):
    """V-19: what a seed gives is reproducible whatever the batch mates, and at temperature 0 it is the argmax."""
    rows, logits = mixed_rows()
    batch = Rows(library, VOCAB, rows)
    everyone = batch.draw(logits)
    assert everyone.bad is None and not everyone.faults
    rng = np.random.default_rng(0)
    groups = [[i] for i in range(len(rows))] + [rng.permutation(len(rows))[:n].tolist() for n in (2, 5, 11, 20)]
    for group in groups if library.name != "jax" else groups[-2:]:  # where each size is compiled
        drawn = batch.draw(logits, group)
        assert drawn.tokens.tolist() == everyone.tokens[group].tolist()
    greedy = [i for i, row in enumerate(rows) if row.params == SamplingParams(temperature=0, max_tokens=None)]
    plain = [i for i in greedy if not rows[i].bad_words]
    assert plain and everyone.tokens[plain].tolist() == logits[plain].argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "library",
    [NUMPY, *(pytest.param(BACKENDS[name], marks=pytest.mark.slow) for name in ("torch", "jax"))],
    ids=BACKENDS,
)
def test_a_mixed_batch_gives_what_the_definition_gives(library):
    rows, logits = mixed_rows()
    drawn = Rows(library, VOCAB, rows).draw(logits)
    for i, row in enumerate(rows):
        assert agrees(int(drawn.tokens[i]), logits[i], row), row.params
        assert (i in drawn.logprobs) == (row.params.logprobs is not None)


# ---- which program -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params, path",
    [
        (dict(), PLAIN),
        (dict(temperature=0, top_k=5, typical_p=0.5), PLAIN),
        (dict(top_k=5), NEAR),
        (dict(top_k=63, top_p=0.5), NEAR),
        (dict(top_k=64), FAR),
        (dict(top_k=1024), FULL),
        (dict(top_k=1024, min_p=0.1), NEAR),
        (dict(top_k=VOCAB), PLAIN),
        (dict(top_k=VOCAB + 1, top_p=0.5), NEAR | MASS),
        (dict(top_p=0.5), NEAR | MASS),
        (dict(top_p=0.5, typical_p=0.5), NEAR | MASS | TYPICAL),
        (dict(typical_p=0.5), FULL | TYPICAL),
        (dict(typical_p=0.5, top_k=100), FAR | TYPICAL),
        (dict(min_p=0.5), NEAR),
        (dict(repetition_penalty=2.0, logit_bias={1: 1}), PLAIN),
    ],
    ids=str,
)
def test_the_program_follows_from_the_row_alone(params, path):
    assert path_of(SamplingParams(**params), VOCAB) == path


def test_a_small_vocabulary_is_sorted_rather_than_searched_twice():
    assert path_of(SamplingParams(top_k=100), 4096) == FAR and path_of(SamplingParams(top_k=100), 4095) == FULL
    assert path_of(SamplingParams(top_k=10), 30) == NEAR


# ---- context -------------------------------------------------------------------------------------------------


@on_each
def test_penalties_follow_the_output(library):
    """Greedy with a frequency penalty: each token comes until it has cost more than the distance to the next."""
    row = Row(SamplingParams(temperature=0, frequency_penalty=1.0, max_tokens=None), prompt=[0, 0, 0])
    rows = Rows(library, 4, [row])
    logits = np.array([2.2, 1.9, 0.1, -9], np.float32)
    came = []
    for _ in range(9):
        [token] = rows.draw(logits).tokens.tolist()
        assert rows.draw(logits).tokens.tolist() == [token]  # a step may be run again
        came.append(token)
        rows.append(0, token)
    assert came == [0, 1, 0, 1, 0, 2, 1, 0, 2]


@on_each
def test_lists_of_tokens_grow(library):
    """A context of hundreds of different tokens, beside a row with none."""
    rng = np.random.default_rng(0)
    long = Row(SamplingParams(repetition_penalty=1.5, temperature=0), prompt=rng.permutation(300), output=range(40))
    none = Row(SamplingParams(frequency_penalty=1.0, temperature=0))
    rows = Rows(library, 500, [long, none])
    logits = rng.normal(size=(2, 500)).astype(np.float32)
    logits[1, 0] = 50  # the token that fills up lists; it is in the prompt, which does not count here
    drawn = rows.draw(logits).tokens.tolist()
    assert drawn == [int(np.argmax(edited(logits[0], long.prompt, long.output, repetition_penalty=1.5))), 0]


def test_a_row_forgets_the_request_before():
    heavy = dict(repetition_penalty=1.9, logit_bias={2: -100}, allowed_token_ids=[2, 8], min_tokens=5)
    rows = Rows(NUMPY, 10, [Row(SamplingParams(temperature=0, **heavy), stop_tokens=[8], bad_words=[[5]])])
    assert rows.draw(LOGITS).tokens.tolist() == [2]
    for params, token in ((dict(), 2), (dict(logit_bias={3: 1}), 2), (dict(allowed_token_ids=[5, 6]), 5)):
        other = Rows(NUMPY, 10, [Row(SamplingParams(temperature=0, **params))])
        [job] = other.jobs
        rows.sampler.admit(job)
        assert rows.sampler.draw(LOGITS[None], [job], np.array([0]), np.array([1])).tokens.tolist() == [token]


def test_bad_words_need_all_of_their_tokens_in_the_output():
    word = [[1, 2, 3]]
    logits = np.array([0.0, 0.0, 0.0, 9.0, 1.0], np.float32)
    for output, token in (([1, 2], 4), ([0, 1, 2], 4), ([2], 3), ([1, 0, 2], 3), ([], 3), ([1, 2, 3, 1, 2], 4)):
        row = Row(SamplingParams(temperature=0), prompt=[1], output=output, bad_words=word)
        assert Rows(NUMPY, 5, [row]).draw(logits).tokens.tolist() == [token], output
    row = Row(SamplingParams(temperature=0), prompt=[1, 2], bad_words=word)  # as in vLLM, the prompt does not count
    assert Rows(NUMPY, 5, [row]).draw(logits).tokens.tolist() == [3]


# ---- processors ----------------------------------------------------------------------------------------------


@on_each
def test_processors_get_the_output_and_native_logits(library):
    seen = []

    def halve(output, logits):
        seen.append((output, library.get(logits).tolist()))
        assert library.owns(logits) and logits.dtype == library.dtype("float32")
        return logits / 2

    def only_five(output, logits):
        at = library.xp.arange(10, device=library.device)
        return library.xp.where(at == 5, logits, -INF)

    rows = [
        Row(SamplingParams(logits_processors=[halve, only_five], logit_bias={2: 1}), prompt=[4], output=[7, 8]),
        Row(SamplingParams(temperature=0)),
        Row(SamplingParams(temperature=0, logits_processors=[only_five], presence_penalty=2), output=[5]),
    ]
    drawn = Rows(library, 10, rows).draw(LOGITS)
    assert drawn.tokens.tolist() == [5, 2, 5] and not drawn.faults
    assert seen == [([7, 8], [x + (i == 2) for i, x in enumerate(LOGITS.tolist())])]


@on_each
def test_penalties_come_after_the_processors(library):
    def to_one(output, logits):
        return logits * 0 + 1

    params = SamplingParams(temperature=0, logits_processors=[to_one], presence_penalty=0.5, max_tokens=None)
    rows = Rows(library, 3, [Row(params, output=[0, 1])])
    assert rows.draw([1.0, 2.0, 3.0]).tokens.tolist() == [2]


def raising(output, logits):
    raise RuntimeError("no idea")


PROCESSORS = {
    "raises": (raising, "processor raising raised RuntimeError: no idea"),
    "returns nothing": (lambda output, logits: None, r"must return an array of \w+ of shape \(10,\); got NoneType"),
    "returns a list": (lambda output, logits: [0.0] * 10, r"got list of shape \(\)"),
    "returns too many": (lambda output, logits: logits[None, :], r"got \w+ of shape \(1, 10\)"),
    "returns NaN": (lambda output, logits: logits * float("nan"), "leaves no token that can come"),
    "bans all": (lambda output, logits: logits - INF, "leaves no token that can come"),
}


@on_each
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("what", PROCESSORS)
def test_a_processor_that_fails_harms_its_own_request_only(library, what):
    processor, message = PROCESSORS[what]
    good = Row(SamplingParams(temperature=0, logits_processors=[lambda output, logits: -logits]))
    logits = np.where(np.isfinite(LOGITS), LOGITS, 0)
    drawn = Rows(library, 10, [good, Row(SamplingParams(logits_processors=[processor])), Row(), good]).draw(logits)
    assert list(drawn.faults) == [1] and drawn.bad is None
    with pytest.raises(InvalidRequest, match=message):
        raise drawn.faults[1]
    assert drawn.tokens[[0, 3]].tolist() == [6, 6]


# ---- nothing left, nothing finite ----------------------------------------------------------------------------


@on_each
def test_a_request_that_leaves_no_token_fails_alone(library):
    rows = [
        Row(SamplingParams(allowed_token_ids=[4])),  # which has -inf
        Row(SamplingParams(allowed_token_ids=[2], min_tokens=1), stop_tokens=[2]),
        Row(SamplingParams(allowed_token_ids=[2, 3], temperature=0), bad_words=[[2], [3]]),
        Row(SamplingParams(allowed_token_ids=[2, 3], temperature=0), bad_words=[[2]]),
        Row(SamplingParams(temperature=0)),
    ]
    drawn = Rows(library, 10, rows).draw(LOGITS)
    assert sorted(drawn.faults) == [0, 1, 2] and drawn.bad is None
    for fault in drawn.faults.values():
        assert isinstance(fault, InvalidRequest) and "allowed_token_ids" in str(fault)
    assert drawn.tokens[3:].tolist() == [3, 2]


@on_each
def test_logits_that_are_not_finite_are_the_model_s_fault(library):
    """Also where the token in question could not have come."""
    rows = [Row(SamplingParams(allowed_token_ids=[1])), Row(), Row(SamplingParams(presence_penalty=1)), Row()]
    logits = np.tile(LOGITS, (4, 1))
    logits[0, 7] = logits[1, 0] = np.nan
    logits[2, 3] = INF
    drawn = Rows(library, 10, rows).draw(logits)
    assert drawn.bad.tolist() == [True, True, True, False] and not drawn.faults


@on_each
def test_log_probabilities_are_those_of_the_raw_logits(library):
    params = SamplingParams(
        temperature=0, logprobs=2, allowed_token_ids=[1, 3], repetition_penalty=2, logit_bias={1: 9}
    )
    rows = Rows(library, 10, [Row(), Row(params), Row(SamplingParams(logprobs=9, temperature=0))])
    drawn = rows.draw(np.where(np.isfinite(LOGITS), LOGITS, -9))
    assert drawn.tokens[1:].tolist() == [1, 2] and sorted(drawn.logprobs) == [1, 2]
    assert list(drawn.logprobs[1]) == [2, 8, 1] and list(drawn.logprobs[2])[:3] == [2, 8, 5]
    assert len(drawn.logprobs[2]) == 9


# ---- probabilities in the place of logits ----------------------------------------------------------------------------


class Outputs:
    """Level 1: these rows, one after another."""

    max_model_len = 64

    def __init__(self, rows):
        self.rows, self.vocab_size = np.asarray(rows), len(rows[0])

    def logits(self, tokens, lengths):
        return self.rows[(lengths - 1) % len(self.rows)]


SHARES = [[0.5, 0.25, 0.25], [0.125, 0.0, 0.875], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "rows, told",
    [
        (SHARES, True),
        (np.log(np.array(SHARES) + 1e-9), False),
        ([SHARES[0], [2.0, 1.0, 0.5]], False),
        ([[0.25, 0.75]], False),  # two numbers say too little
        (np.eye(5), False),  # a rule's
    ],
)
def test_probabilities_are_told_of_once(serve, caplog, rows, told):
    engine = serve(Outputs(rows), max_num_seqs=4)
    for stream in [engine.run([0] * n, SamplingParams(max_tokens=20)) for n in (1, 2, 3, 4, 5)]:
        stream.collect()
    assert caplog.text.count("Outputs returns probabilities") == told
    assert [c.key for c in verify(Subject(Outputs(rows), NUMPY)).causes] == ["probabilities"] * told
