"""Rows through models of one's own, on every rung of the ladder, and through feed-forward ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hibachi
from hibachi.engine.sampling.uniforms import draws
from hibachi.errors import InvalidRequest
from hibachi.llm import own as own_models
from hibachi.offline.tasks.array_task import host, numbers
from hibachi.offline.tasks.task import RowError

from .own import Sung

FILE = Path(__file__).with_name("own.py")
TABLE = "a,b,label\n1,2,x\n3.5,4,y\nfoo,4,z\n13,1,q\n,1,q\nTrue,1,w\n1e300,1,w\n"
FORWARD = ("--task", "forward", "--feature-columns", "a,b")


def own(name):
    return ("--model", f"{FILE}:{name}")


def outputs(rows):
    return [row["output"] for row in rows]


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, where", [("Tokens", "own"), ("tokens", "own"), ("tokens_object", "own"), ("tokens", "child")]
)
def test_a_model_that_returns_tokens(runs, name, where):
    given = [[1, 2], [13], [5], [], "[1,2,3]", 5, [40], ["a"], [[1], [2, 3]], [1] * 70]
    flags = (*own(name), "--tokens-column", "t", "--max-tokens", "3", "--engine", where)
    assert runs({"in.jsonl": [{"t": t} for t in given]}, *flags) == 3
    rows = runs.rows()
    assert outputs(rows) == [[3, 4, 5], None, [6], None, [4, 5, 6], None, [41, 42, 43], None, None, None]
    assert [row["finish_reason"] for row in rows[:3]] == ["length", None, "stop"]  # at 7, which is not part of it
    assert rows[0]["prompt_tokens"] == 2 and rows[0]["completion_tokens"] == 3
    errors = [rows[i]["error"] for i in (1, 3, 5, 7, 8, 9)]
    words = ("ValueError: thirteen", "at least one", "a list of tokens", "numbers", "equal length", "70")
    for error, word, line in zip(errors, words, (2, 4, 6, 8, 9, 10), strict=True):
        assert word in error and f"line {line}: " in error


def test_tokens_that_are_vectors(runs):
    given = [{"t": [[1.0, 2.0]], "m": 2}, {"t": [[4, 2], [8.0, 4]], "m": 1}, {"t": [2.0], "m": 3}]
    rows = runs.of(given, *own("Vectors"), "--tokens-column", "t", "--param-column", "max_tokens=m")
    assert outputs(rows) == [[[0.5, 1.0], [0.25, 0.5]], [[4.0, 2.0]], [1.0, 0.5, 0.25]]


def test_frames_and_seeds_by_columns(runs):
    each = [{"top_k": 1}, {}]
    given = [{"t": [[1, 2]], "s": 5, "c": each}, {"t": [[1, 2]], "s": 5, "c": None}, {"t": [[1, 9]], "s": 1, "c": None}]
    columns = ("--tokens-column", "t", "--param-column", "seed=s", "--max-tokens", "4")
    rows = runs.of(given, *own("Sung"), *columns, "--param-column", "codebooks=c")
    assert outputs(rows)[2] is None and "0 to 7" in rows[2]["error"]
    with hibachi.AutoregressiveBatchInference(Sung(), deterministic=False) as engine:
        for row, codebooks in zip(rows, (each, ()), strict=False):
            params = hibachi.SamplingParams(seed=5, max_tokens=4, codebooks=codebooks)
            assert row["output"] == [frame.tolist() for frame in engine.run([[1, 2]], params)]
    rows = runs.of([{"t": [1.0], "s": i} for i in (3, 4)], *own("Drawing"), *columns)
    want = [draws(np.full(4, i), np.arange(1, 5), 1)[0][:, 0].astype(float).tolist() for i in (3, 4)]
    assert outputs(rows) == want


def test_parameters_that_a_model_cannot_have_are_refused_before_its_rows(runs):
    given = {"in.jsonl": [{"t": [1.0]}]}
    for name in ("Drawing", "Vectors"):
        assert runs(given, *own(name), "--tokens-column", "t", "--param", "temperature=0.5") == 1
        assert "no logits" in runs.told


def test_a_model_that_takes_inputs_is_refused_before_its_rows(runs):
    assert runs({"in.jsonl": [{"t": [1.0]}]}, *own("Spoken"), "--tokens-column", "t") == 1
    assert "Spoken takes inputs beside its tokens (speaker)" in runs.told


@pytest.mark.parametrize("name, flags", [("Sums", ("--task", "forward")), ("Vectors", ("--max-tokens", "7"))])
def test_the_same_bytes_come_from_both_places(runs, name, flags):
    given = [{"t": t} for t in ([[0.1, 2.7]], [[13.0, 1.0]], [[1e-40, 3.0]], [[1.0], [2.0, 3.0]], "x", [[1e10, 1e10]])]
    flags, found = (*own(name), "--tokens-column", "t", *flags), []
    for where in ("own", "child"):
        assert runs({"in.jsonl": given}, *flags, "--engine", where, "--dtype", "float32", out=f"{where}.jsonl") == 3
        found.append((runs.folder / f"{where}.jsonl").read_bytes())
    assert found[0] == found[1] and found[0].count(b'"error": null') >= 2


def test_what_is_feed_forward_is_no_task_of_tokens(runs):
    given = {"in.jsonl": [{"t": [1.0, 2.0]}]}
    assert runs(given, *own("Kinds"), "--tokens-column", "t") == 1 and "expected the task forward" in runs.told
    assert runs(given, *own("Kinds"), "--tokens-column", "t", "--task", "forward") == 0


@pytest.mark.slow
def test_a_row_that_ends_the_process_ends_no_run(runs):
    given = [{"t": [n]} for n in (1, 13, 2, 3)]
    flags = (*own("Dies"), "--tokens-column", "t", "--max-tokens", "2", "--engine", "child")
    assert runs({"in.jsonl": given}, *flags) == 3
    assert outputs(runs.rows()) == [[2, 3], None, [3, 4], [4, 5]] and "lost" in runs.rows()[1]["error"]


@pytest.mark.parametrize("name", ["Tokens", "tokens"])
def test_what_means_nothing_to_such_a_model_is_refused(runs, name):
    given = {"in.jsonl": [{"t": [1]}]}
    assert runs(given, *own(name), "--tokens-column", "t", "--temperature", "1") == 1
    assert "temperature means nothing here" in runs.told
    assert runs(given, *own(name), "--prompt-column", "t", "--chat") == 1
    assert runs(given, *own(name), "--tokens-column", "t", "--task", "embed") == 1 and "hidden states" in runs.told


def test_a_model_is_not_made_for_what_can_be_known_without_it(runs):
    from hibachi.common.named import object_named

    made = object_named(f"{FILE}:made")
    made.clear()
    rows = [{"t": [1]}, {"t": 5}]
    for name in ("tokens", "Tokens", "logits", "Logits"):
        assert runs({"in.jsonl": rows}, *own(name), "--tokens-column", "q") == 1 and "no column 'q'" in runs.told
        assert runs({"in.jsonl": rows}, *own(name), "--tokens-column", "t", "--validate") == 1 and "line 2" in runs.told
    assert not made and not runs.loaded
    assert runs({"in.jsonl": rows[:1]}, *own("tokens"), "--tokens-column", "t") == 0 and made == ["Tokens"]


# ---- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Logits", "logits"])
def test_a_model_that_returns_logits_and_has_no_tokenizer(runs, name):
    given = [[1, 2], [13], [17], [5], [True], [40], [1.5], "[1, 2]"]
    flags = (*own(name), "--tokens-column", "t", "--max-tokens", "3")
    assert runs({"in.jsonl": [{"t": t} for t in given]}, *flags) == 3
    rows = runs.rows()
    found = [row["output_token_ids"] for row in rows]
    assert found == [[3, 4, 5], None, None, [6, 7, 8], None, None, None, [3, 4, 5]]
    assert "thirteen" in rows[1]["error"] and "NaN" in rows[2]["error"] and "from 0 to 31" in rows[5]["error"]


@pytest.mark.parametrize("where", ["own", "child"])
def test_a_model_that_returns_logits_and_has_a_tokenizer(runs, where):
    given = [{"prompt": p} for p in ("abc", "ABC", [1, 2], "xy", "k", "f")]
    flags = (*own("Texts"), "--engine", where, "--max-tokens", "4", "--temperature", "0", "--param", "stop=h")
    assert runs({"in.jsonl": given}, *flags) == 3
    rows = runs.rows()
    assert outputs(rows) == ["defg", None, "defg", None, "l", "g"]
    assert [row["finish_reason"] for row in rows] == ["length", None, "length", None, "stop", "stop"]
    assert "line 4: The tokenizer raised KeyError" in rows[3]["error"]  # and the others did not suffer


@pytest.mark.parametrize("name", ["SumPaged", "SumState"])
def test_a_model_with_a_cache(runs, name):
    flags = ("--model", f"hibachi.testing.toys:{name}", "--tokens-column", "t", "--max-tokens", "3")
    rows = runs.of([{"t": [1, 2]}, {"t": [10]}, {"t": [3]}], *flags, "--temperature", "0")
    assert [row["output_token_ids"] for row in rows] == [[4, 8, 6], None, [4, 8, 6]]
    assert "from 0 to 9" in rows[1]["error"]


def test_what_a_tokenizer_raises_without_a_stop_string(runs):
    rows = runs.of([{"prompt": "xy"}, {"prompt": "a"}], *own("Texts"), "--max-tokens", "3", "--temperature", "0")
    assert outputs(rows) == [None, "bcd"] and "KeyError" in rows[0]["error"]


def test_lines_for_a_model_of_ones_own(runs):
    pytest.importorskip("msgspec")
    body = {"max_tokens": 3, "temperature": 0}
    given = [
        {"custom_id": p, "method": "POST", "url": "/v1/completions", "body": {"prompt": p, **body}}
        for p in ("abc", "xy", "ABC")
    ]
    rows = runs.of(given, *own("Texts"))
    assert rows[0]["response"]["body"]["choices"][0]["text"] == "def"
    assert [row["response"]["status_code"] for row in rows] == [200, 500, 400]


# ---- feed-forward ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["own", "child"])
def test_features_are_one_input_of_floats(runs, where):
    assert runs({"in.csv": TABLE}, *own("Sums"), *FORWARD, "--engine", where) == 3
    rows = runs.rows()
    assert outputs(rows) == [[3.0, 5.0], [7.5, 28.25], None, None, None, [2.0, 2.0], None]
    assert [row["label"] for row in rows] == list("xyzqqww") and rows[0]["a"] == "1"
    words = ("a must be a number; got 'foo'", "thirteen", "a must be a number; got ''", "float32 can hold")
    assert all(w in rows[i]["error"] for w, i in zip(words, (2, 3, 4, 6), strict=True))


def test_several_outputs(runs):
    rows = runs.of([{"a": 1, "b": 2}], *own("Apart"), *FORWARD)
    assert outputs(rows) == [{"sum": 3.0, "both": [[1.0, 2.0], [1.0, 4.0]]}]


def test_inputs_that_are_lists(runs):
    given = [{"v": [1, 2]}, {"v": [1.5, 2]}, {"v": [[1, 2], [3, 5]]}, {"v": 3}, {"v": "[4, 6]"}]
    rows = runs.of(given, *own("Mean"), "--task", "forward", "--tokens-column", "v")
    assert outputs(rows) == [1.5, 1.75, [1.5, 4.0], None, 5.0]


def test_the_dtype_of_inputs(runs):
    lists = [{"v": [1]}, {"v": [1.5]}, {"v": [True]}]
    flags = (*own("Dtype"), "--task", "forward", "--tokens-column", "v")
    assert outputs(runs.of(lists, *flags)) == [8, -4, 8]
    assert outputs(runs.of(lists, *flags, "--dtype", "float64")) == [-8, -8, -8]
    assert outputs(runs.of(lists, *flags, "--dtype", "int32")) == [4, None, 4]
    assert outputs(runs.of([{"a": 1}, {"a": 1.5}], *own("Dtype"), "--task", "forward", "--feature-columns", "a")) == [
        -4,
        -4,
    ]
    assert runs({"in.jsonl": lists}, *flags, "--dtype", "bfloat16") == 1 and "bfloat16" in runs.told


@pytest.mark.parametrize("task", [FORWARD, ("--tokens-column", "t", "--max-tokens", "2")])
def test_what_may_change_bits_makes_the_run(runs, task):
    pytest.importorskip("array_api_strict")
    given = {"in.jsonl": [{"a": 1, "b": 2, "t": [1]}, {"a": 3, "b": 4, "t": [3]}]}
    flags = (*own("Sums" if task is FORWARD else "Tokens"), *task)
    assert runs(given, *flags, "--limit", "1") == 0
    assert runs(given, *flags, "--dtype", "int32", again=True) == 1 and "engine.dtype: " in runs.told
    assert (
        runs(given, *flags, "--backend", "array_api_strict", again=True) == 1 and "engine.backend: numpy" in runs.told
    )
    assert runs(given, *flags, again=True) == 0 and len(runs.rows()) == 2


@pytest.mark.parametrize("name", ["FeedforwardBatchInference", "AutoregressiveBatchInference"])
@pytest.mark.parametrize("seconds", ["7", "0"])
def test_how_long_an_engine_may_hang_is_told_it(runs, monkeypatch, name, seconds):
    made, engine = [], getattr(own_models, name)

    def make(*args, **options):
        made.append(options["stall_after"])
        return engine(*args, **options)

    monkeypatch.setattr(own_models, name, make)
    flags = (*own("Sums"), *FORWARD) if name.startswith("Feed") else (*own("Tokens"), "--tokens-column", "t")
    assert runs({"in.jsonl": [{"a": 1, "b": 2, "t": [6]}]}, *flags, "--stall-after", seconds) == 0
    assert made == [7.0 if seconds == "7" else None]


def test_outputs_that_json_has_not_are_errors_of_their_rows(runs):
    flags = ("--task", "forward", "--feature-columns", "a")
    [row] = runs.of([{"a": 1}], *own("Complex"), *flags)
    assert row["output"] is None and "cannot be written: expected numbers; got the dtype complex" in row["error"]
    assert outputs(runs.of([{"a": 1}], *own("Long"), *flags)) == [1.0]


def test_what_json_has_of_arrays():
    for other in (np.array([{}]), np.array(["2020"], "datetime64[D]"), np.array([b"x"]), np.zeros(1, "i4,i4")):
        with pytest.raises(RowError, match="dtype"):
            host(other)
    found = [host(np.array([1.5, 2], kind)).tolist() for kind in (np.float16, np.float32, np.longdouble)]
    assert found == [[1.5, 2.0]] * 3 and all(type(x) is float for row in found for x in row)
    assert host(np.array([True])).tolist() == [True] and host(2**40).tolist() == 2**40
    small = pytest.importorskip("ml_dtypes").bfloat16
    assert host(np.array([1.5], small)).tolist() == [1.5]


@pytest.mark.parametrize("name, errors", [("NaN", [None, "NaN"]), ("Few", ["must return shape", "must return shape"])])
def test_wrong_outputs_are_errors_of_their_rows(runs, name, errors):
    rows = runs.of([{"a": 1}, {"a": 5}], *own(name), "--task", "forward", "--feature-columns", "a")
    for row, error in zip(rows, errors, strict=True):
        assert row["error"] is None if error is None else error in row["error"]


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--model", "tiny"), "for a model of your own"),
        (own("Nope"), "has no 'Nope'"),
        (("--model", "/nope.py:A"), "There is no file"),
        ((*own("Sums"), "--temperature", "1"), "temperature means nothing here"),
        ((*own("Sums"), "--chat"), "with chat; got tokens"),
    ],
)
def test_what_is_wrong_for_all_rows(runs, flags, words):
    assert runs({"in.csv": TABLE}, *FORWARD, *flags) == 1 and words in runs.told


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "jsonl.gz"])
def test_outputs_in_every_format(runs, kind):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    assert runs({"in.csv": TABLE}, *own("Sums"), *FORWARD, out=f"out.{kind}") == 3
    assert runs({f"out.{kind}": (runs.folder / f"out.{kind}").read_bytes()}, "--task", "forward", "--feature-columns",
                "a,b", *own("Mean"), "--result-prefix", "again_", out="back.jsonl") == 3  # fmt: skip
    back = runs.rows("back.jsonl")
    first = back[0]["output"]
    assert (first if isinstance(first, list) else json.loads(first)) == [3.0, 5.0]
    assert [row["again_output"] for row in back] == [1.5, 3.75, None, 7.0, None, 1.0, None]


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_of_other_libraries_become_lists(runs, library):
    pytest.importorskip(library)
    pytest.importorskip(f"hibachi_{library}")
    sources = {
        "torch": "import torch\nW = torch.arange(6.).reshape(2, 3)\n"
        "class M(torch.nn.Module):\n    w = W\n    def forward(self, x): return (x @ W).to(torch.bfloat16)\n",
        "jax": "import jax.numpy as jnp\nW = jnp.arange(6.).reshape(2, 3)\n"
        "class M:\n    w = W\n    def forward(self, x): return (x @ W).astype(jnp.bfloat16)\n",
    }
    file = runs.folder / f"{library}_model.py"
    file.write_text(sources[library])
    given = {"in.csv": "a,b\n1,2\n0.5,0\n"}
    assert runs(given, "--model", f"{file}:M", "--backend", library, *FORWARD) == 0
    assert outputs(runs.rows()) == [[6.0, 9.0, 12.0], [0.0, 0.5, 1.0]]


# ---- without extras --------------------------------------------------------------------------------------------------

BLOCKED = """
import sys
for name in ("msgspec", "pyarrow", "tqdm", "zstandard", "tokenizers", "safetensors", "minijinja"):
    sys.modules[name] = None
