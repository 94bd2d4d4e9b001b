"""What only engines show of a model: that rows come, go and fail. And how answers are compared."""

import numpy as np
import pytest

from hibachi import load_backend
from hibachi.engine.ladder import ModelKind
from hibachi.testing import toys
from hibachi.testing.verify import Subject, prompts, verify
from hibachi.testing.verify import engine_trials as trials
from hibachi.testing.verify.answers import Answer, different
from hibachi.testing.verify.drive import Found
from hibachi.testing.verify.spy import Spy
from hibachi.testing.verify.subject import subject_backend
from hibachi.testing.verify.trials import TRIALS

from .broken_models import NUMPY, HasTooFewPositions, RemembersByPlace
from .good_models import FRAMES, TOYS

LIVE = {trial.key: trial for trial in TRIALS if trial.last}


def said(subject, key):
    """What the trial says that is wrong, whatever others would; None: nothing. {variant: ...}"""
    found = {}
    for what, make in LIVE[key].variants(subject):
        found[what] = None
        try:
            assert make() == {}
        except Found as e:
            found[what] = str(e)
    return found


@pytest.fixture
def judged():
    """judged(model, key, options): what the trials says that is wrong, in the first variant that says anything."""
    subjects = []

    def judge(model, key, **options):
        subjects.append(Subject(model, **options))
        return next(filter(None, said(subjects[-1], key).values()), None)

    yield judge
    for subject in subjects:
        subject.close()


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.__name__)
def test_a_good_model_of_every_rung_passes_each_trial(toy):
    subject = Subject(toy(NUMPY), **TOYS[toy])
    report = verify(subject)
    tried = {r.key: (r.state, r.why) for r in report.results if r.key in LIVE}
    skipped = {key: why for key, (state, why) in tried.items() if state == "skipped"}
    # Rows of a past do not say whose they are; others name no lengths.
    told = set(LIVE) - ({"raises", "nan"} if subject.kind is ModelKind.OWN_CACHE else {"borders"})
    assert set(tried) == told and {state for state, _ in tried.values()} <= {"alike", "skipped"}
    without_limit = toy in (toys.Count, toys.Halve, toys.SumTokens, toys.SumLogits)
    assert skipped.get("longest", "") == ("it has no max_model_len" if without_limit else "")
    integers = toy in (toys.Count, toys.SumTokens, toys.SumFrames)
    assert skipped.get("nan", "") == ("integers cannot be NaN" if integers else "")
    assert not skipped.keys() - {"borders", "longest", "nan"}


class Slow:
    """Asynchronous, with tokens that are numbers."""

    async def forward(self, tokens):
        return tokens[:, -1] + 1


def test_a_model_that_is_asynchronous_passes():
    report = verify(Subject(Slow(), vocab_size=5))
    assert report.good and {r.state for r in report.results if r.key in LIVE} == {"alike", "skipped"}


@pytest.mark.parametrize(
    "key, message",
    [
        ("joins", "when others join while the first is running"),
        ("leaves", "when the others end at different steps"),
        ("cancels", "when one of the others cancels"),
        ("raises", "of which the call raises"),
        ("nan", "of which the output is NaN"),
        ("shapes", "after an output with"),
    ],
)
def test_a_model_that_remembers_by_place_fails_where_rows_come_and_go(judged, key, message):
    assert message in judged(RemembersByPlace(NUMPY), key)


def test_the_longest_prompt_is_tried_alone_and_beside_others(judged):
    assert "IndexError" in judged(HasTooFewPositions(NUMPY), "longest")
    assert judged(HasTooFewPositions(NUMPY), "longest", max_model_len=48) is None

    class MixesLongPrompts(toys.SumLogits):
        max_model_len = 64

        def logits(self, tokens, lengths):
            return super().logits(tokens, lengths) + (lengths.max() > 50) * np.roll(lengths, 1)[:, None] * np.eye(10)[1]

    assert "beside" in judged(MixesLongPrompts(NUMPY), "longest")
    assert judged(toys.SumFrames(NUMPY), "longest", examples=FRAMES) is None  # what the model says makes them long
    short = type("Short", (toys.SumTokens,), {"max_model_len": 30})
    assert judged(short(NUMPY), "longest", examples=FRAMES) is None

    class BeginsWithAClass(toys.SumLogits):
        """Its first token is below 5. So are the examples'."""

        max_model_len = 64

        def logits(self, tokens, lengths):
            first = tokens[np.arange(len(tokens)), tokens.shape[1] - lengths]
            assert (first < 5).all()
            return super().logits(tokens, lengths)

    assert judged(BeginsWithAClass(NUMPY), "longest", examples=[[1, 9, 2], [3, 8]]) is None


def test_prompts_of_one_token_are_tried_beside_longer_ones(judged):
    class MixesOnes(toys.SumTokens):
        def forward(self, tokens, lengths):
            return (super().forward(tokens, lengths) + (len(set(lengths.tolist())) > 1) * (lengths == 1)) % 10

    assert "beside longer ones, so that it is padded" in judged(MixesOnes(NUMPY), "ones", vocab_size=10)

    class RefusesOnes(toys.Count):
        def forward(self, tokens):
            if tokens.shape[1] == 1:
                raise ValueError("it takes two")
            return super().forward(tokens)

    assert judged(RefusesOnes(NUMPY), "ones", examples=[[1, 2], [3, 4, 5]]) is None


