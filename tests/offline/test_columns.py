"""What the columns of rows say, and what becomes of each row."""

from __future__ import annotations

import datetime
import json
from dataclasses import fields
from decimal import Decimal

import pytest

from hibachi.errors import ConfigError, InvalidRequest
from hibachi.llm.own import open_texts
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.columns import LISTS, PARAMS, Columns, RowReader, value_of
from hibachi.request import SamplingParams
from hibachi.structured import StructuredOutputs

from .ran import TEMPLATE


def asked(columns, **values):
    return RowReader(columns, SamplingParams()).read(Row(0, "in.csv", 2, values))


# ---- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, given, value",
    [
        ("max_tokens", 8, 8),
        ("max_tokens", "8", 8),
        ("max_tokens", "8.0", 8),
        ("max_tokens", 8.0, 8),
        ("max_tokens", 8.5, 8.5),
        ("max_tokens", "many", "many"),
        ("max_tokens", "", None),
        ("max_tokens", "  ", None),
        ("max_tokens", None, None),
        ("temperature", "0.5", 0.5),
        ("temperature", Decimal("0.5"), 0.5),
        ("temperature", 1.0, 1.0),
        ("ignore_eos", "True", True),
        ("ignore_eos", "false", False),
        ("stop", "", None),
        ("stop", " ", " "),
        ("stop", "\n", "\n"),
        ("stop", "5", "5"),
        ("stop", '"x"', '"x"'),
        ("stop", '["a", "b"]', ["a", "b"]),
        ("stop", "[1]", "[1]"),
        ("stop", "[", "["),
        ("stop_token_ids", "[1, 2]", [1, 2]),
        ("logit_bias", '{"5": 1.5}', {5: 1.5}),
        ("logit_bias", {"5": 1.5, "6": None}, {5: 1.5}),
        ("logit_bias", {"²": 1.5}, {"²": 1.5}),
        ("structured_outputs", '{"regex": "a"}', {"regex": "a"}),
        ("structured_outputs", {"regex": None, "json": {"a": None}}, {"json": {"a": None}}),
        ("structured_outputs", "", None),
        ("beams", {"width": 5, "length_penalty": None}, {"width": 5}),
        ("structured_outputs", "a+", "a+"),
    ],
)
def test_a_parameter_is_read_from_a_cell(name, given, value):
    found = value_of(name, given)
    assert found == value and type(found) is type(value)


def test_the_parameters_that_are_lists_are_known():
    """A new one is refused in a column of numbers, unless `LISTS` names it."""
    kinds = {f.name: str(f.type) for f in fields(SamplingParams) if f.name in PARAMS}
    assert {name for name, kind in kinds.items() if "Sequence" in kind or "Mapping" in kind} == set(LISTS)


def test_equal_numbers_of_different_types_are_not_taken_for_each_other():
    asking = RowReader(Columns(prompt="p", param_columns={"temperature": "t", "n": "n"}), SamplingParams())

    def read(**values):
        return asking.read(Row(0, "f", 1, {"p": "a", **values}))

    assert read(t=1, n=1).params is read(t=1, n=1).params  # such sets are made once
    for right, wrong in (({"t": 1}, {"t": True}), ({"n": 1}, {"n": True})):
        read(**right)
        with pytest.raises(InvalidRequest):
            read(**wrong)
    assert read(t=None).params.temperature == 1.0


def test_the_sets_of_parameters_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr("hibachi.offline.tasks.columns._KNOWN", 4)
    asking = RowReader(Columns(prompt="p", param_columns={"seed": "s"}), SamplingParams())
    seeds = [asking.read(Row(0, "f", 1, {"p": "a", "s": i % 6})).params.seed for i in range(20)]
    assert seeds == [i % 6 for i in range(20)]


