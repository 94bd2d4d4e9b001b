"""From the times of tokens to figures: by hand on small runs."""

import json

import pytest

from benchmarks.bench.figures import figures, kept, read_results, summarise
from benchmarks.bench.process import Answered, Ran
from benchmarks.bench.watch import CONTENDED, Use
from hibachi.errors import ConfigError
from hibachi.testing.bench.report import Slo
from hibachi.testing.bench.work import TimedRequest

REQUESTS = [TimedRequest(0, 0.0, [1, 2], 3), TimedRequest(1, 1.0, [1, 2, 3], 2)]
ANSWERS = [Answered(0, 0.0, [0.5, 0.6, 0.9], [7, 8, 9]), Answered(1, 1.0, [1.2, 2.0], [7, 8])]
QUIET = Use(2.1, 3.0, 0.0, 100.0)


def run(**change):
    base = figures(REQUESTS, Ran(ANSWERS, QUIET, {}))
    about = {"engine": "hibachi (numpy)", "version": "1", "model": "m", "dtype": "float32", "threads": 2}
    about |= {"work": "W1", "rate": None}
    return about | {"start_up": {"total": 2.0, "import": 0.5, "load": 1.0}} | base | change


def test_figures_by_hand():
    f = figures(REQUESTS, Ran(ANSWERS, QUIET, {}))
    assert (f["requests"], f["prompt_tokens"], f["new_tokens"], f["complete"]) == (2, 5, 5, True)
    assert f["seconds"] == 2.0 and f["tokens_per_second"] == 2.5
    assert f["ttft"]["p50"] == pytest.approx(0.35) and f["ttft"]["p99"] == pytest.approx(0.5, abs=0.01)
    assert f["itl"]["p50"] == pytest.approx(0.3)  # of 0.1, 0.3, 0.8
    assert f["e2e"]["p50"] == pytest.approx(0.95)
    assert not f["contended"] and "goodput" not in f


def test_what_is_missing_shows():
    f = figures(REQUESTS, Ran([ANSWERS[0], Answered(1, 1.0, [], [])], QUIET, {}))
    assert not f["complete"] and f["new_tokens"] == 3
    f = figures(REQUESTS, Ran([], QUIET, {}))
    assert f["ttft"] is None and f["tokens_per_second"] == 0


def test_goodput_counts_who_kept_both_promises():
    slow_start, slow_tokens = Slo(ttft=0.3, itl=1.0), Slo(ttft=1.0, itl=0.5)
    assert [kept(slow_start, a) for a in ANSWERS] == [False, True]
    assert [kept(slow_tokens, a) for a in ANSWERS] == [True, False]
    f = figures(REQUESTS, Ran(ANSWERS, QUIET, {}), slow_start)
    assert f["goodput"] == 0.5 and f["slo_share"] == 0.5
    assert not kept(Slo(), Answered(0, 0.0, [], []))


def test_others_at_work_are_seen():
    assert figures(REQUESTS, Ran(ANSWERS, Use(2.0, 1.0, CONTENDED + 0.01, 1.0), {}))["contended"]
    assert not figures(REQUESTS, Ran(ANSWERS, Use(2.0, None, None, None), {}))["contended"]  # this system does not say


def test_medians_are_of_the_quiet_runs():
    rates = [(100.0, False), (110.0, False), (120.0, False), (10.0, True)]
    [s] = summarise(run(tokens_per_second=rate, contended=bad) for rate, bad in rates)
    assert s.values["tokens_per_second"] == 110 and (s.runs, s.contended) == (4, 1)
    [s] = summarise(run(tokens_per_second=rate, contended=True) for rate, _ in rates)
    assert s.values["tokens_per_second"] == 105 and (s.runs, s.contended) == (4, 4)
    assert s.values["ttft.p50"] == pytest.approx(0.35) and s.values["start_up.load"] == 1.0


def test_what_differs_is_summarised_apart():
    runs = [run(), run(rate=2.0), run(dtype="bfloat16"), run(work="W4"), run(engine="vllm"), run(version="2")]
    assert len(summarise([*runs, run(threads=1)])) == 7


def test_a_failure_is_a_result():
    failed = {k: run()[k] for k in ("engine", "version", "model", "dtype", "threads", "work", "rate")} | {
        "failed": "no memory"
    }
    [s] = summarise([failed])
    assert (s.failed, s.runs) == ("no memory", 0)
    assert summarise([failed, run()])[0].failed is None


def test_files_are_read_back(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps({"runs": [run()]}))
    assert read_results([tmp_path / "r.json"]) == [{"runs": [run()]}]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": [{}]}', '{"runs": 3}', '{"runs": [{"engine": "x"}]}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match="is no result"):
        read_results([tmp_path / "r.json"])