from hibachi.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "given, out, flags",
    [
        ("in.csv", "out.jsonl", [*own("Sums"), *FORWARD]),
        ("in.csv", "out.csv", [*own("Sums"), *FORWARD]),
        ("in.jsonl", "out.csv.gz", [*own("Tokens"), "--tokens-column", "t"]),
        ("in.jsonl", "out.jsonl", [*own("Texts"), "--prompt-column", "t"]),
    ],
)
def test_plain_files_and_models_of_ones_own_need_no_extra(tmp_path, given, out, flags):
    (tmp_path / "in.csv").write_text("a,b\n1,2\n3,4\n")
    (tmp_path / "in.jsonl").write_text('{"t": [1]}\n{"t": [2, 3]}\n')
    words = ["run-batch", "-i", str(tmp_path / given), "-o", str(tmp_path / out), *flags]
    done = subprocess.run([sys.executable, "-c", BLOCKED, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / out).stat().st_size


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, dtype",
    [([1, 2], "int64"), ([True], "int64"), ([1, 2.5], "float32"), ("[[1], [2]]", "int64"), ([2**53], "int64")],
)
def test_numbers(given, dtype):
    found = numbers(given)
    assert found.dtype == dtype and found.tolist() == (json.loads(given) if isinstance(given, str) else given)


@pytest.mark.parametrize(
    "given", ["x", ["a"], [[1], [1, 2]], {"a": 1}, [None], [2**70], [1e300], [2**63], "[" * 10_000]
)
def test_what_is_no_number(given):
    with pytest.raises(InvalidRequest) as e:
        numbers(given)
    assert len(str(e.value)) < 400
    with pytest.raises(InvalidRequest):
        numbers([300], np.dtype("int8"))
