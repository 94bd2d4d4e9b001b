"""Good models pass on every library; of a faulty one, the fault is named, with where it was seen."""

import json
import re
import types

import numpy as np
import pytest

from hibachi import ConfigError, Input, load_backend, load_model
from hibachi.backend.infer import training
from hibachi.testing import toys
from hibachi.testing.verify import Subject, verify
from hibachi.testing.verify.inside import changed, kept
from hibachi.testing.verify.subject import difference, prompts_in
from tests.model.test_agreement import make

from .broken_models import BROKEN, NUMPY
from .faulty_models import FAULTY, Attends, AttendsToPadding, BatchNormed, Decoder, DropsOut, PositionsFromZero
from .good_models import FRAMES, TOYS, VALUES, example

SLOW = pytest.mark.slow


def judged(model, backend=None, **options):
    return verify(Subject(model, backend, **options))


def states(report):
    return {r.key: r.state for r in report.results}


def faulty(report):
    return [r for r in report.results if r.faulty]


# ---- good models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch", pytest.param("jax", marks=SLOW)])
@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.__name__)
def test_a_good_model_of_every_rung_passes(toy, library):
    backend = load_backend(library)
    report = judged(toy(backend), backend, **TOYS[toy])
    assert report.good, "\n".join(report.lines())
    assert set(states(report).values()) <= {"equal", "alike", "skipped"}  # toys count in whole numbers


@pytest.mark.slow
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_the_model_that_ships_differs_by_rounding_only(library):
    plain = load_backend(library).plain()
    report = judged(load_model("tiny", plain), sizes=(2,), chunks=(3,))
    assert report.good, "\n".join(report.lines())
    assert "rounding" in states(report).values() and max(r.worst for r in report.results) < 1e-4
    assert report.lines()[-1] == "No fault was found; some outputs differ by rounding."


def test_the_model_that_ships_is_the_same_in_every_bit_with_kernels():
    report = judged(load_model("tiny", "numpy"), sizes=(2,), chunks=(3,))
    assert report.good and "rounding" not in states(report).values()


@pytest.mark.parametrize("model", [Attends, Decoder])
def test_the_good_siblings_of_the_faulty_models_pass(model):
    assert judged(model()).good


@pytest.mark.parametrize(
    "name", ["custom_numpy", "custom_torch", "music_codebooks", "time_series", "recurrent_state", "paged_attention",
             "feedforward"]
)  # fmt: skip
def test_the_examples_pass(name):
    model, options = example(name)
    report = judged(model, **options)
    assert report.good, "\n".join(report.lines())


def test_what_does_not_apply_is_said_to_be_skipped():
    report = judged(toys.Count(NUMPY), vocab_size=10)
    assert states(report)["padding"] == "skipped" and "chunks" not in states(report)
    assert re.search(r"padding in front of it +- +it is never padded$", "\n".join(report.lines()), re.MULTILINE)


def test_a_model_with_async_def_is_tried_as_an_engine_runs_it():
    class Later(toys.SumTokens):
        async def forward(self, tokens, lengths):
            return super().forward(tokens, lengths)

    report = judged(Later(NUMPY), NUMPY, vocab_size=10)
    assert report.good and "rounding" not in states(report).values()


# ---- faulty models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAULTY, ids=str)
def test_the_fault_is_named(case):
    report = judged(case.model(), **case.options)
    told = "\n".join(report.lines())
    assert not report.good and report.causes[0].key == case.cause, told
    first = faulty(report)[0]
    assert first.key == case.trial, told
    where = f"{first.variant}: {first.first.told() if first.first else first.why}"
    assert re.search(case.where, where), where
    assert re.search(case.saw, " ".join(report.causes[0].saw)), report.causes[0].saw


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_the_cause_is_named(case):
    report = judged(case.made(), NUMPY, **case.options)
    assert [c.key for c in report.causes] == [case.cause], "\n".join(report.lines())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [100, 200, 300])
