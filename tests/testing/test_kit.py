"""What the kit makes of backends that are broken: it comes to an end, and says each thing once."""

import json
import operator
import re
import subprocess
import time

import numpy as np
import pytest

import hibachi
from conformance.cases import WrongAnswer
from conformance.serving import Serving
from hibachi import ArrayBackend, ModelError, NumpyBackend
from hibachi.backend.nine import OPERATIONS, NineBackend
from hibachi.errors import ConfigError
from hibachi.testing.causes import cause_of, frames, hung_at, normal, places
from hibachi.testing.gaps import read_gaps
from hibachi.testing.nine import NineHandle
from hibachi.testing.run import pytest_words
from hibachi.testing.toys import Count, SumLogits, SumPaged

from . import sick as backends

SOON = "--promise-timeout=2"


def blocks(said, kind):
    """The first lines of the report's blocks of this kind: BROKEN, HUNG, ..."""
    return [line for line in said.splitlines() if re.match(rf"{kind}\b.* on \S+", line)]


def row(said, group):
    return next(line for line in said.splitlines() if line.startswith(f"{group}  ")).removeprefix(group).strip()


# ---- the whole -------------------------------------------------------------------------------------------------------


def check_faulty(status, said):
    """Each of the four is named once, and what is built on it apart."""
    assert status == 1
    assert len(blocks(said, "HUNG")) == 1 and re.search(r"at sick.py:\d+ in take\n", said)
    broken = blocks(said, "BROKEN")
    assert len(broken) == 3, said
    for operation in ("pop removes", "idx where all true wants", "write cache sets"):
        assert sum(operation in line for line in broken) == 1, said
    assert len(blocks(said, "MAY FOLLOW")) == 1
    assert "Traceback" not in said


@pytest.mark.slow
def test_three_faults_and_a_hang_are_named_once_in_two_minutes(sick):
    begun = time.monotonic()
    status, said = sick("Faulty")
    assert time.monotonic() - begun < 120
    check_faulty(status, said)


# ---- the first stage -------------------------------------------------------------------------------------------------


def test_where_the_first_stage_fails_the_rest_is_not_run(sick):
    status, said = sick("NoPut", "NoPrograms", "Faulty", arguments=("-k", "not_here or smoke or softmax"))
    assert status == 1
    put, level = blocks(said, "SMOKE")
    assert re.sub(r":\d+ ", ":n ", put) == (
        "SMOKE failed on sick:NoPut at 'an array can be put': TypeError: expected 2 tensors, got 0x7f12 "
        "at sick.py:n in put. Look at put(a, dtype), which takes a NumPy array, and at owns(t). "
        "The rest was not run (--no-smoke runs it)."
    )
    assert re.search(r"at level 1': RuntimeError: cannot compile this at sick.py:\d+ in program. Look at ", level)
    assert row(said, "smoke").split() == ["0/1", "4/5", "6/6"]
    assert row(said, "arrays and arithmetic").split() == ["not", "run", "not", "run", "3/3"]
    assert not blocks(said, "BROKEN") and "8 passed" not in said


def test_without_the_first_stage_everything_is_run_and_one_cause_told_once(sick):
    status, said = sick("NoPut", arguments=("--no-smoke",))
    assert status == 1
    assert len(blocks(said, "SMOKE")) == len(blocks(said, "BROKEN")) == 1
    [block] = blocks(said, "BROKEN")
    assert re.search(r"and \d\d\d more$", block) and said.count("expected 2 tensors, got 0x7f12\n") == 1


@pytest.mark.slow
def test_a_first_stage_that_hangs_is_cut_off(sick):
    status, said = sick("SlowCache", arguments=(SOON,))
    assert status == 1
    [line] = blocks(said, "SMOKE")
    assert "at 'an engine takes a step at level 2': HUNG: No end after 2" in line
    assert re.search(r"at sick.py:\d+ in make_cache. Look at put_all", line)
    assert row(said, "smoke") == "5/6, 1 HUNG" and row(said, "sampling") == "not run"


def test_plain_pytest_has_all_of_it_but_the_limit_of_time(sick, tmp_path):
    (tmp_path / "gaps").write_text("an array can be put # it is new\n")
    plain = [*pytest_words(["--backend=sick:NoPut", "-k", "array_can or it_comes or softmax"]), "--json=all"]
    status, said = sick(program=("-m", "pytest"), arguments=plain)
    assert status == 1 and len(blocks(said, "SMOKE")) == 1 and row(said, "arrays and arithmetic") == "not run"
    status, said = sick(program=("-m", "pytest"), arguments=[*plain, "--known-gaps=gaps"])
    assert status == 1 and row(said, "smoke") == "0/2, 1 known" and "at 'it comes back': TypeError" in said
    assert [*json.loads((tmp_path / "all").read_text())["backends"]] == ["sick:NoPut"]


