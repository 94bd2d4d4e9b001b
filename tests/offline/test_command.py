"""`hibachi run-batch` as people call it: formats, wrong input, exit statuses, what is said."""

from __future__ import annotations

import datetime
import json
import sys

import pytest

from hibachi.cli.main import main

GREEDY = ("--max-tokens", "2", "--temperature", "0")
ROWS = [{"prompt": "She was", "k": i, "x": i / 7, "b": i % 2 == 0, "l": [i, 1], "o": {"a": "é"}} for i in range(4)]


# ---- formats ---------------------------------------------------------------------------------------------------------


def test_v33_parquet_keeps_its_types_and_the_round_trip_its_values(runs):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    zone = datetime.timezone(datetime.timedelta(hours=2))
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "i8": pa.array([1, None], pa.int8()),
            "u64": pa.array([2**64 - 1, 0], pa.uint64()),
            "f32": pa.array([0.1, float("nan")], pa.float32()),
            "when": pa.array([datetime.datetime(2024, 5, 1, 12, tzinfo=zone)] * 2, pa.timestamp("us", "Europe/Paris")),
            "day": pa.array([datetime.date(2024, 5, 1), None]),
            "nested": [[{"x": 1}], []],
            "raw": [b"\0\xff", b""],
        }
    )
    parquet.write_table(table, runs.folder / "made.parquet")
    assert runs({"in.parquet": (runs.folder / "made.parquet").read_bytes()}, *GREEDY, out="out.parquet") == 0
    back = parquet.read_table(runs.folder / "out.parquet")
    assert [back.schema.field(n).type for n in table.schema.names] == table.schema.types
    assert str(back.select(table.schema.names).to_pylist()) == str(table.to_pylist())
    results = {"output": "string", "prompt_tokens": "int64", "completion_tokens": "int64", "error": "string"}
    assert {name: str(back.schema.field(name).type) for name in results} == results
    assert runs({"in.parquet": (runs.folder / "made.parquet").read_bytes()}, *GREEDY) == 0
    row = runs.rows()[1]
    assert row["f32"] is None and row["when"].startswith("2024-05-01T12:00:00") and "NaN" in " ".join(runs.said())


def test_several_files_globs_and_folders_are_one_input(runs):
    for name, text in {
        "a.jsonl": '{"prompt": "a"}\n',
        "b.csv": "prompt\nb\nc\n",
        "sub/c.tsv": "prompt\tx\nd\t1\n",
    }.items():
        (runs.folder / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (runs.folder / "d" / name).write_text(text)
    folder, out = runs.folder / "d", runs.folder / "out.jsonl"

    def prompts(*names, flags=()):
        for file in runs.folder.glob("out*"):
            file.unlink()
        assert main(["run-batch", "-i", *names, "-o", str(out), "--engine", "own", *GREEDY, *flags]) == 0
        return "".join(row["prompt"] for row in runs.rows())

    assert prompts(str(folder)) == "abcd"
    assert prompts(f"{folder}/*.csv", f"{folder}/a.jsonl") == "bca"
    assert prompts(f"{folder}/**/*.tsv", f"{folder}/b.csv") == "dbc"
    assert prompts(str(folder), flags=("--limit", "3")) == "abc"
    assert prompts(str(folder), flags=("--shard", "2/2")) == "bd"
    assert prompts(str(folder), flags=("--shard", "2/2", "--limit", "3")) == "b"


# ---- wrong input -----------------------------------------------------------------------------------------------------


def test_a_file_that_is_refused_loads_nothing(runs):
    assert runs({"in.jsonl": "prompt\na\n"}) == 1 and "by its name expected JSON Lines" in runs.told
    assert not runs.loaded and not (runs.folder / "out.jsonl").exists() and "go on where it was" not in runs.told


# ---- validate, fail fast, errors -------------------------------------------------------------------------------------


def test_v29_a_wrong_line_is_named_and_nothing_runs(runs):
    given = [{"prompt": "a"}, {"prompt": "b"}, '{"prompt', {"prompt": "c"}]
    assert runs({"in.jsonl": given}, "--validate") == 1
    assert "in.jsonl, line 3: expected a JSON object" in runs.told and "A row cannot be computed" in runs.told
    assert not runs.loaded and not (runs.folder / "out.jsonl").exists()
    assert runs({"in.jsonl": given[:2]}, *GREEDY, "--validate") == 0 and len(runs.rows()) == 2


def test_of_many_wrong_rows_some_are_named(runs):
    assert runs({"in.jsonl": ["{"] * 30}, "--validate") == 1
    assert "30 rows" in runs.told and "line 20:" in runs.told and "line 21:" not in runs.told
    assert "and 10 more" in runs.told


def test_rows_that_are_not_part_of_the_run_are_not_judged(runs):
    assert runs({"in.jsonl": [{"prompt": "a"}, "{"]}, *GREEDY, "--validate", "--limit", "1") == 0
    assert runs({"in.jsonl": [{"prompt": "a"}, "{"]}, *GREEDY, "--validate", "--shard", "1/2") == 0


def test_errors_go_to_a_file_too(runs):
    given = {"a.jsonl": [{"prompt": "a"}, {"prompt": ""}], "b.csv": "prompt,x\nb,1\n,2\nc\n"}
    assert runs(given, *GREEDY, "--errors", str(runs.folder / "e.jsonl")) == 3
    errors = runs.rows("e.jsonl")
    assert [(e["row"], e["line"]) for e in errors] == [(1, 2), (3, 3), (4, 4)]
    assert [e["file"].rsplit("/", 1)[1] for e in errors] == ["a.jsonl", "b.csv", "b.csv"]
    rows = [row["error"] for row in runs.rows()]
    assert [e is None for e in rows] == [True, False, True, False, False]
    assert all(e["error"] in rows[e["row"]] for e in errors)


# ---- statuses and words ----------------------------------------------------------------------------------------------


def test_exit_statuses(runs):
    good, bad = {"in.jsonl": [{"prompt": "a"}]}, {"in.jsonl": [{"prompt": ""}]}
    assert runs(good, *GREEDY) == 0
    assert runs(good, *GREEDY, again=True) == 0 and runs.loaded == 1
    assert "There was nothing to do" in runs.said()[-1]
    assert runs(bad, *GREEDY) == 3 and runs(bad, *GREEDY, again=True) == 0
    assert runs(good, "--param", "top_p=7") == 1 and "top_p" in runs.told
    assert runs(good, "--model", "/nope") == 1 and "/nope" in runs.told
    for flags in (("--shard", "5/4"), ("--shard", "x"), ("--task", "x"), ("--nope",), ("--param", "x")):
        with pytest.raises(SystemExit) as e:
            runs(good, *flags)
        assert e.value.code == 2


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--limit", "0"), "at least 1"),
        (("--report", "{in}"), "expected another file for its report"),
        (("--plot", "x.pdf"), ".png or .svg"),
        (("--report", "{no}/r.json"), "in a folder that is there"),
        (("--errors", "{in}"), "is an input"),
        (("--format", "x"), "expected jsonl, csv"),
        (("--delimiter", "ab"), "one character"),
        (("--encoding", "nope"), "text encoding"),
        (("--param", "nope=1"), "no sampling parameter 'nope'"),
        (("--param-column", "nope=x"), "no sampling parameter 'nope'"),
        (("--config", "{no}/x.toml"), "x.toml"),
    ],
)
def test_flags_that_are_refused_before_a_model_is_loaded(runs, flags, words):
    given = runs.folder / "in.jsonl"
    flags = [flag.replace("{in}", str(given)).replace("{no}", str(runs.folder / "no")) for flag in flags]
    assert runs({"in.jsonl": [{"prompt": "a"}]}, *flags) == 1
    assert words in runs.told and not runs.loaded and given.read_text() == '{"prompt": "a"}\n'


