"""The matrix of formats, in and out, with the types of values compared (V-33)."""

import argparse
import csv
import datetime
import decimal
import gzip
import io
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hibachi.cli import runbatch
from hibachi.errors import ConfigError
from hibachi.offline.files import arrow, arrowtypes, jsonl, parquet
from hibachi.offline.files import format as format_
from hibachi.offline.files.format import Field
from hibachi.offline.files.rows import InvalidInput, Row
from hibachi.offline.files.sources import Sources
from hibachi.offline.files.table import FORMATS, NAMES, FileForm, form_of, open_writer

RESULTS = [
    Field("r_text", "text"),
    Field("r_int", "int"),
    Field("r_float", "float"),
    Field("r_bool", "bool"),
    Field("r_ints", "ints"),
    Field("r_floats", "floats"),
    Field("r_json", "json"),
]
ANSWER = {
    "r_text": 'an "answer",\n\r of\tsome length, ü \U0001f600',
    "r_int": -5,
    "r_float": 0.1,
    "r_bool": True,
    "r_ints": [1, 2**62],
    "r_floats": [0.1, -2.5],
    "r_json": {"b": [1, None], "a": "ü"},
}


def packed(data, compression):
    if compression is None:
        return data
    if compression == "gz":
        return gzip.compress(data, mtime=0)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as to:
        to.write(data)
    return sink.getvalue().to_pybytes()


def unpacked(data, compression):
    if compression == "zst":
        return pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()
    return gzip.decompress(data) if compression == "gz" else data


@pytest.fixture
def convert(tmp_path):
    """convert(inputs, out, results, answers) -> the output's bytes and the remarks. inputs: {name: bytes}."""

    def run(inputs, out, results=(), answer=None, **options):
        for name, data in inputs.items():
            (tmp_path / name).write_bytes(data)
        sources = Sources([str(tmp_path / name) for name in inputs], **options)
        file = io.BytesIO()
        writer = open_writer(file, form_of("-", out), sources=sources, results=results)
        for row in sources.rows():
            writer.write(row, answer or {})
        writer.close()
        return file.getvalue(), writer.remarks

    return run


def lines_of(data):
    return [json.loads(line) for line in data.decode().splitlines()]


def cells_of(data, delimiter=","):
    return list(csv.reader(io.StringIO(data.decode(), newline=""), delimiter=delimiter, strict=True))


def table_of(data):
    return pq.read_table(pa.BufferReader(data))


def parquet_of(table, **options):
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


TZ = "Europe/Berlin"
INNER = pa.struct([("a", "int32"), ("t", pa.timestamp("ns"))])
JSON_ROWS = [
    {"id": 1, "x": 0.1 + 0.2, "s": 'ä, "q"\n\r', "yes": True, "none": None, "l": [1, 2], "d": {"a": 1, "b": ["x"]}},
    {"id": -(2**63), "x": -0.0, "s": "", "yes": False, "none": None, "l": [], "d": {"a": None, "b": []}},
    {"id": None, "x": 1e300, "s": "\ufeff x", "yes": None, "none": None, "l": None, "d": None},
]
JSONL = "".join(json.dumps(row) + "\n" for row in JSON_ROWS).encode()
CSV = b'id,x,s\n1,0.50,"\xc3\xa4, ""q""\n\r"\n007,,-0.0\n'
TABLE = pa.table(
    {
        "id": pa.array([1, None, 2**64 - 1], pa.uint64()),
        "small": pa.array([1, -128, None], pa.int8()),
        "x": pa.array([0.5, float("nan"), None], pa.float32()),
        "s": pa.array(["ä", "", None]),
        "yes": pa.array([True, False, None]),
        "raw": pa.array([b"\xff\0", b"", None], pa.binary()),
        "day": pa.array([datetime.date(2024, 2, 29), datetime.date(1, 1, 1), None]),
        "ns": pa.array([1, 1_700_000_000_123_456_789, None], pa.timestamp("ns")),
        "zone": pa.array([0, 1_700_000_000_123_456, None], pa.timestamp("us", TZ)),
        "time": pa.array([1, 86_399_999_999_999, None], pa.time64("ns")),
        "for": pa.array([90_500_000, -1, None], pa.duration("us")),
        "price": pa.array([decimal.Decimal("1.50"), decimal.Decimal("-0.01"), None], pa.decimal128(9, 2)),
        "l": pa.array([[1, None], [], None], pa.list_(pa.int16())),
        "d": pa.array(
            [{"a": 1, "t": 1}, {"a": None, "t": 1001}, None], pa.struct([("a", "int32"), ("t", pa.timestamp("ns"))])
        ),
        "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        "cat": pa.array(["u", "v", None]).dictionary_encode(),
    }
)
PARQUET = parquet_of(TABLE, row_group_size=2)
AS_TEXTS = [  # of the table, as JSON and CSV have them
    {
        "id": 1, "small": 1, "x": 0.5, "s": "ä", "yes": True, "raw": "/wA=", "day": "2024-02-29",
        "ns": "1970-01-01T00:00:00.000000001", "zone": "1970-01-01T01:00:00+01:00", "time": "00:00:00.000000001",
        "for": "PT90.5S", "price": "1.50", "l": [1, None], "d": {"a": 1, "t": "1970-01-01T00:00:00.000000001"},
        "map": [["k", 1]], "cat": "u",
    },
    {
        "id": None, "small": -128, "x": None, "s": "", "yes": False, "raw": "", "day": "0001-01-01",
        "ns": "2023-11-14T22:13:20.123456789", "zone": "2023-11-14T23:13:20.123456+01:00",
        "time": "23:59:59.999999999", "for": "-PT0.000001S", "price": "-0.01", "l": [],
        "d": {"a": None, "t": "1970-01-01T00:00:00.000001001"}, "map": [], "cat": "v",
    },
    {"id": 2**64 - 1} | dict.fromkeys(TABLE.column_names[1:]),
]  # fmt: skip


