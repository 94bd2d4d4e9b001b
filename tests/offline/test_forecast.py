"""What `--plan` says, against what a run then does."""

import json
from dataclasses import replace

import pytest

from hibachi.errors import ConfigError
from hibachi.offline.batch import Batch
from hibachi.offline.forecast import forecast
from hibachi.offline.report import Course, check_plot, plot, report, text
from hibachi.offline.runs import Watcher
from hibachi.offline.runs import run_batch as run
from hibachi.offline.settings import settle
from hibachi.offline.tasks.columns import Columns

SHARED = list(range(3, 67))  # four blocks


class Seen(Watcher):
    def __init__(self):
        self.course = Course()

    def turn(self, counts):
        self.course.see(counts)


@pytest.fixture
def batch(tmp_path):
    rows = [{"tokens": [*SHARED, 100 + i], "n": 4} for i in range(8)] + [{"tokens": [7, 8], "n": 2}, {"tokens": []}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return Batch(
        inputs=[str(tmp_path / "in.jsonl")],
        output=str(tmp_path / "out.jsonl"),
        settings=settle({"engine": "own", "max_num_seqs": 1, "block_size": 16}, {}),
        columns=Columns(
            tokens="tokens", params={"ignore_eos": True, "temperature": 0}, param_columns={"max_tokens": "n"}
        ),
    )


def test_a_plan_counts_what_the_run_then_counts(batch):
    plan = forecast(batch)
    done = run(batch)
    assert (plan.rows, plan.wrong) == (9, 1) and (done.rows, done.failed) == (10, 1)
    assert "at least one token" in plan.first_wrong
    assert plan.prompt_tokens == done.counts.prompt_tokens == 8 * 65 + 2
    assert plan.new_tokens == done.counts.new_tokens == 8 * 4 + 2 and plan.longest == 4
    assert plan.cached_tokens == done.counts.cached_tokens == 7 * 64
    assert plan.seconds is None and "not known" in plan.text()


def test_of_equal_prompts_the_last_block_is_computed_again(tmp_path, batch):
    (tmp_path / "in.jsonl").write_text((json.dumps({"tokens": SHARED, "n": 1}) + "\n") * 3)
    plan, done = forecast(batch), run(batch)
    assert plan.cached_tokens == done.counts.cached_tokens == 2 * 48


def test_without_a_prefix_cache_nothing_is_spared(batch):
    batch.settings = replace(batch.settings, enable_prefix_caching=False)
    assert forecast(batch).cached_tokens == 0


def test_a_cache_that_holds_less_than_a_prompt_spares_nothing(batch):
    position = 2 * 4 * 4 * 2 * 32  # of the tiny model: four layers of two heads of 32 in float32, keys and values
    batch.settings = replace(batch.settings, kv_cache_memory_bytes=2 * 16 * position)
    assert forecast(batch).cached_tokens == 0


def test_a_plan_loads_no_weights_and_reads_openai_lines(tmp_path, batch, monkeypatch):
    monkeypatch.setattr("hibachi.llm.model.registry.load_model", None)
    body = {"prompt": [3, 4, 5], "max_tokens": 7}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line) + "\n")
    batch.columns = Columns()
    plan = forecast(batch)
    assert (plan.rows, plan.wrong, plan.prompt_tokens, plan.new_tokens) == (1, 1, 3, 7)


def test_a_plan_counts_all_answers_of_a_row(tmp_path, batch):
    (tmp_path / "in.jsonl").write_text('{"tokens": [3, 4, 5], "n": 3}\n')
    batch.columns = Columns(
        tokens="tokens", params={"max_tokens": 5, "ignore_eos": True, "temperature": 1}, param_columns={"n": "n"}
    )
    plan, done = forecast(batch), run(batch)
    assert plan.new_tokens == done.counts.new_tokens == 15 and plan.longest == 5 and plan.prompt_tokens == 3
    batch.columns = Columns(tokens="tokens", params={"max_tokens": 5, "best_of": 4})
    assert forecast(batch).new_tokens == 20
    batch.columns, batch.task = Columns(tokens="tokens"), "embed"
    assert (forecast(batch).new_tokens, forecast(batch).longest) == (0, 0)


def test_a_plan_of_a_line_with_several_prompts(tmp_path, batch):
    pytest.importorskip("msgspec")
    batch.columns = Columns()
    body = {"prompt": [[3, 4, 5], [3]], "max_tokens": 7, "n": 2, "ignore_eos": True}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    plan, done = forecast(batch), run(batch)
    assert plan.prompt_tokens == done.counts.prompt_tokens == 4
    assert plan.new_tokens == done.counts.new_tokens == 28 and plan.longest == 7


def test_a_plan_takes_defaults_from_where_the_run_does(tmp_path, batch):
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "generation_config.json").write_text('{"max_new_tokens": 9}')
    batch.columns = Columns(tokens="tokens")
    batch.settings = replace(batch.settings, generation_config=str(tmp_path / "g"))
    assert forecast(batch).longest == 9
    batch.settings = replace(batch.settings, generation_config="vllm")
    assert forecast(batch).longest == 16


def test_times_come_from_an_earlier_report_or_from_measured_steps(tmp_path, batch):
    seen = Seen()
    done = run(batch, seen)
    told = report(done, seen.course, {})
    (tmp_path / "report.json").write_text(json.dumps(told))
    least, most = forecast(batch, report=str(tmp_path / "report.json")).seconds
    assert least == most == pytest.approx(told["seconds"])  # the same rows take as long once more
    names = ("step", "token", "row", "position", "pair")
    (tmp_path / "fit.json").write_text(json.dumps({"seconds": dict.fromkeys(names, 0.0) | {"step": 1.0}}))
    plan = forecast(batch, step_time=str(tmp_path / "fit.json"))
    assert plan.seconds == (34.0, 34.0)  # a step a token, one row at once
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match="a report that"):
        forecast(batch, report=str(tmp_path / "report.json"))


def test_a_plan_needs_files_and_a_tokenizer_of_its_own(batch):
    batch.url = "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="--model"):
        forecast(batch)
    batch.url, batch.inputs = None, ["-"]
    with pytest.raises(ConfigError, match="name files"):
        forecast(batch)


def test_a_report_says_what_was_done(tmp_path, batch):
    seen = Seen()
    done = run(batch, seen)
    told = report(done, seen.course, {"output": "out.jsonl"})
    json.dumps(told)
    assert told["rows"] == 10 and told["failed"] == 1 and told["status"] == "done"
    assert told["hit share"] == round(7 * 64 / (8 * 65 + 2), 4)
    assert told["this start"]["new_tokens"] == 34 and told["course"][0]["memory"] > 1 << 20
    words = text(done, "out.jsonl")
    assert "10 rows, 1 failed" in words and "85.8% of them from the cache" in words
    assert "There was nothing to do" in text(run(batch), "out.jsonl")
    pytest.importorskip("matplotlib")
    plot(told, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        check_plot("a.gif")


def test_the_course_of_a_long_run_stays_short(monkeypatch):
    now = 0.0
    monkeypatch.setattr("hibachi.offline.report.time.monotonic", lambda: now)
    course = Course()
    from hibachi.offline.drive import Counts

    for _ in range(20_000):
        now += 1.0
        course.see(Counts(rows=int(now)))
    assert 256 <= len(course.points) <= 1024
    gaps = {b["rows"] - a["rows"] for a, b in zip(course.points, course.points[1:], strict=False)}
    assert max(gaps) <= 64 and course.points[-1]["rows"] > 19_900
