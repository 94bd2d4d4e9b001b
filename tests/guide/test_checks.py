"""Forms are checked in processes that may be ended: what is hostile harms nobody, and what was seen is not checked
again.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hibachi.engine.guide import checks, llg
from hibachi.engine.guide.checks import Verdicts
from hibachi.engine.guide.protocol import MOST_KEYWORDS, Counted, FormRefused, Grammar, GuideFailed
from hibachi.errors import ConfigError, EngineClosed
from hibachi.structured import StructuredOutputs

from ..lib.inside import checking, running
from . import made


@pytest.fixture
def own():
    """Guides that a test may end processes of."""
    setting = made.Setting(made.of_bytes(ends=(0,)))
    yield setting
    setting.guides.close()


def pids(setting) -> list[int]:
    return [process.pid for process in checking(setting.guides)]


def nested(n: int, keyword: str):
    """2 ** n schemas in 1 MB, of which the library makes all."""
    if n == 0:
        return {"type": "integer"}
    return {keyword: [nested(n - 1, keyword), {"type": "array", "items": nested(n - 1, keyword)}]}


def patterns(n: int) -> dict:
    """A form that takes n * n / 25 ms on a fast core."""
    return {"json": {"type": "object", "patternProperties": {f"^{i}.*x{i}$": {} for i in range(n)}}}


# ---- what was seen ---------------------------------------------------------------------------------------------------


def test_a_form_is_checked_once_whatever_its_verdict(own):
    counted = own.guides.counted
    first = own.check(json={"type": "integer"})
    assert own.check(json='{"type":"integer"}') is first and (counted.checks, counted.hits) == (1, 1)
    assert own.check(json={"type": "integer"}, whitespace_pattern=" ?") is not first
    messages = set()
    for _ in range(3):
        with pytest.raises(FormRefused) as caught:
            own.check(json={"not": {}})
        messages.add((str(caught.value), caught.value.keyword))
    assert len(messages) == 1 and (counted.checks, counted.hits) == (3, 3)
    assert counted.refused == {"not": 1}
    began = time.perf_counter()
    for _ in range(100):
        own.check(json={"type": "integer"})
    assert time.perf_counter() - began < 0.5  # with the making of the forms


def test_the_least_recently_used_verdicts_go_first():
    form = [StructuredOutputs(regex="a" * (i + 1)) for i in range(4)]
    kept = Verdicts(entries=2, size=10**6)
    kept.keep(form[0], Grammar("0"))
    kept.keep(form[1], Grammar("1"))
    assert kept.find(form[0]).source == "0"
    kept.keep(form[2], FormRefused("2"))
    assert kept.find(form[1]) is None and kept.find(form[0]) and kept.find(form[2]) and len(kept) == 2
    small = Verdicts(entries=100, size=10_000)
    for i in range(4):
        small.keep(form[i], Grammar("x" * 3000))
    assert small.find(form[0]) is None and small.find(form[3]) and len(small) == 2
    small.keep(StructuredOutputs(choice=["y" * 20_000]), Grammar(""))
    assert len(small) == 0  # it is too large to be kept


def test_refused_keywords_are_counted_by_so_many_names():
    counted = Counted()
    for i in range(MOST_KEYWORDS + 50):
        counted.note(FormRefused("", f"k{i}"))
    counted.note(FormRefused(""))
    assert len(counted.refused) == MOST_KEYWORDS + 1 and counted.refused["other"] == 51
    counted.note(Grammar("", 5.0))
    assert counted.checks == MOST_KEYWORDS + 52


# ---- several at once -------------------------------------------------------------------------------------------------


def test_checks_of_one_form_wait_for_one(own):
    found, ready = [], threading.Barrier(8)

    def ask():
        ready.wait()
        found.append(own.check(choice=[f"text {i}" for i in range(2000)]))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(f) for f in found}) == 1 and own.guides.counted.checks == 1
    assert own.guides.counted.hits == 7 and not running(own.guides)
    assert len(pids(own)) == 1  # nor is a second process started for one after the other


def test_a_slow_form_does_not_hold_up_others(own, monkeypatch):
    monkeypatch.setattr(llg, "SECONDS", 0.8)
    own.check(regex="a")

    def refused():
        with pytest.raises(FormRefused):
            own.check(**patterns(300))

    slow = threading.Thread(target=refused)
    slow.start()
    while not running(own.guides):
        time.sleep(0.001)
    own.check(regex="b")
    assert slow.is_alive() and len(pids(own)) == 2
    slow.join()


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_a_process_that_somebody_ends_is_started_again(own):
    own.check(regex="a")
    os.kill(pids(own)[0], signal.SIGKILL)
    assert own.check(regex="b").source
    (pid,) = pids(own)
    answer = []
    asking = threading.Thread(target=lambda: answer.append(own.check(**patterns(180))))
    asking.start()
    while not running(own.guides):
        time.sleep(0.001)
    time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)  # in the middle
    asking.join()
    assert isinstance(answer[0], Grammar) and pids(own) != [pid]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems limit no address space")
def test_a_form_that_takes_too_much_memory_is_refused_and_others_are_not(own, monkeypatch):
    monkeypatch.setattr(llg, "MEMORY", 2**22)
    form = {"choice": [f"text {i}" for i in range(30_000)]}
    with pytest.raises(FormRefused, match="choice: it is too complex: checking it took more than 2 s, 512 MiB or the"):
        own.check(**form)
    with pytest.raises(FormRefused, match="too complex"):
        own.check(**form)
    assert own.guides.counted.checks == 1 and own.guides.counted.hits == 1
    assert own.check(regex="a").source


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no alarms")
def test_a_form_that_takes_too_long_is_refused_and_others_are_not(own, monkeypatch):
    monkeypatch.setattr(llg, "SECONDS", 0.1)
    monkeypatch.setattr(checks, "WALL", 1000)
    with pytest.raises(FormRefused, match="too complex: checking it took more than"):
        own.check(**patterns(600))  # half a minute
    assert own.check(regex="a").source


def test_a_process_that_cannot_be_started_is_an_error_of_the_place(own, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(ConfigError, match="cannot be started"):
            own.check(regex="a")
        patched.setattr(sys, "executable", "/bin/true")
        with pytest.raises(ConfigError, match="ended before it was ready"):
            own.check(regex="a")
    assert own.check(regex="a").source  # neither was kept


def test_after_the_end_nothing_is_started(own):
    kept = own.check(regex="a")
    (process,) = checking(own.guides)
    own.guides.close()
    own.guides.close()
    assert process.poll() is not None and own.check(regex="a") is kept
    with pytest.raises(EngineClosed):
        own.check(regex="b")


def test_guides_that_are_forgotten_leave_no_process():
    setting = made.Setting(made.of_bytes(ends=(0,)))
    setting.check(regex="a")
    (process,) = checking(setting.guides)
    del setting
    assert process.poll() is not None


FORKED = """
import os, sys
from tests.guide import made
setting = made.Setting(made.of_bytes(ends=(0,)))
guides = [setting.guide(regex=f"a{n}") for n in (1, 2, 3)]
setting.masks(*guides)  # starts threads
theirs = setting.guides._checks._processes[0]._process.pid
child = os.fork()
if not child:
    setting.guide(regex="b")  # by a process of its own
    assert setting.guides._checks._processes[0]._process.pid != theirs
    assert setting.guides.counted.hits == 0 and setting.check(regex="a1")
    assert setting.guides.counted.hits == 1
    assert setting.masks(*guides).sum() == 3
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
setting.guide(regex="c")
assert setting.guides._checks._processes[0]._process.pid == theirs
print("both")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_fork_has_processes_and_threads_of_its_own():
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=100)
    assert ran.stdout == "both\n", ran.stderr