def cell(value):
    if value is None:
        return ""
    if isinstance(value, (bool, list, dict)):
        return json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, str) else repr(value)


FORMS = [(form, packing) for form in ("jsonl", "csv", "tsv") for packing in (None, "gz", "zst")] + [("parquet", None)]


@pytest.mark.parametrize("form, end", FORMS)
@pytest.mark.parametrize("kind, start", FORMS)
def test_every_format_becomes_every_format(convert, kind, form, start, end):
    """V-33: all columns with value and type, and the results behind them."""
    data = {"jsonl": JSONL, "csv": CSV, "tsv": CSV.replace(b",", b"\t"), "parquet": PARQUET}[kind]
    rows = {"jsonl": JSON_ROWS, "parquet": AS_TEXTS}.get(kind)
    if rows is None:
        header, *cells = cells_of(data, "," if kind == "csv" else "\t")
        rows = [dict(zip(header, row, strict=True)) for row in cells]
    name = f"in.{kind}" + (f".{start}" if start else "")
    out, remarks = convert({name: packed(data, start)}, f"{form}.{end}" if end else form, RESULTS, ANSWER)
    out = unpacked(out, end)
    names = [*rows[0], *ANSWER]
    if form == "jsonl":
        found = lines_of(out)
        assert found == [row | ANSWER for row in rows] and all(list(row) == names for row in found)
        assert [repr(row) for row in found] == [repr(row | ANSWER) for row in rows]  # 1 and 1.0 are equal, and True
        assert "ä".encode() in out and remarks == ({jsonl.NOT_FINITE: 1} if kind == "parquet" else {})
    elif form == "parquet":
        table = table_of(out)
        assert table.column_names == names
        if kind == "parquet":
            for column in TABLE.column_names:
                expected = TABLE[column].cast(pa.string()) if column == "cat" else TABLE[column]
                assert table[column].type == expected.type
                assert same(table[column], expected), column
        else:
            assert table.select(list(rows[0])).to_pylist() == rows
            if kind == "jsonl":
                assert table.schema.types[:7] == [
                    pa.int64(),
                    pa.float64(),
                    pa.string(),
                    pa.bool_(),
                    pa.null(),
                    pa.list_(pa.field("element", pa.int64())),
                    pa.struct([("a", pa.int64()), ("b", pa.list_(pa.field("element", pa.string())))]),
                ]
            else:
                assert table.schema.types[:3] == [pa.string()] * 3
        expected = ANSWER | {"r_json": '{"b": [1, null], "a": "ü"}'}
        assert table.select(list(ANSWER)).to_pylist() == [expected] * len(rows)
        kinds = [pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.list_(pa.int64()), pa.list_(pa.float64())]
        assert [table[name].type for name in ANSWER] == [*kinds, pa.string()]
    else:
        delimiter = "," if form == "csv" else "\t"
        header, *cells = cells_of(out, delimiter)
        assert header == names
        expected = [[cell(row[name]) for name in rows[0]] + [cell(value) for value in ANSWER.values()] for row in rows]
        if kind == "parquet":
            expected[1][2] = "nan"  # which CSV has, and JSON has not
        assert cells == expected
        assert not out.startswith(b"\xef\xbb\xbf") and b"\r\n" not in out