def test_a_row_says_what_form_its_answer_must_have():
    asking = RowReader(Columns(prompt="p", param_columns={"structured_outputs": "f"}), SamplingParams())

    def read(form):
        return asking.read(Row(0, "f", 1, {"p": "a", "f": form})).params

    schema = {"type": "object", "properties": {"b": {}, "a": {"const": None}}}
    expected = StructuredOutputs(json=schema)
    for form in ({"json": schema, "regex": None}, {"json": json.dumps(schema)}, json.dumps({"json": schema})):
        assert read(form).structured_outputs == expected
    assert read({"choice": ["a", "b"]}).structured_outputs == StructuredOutputs(choice=("a", "b"))
    assert read("").structured_outputs is read(None).structured_outputs is None
    for wrong, words in (
        ("a+", "must be a StructuredOutputs or a mapping"),
        ({}, "exactly one"),
        ({"a": 1}, "no field"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            read(wrong)


def test_a_long_set_of_parameters_is_not_kept():
    """Thousands of schemas of a megabyte would be too much."""
    asking = RowReader(Columns(prompt="p", param_columns={"structured_outputs": "f"}), SamplingParams())
    rows = [Row(0, "f", 1, {"p": "a", "f": {"regex": "a" * n}}) for n in (10, 20_000)]
    assert [asking.read(row).params is asking.read(row).params for row in rows] == [True, False]


def test_who_says_the_seed():
    assert asked(Columns(params={"seed": 3}), prompt="a").seeded
    assert asked(Columns(param_columns={"seed": "s"}), prompt="a", s=0).seeded
    assert not asked(Columns(param_columns={"seed": "s"}), prompt="a", s=None).seeded


@pytest.mark.parametrize(
    "what, words",
    [
        ({"params": {"foo": 1}}, "no sampling parameter 'foo'"),
        ({"param_columns": {"logits_processors": "x"}}, "no sampling parameter"),
        ({"params": {"top_p": 7}}, "top_p must be"),
        ({"params": {"n": 2}, "param_columns": {"n": "x"}}, "n is given for all rows, and by a column"),
        ({"prompt": "a", "tokens": "b"}, "expected one of prompt, tokens"),
        ({"tokens": "a", "chat": True}, "Token ids"),
        ({"messages": "a", "system": "b"}, "own system message"),
        ({"template": "x {a"}, "cannot be read"),
        ({"template": "x {}"}, "expected a column in each pair of braces"),
        ({"template": "x {a:>5}"}, "got {a:>5}"),
        ({"template": "x {a!r}"}, "got {a!r}"),
    ],
)
def test_what_makes_no_sense_for_any_row(what, words):
    with pytest.raises(ConfigError) as e:
        Columns(**what)
    assert words in str(e.value)


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_a_template_is_filled_as_cells_of_csv_are():
    columns = Columns(template="{{é}} {a}|{b}|{c}|{d}|{e}")
    values = {"a": "{x}", "b": [1, "é"], "c": True, "d": datetime.date(2024, 5, 1), "e": 1.5}
    assert asked(columns, **values).prompt == '{é} {x}|[1, "é"]|true|2024-05-01|1.5'
    with pytest.raises(InvalidRequest, match="no 'b'"):
        asked(columns, **{**values, "b": None})


def test_names_in_templates_are_whole_columns():
    assert asked(Columns(template="{a.b} {0}"), **{"a.b": "x", "0": "y"}).prompt == "x y"


def test_a_system_message_stands_before_the_prompt():
    assert asked(Columns(system="S"), text="hi").prompt == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hi"},
    ]
    assert asked(Columns(chat=True, template="<{a}>"), a="x").prompt == [{"role": "user", "content": "<x>"}]
    with pytest.raises(InvalidRequest, match="must be a text"):
        asked(Columns(chat=True), prompt=[1])


@pytest.mark.parametrize("given", [5, "x", [1], {"role": "user"}, "[1]", None])
def test_messages_are_a_list_of_objects(given):
    with pytest.raises(InvalidRequest):
        asked(Columns(messages="m"), m=given)
    found = [{"role": "user", "content": "a"}]
    assert asked(Columns(messages="m"), m=found).prompt == asked(Columns(messages="m"), m=json.dumps(found)).prompt


# ---- all columns -----------------------------------------------------------------------------------------------------

CHAT_LIST = "list<element: struct<role: string, content: string>>"
DICTIONARY = "dictionary<values=string, indices=int32, ordered=0>"


@pytest.mark.parametrize(
    "columns, types, fits",
    [
        (Columns(), {"prompt": "string"}, True),
        (Columns(), {"prompt": DICTIONARY}, True),
        (Columns(), {"prompt": "int64"}, False),
        (Columns(), {"text": "double"}, False),
        (Columns(), {"prompt": "list<element: int64>"}, True),
        (Columns(), {"prompt": "list<element: string>"}, False),
        (Columns(chat=True), {"prompt": "list<element: int64>"}, False),
        (Columns(prompt="a"), {"a": "null"}, True),
        (Columns(prompt="a"), {"a": "string | int64"}, False),
        (Columns(tokens="t"), {"t": "list<element: fixed_size_list<element: float>[2]>"}, True),
        (Columns(tokens="t"), {"t": "string"}, True),
        (Columns(tokens="t"), {"t": "int64"}, False),
        (Columns(messages="m"), {"m": CHAT_LIST}, True),
        (Columns(messages="m"), {"m": "list<element: string>"}, False),
        (Columns(features=("a", "b")), {"a": "double", "b": "bool"}, True),
        (Columns(features=("a", "b")), {"a": "double", "b": "timestamp[us]"}, False),
        (Columns(param_columns={"n": "c"}), {"prompt": "string", "c": "double"}, True),
        (Columns(param_columns={"n": "c"}), {"prompt": "string", "c": "date32[day]"}, False),
        (Columns(param_columns={"stop": "c"}), {"prompt": "string", "c": "list<element: string>"}, True),
        (Columns(param_columns={"structured_outputs": "c"}), {"prompt": "string", "c": "struct<regex: string>"}, True),
        (Columns(template="{a}"), {"prompt": "int64", "a": "int64"}, True),
    ],
)
def test_types_are_judged_before_rows_are(columns, types, fits):
    if fits:
        columns.check_types(types)
    else:
        with pytest.raises(ConfigError, match=next(iter(types.values())).split("<")[0].split(" ")[0] + "|must hold"):
            columns.check_types(types)


@pytest.mark.parametrize("flags", [("--prompt-column", "q"), ("--template", "{q}"), ("--param-column", "n=q")])
def test_a_missing_column_is_refused_before_a_model_is_loaded(runs, flags):
    assert runs({"in.csv": "prompt,x\na,1\n"}, *flags) == 1
    assert "no column 'q'. It has: 'prompt', 'x'" in runs.told and not runs.loaded
    assert runs({"in.jsonl": [{"prompt": "a"}, {"prompt": "b", "x": 1}]}, *flags) == 1
    assert "no column 'q'" in runs.told and not runs.loaded


def test_a_key_that_only_a_later_row_of_json_has_is_a_column(runs):
    rows = runs.of([{"prompt": "a"}, {"prompt": "a", "n": 2}], "--param-column", "n=n", "--max-tokens", "1")
    assert [len(row["output"]) for row in rows] == [1, 2]


def test_a_column_of_the_wrong_type_is_refused_before_a_model_is_loaded(runs):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"prompt": [1, 2]}), runs.folder / "a.parquet")
    assert runs({"a.parquet": (runs.folder / "a.parquet").read_bytes()}) == 1
    assert "'prompt' must hold texts, or lists of token ids; it is of the type int64" in runs.told and not runs.loaded


