"""Rows with conversations: thoughts and calls have columns of their own, the same in every run."""

from __future__ import annotations

import json

import pytest

from hibachi.errors import ConfigError, InvalidRequest
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.columns import Columns, RowReader
from hibachi.request import SamplingParams

from ..serve.saying import CALL, OTHER, SAYS, THINKS, THOUGHT, told

LOOK = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}  # fmt: skip
ROWS = [
    {"messages": told(f"{THOUGHT}Well.")},
    {"messages": told(f"{THOUGHT}I look.\n{CALL}\n{OTHER}"), "tools": [LOOK]},
    {"messages": told("Plain."), "tools": []},
    {"messages": told(CALL), "tools": json.dumps([LOOK])},
    {"messages": told(CALL), "tools": None},
    {"messages": told(f"{THOUGHT}{CALL[:50]}"), "tools": [LOOK]},
    {"messages": told("x"), "tools": [LOOK, LOOK]},
    {"messages": told("x"), "tools": "no JSON"},
    {"messages": told("x"), "tools": [{"type": "web_search"}]},
    {"messages": told("x"), "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}]},
    {"messages": told("Last.")},
]
FLAGS = ("--messages-column", "messages", "--max-tokens", "200", "--temperature", "0")


@pytest.fixture
def flags(runs):
    """Of a model that says what it is told to."""
    (runs.folder / "says.py").write_text(SAYS)
    return ("--model", f"{runs.folder / 'says.py'}:Says", "--chat-template", THINKS, *FLAGS)


def test_thoughts_and_calls_stand_apart_from_the_text(runs, flags):
    assert runs({"in.jsonl": ROWS}, *flags) == 3
    rows = runs.rows()
    assert [*rows[0]][1:] == ["output", "reasoning_content", "tool_calls", "finish_reason", "prompt_tokens",
                              "completion_tokens", "error"]  # fmt: skip
    assert [(r["output"], r["reasoning_content"], r["finish_reason"]) for r in rows[:6]] == [
        ("Well.", "Let me see.", "stop"),
        ("I look.", "Let me see.", "tool_calls"),
        ("Plain.", None, "stop"),
        ("", None, "tool_calls"),
        (CALL, None, "stop"),
        ("", "Let me see.", "length"),  # as a call that has begun is a whole one, or cut off
    ]
    assert rows[0]["tool_calls"] is rows[2]["tool_calls"] is rows[4]["tool_calls"] is None
    calls = rows[1]["tool_calls"]
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"at": 'the "sun"\n猫'}, {"at": ""}]
    assert [*calls[0]] == ["id", "type", "function"] and len({c["id"] for c in (*calls, *rows[3]["tool_calls"])}) == 3
    [cut] = rows[5]["tool_calls"]
    assert cut["incomplete"] is True and cut["function"]["name"] == "look"
    wrong = (
        "tools[1].function.name is 'look'",
        "tools must be a list",
        "tools[0]",
        "tools[0].function.parameters.type",
    )
    for row, words in zip(rows[6:10], wrong, strict=True):
        assert words in row["error"] and row["output"] is None
    assert rows[10]["output"] == "Last." and rows[10]["error"] is None


def test_the_same_bytes_in_any_company_and_after_an_end(runs, flags):
    assert runs({"in.jsonl": ROWS}, *flags) == 3
    whole = (runs.folder / "out.jsonl").read_bytes()
    assert runs({"in.jsonl": ROWS}, *flags, "--max-num-seqs", "1") == 3
    assert (runs.folder / "out.jsonl").read_bytes() == whole
    assert runs({"in.jsonl": ROWS}, *flags, "--limit", "2") == 0
    assert runs({"in.jsonl": ROWS}, *flags, again=True) == 3
    assert (runs.folder / "out.jsonl").read_bytes() == whole
    assert runs({"in.jsonl": ROWS}, *flags, "--reasoning-field", "reasoning", again=True) == 1, "another run"
    assert "parsers" in runs.told


