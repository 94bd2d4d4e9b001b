"""OpenAI's batch lines: each is answered as a server would answer its body, as vLLM's run-batch takes them."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("msgspec")

from hibachi.errors import InvalidRequest
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.lines import Seen, are_lines
from hibachi.offline.tasks.task import id_of

from .ran import TEMPLATE, Runs

TEXT, CHAT, VECTOR = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
HI = [{"role": "user", "content": "hi"}]


def line(own, url=TEXT, **body):
    return {"custom_id": own, "method": "POST", "url": url, "body": body}


def short(own, **body):
    return line(own, prompt="She was", max_tokens=2, **body)


def codes(rows):
    return {row["custom_id"]: row["response"]["status_code"] for row in rows}


# ---- answers ---------------------------------------------------------------------------------------------------------

BEGUN = [{"role": "user", "content": "Tell me"}, {"role": "assistant", "content": "She was"}]
GOES_ON = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}
BODIES = [
    (TEXT, {"prompt": "She was", "max_tokens": 4, "seed": 1}),
    (TEXT, {"prompt": ["She was", "x"], "max_tokens": 4, "seed": 1, "n": 2, "logprobs": 2}),
    (TEXT, {"prompt": [5, 6, 7], "max_tokens": 3, "seed": 1, "echo": True, "return_token_ids": True}),
    (TEXT, {"prompt": [[5], [6, 7]], "seed": 2}),
    (TEXT, {"prompt": "She was", "max_tokens": 40, "seed": 1, "stop": ["e", "a"], "model": "tiny"}),
    (TEXT, {"prompt": "She was", "best_of": 3, "n": 2, "seed": 4, "max_tokens": 3, "temperature": 0.8, "top_p": 0.9}),
    (TEXT, {"prompt": "She was", "logit_bias": {"5": 100}, "max_tokens": 3, "seed": -3}),
    (CHAT, {"messages": HI, "max_tokens": 4, "seed": 1}),
    (CHAT, {"messages": HI, "max_completion_tokens": 4, "seed": 1, "n": 2, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": HI, "max_tokens": 4, "seed": 1, "prediction": {"type": "content", "content": "She was"}}),
    (CHAT, {"messages": HI, "max_tokens": 4, "seed": 1, "prediction": {"type": "text", "content": "She was"}}),
    (VECTOR, {"input": "She was"}),
    (VECTOR, {"input": ["She was", "x"], "encoding_format": "base64"}),
    (VECTOR, {"input": [5, 6]}),
    (VECTOR, {"input": ["She was", "x"], "dimensions": 3}),
    (VECTOR, {"input": "x", "dimensions": 1_000_000}),
    (TEXT, {"prompt": ["She was there", [5, 6, 7]], "truncate_prompt_tokens": 2, "max_tokens": 3, "temperature": 0}),
    (TEXT, {"prompt": "x", "max_tokens": 9, "temperature": 0, "stop": ["e", "a"], "skip_special_tokens": False}),
    (CHAT, {**GOES_ON, "messages": [*BEGUN, {"role": "assistant", "content": None}]}),
    (CHAT, {**GOES_ON, "echo": True, "max_tokens": 3, "temperature": 0}),
    (CHAT, {**GOES_ON, "truncate_prompt_tokens": 3, "add_special_tokens": True, "max_tokens": 3, "temperature": 0}),
    (TEXT, {"prompt": ""}),
    (TEXT, {"prompt": []}),
    (TEXT, {"prompt": [10**6]}),
    (TEXT, {"prompt": [True]}),
    (TEXT, {"prompt": "x", "temperature": -1}),
    (TEXT, {"prompt": "x", "max_tokens": 10_000}),
    (TEXT, {"prompt": "x " * 50_000}),
    (TEXT, {"prompt": "x", "foo": 1}),
    (TEXT, {"prompt": "x", "guided_json": "{"}),
    (TEXT, {"prompt": "x", "guided_json": {}, "guided_regex": "a"}),
    (TEXT, {"prompt": "x", "response_format": {"type": "structural_tag"}}),
    (CHAT, {"messages": HI, "response_format": {"type": "json_object"}, "max_tokens": 9, "temperature": 0}),
    (TEXT, {}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [1]}),
    (CHAT, {"messages": [{"content": "x"}]}),
]


def without(body):
    """An answer without what is another's each time."""
    usage = body.get("usage")
    usage = usage and {k: v for k, v in usage.items() if not k.endswith("_tokens_details")}
    return {k: v for k, v in body.items() if k not in ("id", "created", "usage")} | ({"usage": usage} if usage else {})