@pytest.mark.parametrize(
    "missing, given, out",
    [
        ("pyarrow", [{"prompt": "a"}], "out.parquet"),
        ("pyarrow", [{"prompt": "a"}], "out.csv.zst"),
        ("msgspec", [{"custom_id": "a", "url": "/v1/completions", "body": {}}], "out.jsonl"),
    ],
)
def test_a_missing_extra_is_said_before_a_model_is_loaded(runs, monkeypatch, missing, given, out):
    monkeypatch.setitem(sys.modules, missing, None)
    assert runs({"in.jsonl": given}, out=out) == 1
    assert f"'{missing}'" in runs.told and "extra 'batch'" in runs.told and not runs.loaded


def test_a_report_says_how_it_went(runs):
    file = runs.folder / "r.json"
    assert runs({"in.jsonl": [{"prompt": "a"}, {"prompt": ""}]}, *GREEDY, "--report", str(file)) == 3
    told = json.loads(file.read_text())
    assert told["rows"] == 2 and told["failed"] == 1 and told["status"] == "done"
    assert "2 rows, 1 failed" in " ".join(runs.said())


def test_a_report_is_never_an_input_and_never_in_the_place_of_one(runs):
    folder = runs.folder / "d"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"prompt": "a"}\n')
    out = runs.folder / "out.jsonl"
    words = ["run-batch", "-i", str(folder), "-o", str(out), "--engine", "own", *GREEDY]
    taken = (folder / "a.jsonl", f"{out}.journal", f"{out}.part", out, folder)
    for file in taken:
        assert main([*words, "--report", str(file)]) == 1
    (folder / "none").mkdir()
    errors = ["--errors", str(runs.folder / "e.jsonl"), "--report", str(runs.folder / "e.jsonl")]
    assert main([*words, *errors]) == 1
    assert "".join(runs.said()).count("another file for its report") == len(taken) + 1
    assert [f.name for f in sorted(runs.folder.iterdir())] == ["d"] and not runs.loaded
    assert sorted(f.name for f in folder.iterdir()) == ["a.jsonl", "none"]
    assert (folder / "a.jsonl").read_text() == '{"prompt": "a"}\n'
    for _ in range(2):  # the second time it is there
        out.unlink(missing_ok=True)
        assert main([*words, "--report", str(folder / "r.json")]) == 0
        assert [row["prompt"] for row in runs.rows()] == ["a"]
    assert main([*words, "--plan", "--report", str(folder / "r.json")]) == 0
    assert "1 rows\n" in "\n".join(runs.said())
    pytest.importorskip("matplotlib")
    assert main([*words, "--report", str(folder / "r.svg"), "--plot", str(folder / "r.svg")]) == 1
    assert "another file for its report" in "".join(runs.said())