@pytest.mark.parametrize("name", ["output", "error", "finish_reason"])
def test_results_do_not_take_the_names_of_columns(runs, name):
    assert runs({"in.csv": f"prompt,{name}\na,1\n"}) == 1
    assert f"'{name}'" in runs.told and "--result-prefix" in runs.told and not runs.loaded
    assert runs({"in.csv": f"prompt,r_{name}\na,1\n"}, "--result-prefix", "r_") == 1
    assert runs({"in.csv": f"prompt,{name}\na,1\n"}, "--result-prefix", "r_", "--max-tokens", "1") == 0
    assert runs.rows()[0][name] == "1" and f"r_{name}" in runs.rows()[0]


def test_a_later_row_with_the_name_of_a_result_is_an_error(runs):
    given = [{"prompt": "a"}, {"prompt": "b", "output": "mine"}, {"prompt": "c"}]
    rows = runs.of(given, "--max-tokens", "1")
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert "line 2: expected no 'output'" in rows[1]["error"]
    assert runs({"in.jsonl": given}, "--validate") == 1 and "line 2" in runs.told


@pytest.mark.parametrize("out", ["out.csv", "out.parquet"])
def test_a_later_name_of_a_result_is_refused_before_all_is_computed_where_columns_are_fixed(runs, out):
    if out.endswith("parquet"):
        pytest.importorskip("pyarrow")
    given = {"in.jsonl": [{"prompt": "a"}, {"prompt": "b", "output": "mine"}, {"prompt": "c", "x": 1}]}
    assert runs(given, "--max-tokens", "1", out=out) == 1
    assert "a column 'output'" in runs.told and "--result-prefix" in runs.told and not runs.loaded
    assert runs(given, "--max-tokens", "1", "--limit", "1", out=out) == 0, "rows that are not of the run do not count"
    assert runs(given, "--max-tokens", "1", "--result-prefix", "r_", out=out) == 0
    if out == "out.csv":
        assert (runs.folder / out).read_text().startswith("prompt,output,x,r_output,")
        assert runs(given, "--max-tokens", "1", "--result-prefix", "r_", "--limit", "2", out=out) == 0
        assert (runs.folder / out).read_text().startswith("prompt,output,r_output,")