def test_other_tokens_lead_to_the_same_names(seed):
    cases = [(case.model, case.cause, case.options) for case in FAULTY]
    cases += [(case.made, case.cause, case.options) for case in BROKEN]
    named = []
    for model, cause, options in cases:
        causes = judged(model(), seed=seed, **options).causes
        named.append([c.key for c in causes][:1] == [cause])
    assert sum(named) >= len(named) - 1  # toys count modulo 10, so a fault may hide by chance


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma2", "Mixtral", "Mamba", "GPT-2", "Falcon 40B"])
def test_architectures_pass(name, tmp_path):
    make(name, tmp_path)
    report = judged(load_model(tmp_path))
    assert report.good, "\n".join(report.lines())


def test_a_fault_in_later_tokens_says_at_which_it_begins():
    class Late(Attends):
        def logits(self, tokens, lengths):
            out = super().logits(tokens, lengths)
            return out + (lengths.max() == 13) * out[::-1]

    first = faulty(judged(Late()))[0]
    assert (first.key, first.first.row, first.first.seen, first.first.step) == ("neighbours", "a", 13, 3)


def test_the_padding_token_that_leaks_is_tried_where_a_model_has_no_lengths():
    class Sums:
        def forward(self, tokens):
            return tokens.sum(1) % 10

    assert judged(Sums(), vocab_size=10, padding_token=0).causes == []
    report = judged(Sums(), vocab_size=10, padding_token=3)
    assert [c.key for c in report.causes] == ["padding-leaks"]
    assert judged(Sums(), vocab_size=10, padding_token=3, padding=False).good


def test_padding_tokens_in_a_step_are_tried_where_steps_are_padded():
    class CountsRows(toys.SumState):
        def step(self, params, cache, x):
            out, cache = super().step(params, cache, x)
            return out + x.row.shape[0], cache

    report = judged(CountsRows(load_backend("jax")), sizes=(2,), chunks=(3,))
    assert [c.key for c in report.causes] == ["padded-step"]


# ---- rounding --------------------------------------------------------------------------------------------------------


class Rounds(Attends):
    """Differs with the number of rows by a millionth."""

    def logits(self, tokens, lengths):
        return super().logits(tokens, lengths) * (1 + 1e-6 * (len(tokens) > 1))


def test_rounding_is_a_note_and_with_exact_a_fault():
    report = judged(Rounds())
    assert report.good and states(report)["copies"] == "rounding"
    report = judged(Rounds(), exact=True)
    assert [c.key for c in report.causes] == ["rounding"] and faulty(report)[0].key == "copies"
    assert re.search(r"beside copies of itself +ROUNDING +[0-9.]+e-0[67]\n +2 rows: row a", "\n".join(report.lines()))


def test_the_tolerance_decides_what_is_rounding():
    assert not judged(Rounds(), tolerance=1e-8).good
    bfloat16 = type("InBfloat16", (Rounds,), {"dtype": "bfloat16"})
    assert Subject(bfloat16()).tolerance == 5e-2 and Subject(Rounds()).tolerance == 1e-4


def test_a_difference_is_relative_to_the_largest_output_and_found_where_it_is_largest():
    want = np.array([[10.0, -20.0, np.inf], [np.nan, 5.0, 0.0]])
    assert difference("a", 1, 1, want.copy(), want) is None
    got = want.copy()
    got[1, 1] = 4.0
    d = difference("a", 1, 1, got, want)
    assert (d.size, d.place, d.got, d.want) == (0.05, (1, 1), 4.0, 5.0)
    got[0, 0] = np.nan
    assert difference("a", 1, 1, got, want).size == np.inf


# ---- how it is told --------------------------------------------------------------------------------------------------


def test_two_runs_tell_the_same():
    first, second = (judged(PositionsFromZero()).as_json() for _ in range(2))
    assert first == second


def test_the_report_for_programs_is_plain_json():
    report = json.loads(json.dumps(judged(AttendsToPadding()).as_json(), allow_nan=False))
    assert not report["good"] and [c["key"] for c in report["causes"]] == ["padding-leaks"]
    [trial] = [t for t in report["trials"] if t["key"] == "padding"]
    assert trial["result"] == "differs" and trial["variant"] == "1 in front of a prompt of 11"
    assert (trial["row"], trial["tokens_seen"], trial["new_token"]) == ("a", 11, 1)
    assert trial["difference"] == pytest.approx(abs(trial["got"] - trial["alone"]) / 3, rel=1)


