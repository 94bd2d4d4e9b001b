"""A user's own model is judged: good ones keep every promise on every library, broken ones are caught."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conformance import own_model
from hibachi import ConfigError, load, load_model
from hibachi.lm.named import object_named
from hibachi.testing import prompts, toys
from hibachi.testing.answers import Answer, different
from hibachi.testing.options import ids, token
from hibachi.testing.own import Own, backend_of
from hibachi.testing.spy import Spy

from .broken_models import BROKEN, NUMPY, RemembersByPlace

ROOT = Path(__file__).parents[2]
PROMISES = {name.removeprefix("test_"): test for name, test in vars(own_model).items() if name.startswith("test_")}
FRAMES = [[[1, 2, 3]], [[1, 0, 5], [3, 6, 2], [1, 1, 1]]]  # tokens of three codes
VALUES = [[[1.0, 2.0]], [[8.0, 0.0], [3.0, 6.0], [1.0, 1.0]]]


def verdict(own, promise):
    """None if it is kept; else "-", or what is said."""
    try:
        PROMISES[promise](own)
    except pytest.skip.Exception as e:
        return f"- {e}"
    except pytest.fail.Exception as e:
        return str(e)
    finally:
        own.spy.undo()
    return None


def judge(own, *some):
    """{promise: what is said of it, of those that are not kept}."""
    try:
        said = {promise: verdict(own, promise) for promise in some or PROMISES}
    finally:
        own.close()
    return {promise: why for promise, why in said.items() if why is not None}


def broken(said):
    return {promise: why for promise, why in said.items() if not why.startswith("- does not apply")}


# ---- good models -----------------------------------------------------------------------------------------------------

TOYS = {
    toys.Count: {"vocab_size": 10},
    toys.Halve: {"examples": VALUES},
    toys.SumTokens: {"examples": FRAMES},
    toys.SumLogits: {},
    toys.SumPaged: {},
    toys.SumFrames: {"examples": FRAMES},
    toys.SumState: {},
    toys.SumBoth: {},
}
APPLY_NOT = {  # how many promises do not apply
    toys.Count: 3, toys.Halve: 2, toys.SumTokens: 2, toys.SumLogits: 1, toys.SumFrames: 2,
}  # fmt: skip


@pytest.mark.parametrize("library", ["numpy", "torch", pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.__name__)
def test_a_good_model_of_every_rung_keeps_every_promise(toy, library):
    said = judge(Own(toy(load(library)), **TOYS[toy]))
    assert not broken(said)
    assert len(said) == APPLY_NOT.get(toy, 1)


@pytest.mark.parametrize("toy", [toys.SumLogits, toys.SumPaged])
def test_a_good_model_keeps_promises_on_a_library_that_compiles(toy):
    assert not judge(
        Own(toy(load("jax"))), "a_request_alone_is_answered", "requests_together_give_what_each_gives_alone"
    )


def example(name, library="numpy"):
    """A model of the examples, and settings to judge it by."""
    get = lambda what: object_named(f"{ROOT}/examples/{what}")  # noqa: E731
    if name == "custom_numpy":
        return get("custom_numpy.py:NextEvent")(get("custom_numpy.py:PATHS")), {}
    if name == "custom_torch":
        return get("custom_torch.py:Reciter")(), {"vocab_size": len(get("custom_torch.py:ALPHABET"))}
    if name == "custom_jax":
        size, width, hidden = (
            len(get("custom_jax.py:ALPHABET")),
            get("custom_jax.py:WIDTH"),
            get("custom_jax.py:HIDDEN"),
        )
        shapes = {"embed": (size, width), "hidden": (16 * width, hidden), "out": (hidden, size)}
        draw, put = np.random.default_rng(0).normal, load("jax").put
        params = {name: put(draw(size=shape).astype("float32")) for name, shape in shapes.items()}
        return get("custom_jax.py:Counter")(params), {"vocab_size": size, "padding_token": 0}
    if name == "music_codebooks":
        tune = get("music_codebooks.py:TUNE")
        voices = [np.array([[pitch, 0, 0, 0] for pitch in part]) for part in (tune[:1], tune[16:21])]
        return get("music_codebooks.py:Round")(tune), {"examples": voices}
    if name == "time_series":
        simulate = get("time_series.py:simulate")
        return get("time_series.py:Autoregression")(simulate(500, 0)), {
            "examples": [simulate(30 + n, n) for n in (1, 2)]
        }
    if name == "recurrent_state":
        ids = [get("recurrent_state.py:ALPHABET").index(c) for c in get("recurrent_state.py:VERSE")]
        return get("recurrent_state.py:EchoState")(ids), {}
    if name == "paged_attention":
        return get("paged_attention.py:InductionHead")(load(library)), {}
    x = np.random.default_rng(0).normal(size=(40, 2))
    return get("feedforward.py:Flowers")(x, x[:, 0] > 0), {"examples": list(x[:3]), "feedforward": True}


@pytest.mark.parametrize(
    "name, library",
    [
        ("custom_numpy", "numpy"),
        ("custom_torch", "torch"),
        pytest.param("custom_jax", "jax", marks=pytest.mark.slow),
        ("music_codebooks", "numpy"),
        ("time_series", "numpy"),
        ("recurrent_state", "numpy"),
        ("paged_attention", "torch"),
        ("feedforward", "numpy"),
    ],
)
def test_the_examples_keep_every_promise(name, library):
    model, settings = example(name, library)
    own = Own(model, **settings | {"max_model_len": 100})
    assert own.backend.name == library
    assert not broken(judge(own))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_model_that_ships_keeps_every_promise(library):
    own = Own(load_model("tiny", load(library)))
    assert (own.limit, own.backend.name) == (512, library)
    assert not broken(judge(own))


class Slow:
    """Asynchronous, with tokens that are numbers."""

    async def forward(self, tokens):
        return tokens[:, -1] + 1


def test_a_good_model_that_is_asynchronous_keeps_every_promise():
    assert not broken(judge(Own(Slow(), vocab_size=5)))


# ---- broken models ---------------------------------------------------------------------------------------------------


def made(model):
    return model(NUMPY) if "backend" in inspect.signature(model).parameters else model()


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_a_broken_model_is_caught_by_the_promise_meant_for_it(case):
    own = Own(made(case.model), NUMPY, **case.options)
    first = None
    for promise in PROMISES:
        first = verdict(own, promise)
        if first is not None and not first.startswith("-"):
            break
    own.close()
    assert promise.startswith(case.promise), f"{promise}: {first}"
    expected, got, mend = first.splitlines()
    assert expected.startswith("expected  ") and mend.startswith("mend      ")
    assert re.search(case.says, got.removeprefix("got       ")), got


def test_a_model_that_is_not_a_function_breaks_the_promises_about_faults_too():
    said = judge(Own(RemembersByPlace(NUMPY)))
    assert "as alone" in said["who_leaves_early_changes_nothing"]
    assert "of which the call raises" in said["a_call_that_raises_ends_the_guilty_request_only"]
    assert "of which the output is NaN" in said["nan_in_a_row_ends_its_request_only"]


class Deaf(Spy):
    """Neither fails nor spoils a call."""

    def __setattr__(self, name, value):
        if name not in ("before", "after") or not hasattr(self, name):
            super().__setattr__(name, value)


@pytest.mark.parametrize(
    "promise, expected, got",
    [
        (
            "a_call_that_raises_ends_the_guilty_request_only",
            "0 tokens, then ModelError, for the one request",
            "[6, 2, 4",
        ),
        ("nan_in_a_row_ends_its_request_only", "0 tokens, then NonFiniteOutput, for the one request", "[6, 2, 4"),
        ("an_output_of_the_wrong_shape_is_refused", "InvalidModelOutput for an output", "["),
    ],
)
def test_a_fault_that_goes_unnoticed_breaks_a_promise(promise, expected, got, monkeypatch):
    monkeypatch.setattr("hibachi.testing.own.Spy", Deaf)
    said = judge(Own(toys.SumLogits(NUMPY)), promise)[promise].splitlines()
    assert said[0].startswith(f"expected  {expected}") and said[1].startswith("got       [")


def test_what_cannot_be_compared_is_not_judged():
    class Silent(toys.SumLogits):
        def logits(self, tokens, lengths):
            raise OSError("no weights")

    said = judge(Own(Silent(NUMPY)))
    assert "OSError: no weights" in said.pop("a_request_alone_is_answered")
    assert len(said) == len(PROMISES) - 1
    assert all(why.startswith(("- not judged, as requests alone", "- does not apply")) for why in said.values())


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_are_drawn_below_the_size_of_the_vocabulary():
    found = Own(toys.SumLogits(NUMPY)).prompts
    assert sorted(map(len, found)) == [2, 3, 3, 7, 7, 10, 17]
    assert all(p.min() >= 0 and p.max() < 10 for p in found)
    assert max(len(p) for p in Own(toys.SumLogits(NUMPY), max_model_len=12).prompts) == 9


def test_examples_are_made_longer_by_the_model():
    """So that some share their length, and there are several lengths."""
    own = Own(toys.SumTokens(NUMPY), examples=[[1, 2], [1, 2], [3, 1, 4, 1, 5]])
    more = [[1, 2, *toys.expected([1, 2], k)] for k in (1, 3)]
    assert [p.tolist() for p in own.prompts] == [[1, 2], [3, 1, 4, 1, 5], *more]
    assert len(own.long_prompt(30)) == 30
    own.close()


def test_examples_come_from_the_model_or_from_who_judges_it():
    class Named(toys.Count):
        example_prompts = ([1, 2], [5, 6, 7])

    class Made(toys.Count):
        def example_prompts(self):
            return [np.array([4]), self.backend.put(np.array([7, 7]))]

    assert Own(Named(NUMPY)).prompts[0].tolist() == [1, 2]
    assert Own(Made(load("torch"))).prompts[0].tolist() == [4]
    assert Own(Named(NUMPY), examples=lambda: [[9, 9], [8]]).prompts[0].tolist() == [8]


def test_where_no_request_can_be_told_from_the_others_faults_are_not_judged():
    own = Own(toys.SumLogits(NUMPY), examples=[[1, 2], [1, 2, 4]])
    assert own.guilty is None
    assert judge(own, "nan_in_a_row_ends_its_request_only")["nan_in_a_row_ends_its_request_only"].startswith("- not")


@pytest.mark.parametrize(
    "model, options, message",
    [
        (toys.Count, {}, "nothing to try Count on. Give vocab_size"),
        (toys.Count, {"feedforward": True}, "nothing to try Count on. Give --examples"),
        (toys.Count, {"examples": [[1]]}, "at least two different ones are needed; got 1"),
        (toys.Count, {"examples": [[1], [1]]}, "at least two different ones are needed; got 1"),
        (toys.Count, {"examples": [[1], []]}, r"one at least; got \[\]"),
        (toys.Count, {"examples": ["ab", [1]]}, "one at least; got 'ab'"),
        (toys.SumLogits, {"max_model_len": 7}, "max_model_len >= 8; got 7"),
        (toys.SumLogits, {"examples": [[1], [2] * 60]}, "60 tokens and 6 new ones are over max_model_len=64"),
        (object, {}, "A model needs one of"),
    ],
)
def test_what_cannot_be_judged_is_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        Own(model(NUMPY) if model is not object else object(), **options)


def test_the_library_is_that_of_the_models_arrays():
    class Weights:
        def __init__(self, **arrays):
            self.__dict__ |= arrays

        def forward(self, tokens):
            return tokens

    torch, jax = load("torch").zeros((2,), "float32"), load("jax").zeros((2,), "float32")
    assert backend_of(Weights()).name == backend_of(Weights(w=np.zeros(2))).name == "numpy"
    assert backend_of(Weights(w=[np.zeros(2), {"x": torch}])).name == "torch"
    assert backend_of(Weights(params={"w": jax})).name == "jax"
    assert backend_of(Weights(parameters=lambda: iter([torch]))).name == "torch"
    assert backend_of(Weights(backend="torch", params=jax)).name == "torch"


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


# ---- the command -----------------------------------------------------------------------------------------------------

PROGRAM = """
import numpy as np