def test_columns_that_parquet_cannot_have_are_refused_before_a_model_is_loaded(runs):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, column in (("a", [1]), ("b", [{"y": 1}])):
        parquet.write_table(pa.table({"prompt": ["x"], "x": column}), runs.folder / f"{name}.parquet")
    given = {f"{name}.parquet": (runs.folder / f"{name}.parquet").read_bytes() for name in "ab"}
    assert runs(given, "--max-tokens", "1", out="out.parquet") == 1
    assert "column 'x': expected one type" in runs.told and not runs.loaded


# ---- rows through a model --------------------------------------------------------------------------------------------

GOOD = {"a": "She was", "b": [1, 2, 3], "c": "日本"}
BAD = {
    "": "at least one token",
    None: "no 'prompt'",
    5: "a text or a list of token ids",
    "[1, true]": "list of token ids",
    "[1.5]": "list of token ids",
    "[100000]": "from 0 to 2047",
    "[-1]": "from 0 to 2047",
    "[1180591620717411303424]": "numbers",
    "{}": "list of token ids",
    "x" * 50_000: "context",
    "\ud800": "Unicode",
}


def test_wrong_rows_are_errors_with_their_places_and_others_are_right(runs):
    wrong = [json.loads(p) if isinstance(p, str) and p[:1] in ("[", "{") else p for p in BAD]
    given = [p for one in wrong for p in (one, "She was")] + list(GOOD.values())
    assert runs({"in.jsonl": [{"prompt": p} for p in given]}, "--max-tokens", "3", "--temperature", "0") == 3
    rows = runs.rows()
    for i, words in enumerate(BAD.values()):
        row = rows[2 * i]
        assert row["output"] is None and words in row["error"]
        assert row["error"].startswith(f"{runs.folder / 'in.jsonl'}, line {2 * i + 1}: ")
    texts = {row["output"] for row in rows[1 : 2 * len(BAD) : 2]}
    alone = runs.of([{"prompt": "She was"}], "--max-tokens", "3", "--temperature", "0")
    assert texts == {alone[0]["output"]} and all(row["error"] is None for row in rows[2 * len(BAD) :])


def test_a_wrong_value_in_one_row_is_that_rows_error(runs):
    given = "prompt,t,m\na,0,2\nb,x,2\nc,0,two\nd,,\n"
    flags = ("--param-column", "temperature=t", "--param-column", "max_tokens=m")
    assert runs({"in.csv": given}, *flags) == 3
    errors = [row["error"] for row in runs.rows()]
    assert errors[0] is None and errors[3] is None
    assert "line 3: temperature must be" in errors[1] and "line 4: max_tokens must be" in errors[2]


def by_prompt(rows):
    return {row["prompt"]: (row["output"], row["finish_reason"]) for row in rows}


def test_results_depend_on_the_row_and_the_seed_alone(runs):
    given = [{"prompt": f"Row {i} was", "s": i % 3 or None} for i in range(12)]
    flags = ("--param-column", "seed=s", "--max-tokens", "6")
    rows = runs.of(given, *flags)
    whole = by_prompt(rows)
    own = [row for row in given if row["s"]]
    assert by_prompt(runs.of(own[::-1], *flags)) == {row["prompt"]: whole[row["prompt"]] for row in own}
    shards = [by_prompt(runs.of(given, *flags, "--shard", f"{i}/3")) for i in (1, 2, 3)]
    assert [len(s) for s in shards] == [4, 4, 4] and whole == {k: v for s in shards for k, v in s.items()}
    other = by_prompt(runs.of(given, *flags, "--seed", "1"))
    assert all(other[row["prompt"]] == whole[row["prompt"]] for row in own)
    assert any(other[row["prompt"]] != whole[row["prompt"]] for row in given if not row["s"])
    twice = runs.of([{"prompt": "A"}, {"prompt": "A"}], "--max-tokens", "8")
    assert twice[0]["output"] != twice[1]["output"]


def test_a_row_says_what_the_library_says(runs):
    given = {"n": 2, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 4, "seed": 7, "stop": ["e"], "temperature": 0.9}
    flags = [word for name, value in given.items() for word in ("--param", f"{name}={json.dumps(value)}")]
    [row] = runs.of([{"prompt": "She was not"}], *flags, "--token-ids")
    with open_texts("tiny", max_model_len=256) as llm:
        [done] = llm.generate("She was not", llm.default_params.with_(**given))
    assert row["output"] == [c.text for c in done.choices]
    assert row["finish_reason"] == [c.finish_reason for c in done.choices]
    assert row["output_token_ids"] == [c.token_ids for c in done.choices]
    scores = [[{int(i): p for i, p in by_id.items()} for by_id in c] for c in row["logprobs"]]
    assert scores == [c.logprobs for c in done.choices]
    assert row["prompt_logprobs"][0] is None and len(row["prompt_logprobs"]) == row["prompt_tokens"] == 3
    assert row["completion_tokens"] == sum(len(c.token_ids) for c in done.choices)