def same(a, b):
    """To the nanosecond, and NaN is NaN."""
    values = [[math.inf if v != v else v for v in arrow.values(each.combine_chunks())] for each in (a, b)]
    return values[0] == values[1]


@pytest.mark.parametrize("form", ["jsonl", "csv.gz", "tsv", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("data", [JSONL, CSV, PARQUET], ids=["jsonl", "csv", "parquet"])
def test_equal_rows_give_equal_bytes(convert, form, data, monkeypatch):
    once, _ = convert({"in": data}, form, RESULTS, ANSWER)
    monkeypatch.setattr("time.time", lambda: 1e9)
    assert convert({"in": data}, form, RESULTS, ANSWER)[0] == once
    if form == "csv.gz":
        assert once[3] == 0 and once[4:8] == bytes(4)  # no name, no time


# ---- JSON Lines out --------------------------------------------------------------------------------------------------


def test_json_is_written_as_it_was_read(convert):
    line = (
        '{"z": 12345678901234567890123, "a": 0.1, "b": -0.0, "c": 1e+22, "ü": "ä\\u0000\\ud800", "t": [true, 1, 1.0]}\n'
    )
    out, remarks = convert({"in": line.encode()}, "jsonl")
    assert out.decode() == line and remarks == {jsonl.SURROGATE: 1}
    out, remarks = convert({"in": b'{"a": NaN, "b": [-Infinity, 1e999], "c": "NaN"}'}, "jsonl")
    assert out == b'{"a": null, "b": [null, null], "c": "NaN"}\n' and remarks == {jsonl.NOT_FINITE: 3}


def test_an_error_row_is_written_with_what_could_be_read(convert):
    results = [Field("error", "text")]
    ragged = b"a,b\n1\n2,3,4\n"
    out, _ = convert({"in": ragged}, "jsonl", results, {"error": "why"})
    assert lines_of(out) == [{"a": "1", "b": None, "error": "why"}, {"a": "2", "b": "3", "error": "why"}]
    out, _ = convert({"in": ragged}, "csv", results, {"error": "why"})
    assert out == b"a,b,error\n1,,why\n2,3,why\n"
    out, _ = convert({"in": b'{"a": 1}\n[]\n'}, "parquet", results, {"error": "why"})
    assert table_of(out).to_pylist() == [{"a": 1, "error": "why"}, {"a": None, "error": "why"}]
    out, _ = convert({"in": b'{"a": 1}\n[]\n'}, "jsonl", results, {"error": "why"})
    assert lines_of(out) == [{"a": 1, "error": "why"}, {"error": "why"}]


def test_results_are_there_in_each_line_and_collide_with_nothing(convert):
    results = [Field("r", "int"), Field("s", "text")]
    out, remarks = convert({"in": b'{"a": 1}\n{"r": 3, "b": 2}\n'}, "jsonl", results, {"s": "x"})
    assert out == b'{"a": 1, "r": null, "s": "x"}\n{"b": 2, "r": null, "s": "x"}\n'
    assert remarks == {jsonl.REPLACED: 1}
    for form in ("csv", "parquet"):
        with pytest.raises(ConfigError, match="that the input has not; it has r"):
            convert({"in": b'{"a": 1}\n{"r": 3}\n'}, form, results)
    with pytest.raises(ConfigError, match="different names; more than once: r"):
        convert({"in": b'{"a": 1}\n'}, "jsonl", [*results, Field("r", "text")])


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_results_alone(form):
    file = io.BytesIO()
    writer = open_writer(file, form_of("-", form), sources=None, results=[Field("r", "json"), Field("i", "int")])
    writer.write(Row(0, "F", 1, {"a": 1}), {"r": {"x": [float("nan")]}, "i": 7})
    writer.close()
    assert writer.remarks == {jsonl.NOT_FINITE: 1} and not file.closed
    if form == "parquet":
        assert table_of(file.getvalue()).to_pylist() == [{"r": '{"x": [null]}', "i": 7}]
    else:
        expected = {"jsonl": b'{"r": {"x": [null]}, "i": 7}\n', "csv": b'r,i\n"{""x"": [null]}",7\n'}
        assert file.getvalue() == expected[form]


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv.gz", "parquet", "jsonl.zst"])
def test_no_rows_make_a_file_that_can_be_read(convert, form, tmp_path):
    out, _ = convert({"in.csv": b"a,b\n"}, form, RESULTS)
    (tmp_path / "out").write_bytes(out)
    sources = Sources([str(tmp_path / "out")], delimiter="\t" if form == "tsv.gz" else None)
    assert list(sources.rows()) == []
    assert sources.columns == ([] if "jsonl" in form else ["a", "b", *ANSWER])
    assert convert({"empty": b""}, form)[0] is not None


# ---- CSV out ---------------------------------------------------------------------------------------------------------


def test_csv_of_json_has_all_keys_in_order_of_appearance(convert):
    out, _ = convert({"in": b'{"b": 1, "a": "x"}\n{"c": [1], "b": true}\nnot\n{"a": ""}\n'}, "csv")
    assert out == b"b,a,c\n1,x,\ntrue,,[1]\n,,\n,,\n"


@pytest.mark.parametrize("text", ["", "\r", "a\rb", "\n", '"', ' "x" ', "\ufeff", "a,b", "a\tb", "\0", " ", "'", ";"])
@pytest.mark.parametrize("form", ["csv", "tsv"])
def test_any_text_is_read_back_from_csv(convert, tmp_path, text, form):
    """By Python's csv module and by us, also alone in its row, and as a column's name."""
    line = (json.dumps({text or "a": text}) + "\n").encode()
    out, _ = convert({"in": line * 2}, form)
    assert cells_of(out, "," if form == "csv" else "\t") == [[text or "a"], [text], [text]]
    if "\0" not in text:
        (tmp_path / f"out.{form}").write_bytes(out)
        rows = [row.values for row in Sources([str(tmp_path / f"out.{form}")]).rows()]
        assert rows == [{text or "a": text}] * 2


def test_csv_has_what_json_has_not(convert):
    out, remarks = convert({"in": b'{"a": NaN, "b": "\\ud800", "c": [NaN]}'}, "csv")
    assert out == b"a,b,c\nnan,\\ud800,[null]\n" and remarks == {jsonl.SURROGATE: 1, jsonl.NOT_FINITE: 1}


# ---- Parquet out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, kind, expected",
    [
        ([1, None, 2**63 - 1], pa.int64(), None),
        ([1, 2**63], pa.string(), ["1", str(2**63)]),
        ([1, 0.5], pa.float64(), [1.0, 0.5]),
        ([2**53 + 1, 0.5], pa.string(), [str(2**53 + 1), "0.5"]),
        ([1, True], pa.string(), ["1", "true"]),
        ([1, "1", None], pa.string(), ["1", '"1"', None]),
        ([[1], "x"], pa.string(), ["[1]", '"x"']),
        ([[1], [0.5], []], pa.list_(pa.float64()), [[1.0], [0.5], []]),
        ([[1, "x"]], pa.string(), ['[1, "x"]']),
        ([[2**63]], pa.string(), [f"[{2**63}]"]),
        ([[1, 2**63]], pa.string(), [f"[1, {2**63}]"]),
        ([[True], [1]], pa.string(), ["[true]", "[1]"]),
        ([["x", None], [True]], pa.string(), ['["x", null]', "[true]"]),
        ([[[1], []], [None]], pa.list_(pa.list_(pa.int64())), None),
        ([[], None], pa.list_(pa.null()), None),
        (
            [{"a": 1, "b": None}, {"b": "x", "a": 2}],
            pa.struct([("a", pa.int64()), ("b", pa.string())]),
            [{"a": 1, "b": None}, {"a": 2, "b": "x"}],
        ),
        ([{"a": 1}, {"a": 1, "b": 2}], pa.string(), ['{"a": 1}', '{"a": 1, "b": 2}']),
        ([{}], pa.string(), ["{}"]),
        ([[{"role": "user", "content": "x"}]], pa.list_(pa.struct([("role", "string"), ("content", "string")])), None),
        ([{"a": [{"b": 1}, {"c": 1}]}], pa.string(), ['{"a": [{"b": 1}, {"c": 1}]}']),
        ([None, None], pa.null(), None),
        (["\ud800"], pa.string(), ["\\ud800"]),
        ([["\ud800"]], pa.list_(pa.string()), [["\\ud800"]]),
        ([float("nan")], pa.float64(), None),
    ],
)
def test_a_column_of_json_has_a_type_that_holds_all_its_values(convert, values, kind, expected):
    data = "".join(json.dumps({"a": value, "id": i}) + "\n" for i, value in enumerate(values)).encode()
    out, remarks = convert({"in": data}, "parquet")
    table = table_of(out)
    assert str(table["a"].type).replace("element:", "item:") == str(kind)
    assert repr(table["a"].to_pylist()) == repr(values if expected is None else expected)
    counted = [arrowtypes.BEYOND] if str(2**63) in (expected or []) else [jsonl.SURROGATE] if b"\\ud800" in data else []
    assert remarks == dict.fromkeys(counted, 1)


def test_parquet_files_of_differing_columns_become_one(convert):
    first = parquet_of(pa.table({"a": pa.array([1], pa.int32()), "b": ["x"]}))
    second = parquet_of(pa.table({"c": pa.array(["u"]).dictionary_encode(), "a": pa.array([2**40])}))
    table = table_of(convert({"1": first, "2": second}, "parquet")[0])
    assert table.to_pylist() == [{"a": 1, "b": "x", "c": None}, {"a": 2**40, "b": None, "c": "u"}]
    assert table.schema.types == [pa.int64(), pa.string(), pa.string()]


@pytest.mark.parametrize(
    "one, other",
    [
        (pa.array([2**60]), pa.array([0.5])),
        (pa.array([2**60], pa.uint64()), pa.array([-1])),
        (pa.array(["x"]), pa.array([1])),
        (pa.array(["x"]), pa.array([b"x"])),
        (pa.array([1], pa.timestamp("us", "UTC")), pa.array([1], pa.timestamp("us", TZ))),
        (pa.array([[2**60]]), pa.array([[0.5]])),
    ],
)
def test_parquet_files_of_types_that_no_type_holds_are_refused(convert, tmp_path, one, other):
    inputs = {"1": parquet_of(pa.table({"k": one})), "2": parquet_of(pa.table({"k": other}))}
    with pytest.raises(ConfigError, match="column 'k': expected one type in all files"):
        convert(inputs, "parquet")
    assert len(lines_of(convert(inputs, "jsonl")[0])) == 2
    sources = Sources([str(tmp_path / "1"), str(tmp_path / "2"), str(tmp_path / "1")])
    assert sources.types == {"k": f"{one.type} | {other.type}".replace("item:", "element:")}


def test_files_of_several_formats_become_one(convert):
    table = pa.table({"id": pa.array([3], pa.int32()), "t": pa.array([5], pa.timestamp("ns")), "m": ["1"]})
    inputs = {
        "1": b'{"id": 1, "s": "x"}\n{"id": 2, "m": 0.5}\n',
        "2.csv": b"s,m\ny,2\n",
        "3.parquet": parquet_of(table),
    }
    out = table_of(convert(inputs, "parquet")[0])
    assert out.drop_columns("t").to_pylist() == [
        {"id": 1, "s": "x", "m": None},
        {"id": 2, "s": None, "m": "0.5"},
        {"id": None, "s": "y", "m": '"2"'},
        {"id": 3, "s": None, "m": '"1"'},
    ]
    assert out["t"].cast(pa.int64()).to_pylist() == [None, None, None, 5]
    assert out.schema.field("t").type == pa.timestamp("ns") and out.schema.field("id").type == pa.int64()
    assert convert(inputs, "csv")[0].startswith(
        b"id,s,m,t\n1,x,,\n2,,0.5,\n,y,2,\n3,,1,1970-01-01T00:00:00.000000005\n"
    )


def test_more_keys_than_columns_are_refused(convert, monkeypatch):
    monkeypatch.setattr(arrowtypes, "MOST_COLUMNS", 20)
    data = b"".join(b'{"k%d": 1}\n' % i for i in range(21))
    for form in ("csv", "parquet"):
        with pytest.raises(ConfigError, match="at most 20 different keys"):
            convert({"in": data}, form)
    assert convert({"in": data}, "jsonl")[0] == data


def test_row_groups_depend_on_rows_alone(convert, monkeypatch):
    monkeypatch.setattr(parquet, "PART_ROWS", 7)
    monkeypatch.setattr(parquet, "GROUP_ROWS", 20)
    table = pa.table({"a": range(100), "s": ["x" * 100] * 100})
    out, _ = convert({"in": parquet_of(table, row_group_size=33)}, "parquet", RESULTS, ANSWER)
    about = pq.ParquetFile(pa.BufferReader(out)).metadata
    assert [about.row_group(i).num_rows for i in range(about.num_row_groups)] == [21, 21, 21, 21, 16]
    assert table_of(out).select(["a", "s"]).equals(table)
    for name, most in {"PART_ROWS": 10**6, "GROUP_ROWS": 10**6, "PART_BYTES": 1000, "GROUP_BYTES": 3000}.items():
        monkeypatch.setattr(parquet, name, most)
    out, _ = convert({"in": parquet_of(table)}, "parquet")
    about = pq.ParquetFile(pa.BufferReader(out)).metadata
    assert 3 <= about.num_row_groups <= 5 and table_of(out).equals(table)


def test_rows_may_come_in_any_order_and_by_hand(tmp_path):
    table = pa.table({"a": range(10), "t": pa.array(range(10), pa.timestamp("ns"))})
    (tmp_path / "in").write_bytes(parquet_of(table, row_group_size=5))
    sources = Sources([str(tmp_path / "in")])
    rows = list(sources.rows())
    order = (7, 9, 1, 3, 2, 4, 8, 6, 5, 0)
    rows = [rows[i] for i in order]
    file = io.BytesIO()
    writer = open_writer(file, form_of("-", "parquet"), sources=sources, results=[Field("n", "int")])
    for row in rows:
        writer.write(row, {"n": row.number})
    writer.write(Row(0, "by hand", 1, {"a": 77}), {})
    writer.close()
    out = table_of(file.getvalue())
    assert out["n"].to_pylist() == [*order, None]
    assert out["a"].to_pylist() == [*order, 77]
    assert out["t"].cast(pa.int64()).to_pylist() == [*order, None]


def test_an_input_that_changed_since_its_types_were_found_is_told(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b'{"a": 1}\n')
    sources = Sources([str(path)])
    writer = open_writer(io.BytesIO(), form_of("-", "parquet"), sources=sources, results=[])
    path.write_bytes(b'{"a": "x"}\n')
    writer.write(next(sources.rows()), {})
    with pytest.raises(InvalidInput, match="column 'a': expected values of the type int64"):
        writer.close()


# ---- Parquet in ------------------------------------------------------------------------------------------------------


def test_values_of_parquet_are_python_s(tmp_path):
    (tmp_path / "in").write_bytes(PARQUET)
    sources = Sources([str(tmp_path / "in")])
    rows = list(sources.rows())
    first = rows[0].values
    assert [(row.number, row.line, row.place) for row in rows] == [
        (i, i + 1, f"{tmp_path}/in, row {i + 1}") for i in range(3)
    ]
    assert first["id"] == 1 and first["raw"] == b"\xff\0" and first["price"] == decimal.Decimal("1.50")
    assert first["zone"].utcoffset() == datetime.timedelta(hours=1) and first["for"] == datetime.timedelta(seconds=90.5)
    assert first["day"] == datetime.date(2024, 2, 29) and first["d"]["t"] == "1970-01-01T00:00:00.000000001"
    assert first["map"] == [("k", 1)] and first["cat"] == "u" and rows[2].values["s"] is None
    assert sources.types["ns"] == "timestamp[ns]" and sources.types["l"].startswith("list<") and not rows[0].error
    assert sources.columns == TABLE.column_names


@pytest.mark.parametrize(
    "array, value",
    [
        (pa.array([10**15], pa.timestamp("s")), "1000000000000000 s after 1970-01-01"),
        (pa.array([1000], pa.timestamp("ns")), datetime.datetime(1970, 1, 1, 0, 0, 0, 1)),
        (pa.array([-1], pa.timestamp("ns")), "1969-12-31T23:59:59.999999999"),
        (pa.array([1], pa.timestamp("ns", "+01:30")), "1970-01-01T01:30:00.000000001+01:30"),
        (pa.array([1], pa.timestamp("ns", "-02:00")), "1969-12-31T22:00:00.000000001-02:00"),
        (
            pa.array([1_000_000], pa.timestamp("us", "Mars/Base")),
            datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.UTC),
        ),
        (pa.array([1001], pa.duration("ns")), "PT0.000001001S"),
        (pa.array([-(10**18)], pa.duration("s")), "-PT1000000000000000000S"),
        (pa.array([3_000], pa.time64("ns")), datetime.time(0, 0, 0, 3)),
        (pa.array([61], pa.time32("s")), datetime.time(0, 1, 1)),
        (pa.array([10**7], pa.int32()).view(pa.date32()), "29349-01-26"),
        (pa.array([[1, None]], pa.list_(pa.timestamp("ns"), 2)), ["1970-01-01T00:00:00.000000001", None]),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.duration("ns"))), [("k", "PT0.000000001S")]),
        (pa.array([1], pa.timestamp("ns")).dictionary_encode(), "1970-01-01T00:00:00.000000001"),
        (pa.array([1.5], pa.float16()), 1.5),
        (pa.array([b"a\xff"], pa.binary()).view(pa.string()), "a\udcff"),
        (pa.array([["x"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))), ["x"]),
        (pa.array(["x"], pa.string_view()), "x"),
        (pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}"])), "{}"),
        (pa.array([decimal.Decimal(10) ** 50], pa.decimal256(60, 0)), decimal.Decimal(10) ** 50),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_what_python_s_types_cannot_hold_is_text(array, value):
    assert arrow.values(array) == [value]
    assert arrow.values(pa.concat_arrays([array, pa.nulls(1, array.type)])) == [value, None]