def test_an_answer_is_what_a_server_would_say(runs, server):
    given = [line(str(i), url, **body) for i, (url, body) in enumerate(BODIES)]
    assert runs({"in.jsonl": given}, *CHATS) == 3
    for row, there, about in zip(runs.rows(), runs.at(server), given, strict=True):
        assert json.dumps(row) == json.dumps(there), about
        assert row["custom_id"] == about["custom_id"] and "tokens_details" not in json.dumps(row)
        assert (row["error"] is None) == (row["response"]["status_code"] == 200)


def test_predictions_are_proposed_and_change_no_answer(tmp_path, capsys):
    """How many were right depends on other requests, and is not told."""
    runs = Runs(tmp_path, capsys)  # with an engine of its own each time
    body = {"prompt": "She was", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    asked = [line("0", TEXT, **body)]
    assert runs({"in.jsonl": asked}) == 0
    (plain,) = runs.rows()
    expected = {"type": "content", "content": plain["response"]["body"]["choices"][0]["text"]}
    asked.append(line("1", TEXT, **body, prediction=expected))
    assert runs({"in.jsonl": asked}, "--speculative-config", '{"num_speculative_tokens": 4}') == 0
    for row in runs.rows():
        assert without(row["response"]["body"]) == without(plain["response"]["body"])
        assert "tokens_details" not in json.dumps(row)


CHATS = ("--chat-template", TEMPLATE)


def test_a_form_that_the_engine_refuses_is_told_by_the_name_that_it_has_in_the_line(runs, monkeypatch):
    def refuse(*_, **__):
        raise InvalidRequest.at(("structured_outputs", "json"), " is too much.")

    assert runs({"in.jsonl": [short("a")]}) == 0
    monkeypatch.setattr(runs.texts, "submit", refuse)
    assert runs({"in.jsonl": [short("a", guided_json={})]}) == 3
    [row] = runs.rows()
    error = row["response"]["body"]["error"]
    assert row["response"]["status_code"] == 400
    assert (error["message"], error["param"]) == ("guided_json is too much.", "guided_json")


def test_answers_have_no_field_of_time_or_company(runs, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "7")
    given = [line(f"{i}", prompt=f"Row {i}", max_tokens=3) for i in range(6)]
    given += [
        line("twice", prompt="Row 0", max_tokens=3),
        line("c", CHAT, messages=HI, max_tokens=3),
        line("v", VECTOR, input="x"),
        short("t", timeout=1e-9),
    ]
    whole = runs.of(given, *CHATS)
    assert all(row["response"]["status_code"] == 200 for row in whole)
    choices = [whole[i]["response"]["body"]["choices"] for i in (0, 6)]
    assert choices[0] != choices[1]  # each row draws by itself
    assert runs.of(given, *CHATS) == whole
    assert [row for i in (1, 2) for row in runs.of(given, *CHATS, "--shard", f"{i}/2")] == whole[::2] + whole[1::2]
    other = runs.of(given, *CHATS, "--seed", "1")
    assert not {row["id"] for row in whole} & {row["id"] for row in other}
    names = [x for row in whole for x in (row["id"], row["response"]["request_id"], row["response"]["body"].get("id"))]
    assert len(set(filter(None, names))) == 3 * len(given) - 1  # a vector's answer has none
    assert whole[0]["response"]["body"]["created"] == 7
    assert whole[0]["id"].startswith("batch_req_") and whole[0]["response"]["body"]["id"].startswith("cmpl-")


# ---- lines that are refused ------------------------------------------------------------------------------------------

REFUSED = {
    "audio": (line("audio", "/v1/audio/transcriptions", file="x"), 400, "url must be one of"),
    "stream": (short("stream", stream=True), 400, "stream must not be true"),
    "model": (short("model", model="gpt-4"), 404, "'gpt-4' is not the one that runs, which is called tiny"),
    "method": ({**short("method"), "method": "GET"}, 400, "method must be POST"),
    "list": ({**short("list"), "body": [1]}, 400, "body must be an object"),
    "none": ({"custom_id": "none", "method": "POST", "url": TEXT}, 400, "body must be an object"),
    "more": ({**short("more"), "extra": 1}, 400, "Unknown field: extra"),
    "foo": (short("foo", foo=1), 400, "Unknown field: foo. There is none of that name"),
    "half": (line("half", prompt="\ud800"), 400, "valid Unicode"),
}


def test_v30_a_line_that_is_refused_says_so_and_the_others_are_answered(runs):
    given = ["", short("good"), "   ", *(one for one, _, _ in REFUSED.values()), "", short("last", model="tiny")]
    assert runs({"in.jsonl": given}) == 3
    rows = {row["custom_id"]: row for row in runs.rows()}
    assert list(rows) == ["good", *REFUSED, "last"]
    assert rows["good"]["error"] is None and rows["last"]["response"]["status_code"] == 200
    for own, (_, code, words) in REFUSED.items():
        row = rows[own]
        assert row["response"]["status_code"] == code and words in row["error"]["message"], own
        assert row["response"]["body"]["error"]["message"] == row["error"]["message"]


def test_custom_ids_are_texts_and_each_is_there_once(runs):
    given = {
        "a.jsonl": [short("x"), short(5), {"method": "POST", "url": TEXT, "body": {"prompt": "x"}}],
        "b.jsonl": ["", short("y"), short("x"), short("y")],
    }
    assert runs(given) == 3
    rows = runs.rows()
    assert [row["response"]["status_code"] for row in rows] == [200, 400, 400, 200, 400, 400]
    assert [row["custom_id"] for row in rows] == ["x", "5", None, "y", "x", "y"]
    assert "a.jsonl, line 2: custom_id must be a text; got 5" in rows[1]["error"]["message"]
    assert f"{runs.folder / 'a.jsonl'}, line 1 already" in rows[4]["error"]["message"]
    assert f"{runs.folder / 'b.jsonl'}, line 2 already" in rows[5]["error"]["message"]


def test_a_duplicate_is_known_after_a_resume(runs):
    given = [short("x"), {**short("bad"), "method": "GET"}, short("x"), short("y")]
    assert runs({"in.jsonl": given}, "--fail-fast") == 3
    assert "line 2: method must be POST" in runs.told and not (runs.folder / "out.jsonl").exists()
    assert runs({"in.jsonl": given}, again=True) == 3
    resumed = runs.rows()
    assert codes(resumed) == {"x": 400, "bad": 400, "y": 200} and resumed[0]["error"] is None
    assert runs({"in.jsonl": given}, "--retry-errors", again=True) == 3
    assert [row["error"] for row in runs.rows()] == [row["error"] for row in resumed]


def test_a_line_that_could_not_be_read_makes_no_later_one_a_duplicate(runs):
    row = f'x,{TEXT},"{{""prompt"": ""a"", ""max_tokens"": 1}}"'
    given = {"in.csv": f"custom_id,url,body\n{row},more\n{row}\n"}
    assert runs(given, "--fail-fast") == 3 and not (runs.folder / "out.jsonl").exists()
    assert runs(given, again=True) == 3
    assert [row["response"]["status_code"] for row in runs.rows()] == [400, 200]


def test_shards_are_the_whole_also_where_a_name_comes_in_two(runs, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    given = [short("a"), short("b"), short("c"), short("a"), short("b"), {**short("d"), "method": "GET"}, short("d")]
    assert runs({"in.jsonl": given}) == 3
    whole = runs.rows()
    assert [row["error"] is None for row in whole] == [True, True, True, False, False, False, False]
    shards = [runs.of(given, "--shard", f"{i}/2") for i in (1, 2)]
    assert shards == [whole[::2], whole[1::2]]
    assert runs({"in.jsonl": given}, "--shard", "1/2", "--validate") == 1 and "line 5: custom_id 'b'" in runs.told
    assert runs({"in.jsonl": given}, "--shard", "2/2", "--validate", "--limit", "3") == 0


def test_templates_take_the_start_of_the_run_for_the_present(runs, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(365 * 86400))
    chat = line("a", CHAT, messages=HI, max_tokens=3, temperature=0)
    plain = line("b", prompt="1971", max_tokens=3, temperature=0)
    bodies = [row["response"]["body"] for row in runs.of([chat, plain], "--chat-template", "{{ strftime_now('%Y') }}")]
    assert bodies[0]["choices"][0]["message"]["content"] == bodies[1]["choices"][0]["text"]


def test_a_line_that_is_no_json_is_answered_with_its_place(runs):
    assert runs({"in.jsonl": [short("a"), "{bad", short("b")]}, "--errors", str(runs.folder / "e.jsonl")) == 3
    rows = runs.rows()
    assert codes(rows) == {"a": 200, None: 400, "b": 200} and "in.jsonl, line 2: " in rows[1]["error"]["message"]
    [error] = runs.rows("e.jsonl")
    assert error["row"] == 1 and error["line"] == 2 and "JSON" in error["error"]


def test_v29_with_validate_nothing_runs_and_each_wrong_line_is_named(runs):
    given = [short("a"), short("b"), "{bad", short("a"), short("c", stream=True), short("d", foo=1)]
    assert runs({"in.jsonl": given}, "--validate") == 1
    for words in ("line 3: expected a JSON", "line 4: custom_id 'a'", "line 5: stream", "line 6: Unknown field"):
        assert words in runs.told
    assert not runs.loaded and not (runs.folder / "out.jsonl").exists()
    assert runs({"in.jsonl": [short("a"), short("b")]}, "--validate") == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (short("a", model="nope"), "'nope' is not the one that runs"),
        (short("a", temperature=-1), "temperature"),
        (line("a", prompt=[]), "prompt is empty"),
        (line("a", prompt="x", best_of=2, n=3), "best_of"),
        (line("a", CHAT, messages=[]), "messages is empty"),
        (line("a", CHAT, messages=HI, top_logprobs=1), "top_logprobs needs logprobs"),
        (line("a", VECTOR, input=[]), "input is empty"),
        (line("a", VECTOR, input="x", dimensions=0), "dimensions"),
    ],
)
def test_with_validate_all_is_judged_that_needs_no_model(runs, wrong, words):
    assert runs({"in.jsonl": [wrong]}, "--validate") == 1
    assert "line 1: " in runs.told and words in runs.told and not runs.loaded