class Model:
    vocab_size = 20
    mixed = 0

    def logits(self, tokens, lengths):
        real = np.arange(tokens.shape[1]) >= tokens.shape[1] - lengths[:, None]
        out = np.cos(np.outer((tokens * real).sum(1), np.arange(1, 21)))
        return out + self.mixed * out.mean(0)

def mixed():
    model = Model()
    model.mixed = 0.5
    return model
"""


@pytest.fixture
def conformance(tmp_path):
    """Runs the command in a folder with a program; returns exit status and all that it printed."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "conftest.py").write_text("raise RuntimeError")

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "hibachi", "conformance", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
        )
        assert "Traceback" not in done.stdout + done.stderr
        return done.returncode, done.stdout + done.stderr

    return run


def test_the_command_says_of_every_promise_whether_it_was_kept(conformance):
    status, said = conformance("--model", "program.py:Model", "--max-model-len=32")
    assert status == 0, said
    assert said.startswith("program.py:Model: level 1, logits out\non numpy (numpy ")
    table = {title.strip(): word for title, word in re.findall(r"^(\w.*?)  +(kept|BROKEN|-)$", said, re.MULTILINE)}
    assert table == {promise.replace("_", " "): "-" if "chunks" in promise else "kept" for promise in PROMISES}
    assert max(map(len, said.splitlines())) <= 80