def test_a_finished_run_leaves_the_report_as_it_is(runs):
    file, given = runs.folder / "r.json", {"in.jsonl": [{"prompt": "a"}]}
    assert runs(given, *GREEDY, "--report", str(file)) == 0
    before = file.read_text()
    assert runs(given, *GREEDY, "--report", str(file), again=True) == 0 and file.read_text() == before
    (runs.folder / "out.jsonl").unlink()  # only to be written again
    assert runs(given, *GREEDY, "--report", str(file), again=True) == 0 and file.read_text() == before
    file.unlink()
    assert runs(given, *GREEDY, "--report", str(file), again=True) == 0 and file.exists()


STEERS = "\x1b]0;x\x07\x9b2J\u202e"


def test_nothing_that_rows_say_steers_the_terminal(runs):
    def clean(text):
        return not any(c in text for c in STEERS if not c.isprintable()) and "\\x1b" in text and "\\u202e" in text

    named = f"a\n{STEERS}.jsonl"
    given = {named: ["{", {"prompt": "a"}]}
    assert runs(given, *GREEDY, "--fail-fast") == 3 and clean(runs.told)
    assert runs(given, *GREEDY, "--validate") == 1 and clean(runs.told) and "a\\n" in runs.told
    assert runs(given, "--plan") == 0 and clean("\n".join(runs.said()))
    assert runs({named: "[]"}) == 1 and clean(runs.told)
    assert main(["generate", "--model", f"/no/{STEERS}"]) == 1 and clean("\n".join(runs.said()))
    [row] = runs.of([{"prompt": STEERS}], *GREEDY)
    assert row["prompt"] == STEERS


def test_it_says_what_computes_and_when_answers_were_cut(runs):
    given = {"in.jsonl": [{"prompt": "She was"}, {"prompt": "The"}, {"prompt": ""}]}
    assert runs(given, "--param", "ignore_eos=true") == 3
    assert "Model: tiny, the model that ships with hibachi (--model names another); numpy" in runs.told
    said = "\n".join(runs.said())
    assert "2 of 2 answers were cut off" in said and "--max-tokens N" in said and "Model:" not in said
    assert runs(given, *GREEDY) == 3 and "cut off" not in "\n".join(runs.said())
    assert runs({"in.jsonl": [{"prompt": "a", "stop": ["a", "e", " "]}]}, "--param-column", "stop=stop") == 0
    assert "cut off" not in "\n".join(runs.said())


def test_what_takes_long_is_said(runs, monkeypatch):
    given = {"in.jsonl": [{"prompt": "a"}]}
    assert runs(given, *GREEDY) == 0 and "Reading" not in runs.told and "Writing" not in runs.told
    monkeypatch.setattr("hibachi.offline.input.LARGE", 10)
    monkeypatch.setattr("hibachi.cli.rowsview.LARGE", 10)
    assert runs(given, *GREEDY) == 0
    assert "Reading the input (0.0 GiB)" in runs.told and f"Writing {runs.folder / 'out.jsonl'} ..." in runs.told


def test_what_ends_a_run_in_its_midst_says_how_to_go_on(runs, monkeypatch):
    from hibachi.errors import ConfigError

    def wait(self, timeout):
        raise ConfigError("401: who are you?")

    monkeypatch.setattr("hibachi.offline.tasks.column_task.ColumnTask.wait", wait)
    assert runs({"in.jsonl": [{"prompt": "a"}]}, *GREEDY) == 1
    assert "401: who are you?\nRun the same command again to go on" in runs.told


@pytest.mark.parametrize("flags", [("--task", "embed"), ("--token-ids",), ("--max-tokens", "3")])
@pytest.mark.parametrize("plan", [(), ("--plan",)])
def test_flags_that_lines_say_themselves_are_refused(runs, flags, plan):
    pytest.importorskip("msgspec")
    given = [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}]
    assert runs({"in.jsonl": given}, *flags, *plan) == 1 and "leave such flags out" in runs.told and not runs.loaded


def test_values_of_parameters_on_the_command_line(runs):
    flags = ("--param", "stop=5", "--param", "ignore-eos=true", "--param", 'logit_bias={"5": 100}', "--seed", "3")
    [row] = runs.of([{"prompt": "a"}], *flags, "--max-tokens", "2", "--token-ids")
    assert row["output_token_ids"] == [5, 5]


def test_the_help_fits_a_terminal_and_names_every_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["run-batch", "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for flag in ("--input", "--template", "--param-column", "--validate", "--errors", "--url", "--model", "--engine"):
        assert flag in text