def test_names_that_lines_may_call_the_model(runs):
    rows = runs.of([short("a", model="one"), short("b", model="tiny"), short("c")], "--served-model-name", "one", "two")
    assert codes(rows) == {"a": 200, "b": 404, "c": 200}
    assert {row["response"]["body"].get("model") for row in rows} == {"one", None}


def test_whether_rows_are_lines_can_be_said(runs):
    assert are_lines(["body", "url", "custom_id"]) and not are_lines(["custom_id", "url"]) and not are_lines(None)
    rows = runs.of([{"prompt": "x", "custom_id": "1", "url": "2", "body": "3"}], "--no-openai", "--max-tokens", "1")
    assert rows[0]["custom_id"] == "1" and rows[0]["output"]
    assert runs({"in.jsonl": [{"prompt": "x"}]}, "--openai") == 1 and "has no custom_id" in runs.told


def test_no_model_template_is_said_without_a_server(runs):
    [row] = runs.of([line("a", CHAT, messages=HI)])
    assert row["response"]["status_code"] == 400 and "server" not in row["error"]["message"].lower()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_lines_in_other_formats(runs, kind):
    bodies = [(TEXT, {"prompt": "She was", "max_tokens": 2}), (VECTOR, {"input": "x"})]
    if kind == "csv":
        import csv
        import io

        text = io.StringIO()
        rows = [[f"{i}", "POST", url, json.dumps(b)] for i, (url, b) in enumerate(bodies)]
        csv.writer(text).writerows([["custom_id", "method", "url", "body"], *rows, ["bad", "POST", TEXT, "nope"]])
        given = text.getvalue()
    else:
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = [line(f"{i}", url, **b) for i, (url, b) in enumerate(bodies)] + [{**line("bad"), "method": "GET"}]
        parquet.write_table(pa.Table.from_pylist(rows), runs.folder / "made.parquet")
        given = (runs.folder / "made.parquet").read_bytes()
    assert runs({f"in.{kind}": given}) == 3
    assert codes(runs.rows()) == {"0": 200, "1": 200, "bad": 400}


# ---- names that came before ------------------------------------------------------------------------------------------


def test_names_are_known_however_many(monkeypatch):
    monkeypatch.setattr("hibachi.offline.tasks.lines._RECENT", 8)
    seen = Seen()
    rows = [Row(i, f"file {i % 3}", i + 1, {}) for i in range(50)]
    assert [seen.add(f"name {row.number}", row) for row in rows] == [None] * 50
    assert [seen.add(f"name {row.number}", rows[0]) for row in rows] == [
        f"file {i % 3}, line {i + 1}" for i in range(50)
    ]
    assert seen.add("\ud800", rows[0]) is None and seen.add("\ud800", rows[1]) == "file 0, line 1"


def test_ids_are_of_seed_row_and_use():
    found = [id_of(seed, n, what) for seed in (0, 1) for n in (0, 1) for what in ("line", "request")]
    assert len(set(found)) == 8 and found[0] == id_of(0, 0, "line")