def test_the_command_says_how_to_mend_what_is_broken(conformance):
    status, said = conformance("--model", "program:mixed", "--backend", "numpy", "--backend=array_api_compat.numpy")
    assert status == 1
    [_, told, _] = said.split("BROKEN on ")[0:3]
    assert told.startswith("numpy: requests together give what each gives alone\n  expected  ")
    assert "\n  got       " in told and " beside 6 others\n  mend      A row of the output" in told
    assert "not judged, as requests together give something else than alone: 10 promises" in said
    assert "BROKEN on array_api_compat.numpy" in said and "Mend the first one first" in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--model program:Absent", "program has no 'Absent'"),
        (
            "--model program:Model --prompt 1,x",
            "--prompt takes token ids with commas between them, as 1,2,3; got '1,x'",
        ),
    ],
)
def test_the_command_refuses_what_it_cannot_judge_in_a_line(conformance, arguments, message):
    status, said = conformance(*arguments.split())
    assert status == 4
    assert message in " ".join(said.split()) and said.startswith("ERROR: ")


def test_tokens_on_the_command_line():
    assert ids("1,2,30") == [1, 2, 30]
    assert (token(None), token("3"), token("0.5")) == (None, 3, 0.5)
    assert token("1,2").tolist() == [[1, 2]] and token("nan,1e3").shape == (1, 2)
    with pytest.raises(ConfigError, match="got '1 2'"):
        ids("1 2")
    with pytest.raises(ConfigError, match="got '1;2'"):
        token("1;2")
