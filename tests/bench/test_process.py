"""Engines in processes of their own: scripts of ours in the place of real ones."""

import shutil
import sys
import time

import pytest

from benchmarks.bench import process
from benchmarks.bench.process import EngineSetup, Process
from benchmarks.bench.session import Session
from hibachi.errors import ConfigError, EngineFailed
from hibachi.testing.bench.work import TimedRequest

ECHO = """
import sys, time
class Engine:
    version, import_seconds = "7.1", 0.25
    def __init__(self, settings):
        print("noise")  # not for the one who reads the answers
        self.settings = settings
        if settings["options"].get("broken"):
            raise ValueError("no such thing")
        if settings["options"].get("dies"):
            sys.exit(3)
        if settings["options"].get("hangs"):
            time.sleep(60)
        self.about = {"library": "echo"}
        self.runs = 0
    def run(self, requests):
        self.runs += 1
        if self.settings["options"].get("fails_at") == self.runs:
            raise RuntimeError("out of luck")
        for r in sorted(requests, key=lambda r: r.due):
            time.sleep(max(0.0, r.due - time.perf_counter()))
            for i in range(r.max_tokens):
                r.times.append(time.perf_counter())
                r.tokens.append(r.prompt[-1] + i)
    def more(self):
        return {"settings": self.settings, "runs": self.runs}
"""
WORK = [TimedRequest(0, 0.0, [5, 6], 3), TimedRequest(1, 0.1, [9], 1)]


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """A folder with `drive.py` and the engine echo."""
    shutil.copy(process.FOLDER / "drive.py", tmp_path)
    (tmp_path / "echo.py").write_text(ECHO)
    monkeypatch.setattr(process, "FOLDER", tmp_path)
    return tmp_path


def setup(engine="echo", **options):
    return EngineSetup(engine, "somewhere/model", "float32", rows=4, max_model_len=64, threads=1, options=options)


def test_an_engine_does_its_work_in_a_process_of_its_own(peers):
    with Process(setup()) as p:
        assert (p.version, p.about) == ("7.1", {"library": "echo"})
        assert p.start_up["total"] > 0 and p.start_up["import"] == 0.25
        ran = p.run(WORK)
        again = p.run(WORK)
    first, second = ran.answers
    assert first.tokens == [6, 7, 8] and second.tokens == [9]
    assert first.due == 0 and second.due == pytest.approx(0.1)
    assert 0 <= first.times[0] <= first.times[2] < second.times[0] and second.times[0] >= 0.1
    assert ran.more["settings"]["rows"] == 4 and (ran.more["runs"], again.more["runs"]) == (2, 3)  # the first warmed up
    if sys.platform == "linux":
        assert ran.use.peak_rss_mib > 1 and ran.use.cpu_seconds >= 0 and 0 <= ran.use.others <= 1
    p.close()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"broken": True}, r"echo: its process ended with status 1: ValueError: no such thing"),
        ({"dies": True}, r"echo: its process ended with status 3: noise"),
        ({"hangs": True}, r"echo: no answer within 0.5 s"),
    ],
)
def test_an_engine_that_does_not_start_says_why(peers, options, message):
    began = time.monotonic()
    with pytest.raises(EngineFailed, match=message):
        Process(setup(**options), timeout=0.5 if "hangs" in options else 60)
    assert time.monotonic() - began < 8 or "hangs" not in options


def test_an_engine_that_fails_at_work_says_why(peers):
    with Process(setup(fails_at=2)) as p, pytest.raises(EngineFailed, match="RuntimeError: out of luck"):
        p.run(WORK)


def test_names_and_interpreters_are_checked(peers):
    with pytest.raises(ConfigError, match="one of echo; got 'other'"):
        Process(setup("other"))
    with pytest.raises(ConfigError, match="cannot run /nowhere/python"):
        Process(EngineSetup("echo", "m", "float32", 1, 8, 1, python="/nowhere/python"))


def test_an_engine_may_be_called_like_its_script(peers):
    """The folder of the scripts is not where `import` looks: a script called colorsys would hide the library."""
    (peers / "colorsys.py").write_text(
        ECHO.replace("import sys, time", "import colorsys, sys, time\ncolorsys.rgb_to_hsv")
    )
    with Process(setup("colorsys")) as p:
        assert p.run(WORK).answers[1].tokens == [9]


# ---- sessions ------------------------------------------------------------------------------------------------------


def session(*setups, **options):
    lines = []
    return Session(setups, vocab_size=100, repeat=2, requests=3, told=lines.append, **options), lines


def test_engines_take_turns(peers):
    shutil.copy(peers / "echo.py", peers / "other.py")
    s, lines = session(setup(), setup("other"))
    runs = list(s.run(["W1", "W4"]))
    assert [(r["work"], r["engine"], r["turn"]) for r in runs] == [
        (work, engine, turn) for work in ("W1", "W4") for turn in (1, 2) for engine in ("echo", "other")
    ]
    assert all(r["complete"] and not r["enable_prefix_caching"] for r in runs) and len(lines) == 8
    assert [r["rows"] for r in runs] == [3] * 4 + [1] * 4 and runs[-1]["model"] == "model"


def test_a_shared_prefix_is_run_cold_warm_and_off(peers):
    runs = list(session(setup())[0].run(["W2"]))
    assert [(r["work"], r["turn"], r["enable_prefix_caching"]) for r in runs] == [
        ("W2 cold", 1, True),
        ("W2 warm", 1, True),
        ("W2 cold", 2, True),
        ("W2 warm", 2, True),
        ("W2 off", 1, False),
        ("W2 off", 2, False),
    ]


def test_rates(peers):
    runs = list(session(setup(), rates=(50.0, 100.0))[0].run(["W3"]))
    assert [(r["rate"], r["turn"]) for r in runs] == [(50.0, 1), (50.0, 2), (100.0, 1), (100.0, 2)]
    assert all("goodput" in r and r["slo_share"] == 1 for r in runs)


def test_one_engine_that_fails_does_not_stop_the_others(peers):
    shutil.copy(peers / "echo.py", peers / "other.py")
    s, lines = session(setup("other", broken=True), setup(fails_at=4), EngineSetup("other", "m", "float32", 1, 8, 1))
    runs = list(s.run(["W1"]))
    assert [(r["engine"], r.get("failed", "")[:44]) for r in runs] == [
        ("other", "its process ended with status 1: ValueError:"),
        ("echo", ""),
        ("other", ""),
        ("echo", "its process ended with status 1: RuntimeErro"),
        ("other", ""),
    ]
    assert sum("failed" in line for line in lines) == 2


def test_work_that_cannot_be_done_is_refused_before_anything_starts(peers, tmp_path):
    with pytest.raises(ConfigError, match="W2 has requests of 560 tokens; the model takes 512"):
        list(session(setup(), context=512)[0].run(["W2"]))
    with pytest.raises(ConfigError, match="a rate is needed"):
        list(session(setup())[0].run(["W3"]))
    with pytest.raises(ConfigError, match=r"or a file; got 'nothing\.jsonl'"):
        list(session(setup())[0].run(["nothing.jsonl"]))