def test_flags_say_which_columns_there_are(runs, flags):
    rows = runs.of(ROWS[:1], *flags, "--reasoning-field", "both", "--param", "tools=[]")
    assert rows[0]["reasoning"] == rows[0]["reasoning_content"] == "Let me see." and "tool_calls" not in rows[0]
    [row] = runs.of(ROWS[:1], *flags, "--reasoning-parser", "none")
    assert row["output"] == f"{THOUGHT}Well." and "reasoning_content" not in row
    [row] = runs.of(ROWS[:1], *flags, "--param", "n=2")
    assert row["output"] == ["Well."] * 2 and row["reasoning_content"] == ["Let me see."] * 2
    assert row["tool_calls"] == [None, None]
    one = {"prompt": told(f"{THOUGHT}{CALL}")[0]["content"]}
    [row] = runs.of([one], *flags[:4], *FLAGS[2:], "--chat")
    assert (row["output"], row["reasoning_content"]) == (CALL, "Let me see.") and "tool_calls" not in row
    [row] = runs.of([one], *flags[:4], *FLAGS[2:], "--chat", "--param", f"tools={json.dumps([LOOK])}")
    assert row["output"] == "" and row["tool_calls"][0]["function"]["name"] == "look"
    [row] = runs.of([{"prompt": "x"}], *flags[:4], *FLAGS[2:])
    assert "reasoning_content" not in row and "tool_calls" not in row, "no chat"


def test_a_choice_a_switch_and_an_effort(runs, flags):
    silent = {"messages": told("<think>\n\n</think>\n\nOff."), "kw": {"enable_thinking": False}}
    rows = [{**silent, "tools": [LOOK]}, {**ROWS[1], "c": "none", "e": "low"}]
    of = [word for name in ("tool_choice=c", "chat_template_kwargs=kw", "reasoning_effort=e")
          for word in ("--param-column", name)]  # fmt: skip
    off, none, odd, named = runs.of(
        [*rows, *({**ROWS[0], "kw": {name: 1}} for name in ("self", "template"))], *flags, *of
    )
    assert "'self'" in odd["error"] and named["output"] == "Well.", "variables may have any other name"
    assert (off["output"], off["reasoning_content"]) == ("Off.", None), "the prompt has ended the thoughts"
    assert none["tool_calls"] is None and CALL in none["output"] and none["finish_reason"] == "stop"
    [plain] = runs.of([{"messages": ROWS[1]["messages"]}], *flags)
    assert none["prompt_tokens"] == plain["prompt_tokens"] + len("EFFORT low"), "and no tools are shown"
    must = ("--param", "tool_choice=required", "--param", "parallel_tool_calls=false")
    called, without = runs.of([ROWS[3], ROWS[0]], *flags, *must)
    assert called["finish_reason"] == "tool_calls" and len(called["tool_calls"]) == 1
    assert "tool_choice wants a call, and there are no tools" in without["error"]


def test_csv_and_parquet_have_them_too(runs, flags):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    shown = {**LOOK, "function": {**LOOK["function"], "strict": None}}
    other = {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}
    rows = [{**ROWS[1], "tools": [shown]}, {**ROWS[0], "tools": [other]}, {**ROWS[2], "tools": None}]
    parquet.write_table(pa.Table.from_pylist(rows), runs.folder / "in.parquet")
    data = (runs.folder / "in.parquet").read_bytes()
    assert runs({"in.parquet": data}, *flags) == 0, runs.told
    arrow = runs.rows()
    assert [c["function"]["name"] for c in arrow[0]["tool_calls"]] == ["look", "look"]
    assert arrow[0]["prompt_tokens"] == runs.of(ROWS[1:2], *flags)[0]["prompt_tokens"], "nulls are no part of tools"
    assert runs({"in.parquet": data}, *flags, out="out.csv") == 0
    assert "reasoning_content,tool_calls,finish_reason" in (runs.folder / "out.csv").read_text()
    assert runs({"in.parquet": data}, *flags, out="out.parquet") == 0
    [calls, *_] = parquet.read_table(runs.folder / "out.parquet").column("tool_calls").to_pylist()
    assert json.loads(calls) == arrow[0]["tool_calls"]