def test_the_process_ends_with_the_one_that_started_it():
    code = (
        "import os\nfrom tests.guide import made\ns = made.Setting(made.of_bytes(ends=(0,)))\ns.check(regex='a')\n"
        "print(s.guides._checks._processes[0]._process.pid, flush=True)\nos._exit(0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    pid = int(ran.stdout)
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except OSError:
            return
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
        if state.startswith("Z"):  # ended, and nobody has asked for it
            return
        time.sleep(0.05)
    pytest.fail("it goes on")


# ---- what is hostile -------------------------------------------------------------------------------------------------

CIRCLES = {
    f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i * 7 + 1) % 300}"}, {"$ref": f"#/$defs/d{(i * 11 + 3) % 300}"}]}
    for i in range(300)
}
HOSTILE = {
    "nested oneOf": {"json": nested(11, "oneOf")},
    "nested anyOf": {"json": nested(11, "anyOf")},
    "nested allOf": {"json": nested(11, "allOf")},
    "a megabyte": {"json": {"type": "object", "description": "x" * 10**6}},
    "definitions": {"json": {"$defs": {f"d{i}": {"properties": {"a": {"minimum": i}}} for i in range(12_000)}}},
    "references": {"json": {"$defs": CIRCLES, "$ref": "#/$defs/d0"}},
    "itself": {"json": {"$ref": "#"}},
    "a circle": {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "deep": {"json": '{"items":' * 400 + "{}" + "}" * 400},
    "as deep as allowed": {"json": '{"items":' * 118 + "{}" + "}" * 118},
    "texts": {"json": {"enum": [f"value {i}" for i in range(20_000)]}},
    "numbers": {"json": {"enum": list(range(60_000))}},
    "optional": {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}},
    "patterns": patterns(100),
    "a long text": {"json": {"type": "string", "minLength": 10**6}},
    "a long list": {"json": {"type": "array", "items": {}, "minItems": 10**6}},
    "multiples": {"json": {"type": "integer", "multipleOf": 7919 * 104_729}},
    "counted": {"regex": "(a{1,1000}){1,1000}"},
    "counted thrice": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "counted classes": {"regex": r"\p{L}{1,1000}" * 50},
    "backtracking": {"regex": "(x+x+)+y"},
    "states": {"regex": "[ab]*a[ab]{300}"},
    "alternatives": {"regex": "|".join(f"{i}.*{i}" for i in range(2000))},
    "parentheses": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "left recursion": {"grammar": 'start: start "a" | "b"'},
    "hidden left recursion": {"grammar": 'start: x start "a" | "b"\nx: "" | "c"'},
    "ambiguous": {"grammar": 'start: start start | "a" | ""'},
    "empty alternatives": {"grammar": 'start: (a | )* \na: | "x"'},
    "nothing": {"grammar": 'start: a\na: a "x"'},
    "no end": {"grammar": 'start: "x" start'},
    "rules": {"grammar": "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} | "b"\n' for i in range(8000)) + 'r8000: "c"'},
    "wide": {
        "grammar": "start: "
        + "|".join(f"r{i}" for i in range(2500))
        + "\n"
        + "".join(f'r{i}: "a" "{i}"\n' for i in range(2500))
    },
    "nested repeats": {"grammar": 'start: a{0,1000}\na: b{0,1000}\nb: "x" | "y" start'},
    "negation": {"grammar": "start: A\nA: ~/(.*a){20}b/ & ~/[ab]*a[ab]{15}/"},
    "parentheses in Lark": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "parentheses in GBNF": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "a quote": {"grammar": 'start: "' + "a" * 10**6},
    "zeros": {"grammar": "\0" * 1000},
    "choices": {"choice": [f"choice {i}" for i in range(2**15)]},
}


def served(tiny, form) -> str | None:
    """Why a form is refused. If it is not, a guide of it computes masks until it fails by name or ends."""
    try:
        guide = tiny.guide(**form)
    except FormRefused as e:
        return str(e)
    try:
        for _ in range(20):
            allowed = tiny.allowed(guide) - tiny.ends
            if not allowed:
                break
            guide.advance([min(allowed)])
    except GuideFailed as e:
        assert "complex" in str(e)
    return None


@pytest.fixture
def small_stack():
    """Of threads, such as those of other systems; what overflows it ends the process."""
    before = threading.stack_size(2**20)
    yield
    threading.stack_size(before)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_refused_by_name_or_served(tiny, small_stack, name):
    """In its time, and on a stack of 1 MiB."""
    began, found = time.process_time(), []
    thread = threading.Thread(target=lambda: found.append(served(tiny, HOSTILE[name])))
    thread.start()
    thread.join()
    (why,) = found
    assert time.process_time() - began < 20
    assert why is None or (why.startswith(f"structured_outputs.{next(iter(HOSTILE[name]))}: ") and len(why) < 300)