def test_rows_of_parquet_are_passed_over_by_number(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BATCH_ROWS", 3)
    (tmp_path / "in").write_bytes(parquet_of(pa.table({"a": range(20)}), row_group_size=8))
    sources = Sources([str(tmp_path / "in")] * 2)
    every = list(sources.rows())
    assert [row.values["a"] for row in every] == [*range(20)] * 2 and [row.number for row in every] == [*range(40)]
    assert [row.line for row in every] == [*range(1, 21)] * 2
    for kept in ({*range(17, 40)}, {4, 9, 39}, set()):
        assert list(sources.rows(lambda number, kept=kept: number not in kept)) == [every[i] for i in sorted(kept)]


def test_parquet_without_its_end_or_damaged_inside(tmp_path):
    table = pa.table({"a": range(5000), "b": [str(i) * 5 for i in range(5000)]})
    whole = parquet_of(table, row_group_size=1000, use_dictionary=False, compression="gzip")
    path = tmp_path / "in.parquet"
    path.write_bytes(whole[:-10])
    with pytest.raises(InvalidInput, match=r"in.parquet: expected a whole Parquet file"):
        Sources([str(path)])
    half = len(whole) // 2
    path.write_bytes(whole[:half] + bytes(200) + whole[half + 200 :])
    rows = []
    with pytest.raises(InvalidInput, match=r"in.parquet, after row \d+: "):
        for row in Sources([str(path)]).rows():
            rows.append(row.values["a"])
    assert rows == list(range(len(rows))) and len(rows) >= 1000
    file = tmp_path / "twice.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), file)
    with pytest.raises(ConfigError, match=r"twice.parquet: expected each column's name once; more than once: \['a'\]"):
        Sources([str(file)])


# ---- the table of formats --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_what_a_format_must_have(format, tmp_path):
    """Read, written, counted, known by its content and by its name, and named wherever formats are."""
    others = [other for other in FORMATS if other is not format]
    assert format.suffixes and not {*format.suffixes} & {s for other in others for s in other.suffixes}
    assert form_of("-", format.name) == FileForm(format, None) and format.name not in [other.name for other in others]
    file = io.BytesIO()
    writer = open_writer(file, FileForm(format, None), sources=None, results=[Field("a", "int"), Field("b", "text")])
    for i in range(3):
        writer.write(Row(i, "x", i + 1, {}), {"a": i, "b": "ü"})
    writer.close()
    path = tmp_path / f"rows{format.suffixes[0]}"
    path.write_bytes(file.getvalue())
    sources = Sources([str(path)])
    assert sources.files[0].format is format and sources.columns == ["a", "b"] and sources.count() == 3
    rows = [*sources.rows(lambda number: number == 1)]
    assert [(row.number, str(row.values["a"]), row.values["b"]) for row in rows] == [(0, "0", "ü"), (2, "2", "ü")]
    assert format.carried(sources, None) == ["a", "b"]
    page = (Path(__file__).parents[2] / "docs" / "offline.md").read_text()
    assert format.title in page.partition("| formats |")[2].partition("\n")[0]
    parser = argparse.ArgumentParser()
    runbatch.arguments(parser)
    _, _, flags = parser.format_help().partition("--format F")
    assert format.name in flags.partition("--delimiter")[0].replace(",", "").split()


# ---- names, disks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, format, expected",
    [
        ("out.jsonl", None, ("jsonl", None)),
        ("a.b/out.NDJSON.GZ", None, ("jsonl", "gzip")),
        ("out.json.zst", None, ("jsonl", "zstd")),
        ("out.csv", None, ("csv", None)),
        ("out.tsv.gz", None, ("tsv", "gzip")),
        ("out.pq", None, ("parquet", None)),
        ("-", "csv.gz", ("csv", "gzip")),
        ("out.csv", "JSONL", ("jsonl", None)),
        ("out.gz", "csv", ("csv", "gzip")),
        ("out.csv.gz", "jsonl.zst", ("jsonl", "zstd")),
        ("out", "parquet", ("parquet", None)),
    ],
)
def test_the_form_is_told_by_name_or_format(name, format, expected):
    form = form_of(name, format)
    assert (form.format.name, form.compression) == expected