class Deaf(Spy):
    """Neither fails nor spoils a call."""

    def __setattr__(self, name, value):
        if name not in ("before", "after") or not hasattr(self, name):
            super().__setattr__(name, value)


@pytest.mark.parametrize(
    "key, expected",
    [
        ("raises", "expected 0 tokens, then ModelError, for the one request of which the call raises; got ["),
        ("nan", "expected 0 tokens, then NonFiniteOutput, for the one request of which the output is NaN; got ["),
        ("shapes", "expected InvalidModelOutput for an output with a row too few; got ["),
    ],
)
def test_a_fault_that_goes_unnoticed_is_a_fault(judged, key, expected, monkeypatch):
    monkeypatch.setattr("hibachi.testing.verify.engines.Spy", Deaf)
    assert judged(toys.SumLogits(NUMPY), key).startswith(expected)


def test_what_engines_show_is_named_as_a_cause_and_the_rest_is_not_tried():
    subject = Subject(HasTooFewPositions(NUMPY))
    report = verify(subject)
    assert [c.key for c in report.causes] == ["longest-context"] and "IndexError" in report.causes[0].saw[0]
    assert {r.key: r.state for r in report.results}["raises"] == "skipped"
    lines = report.lines()
    assert max(map(len, lines)) <= 88 and any(
        line.startswith("FAULT  It does not compute the longest") for line in lines
    )


def test_where_no_request_can_be_told_from_the_others_faults_are_not_tried():
    subject = Subject(toys.SumLogits(NUMPY))
    assert trials.no_guilty(subject) == trials.no_nan(subject) == ""
    subject.engines.guilty = None
    assert trials.no_guilty(subject) == trials.no_nan(subject) == "no prompt can be told from the others"
    subject.close()


def test_the_library_is_that_of_the_models_arrays():
    class Weights:
        def __init__(self, **arrays):
            self.__dict__ |= arrays

        def forward(self, tokens):
            return tokens

    torch, jax = load_backend("torch").zeros((2,), "float32"), load_backend("jax").zeros((2,), "float32")
    assert subject_backend(None, Weights()).name == subject_backend(None, Weights(w=np.zeros(2))).name == "numpy"
    assert subject_backend(None, Weights(w=[np.zeros(2), {"x": torch}])).name == "torch"
    assert subject_backend(None, Weights(params={"w": jax})).name == "jax"
    assert subject_backend(None, Weights(parameters=lambda: iter([torch]))).name == "torch"
    assert subject_backend(None, Weights(backend="torch", params=jax)).name == "torch"


# ---- comparing -------------------------------------------------------------------------------------------------------


def compared(got, want, n=2, tol=1e-3):
    return different(np.array([1]), got, want, "as alone", "now", n, tol)


def sampled(tokens, *likely):
    return Answer(tokens, "length", None, [{5: first, 6: second} for first, second in likely])


def test_ids_count_where_they_are_likelier_than_rounding_and_log_probabilities_everywhere():
    want = sampled([5, 5], (-0.1, -2.0), (-0.69, -0.6903))
    assert compared(want, want) is None
    assert compared(sampled([5, 5], (-0.1004, -2.001), (-0.69, -0.69)), want) is None
    assert compared(sampled([5, 6], (-0.1, -2.0), (-0.6902, -0.69)), want) is None  # a tie, up to rounding
    assert "[6, 5] now" in compared(sampled([6, 5], (-0.1, -2.0), (-0.69, -0.69)), want).got
    told = compared(sampled([5, 5], (-0.1, -2.1), (-0.69, -0.69)), want)
    assert told == (
        "a log-probability of -2 of id 6 as new token 1 for [1], as alone",
        "a log-probability of -2.1 now",
    )
    infinite = sampled([5, 5], (0.0, -np.inf), (0.0, -np.inf))
    assert compared(infinite, infinite) is None
    assert compared(infinite, want) is not None


def test_tokens_are_compared_exactly_and_real_values_up_to_rounding():
    whole = Answer([np.array([1, 2]), np.array([3, 4])], "length")
    assert compared(whole, whole) is None
    assert compared(Answer([np.array([1, 2]), np.array([3, 5])], "length"), whole).got == (
        "[[1, 2], [3, 5]] now, another from new token 2 on"
    )
    assert compared(Answer(whole.items[:1], "stop"), whole).got == "the end 'stop' after 1 tokens now"
    real = Answer([np.array(1.0), np.array(2.0)], "length")
    assert compared(Answer([np.array(1.0005), np.array(2.001)], "length"), real) is None
    assert compared(Answer([np.array(1.1), np.array(2.0)], "length"), real) is not None
    assert compared(Answer([np.array(1.1), np.array(2.0)], "length"), real, tol=0.2) is None
    assert compared(Answer([np.array([1.0]), np.array([2.0])], "length"), real) is not None


def test_prompts_of_a_row_are_known_in_its_dtype():
    assert prompts.begins(np.array([1.0, 2.0, 3.0], np.float32), np.array([1.0, 2.0]))
    assert not prompts.begins(np.array([1]), np.array([1, 2]))