def test_what_is_wrong_for_all_rows_is_refused_first(runs, flags):
    wrong = ({"tools": [LOOK, LOOK]}, "tools[1].function.name"), ({"tools": "x"}, "tools must be a list"), (
        {"tool_choice": "required", "tools": []}, "tool_choice wants a call"), (
        {"chat_template_kwargs": []}, "chat_template_kwargs must be an object"), (
        {"parallel_tool_calls": "x"}, "parallel_tool_calls must be true or false")  # fmt: skip
    for params, words in wrong:
        with pytest.raises(ConfigError) as e:
            Columns(messages="m", params=params)
        assert words in str(e.value)
    with pytest.raises(ConfigError, match="tool_choice must be"):  # though each row may bring tools
        Columns(messages="m", params={"tool_choice": "sometimes"})
    Columns(messages="m", params={"tool_choice": "required"})
    with pytest.raises(ConfigError, match="tools is for chats: expected messages"):
        Columns(prompt="p", params={"tools": [LOOK]})
    assert runs({"in.jsonl": ROWS}, *FLAGS, "--param-column", "tools=t") == 1 and "no column 't'" in runs.told
    assert runs({"in.jsonl": [{**ROWS[0], "tool_calls": 1}]}, *flags) == 1
    assert "'tool_calls'" in runs.told and "--result-prefix" in runs.told
    assert runs({"in.jsonl": ROWS}, *flags, "--validate") == 1
    assert "4 rows cannot be computed" in runs.told


def test_a_row_of_another_kind_of_tools_is_alone_wrong():
    asking = RowReader(Columns(messages="m"), SamplingParams())
    for tools in ({"a": 1}, 5, ["x"], [None], "[1]"):
        with pytest.raises(InvalidRequest, match="tools"):
            asking.read(Row(0, "f", 1, {"m": told("x"), "tools": tools}))


def read_of_arrow(rows, **columns):
    """What each row asks for, as it comes out of a file of Parquet."""
    batch = pytest.importorskip("pyarrow").RecordBatch.from_pylist(rows)
    asking = RowReader(Columns(messages="messages", **columns), SamplingParams())
    return [asking.read(Row(i, "f", i, v, arrow=(batch, i))) for i, v in enumerate(batch.to_pylist())]


def called(name, arguments):
    call = {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [*told("x"), asked, {"role": "tool", "tool_call_id": name, "content": "y"}]


def test_messages_of_arrow_have_no_fields_of_other_rows():
    talks = [called("weather", {"city": "Rome", "near": [{"a": 1}, {"b": None}]}), called("news", {"topic": "x"})]
    first, second = read_of_arrow([{"messages": talk} for talk in talks])
    assert second.prompt == talks[1], "a content of null stays, as templates may tell it from none"
    assert first.prompt == [talks[0][0], called("weather", {"city": "Rome", "near": [{"a": 1}, {}]})[1], talks[0][2]]


def test_nulls_in_json_text_stay():
    schema = {"type": "object", "properties": {"a": {"enum": [1, None]}, "b": {"const": None}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    messages = called("f", {"a": 1, "b": None})
    row = {"messages": json.dumps(messages), "tools": json.dumps(tools), "form": json.dumps({"json": schema})}
    [asked] = read_of_arrow([row], param_columns={"structured_outputs": "form"})
    assert asked.prompt == messages and asked.options.tools == tools
    assert '"const":null' in asked.params.structured_outputs.text.replace(" ", "")


def test_a_form_of_arrow_has_no_fields_of_other_rows():
    schemas = [
        {"type": "object", "properties": {"a": {"type": "string"}}},
        {"type": "array", "items": {"type": "null"}},
    ]
    rows = [{"messages": told("x"), "form": {"json": schema}} for schema in schemas]
    asked = read_of_arrow(rows, param_columns={"structured_outputs": "form"})
    assert [json.loads(a.params.structured_outputs.text) for a in asked] == schemas