@pytest.mark.parametrize(
    "name, format, words",
    [
        ("-", None, "-: expected a name that tells"),
        ("out.gz", None, "expected a name that tells"),
        ("out.parquet.gz", None, "it compresses its columns itself"),
        ("out", "parquet.zst", "it compresses its columns itself"),
        ("out.csv.gz", "parquet", "it compresses its columns itself"),
        ("out.csv", "xml", "format 'xml': expected jsonl, csv"),
        ("out.csv", "", "format '': expected jsonl"),
    ],
)
def test_a_form_that_nothing_tells_is_refused(name, format, words):
    with pytest.raises(ConfigError, match=words):
        form_of(name, format)


class Full(io.BytesIO):
    """A disk with room for so many bytes."""

    room = 100

    def write(self, data):
        if self.tell() + len(data) > self.room:
            raise OSError(28, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("form", [*NAMES, "jsonl.gz", "csv.zst"])
def test_a_full_disk_is_an_os_error_and_nothing_is_written_after_it(form, monkeypatch):
    monkeypatch.setattr(format_, "CHUNK", 200)
    monkeypatch.setattr(parquet, "PART_ROWS", 5)
    monkeypatch.setattr(parquet, "GROUP_ROWS", 5)
    file = Full()
    with pytest.raises(OSError, match="No space left on device"):
        writer = open_writer(file, form_of("-", form), sources=None, results=[Field("r", "text")])
        for i in range(1000):
            writer.write(Row(i, "F", i, {}), {"r": str(i**9)})
        writer.close()
    file.room = 10**9
    size = len(file.getvalue())
    with pytest.raises(OSError, match="No space left on device"):
        writer.close()
    del writer
    assert len(file.getvalue()) == size <= 100


@pytest.mark.parametrize("form", [*NAMES, "jsonl.gz", "csv.zst"])
def test_a_writer_that_is_closed_has_written_all_and_leaves_the_file_open(form):
    raw = io.BytesIO()
    file = io.BufferedWriter(raw, 1 << 20)
    open_writer(file, form_of("-", form), sources=None, results=[Field("r", "text")]).close()
    assert not file.closed and raw.tell() == len(raw.getvalue()) and (raw.getvalue() or form == "jsonl")


@pytest.mark.parametrize("form", [*NAMES, "jsonl.gz", "csv.zst"])
def test_a_writer_may_be_dropped(form):
    file = io.BytesIO()
    writer = open_writer(file, form_of("-", form), sources=None, results=[Field("r", "text")])
    writer.write(Row(0, "F", 1, {}), {"r": "x"})
    size = len(file.getvalue())
    del writer
    assert len(file.getvalue()) == size