def test_the_table_fits_and_says_what_to_do():
    assert max(len(line) for model in (PositionsFromZero, DropsOut) for line in judged(model()).lines()) <= 88
    lines = judged(AttendsToPadding()).lines()
    assert max(map(len, lines)) <= 88
    assert any(line.startswith("FAULT  Padding leaks into the row") for line in lines)
    assert any(line.startswith("mend   Mask it") for line in lines)


def test_after_a_root_fault_the_rest_is_not_tried():
    report = judged(DropsOut())
    assert states(report)["neighbours"] == "skipped"
    assert [r.why for r in report.results].count("not tried") == 16


def test_a_model_in_training_mode_is_said_to_be():
    assert training(BatchNormed()) == ["BatchNorm1d"] and training(BatchNormed().eval()) == []
    assert training(Attends()) == []


def test_what_a_model_keeps_is_named_when_it_changes():
    model = toys.SumTokens(NUMPY)
    model.table, model.random, model.nested = np.zeros(3), np.random.default_rng(0), {"k": [np.ones(2)]}
    before = kept(model, NUMPY)
    assert changed(before, kept(model, NUMPY)) == []
    model.table[1] = 1
    model.random.normal()
    model.nested["k"].append(3)
    names = ["SumTokens.table", "SumTokens.random (a random generator)", "SumTokens.nested"]
    assert changed(before, kept(model, NUMPY)) == names


class Sourced(toys.SumLogits):
    inputs = types.MappingProxyType({"src": Input((None,))})

    def logits(self, tokens, lengths, src):
        return super().logits(tokens, lengths)


class StopsEarly(toys.SumPaged):
    stop_token, stop_rule = 4, (3,)


def test_what_a_class_stops_at_ends_no_trial():
    assert judged(StopsEarly(NUMPY)).good


# ---- what it is given ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, options, message",
    [
        (toys.Count(NUMPY), {}, "There is nothing to try Count on"),
        (toys.Count(NUMPY), {"examples": [[1, 2], [1, 2]]}, "at least two different ones"),
        (toys.SumLogits(NUMPY), {"max_model_len": 11}, "max_model_len >= 12 .*; got 11"),
        (toys.SumLogits(NUMPY), {"examples": [[1, 2], [10]]}, "token ids from 0 to 9"),
        (toys.SumLogits(NUMPY), {"sizes": (1,)}, "Batch sizes must be >= 2"),
        (toys.SumLogits(NUMPY), {"chunks": ()}, "chunks >= 1"),
        (toys.SumTokens(NUMPY), {"examples": FRAMES, "padding_token": [1, 2]}, "padding token must have the shape"),
        (object(), {}, "A model needs one of"),
        (Sourced(NUMPY), {}, "expected a method `encode` beside `past`, which alone takes it; got logits"),
    ],
)
def test_what_cannot_be_verified_is_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        Subject(model, NUMPY, **options)


@pytest.mark.parametrize("limit", [12, 13, 17, 24])
def test_short_contexts_are_enough(limit):
    assert judged(toys.SumPaged(NUMPY), max_model_len=limit).good
    assert judged(toys.SumLogits(NUMPY), max_model_len=limit).good
    assert [c.key for c in judged(PositionsFromZero(), max_model_len=limit).causes] == ["resume-position"]


def test_no_request_is_longer_than_the_model_takes():
    class Limited(toys.SumPaged):
        max_model_len = 15

        def step(self, params, cache, x):
            assert x.kv_len.max() <= 15
            return super().step(params, cache, x)

    assert judged(Limited(NUMPY)).good


def test_examples_of_any_token_are_grown_by_the_model():
    subject = Subject(toys.Halve(NUMPY), NUMPY, examples=VALUES)
    assert {len(tokens) for tokens in subject.driver.tokens.values()} == {27}
    assert np.array_equal(subject.driver.tokens["a"][:2], [[1.0, 2.0], [0.5, 1.0]])


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts"
    path.write_text("1 2 3\n\n4, 5\n[[1, 2], [3, 4]]\n")
    assert prompts_in(path) == [[1, 2, 3], [4, 5], [[1, 2], [3, 4]]]
    path.write_text("1 2\nthree\n")
    with pytest.raises(ConfigError, match="line 2: expected token ids"):
        prompts_in(path)