def test_what_best_of_computed_is_counted_by_the_report_as_in_lines(runs):
    flags = ("--param", "best_of=3", "--param", "ignore_eos=true", "--max-tokens", "4")
    [row] = runs.of([{"prompt": "She was"}], *flags, "--report", str(runs.folder / "report.json"))
    assert row["completion_tokens"] == 4
    assert json.loads((runs.folder / "report.json").read_text())["this start"]["new_tokens"] == 12


def test_stop_strings_end_a_text_and_its_tokens(runs):
    flags = ("--temperature", "0", "--max-tokens", "40")
    [free] = runs.of([{"prompt": "She was", "s": ""}], *flags, "--param-column", "stop=s")
    [ended] = runs.of([{"prompt": "She was", "s": " "}], *flags, "--param-column", "stop=s")
    assert free["finish_reason"] == "length" and ended["finish_reason"] == "stop"
    assert ended["output"] == free["output"].split(" ")[0] and ended["completion_tokens"] < 5
    before = runs.texts.stats().new_tokens
    runs.of([{"prompt": "She was", "s": " "}], "--temperature", "0", "--max-tokens", "200", "--param-column", "stop=s")
    assert runs.texts.stats().new_tokens - before < 150  # what comes after it is not computed


def test_chats(runs):
    chat = ("--chat-template", TEMPLATE, "--max-tokens", "4", "--temperature", "0")
    [one] = runs.of([{"prompt": "hi"}], "--system", "Be {brief} é", *chat)
    said = [{"role": "system", "content": "Be {brief} é"}, {"role": "user", "content": "hi"}]
    wrong = [[], [{"content": "x"}], [{"role": "user", "content": 5}], [{"role": "user", "content": "\ud800"}]]
    given = [{"m": m} for m in (said, json.dumps(said), *wrong)]
    assert runs({"in.jsonl": given}, "--messages-column", "m", *chat) == 3
    rows = runs.rows()
    assert rows[0]["output"] == rows[1]["output"] == one["output"]
    assert [row["error"] is None for row in rows] == [True, True, False, False, False, False]
    plain = runs.of([{"prompt": "[system]Be {brief} é[user]hi"}], "--max-tokens", "4", "--temperature", "0")
    assert plain[0]["output"] == one["output"]
    assert runs({"in.jsonl": [{"prompt": "hi"}]}, "--chat") == 1 and "--chat-template" in runs.told


def test_templates_take_the_start_of_the_run_for_the_present(runs, monkeypatch):
    flags = ("--max-tokens", "4", "--temperature", "0")
    [year] = runs.of([{"prompt": "1971"}], *flags)
    given = {"in.jsonl": [{"prompt": "hi"}, {"prompt": "you"}]}
    chat = ("--chat", "--chat-template", "{{ strftime_now('%Y') }}", *flags)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(365 * 86400))
    assert runs(given, *chat, "--limit", "1") == 0
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(10000 * 86400))
    assert runs(given, *chat, again=True) == 0
    assert [row["output"] for row in runs.rows()] == [year["output"]] * 2, "also of what is computed days later"


def test_embeddings(runs, server):
    given = "text,x\nShe was,1\n,2\n"
    assert runs({"in.csv": given}, "--task", "embed") == 3
    rows = runs.rows()
    with open_texts("tiny", max_model_len=256) as llm:
        [own] = llm.embed("She was")
    assert rows[0]["embedding"] == [float(x) for x in own.embedding] and rows[0]["prompt_tokens"] == 2
    assert rows[1]["embedding"] is None and "line 3" in rows[1]["error"]
    assert runs.at(server, "--task", "embed")[0] == rows[0]
    assert runs({"in.csv": given}, "--task", "embed", "--temperature", "1") == 1 and "not sampled" in runs.told


def test_how_many_proposals_a_row_may_have_is_a_column():
    """A column of integers with gaps is one of floats to many programs."""
    assert value_of("num_speculative_tokens", 3.0) == 3 and value_of("num_speculative_tokens", "0") == 0
    assert type(value_of("num_speculative_tokens", 3.0)) is int