# ---- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, told, at",
    [
        ("Holding", "HUNG", "No end after 2"),
        ("Crashing", "CRASHED", "The process ended with SIGSEGV"),
        ("Leaving", "CRASHED", "The process ended with exit code 0"),
    ],
)
def test_a_promise_that_does_not_end_or_ends_the_process_is_told_and_the_next_is_tried(sick, name, told, at):
    status, said = sick(name, "Faulty", arguments=(SOON, "-k", "silu or softmax"))
    assert status == 1
    assert row(said, "arrays and arithmetic").startswith(f"3/4, 1 {told}")
    [block] = blocks(said, told)
    assert block == f"{told} on sick:{name}: silu is x times its sigmoid"
    assert at in said and (name == "Leaving" or "in silu\n    <- " in said or "<- sick.py:" in said)
    assert "9 passed" in said and f"1 {told.lower()}" in said


@pytest.mark.slow
def test_the_first_hang_is_enough_for_who_asks_to_stop_there(sick):
    status, said = sick("Holding", arguments=(SOON, "-x", "-k", "silu or softmax"))
    assert status == 1 and "HUNG on sick:Holding" in said
    assert row(said, "arrays and arithmetic") == "0/1, 1 HUNG"


@pytest.mark.slow
def test_a_backend_that_hangs_while_it_is_loaded_does_not_keep_the_others_waiting(sick):
    status, said = sick("never", "Faulty", arguments=("--promise-timeout=1", "-k", "softmax", "--json", "all.json"))
    assert status == 1
    assert "LOST sick:never: HUNG while it was loaded: No end after 4" in said
    assert re.search(r"at sick.py:\d+ in never\n", said)
    assert row(said, "arrays and arithmetic") == "3/3"
    assert sick("never", arguments=("--promise-timeout=0.2", "-k", "softmax"))[0] == 1


@pytest.mark.slow
def test_what_a_library_leaves_running_does_not_keep_the_kit_from_ending(sick):
    assert sick("SlowToClose", arguments=("-k", "softmax"))[0] == 0


def test_a_time_limit_is_a_number_of_seconds(conformance):
    for bad in ("-1", "soon"):
        status, said = conformance("--promise-timeout", bad)
        assert status == 2 and "--promise-timeout" in said


# ---- streams that fail -----------------------------------------------------------------------------------------------


class Failing(Count):
    def forward(self, tokens):
        raise ZeroDivisionError("at once")


def test_who_waits_for_a_step_gets_the_error_of_the_stream():
    with Serving(backend := NumpyBackend()) as serve:
        begun = time.monotonic()
        with pytest.raises(ModelError, match="ZeroDivisionError: at once"):
            serve.hold(serve(Failing(backend)), [1])
        gate = serve.gate()
        with pytest.raises(ModelError, match="ZeroDivisionError: at once"):
            gate.wait(serve.single(Failing(backend)).run(np.ones(2)))
        assert time.monotonic() - begun < 10  # a tenth of the patience of a test


def test_who_waits_for_a_step_that_does_not_come_is_told():
    with Serving(backend := NumpyBackend()) as serve:
        gate = serve.gate(step=5)
        with pytest.raises(AssertionError, match="ended with length before the engine came to this step"):
            gate.wait(serve(Count(backend)).run([1], max_tokens=2, stop_rule=gate))


def test_no_promise_waits_for_a_stream_that_has_failed(sick, tmp_path):
    status, _ = sick("NoAttention", arguments=("--no-smoke", "-k", "cache or stream", "--json=told.json"))
    assert status == 1
    groups = json.loads((tmp_path / "told.json").read_text())["backends"]["sick:NoAttention"]["groups"]
    promises = [promise for group in groups.values() for promise in group]
    assert len([p for p in promises if p["status"] == "broken"]) > 15
    assert max(p["seconds"] for p in promises) < 10


def test_a_wrong_stream_says_why_it_failed():
    with Serving(backend := NumpyBackend()) as serve:
        with pytest.raises(AssertionError, match=r"gave \[\] and ended with ModelError \(.*at once") as caught:
            serve.expect(serve(Failing(backend)).run([1]), [2])
        assert isinstance(caught.value.__cause__, ModelError)


class NoFlip:
    """NumPy, with an error of its own whose frames are all hibachi's."""

    __name__, flip = "no_flip", operator.index

    def __getattr__(self, name):
        return getattr(np, name)


def test_an_error_of_the_library_is_shown_and_not_only_what_became_of_it():
    with Serving(backend := ArrayBackend(NoFlip())) as serve:
        engine = serve(SumLogits(backend))
        _, ending = serve.read(engine.run([1, 2], hibachi.SamplingParams(typical_p=0.5, max_tokens=1)))
    assert ending == "InternalError"
    assert f"{ending}" == repr(ending) == "InternalError (TypeError: _operator.index() takes no keyword arguments)"


# ---- causes ----------------------------------------------------------------------------------------------------------


def test_what_differs_between_failures_of_one_kind_is_left_out():
    for one, other in (
        ("index 3 of 7", "index 12 of 9.5e-3"),
        ("<x at 0x7f00>", "<x at 0xff12ab>"),
        ("gave [1, [2]] for (3,)", "gave [] for (1, 2)"),
        ("off by 3.5 (token 1 of [Row(a=(1,))])", "off by nan (token 2 of [Row(a=(2,)), Row(a=())])"),
        ("Arrays are not equal\n\nMismatched: 1 / 2", "Arrays are not equal\nMismatched: 5 / 9"),
    ):
        assert normal(one) == normal(other) != ""
    assert normal("cannot pop") != normal("cannot cat")


def raised(call, *args):
    try:
        call(*args)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_a_cause_is_an_error_and_the_place_in_the_backend_where_it_was_raised():
    backend = backends.NoPut()
    own = places(backend)
    assert own == [backends.__file__] or backends.__file__.startswith(tuple(own))
    one = cause_of(raised(backend.put, 1), own)
    assert one.text == "TypeError: expected 2 tensors, got 0x7f12"
    assert re.fullmatch(r"tests/testing/sick.py:\d+ in put", *one.where)
    assert cause_of(raised(backend.zeros, (), "int33"), own).key != one.key

    def chained():
        try:
            backend.put(1)
        except TypeError as e:
            raise AssertionError("a stream ended with 1 error") from e

    later = cause_of(raised(chained), own)
    assert (later.key, later.text) == (one.key, f"a stream ended with 1 error (from {one.text})")


def test_the_place_is_known_where_the_engine_has_dropped_the_frames():
    """It keeps them in words."""
    own = places(backends.NoPut())
    with Serving(backends.NoAttention()) as serve:
        error = raised(serve.hold, serve.cached(SumPaged), [1, 2])
    assert re.fullmatch(r"tests/testing/sick.py:\d+ in attend", *cause_of(error, own).where)
    assert cause_of(error, own).key.startswith("IndexError; no tile #; ")


def test_wrong_answers_of_one_operation_are_one_cause():
    one, other = (cause_of(WrongAnswer("pop", text), []) for text in ("gave 1", "gave nothing at all"))
    assert one.key == other.key and (one.text, other.text) == ("gave 1", "gave nothing at all")
    assert cause_of(WrongAnswer("cat", "gave 1"), []).key != one.key


DUMP = """Timeout (0:00:01)!
Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 10 in wait
  File "/backend/pool.py", line 20 in work
Thread 0x02 (most recent call first):
  File "/lib/queue.py", line 30 in get
  File "/lib/threading.py", line 31 in run
"""


def test_where_a_process_hangs_is_where_its_backend_does():
    assert [f.name for f in frames(DUMP)] == ["wait", "work", "get", "run"]
    where, inside = hung_at(DUMP, ["/backend/"])
    assert ([f.name for f in where], inside) == (["wait", "work"], True)
    assert hung_at(DUMP, ["/another/"]) == ([], False)


# ---- known gaps ------------------------------------------------------------------------------------------------------


def test_known_gaps_are_shown_and_do_not_fail(sick, tmp_path):
    (tmp_path / "gaps.txt").write_text(
        "# of Faulty\n\npop* # it counts from one\n"
        "test_idx_where_all_true_wants_every_element_true # any is enough\n"
        "idx where all true holds for rows without elements # likewise\n"
        "take gives rows at * # it hangs\n"
        "softmax * # nobody knows\n"
        "nothing of this name # a promise of yesterday\n"
    )
    arguments = (SOON, "--known-gaps", "gaps.txt", "-k", "pop or idx or take_gives or softmax")
    status, said = sick("Faulty", arguments=arguments)
    assert status == 0, said
    assert not blocks(said, "BROKEN") and not blocks(said, "HUNG")
    assert row(said, "arrays and arithmetic") == "3/4, 1 known" and row(said, "nine operations") == "2/5, 3 known"
    assert "KNOWN on sick:Faulty: pop removes exactly one position (it counts from one; of line 3, 5 more are" in said
    assert "KNOWN on sick:Faulty: take gives rows at indices of any shape (it hangs)" in said
    assert "KNOWN on sick:Faulty: idx where all true wants every element true (any is enough)" in said
    [closed] = blocks(said, "NO LONGER")
    assert "softmax sums to one over the last axis, " in closed and closed.endswith("(line 7)")
    assert "Known gaps, line 8: 'nothing of this name' is about no promise of this run" in said


def test_what_is_no_known_gap_fails_still(sick, tmp_path):
    (tmp_path / "gaps.txt").write_text("pop* # it counts from one\n")
    status, said = sick("Faulty", arguments=("--known-gaps=gaps.txt", "-k", "pop or idx"))
    assert status == 1 and len(blocks(said, "BROKEN")) == 1


@pytest.mark.parametrize("line", ["pop", "pop #", "pop #  ", "  # why", "pop why"])
def test_a_line_without_a_name_or_a_reason_is_refused_with_its_number(tmp_path, line):
    (tmp_path / "gaps").write_text(f"# gaps\nidx* # any\n{line}\n")
    if line.strip().startswith("#"):
        assert len(read_gaps(tmp_path / "gaps")) == 1  # a remark
        return
    with pytest.raises(ConfigError, match="gaps, line 3: expected"):
        read_gaps(tmp_path / "gaps")


def test_a_bad_file_of_gaps_is_an_error_before_anything_runs(conformance, tmp_path):
    (tmp_path / "gaps").write_text("pop\n")
    for name, why in (("gaps", "gaps, line 1: expected"), ("nosuch", "nosuch cannot be read")):
        status, said = conformance("--backend", "numpy", "--known-gaps", name)
        assert status == 4 and why in said and "Traceback" not in said


# ---- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_json_tells_what_became_of_each_promise(sick, tmp_path):
    (tmp_path / "gaps").write_text("idx* # any is enough\n")
    arguments = (SOON, "--json=told.json", "--known-gaps=gaps", "-k", "pop or idx or take or silu or array_can")
    assert sick("Faulty", "Crashing", "NoPut", arguments=arguments)[0] == 1
    told = json.loads((tmp_path / "told.json").read_text())
    assert {"python", "numpy", "pytest", "hibachi"} <= told["versions"].keys()
    assert [*told["backends"]] == ["sick:Faulty", "sick:Crashing", "sick:NoPut"]
    faulty, crashing, no_put = told["backends"].values()
    assert faulty["versions"] == {"library": f"numpy {np.__version__}", "device": "cpu"}
    found = {p["promise"]: p for group in faulty["groups"].values() for p in group}
    take, pop = found["take gives rows at indices of any shape"], found["pop removes exactly one position"]
    assert take["status"] == "hung" and take["seconds"] >= 2 and take["where"][0].startswith("sick.py:")
    assert pop["status"] == "broken" and pop["message"].startswith("backend.pop(put(") and pop["seconds"] < 1
    assert pop["test"] == "test_tensors.py::test_pop_removes_exactly_one_position[sick:Faulty]"
    known = found["idx where all true wants every element true"]
    assert (known["status"], known["known_gap"]) == ("known", "any is enough")
    assert found["silu is x times its sigmoid"] | {"seconds": 0} == {
        "promise": "silu is x times its sigmoid",
        "test": "test_arrays.py::test_silu_is_x_times_its_sigmoid[sick:Faulty]",
        "status": "kept",
        "message": None,
        "where": [],
        "cause": None,
        "known_gap": None,
        "seconds": 0,
    }
    assert crashing["counts"]["crashed"] == 1
    assert no_put["counts"]["broken"] == 1 and no_put["counts"]["not run"] > 5


def test_json_on_standard_output_is_alone_there(sick):
    status, said = sick("Faulty", arguments=("--json", "-", "-k", "pop"), stderr=subprocess.DEVNULL)
    assert status == 1
    assert json.loads(said)["backends"]["sick:Faulty"]["counts"] == {"kept": 5, "broken": 1}


def test_a_backend_whose_arrays_numpy_cannot_take_is_told_to_have_get():
    class Sealed:
        def __init__(self, inside):
            self.inside = inside

    class Strange:
        name = "strange"

        def put(self, a):
            return Sealed(a)

        def shape(self, t):
            return t.inside.shape

    for operation in OPERATIONS:
        if not hasattr(Strange, operation):
            setattr(Strange, operation, lambda self, *args: None)
    with pytest.raises(ConfigError, match=r"read arrays of strange.*got object of shape \(\). Add `get`"):
        NineHandle(NineBackend(Strange()))
    Strange.get = lambda self, t: t.inside
    assert NineHandle(NineBackend(Strange())).get(Sealed(np.ones(2))).tolist() == [1, 1]
