"""Rows of files: formats by content, what cannot be read, and how much memory that takes."""

import gzip
import json
import os
import random
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hibachi.errors import ConfigError
from hibachi.offline.files import compressed, delimited, jsonl
from hibachi.offline.files.rows import InvalidInput, Row
from hibachi.offline.files.sources import Sources, expand


@pytest.fixture
def made(tmp_path):
    """made(name, content) -> path; content: bytes, or text."""

    def make(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return make


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as to:
        to.write(data)
    return sink.getvalue().to_pybytes()


def read(*paths, **options):
    return list(Sources(paths, **options).rows())


def brief(rows):
    """(number, line, values, or words of the error)."""
    return [(row.number, row.line, row.error or row.values) for row in rows]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz"])
def test_with_a_stop_nothing_is_read_after_the_last_row(made, monkeypatch, name):
    lines = b"n\n" + b"1\n" * 50 if "csv" in name else b'{"n": 1}\n' * 50
    path, asked = made(name, gzip.compress(lines, mtime=0) if name.endswith("gz") else lines), []
    sources = Sources([path])
    real = jsonl.read if "jsonl" in name else delimited.read

    def watched(content, *rest):
        *rest, skip = rest
        return real(content, *rest, lambda number: bool(asked.append(number)) or skip(number))

    monkeypatch.setattr(jsonl if "jsonl" in name else delimited, "read", watched)
    assert [row.number for row in sources.rows(stop=3)] == [0, 1, 2] and max(asked) == 2
    assert [row.number for row in sources.rows(lambda n: n > 0, stop=3)] == [0] and max(asked) == 2
    assert len(list(sources.rows(stop=99))) == 50


def test_with_a_stop_no_further_file_is_opened(made, monkeypatch):
    pq.write_table(pa.table({"n": [5, 6, 7]}), one := made("a.parquet", b""))
    two, opened = made("b.jsonl", '{"n": 1}\n' * 3), []
    sources = Sources([one, two])
    real = compressed.opened
    monkeypatch.setattr(compressed, "opened", lambda path, kind: opened.append(path) or real(path, kind))
    for stop in (1, 2, 3):
        for skip in (None, lambda n: n == 0):
            want = [n for n in range(stop) if skip is None or n]
            assert [row.number for row in sources.rows(skip, stop=stop)] == want and opened == []
    assert [row.number for row in sources.rows(lambda n: n < 4, stop=5)] == [4] and opened == [two]


def only(path, **options):
    (row,) = read(path, **options)
    return row


# ---- JSON Lines ------------------------------------------------------------------------------------------------------


def test_lines_of_json_are_rows_and_blank_ones_are_counted_as_lines_only(made):
    path = made("a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": [1, {"b": null}], "c": "\xc3\xa4"}')
    rows = read(path)
    assert brief(rows) == [(0, 1, {"a": 1}), (1, 4, {"a": [1, {"b": None}], "c": "ä"})]
    assert rows[1].place == f"{path}, line 4" and rows[0].size == 13


@pytest.mark.parametrize(
    "line, words",
    [
        (b'{"a": 1', "expected a JSON object; at character 8 '': Expecting ',' delimiter"),
        (b'{"a": b}', "at character 7 'b}': Expecting value"),
        (b"[1, 2]", "expected a JSON object; got an array: [1, 2]"),
        (b"null", "expected a JSON object; got null"),
        (b"7", "got a number: 7"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "each key of an object once; 'c' is there more than once"),
        (b'{"a": "\xff"}', "expected UTF-8; byte 8 of the line, 0xff"),
        (b'{"a": "\0"}', "Invalid control character"),
        (b"\0\0\0\0", "expected a JSON object; at character 1"),
        (b'\xef\xbb\xbf{"a": 1}', r"at character 1 '\ufeff{"),
        (b'{"a": ' + b"9" * 5000 + b"}", "expected numbers that can be read"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "expected at most 200 arrays and objects in each other"),
        (b'{"a": ' + b"[" * 99999 + b"]" * 99999 + b"}", "expected at most 200 arrays and objects in each other"),
        (b'{"a": 1} {"a": 2}', "Extra data"),
    ],
)
def test_a_bad_line_of_json_is_an_error_row_and_the_rest_goes_on(made, line, words):
    before, bad, after = read(made("a.jsonl", b'{"a": 0}\n' + line + b'\n{"a": 2}\n'))
    assert (before.values, after.values, after.number, after.line) == ({"a": 0}, {"a": 2}, 2, 3)
    assert (bad.number, bad.line, bad.values) == (1, 2, {}) and words in bad.error
    assert len(bad.error) < 500


def test_json_is_read_exactly(made):
    line = b'{"a": 12345678901234567890123, "b": 0.1, "c": -0.0, "d": "\\ud800", "e": true, "z": 1, "y": 2}'
    values = only(made("a.jsonl", line)).values
    assert repr(values) == repr(json.loads(line)) and list(values) == list("abcdezy")
    deep = only(made("b.jsonl", b'{"a": ' + b"[" * 199 + b"]" * 199 + b', "b": "' + b"[{" * 999 + b'"}'))
    assert deep.error is None
    values = only(made("c.jsonl", b'{"a": NaN, "b": [-Infinity]}')).values
    assert values["a"] != values["a"] and values["b"] == [float("-inf")]


def test_a_line_above_the_limit_is_an_error_row(made, monkeypatch):
    monkeypatch.setattr(jsonl, "LINE_LIMIT", 100)
    monkeypatch.setattr(jsonl, "PIECE", 64)

    def line(size):
        return b'{"a": "' + b"x" * (size - 9) + b'"}'

    rows = read(made("a.jsonl", b"\n".join([line(99), line(100), line(101), line(500), line(20), line(300)])))
    assert [row.error is None for row in rows] == [True, True, False, False, True, False]
    assert rows[3].error == "expected a line of at most 100 bytes; it has 501"
    assert [(row.number, row.line) for row in rows] == [(i, i + 1) for i in range(6)]
    assert [only(made("b.jsonl", line(size))).error is None for size in (100, 101)] == [True, False]


MEASURED = """
import resource, sys
from hibachi.offline.files.sources import Sources
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for row in Sources(sys.argv[1:]).rows():
    print(row.number, row.line, row.error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "b.csv", "quote.csv", "c.jsonl.gz"])
def test_a_line_of_100_mb_is_never_in_memory(tmp_path, name):
    first, last = (b"a,b\n", b"1,2\n") if "csv" in name else (b'{"a": 1}\n', b'{"a": 2}\n')
    piece = {"a.jsonl": b"x" * 10**6, "b.csv": b"x," * 500_000, "quote.csv": b"xxxx,yy\n" * 125_000}
    with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wb") as file:
        file.write(first + (b'"' if name == "quote.csv" else b""))
        for _ in range(100):
            file.write(piece.get(name, b"x" * 10**6))
        file.write(b"\n" + last)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    lines = done.stdout.splitlines()
    assert int(done.stderr) < 200_000  # KiB; the limit of a line is 16 MiB, of which CSV holds some copies
    if name == "quote.csv":  # all of the file is one row
        assert lines == [
            "0 2 expected a row of at most 16777216 characters; it has 100000006 and ends in line 12500003. "
            "Is a quote not closed?"
        ]
    else:
        assert [line.split()[1:3] for line in lines[-2:]] == [["2", "expected"], ["3", "None"]]
        assert "it has 100000001" in lines[-2]


# ---- CSV -------------------------------------------------------------------------------------------------------------


def test_csv_is_texts_below_a_header(made):
    path = made("a.csv", '\ufeff"a",b\r\n1,\r\n\r\n"x\r\ny, ""z""","ä\0"\r\n3,4')
    rows = read(path)
    assert brief(rows) == [
        (0, 2, {"a": "1", "b": ""}),
        (1, 4, {"a": 'x\r\ny, "z"', "b": "ä\0"}),
        (2, 6, {"a": "3", "b": "4"}),
    ]
    assert Sources([path]).columns == ["a", "b"]


def test_delimiters(made):
    assert only(made("a.tsv", "a\tb,c\n1\t2,3")).values == {"a": "1", "b,c": "2,3"}
    assert only(made("a.tsv.gz", gzip.compress(b"a\tb\n1\t2", mtime=0))).values == {"a": "1", "b": "2"}
    assert only(made("b.csv", "a;b\n1;2,3"), delimiter=";").values == {"a": "1", "b": "2,3"}
    assert only(made("b.txt", "a\tb\n1\t2"), delimiter="\\t").values == {"a": "1", "b": "2"}
    for delimiter in ("", ";;", '"', "\n"):
        with pytest.raises(ConfigError, match="expected one character"):
            Sources([made("b.csv", "a")], delimiter=delimiter)


@pytest.mark.parametrize(
    "row, words, values",
    [
        (b"1", "expected 2 cells, as in the header; got 1", {"a": "1"}),
        (b"1,2,3", "expected 2 cells, as in the header; got 3", {"a": "1", "b": "2"}),
        (b'"1"2,3', "expected quotes around whole cells", {}),
        (b"1,\xff", "expected bytes of the file's encoding", {}),
    ],
)
def test_a_bad_row_of_csv_is_an_error_row_and_the_rest_goes_on(made, row, words, values):
    before, bad, after = read(made("a.csv", b"a,b\n0,0\n" + row + b"\n5,6\n"))
    assert (before.values, after.values, after.number, after.line) == ({"a": "0", "b": "0"}, {"a": "5", "b": "6"}, 2, 4)
    assert (bad.number, bad.line, bad.values) == (1, 3, values) and words in bad.error


def test_a_quote_that_is_never_closed_is_named_by_the_line_that_opens_it(made):
    good, bad = read(made("a.csv", 'a,b\n1,2\n3,"4\n5,6\n7,8\n'))
    assert good.error is None and bad.line == 3 and "open at the file's end, line 5" in bad.error


def test_a_field_above_the_limit_of_the_csv_module_is_read(made):
    assert only(made("a.csv", "a,b\n" + "x" * 300_000 + ",y")).values == {"a": "x" * 300_000, "b": "y"}


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_a_record_above_the_limit_is_passed_over_to_its_end(made, monkeypatch, piece):
    monkeypatch.setattr(delimited, "LINE_LIMIT", 50)
    monkeypatch.setattr(delimited, "PIECE", piece)
    long = [  # each a record of more than 50 characters
        "x" * 60 + ",1\n",
        "1," * 40 + "2\n",
        '1,"' + 'a""b,\n' * 20 + '"\r\n',
        '"' + "y" * 60 + '""\n,""""' + '",2\n',
        'x"y,"' + "z" * 60 + '\n",2\n',
        '1,"' + "\n" * 60 + '"\r\n',
        'x""y' * 20 + ",2\n",
        '"",' * 20 + '"\n' + ',"",' * 20 + '"\n',
    ]
    text = "a,b\n" + "".join(record + f"{i},ok\n" for i, record in enumerate(long))
    rows = read(made("a.csv", text))
    assert [row.values for row in rows[1::2]] == [{"a": str(i), "b": "ok"} for i in range(len(long))]
    lines = [2 + sum(r.count("\n") + 1 for r in long[:i]) for i in range(len(long))]
    assert [row.line for row in rows[::2]] == lines
    for row, record in zip(rows[::2], long, strict=True):
        assert int(re.search(r"it has (\d+)", row.error)[1]) in (
            len(record),
            len(record) - 1,
        )  # an end of two characters may be cut
        assert f" and ends in line {row.line + record.count(chr(10)) - 1}." in row.error or record.count("\n") == 1
    assert [row.number for row in rows] == list(range(16))


@pytest.mark.parametrize("seed", range(3))
def test_what_is_passed_over_is_what_would_have_been_read(made, monkeypatch, seed):
    """Over random CSV: with a limit, the same rows at the same lines, those above it as errors."""
    draw, compared = random.Random(seed), 0
    cells = ["x", '"a,"', '"\n\n"', '""', '"b""c"', 'y"y', 'y""', '"""\n,"', "", '","', '""""']
    for _ in range(40):
        rows = [",".join(draw.choices(cells, k=draw.randrange(1, 6))) for _ in range(draw.randrange(9))]
        path = made("a.csv", "a\n" + "\n".join(rows) + draw.choice(["", "\n"]))
        monkeypatch.setattr(delimited, "LINE_LIMIT", 10**6)
        whole = read(path)
        monkeypatch.setattr(delimited, "LINE_LIMIT", limit := draw.randrange(2, 12))
        monkeypatch.setattr(delimited, "PIECE", draw.randrange(1, 5))
        for row, again in zip(whole, read(path), strict=True):
            assert (row.number, row.line, row.size) == (again.number, again.line, again.size)
            assert row == again if row.size <= limit else "expected a row of at most" in again.error
            compared += row.size > limit
    assert compared > 50


def test_encodings(made):
    text = "a,b\nä,\u20ac\n"
    expected = {"a": "ä", "b": "\u20ac"}
    for encoding in ("utf-16", "utf-16-le", "cp1252", "utf-32", "UTF8"):
        assert only(made("a.csv", text.encode(encoding)), encoding=encoding).values == expected
    with pytest.raises(ConfigError, match="UTF-16; give --encoding utf-16"):
        Sources([made("a.csv", text.encode("utf-16"))])
    for encoding in ("nonsense", "hex"):
        with pytest.raises(ConfigError, match="expected the name of a text encoding"):
            Sources([made("a.csv", text)], encoding=encoding)
    with pytest.raises(ConfigError, match="expected JSON Lines in UTF-8; these are in utf-16"):
        Sources([made("a.jsonl", '{"a": 1}'.encode("utf-16"))], encoding="utf-16")
    assert only(made("b.jsonl", '{"a": "ä"}'), encoding="utf-16").values == {"a": "ä"}
    # half a character at the end of the file
    assert "encoding" in read(made("c.csv", text.encode("utf-16") + b"x"), encoding="utf-16")[-1].error


@pytest.mark.parametrize(
    "content, words",
    [
        (b"a,b,a\n1,2,3", "each column's name once; more than once: 'a'"),
        (b"a,,b\n1,2,3", "a name for each column; column 2 has none"),
        (b"a,\xff\n1,2", "expected a header in utf-8; it has bytes that are none. See --encoding"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "expected a header in utf-8"),
        (b"a\0b\n1", "it has NUL bytes"),
        (b'a,"b\n1,2\n', "expected a header, the names of the columns, in utf-8: unexpected end"),
    ],
)
def test_a_header_that_names_no_columns_is_refused(made, content, words):
    with pytest.raises(ConfigError, match=words):
        Sources([made("a.csv", content)])


def test_a_header_above_the_limit_is_refused(made, monkeypatch):
    monkeypatch.setattr(delimited, "LINE_LIMIT", 50)
    with pytest.raises(InvalidInput, match="line 2 has more than 50"):
        Sources([made("a.csv", "\n" + "x" * 100 + "\n1\n")])


# ---- which format ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf", b" " * 200_000])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a"])
def test_an_empty_file_has_no_rows_and_no_columns(made, name, content):
    sources = Sources([made(name, content)])
    assert list(sources.rows()) == [] and sources.columns == [] and sources.types == {}


def test_a_header_only_has_columns_and_no_rows(made):
    for end in ("", "\n", "\r\n\r\n"):
        sources = Sources([made("a.csv", "a,b" + end)])
        assert list(sources.rows()) == [] and sources.columns == ["a", "b"]


def test_the_format_is_found_by_content(made):
    many = [
        made("1", b" " * 100_000 + b'\n{"a": 1}'),
        made("2.data", "a\n2"),
        made("3", gzip.compress(b'{"a": 3}', mtime=0)),
        made("4.txt", zstd(b"b,a\n5,4")),
    ]
    sources = Sources(many)
    assert [(file.format.name, file.compression) for file in sources.files] == [
        ("jsonl", None),
        ("csv", None),
        ("jsonl", "gzip"),
        ("csv", "zstd"),
    ]
    rows = list(sources.rows())
    assert [(row.number, row.file, row.line, str(row.values["a"])) for row in rows] == [
        (0, many[0], 2, "1"),
        (1, many[1], 2, "2"),
        (2, many[2], 1, "3"),
        (3, many[3], 2, "4"),
    ]
    assert sources.columns == ["a", "b"] and list(sources.rows()) == rows


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.parquet", b'{"a": 1}', "by its name expected Parquet; by its content it is JSON Lines"),
        ("a.parquet", b"", "by its name expected Parquet; by its content it is nothing"),
        ("a.jsonl", b"a,b\n1,2", "by its name expected JSON Lines; by its content it is delimited text"),
        ("a.json", b"PAR1....", "by its name expected JSON Lines; by its content it is Parquet"),
        ("a.csv", b'{"a": 1}', "by its name expected delimited text .CSV.; by its content it is JSON Lines"),
        (
            "a.tsv.gz",
            gzip.compress(b'{"a": 1}', mtime=0),
            "expected delimited text .TSV.; by its content it is JSON Lines",
        ),
        ("a.jsonl.gz", b'{"a": 1}', "by its name expected gzip; by its content it is no compressed data"),
        ("a.jsonl.gz", b"", "by its name expected gzip"),
        ("a.csv.zst", gzip.compress(b"a\n1", mtime=0), "by its name expected zstd; by its content it is gzip"),
        ("a.csv", gzip.compress(b"a\n1", mtime=0), "expected delimited text .CSV.; by its content it is gzip"),
        ("a.jsonl", b' \n[{"a": 1}]', "an object a line; got a JSON array. To convert it: python -c"),
        ("a", gzip.compress(b"PAR1...", mtime=0), "got Parquet inside gzip"),
        ("a", b"PK\x03\x04....", "got a zip archive; unpack it"),
        ("a.parquet", b"PAR1" + b"x" * 100, "expected a whole Parquet file"),
        ("a.parquet", b"PAR1", "expected a whole Parquet file"),
    ],
)
def test_what_cannot_be_rows_is_refused(made, name, content, words):
    with pytest.raises(ConfigError, match=words) as caught:
        Sources([made(name, content)])
    assert name in str(caught.value)


def test_what_a_json_array_is_told_to_do_works(made, tmp_path):
    path = made("a.json", '[{"a": "ä"},\n {"a": 2}]')
    with pytest.raises(ConfigError) as caught:
        Sources([path])
    code = str(caught.value).split("python -c '")[1].split("'")[0]
    with open(path) as file, open(tmp_path / "b.jsonl", "w") as to:
        subprocess.run([sys.executable, "-c", code], stdin=file, stdout=to, check=True)
    assert [row.values for row in read(str(tmp_path / "b.jsonl"))] == [{"a": "ä"}, {"a": 2}]


def test_the_columns_of_json_are_of_the_first_row_that_can_be_read(made):
    assert Sources([made("a.jsonl", '{"a"\n[]\n{"b": 1, "a": 2}\n{"c": 3}')]).columns == ["b", "a"]
    assert Sources([made("b.jsonl", '{"a"\n' * 20 + '{"a": 1}')]).columns is None


# ---- compressed ------------------------------------------------------------------------------------------------------

LINES = [b'{"a": %d, "b": "%s"}\n' % (i, os.urandom(20).hex().encode()) for i in range(30_000)]
PACK = {"gz": gzip.compress, "zst": zstd}


@pytest.mark.parametrize("kind", PACK)
def test_several_members_are_one_content(made, kind):
    pack = PACK[kind]
    content = pack(b"".join(LINES[:20_000])) + pack(b"") + pack(b"".join(LINES[20_000:]))
    content += b"\0" * 1000 if kind == "gz" else b""
    assert [row.values["a"] for row in read(made("a.jsonl." + kind, content))] == list(range(30_000))


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("form", ["jsonl", "csv"])
@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_file_that_was_cut_off_gives_the_rows_before_it(made, kind, form, part):
    lines = LINES if form == "jsonl" else [b"a,b\n", *(b"%d,%s\n" % (i, line[-43:-3]) for i, line in enumerate(LINES))]
    whole = PACK[kind](b"".join(lines))
    path = made(f"a.{form}.{kind}", whole[: int(len(whole) * part)])
    if kind == "gz":
        import zlib

        had = zlib.decompressobj(31).decompress(whole[: int(len(whole) * part)]).count(b"\n") - (form == "csv")
    else:
        had = (part - 0.1) * len(LINES)  # to the last whole block of zstd's
    rows = []
    with pytest.raises(InvalidInput, match=rf"a.{form}.{kind}, after line \d+: the .* cut off") as caught:
        for row in Sources([path]).rows():
            rows.append(row)
    assert all(row.error is None for row in rows) and int(rows[-1].values["a"]) == len(rows) - 1
    assert len(rows) == had if kind == "gz" else len(rows) > had
    assert f"after line {rows[-1].line}:" in str(caught.value)


def test_all_before_a_cut_is_had_also_where_it_is_less_than_is_read_at_a_time(made):
    for kind, pack in PACK.items():
        path = made("a.jsonl." + kind, pack(b"".join(LINES[:1000])) + pack(b"".join(LINES[1000:]))[:40])
        rows = Sources([path]).rows()
        assert [next(rows).values["a"] for _ in range(1000)] == list(range(1000))
        with pytest.raises(InvalidInput, match=r"after line 1000: .* cut off"):
            next(rows)


def test_damaged_data_is_named(made):
    content = bytearray(gzip.compress(b"".join(LINES), mtime=0))
    content[len(content) // 2] ^= 0xFF
    with pytest.raises(InvalidInput, match=r"after line \d+: the gzip data is damaged"):
        read(made("a.jsonl.gz", bytes(content)))
    with pytest.raises(InvalidInput, match="the gzip data is damaged"):
        read(made("b.jsonl.gz", gzip.compress(b'{"a": 1}\n', mtime=0) + b"garbage"))


# ---- passing over, content, names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_rows_are_passed_over_by_number(made, name, monkeypatch):
    module = jsonl if name == "a.jsonl" else delimited
    monkeypatch.setattr(module, "LINE_LIMIT", 60)
    lines = [f'{{"a": {i}}}' for i in range(6)] if module is jsonl else ["a", *(str(i) for i in range(6))]
    lines[3:3] = ["", "not a row," if module is jsonl else "1,2", "x" * 100]
    first, second = made(name, "\n".join(lines)), made("2" + name, "\n".join(lines))
    sources = Sources([first, second])
    every = list(sources.rows())
    assert len(every) == 16 and [row.number for row in every] == list(range(16))
    asked = []
    kept = list(sources.rows(lambda number: asked.append(number) or number % 3 != 0))
    assert kept == [row for row in every if row.number % 3 == 0] and asked == list(range(16))


def test_content_tells_an_edit_from_a_touch(made):
    path = made("a.csv", "a\n1\n")
    sources = Sources([path])
    content, signature = sources.content(), sources.signature()
    assert content[0]["bytes"] == 4 and content[0]["name"] == path and len(content[0]["sha256"]) == 64
    os.utime(path, ns=(1, 1))
    assert sources.content() == content and sources.signature() != signature
    made("a.csv", "a\n2\n")
    assert sources.content() != content
    os.unlink(path)
    for again in (sources.content, sources.signature, lambda: list(sources.rows())):
        with pytest.raises(InvalidInput, match=r"a.csv: No such file"):
            again()


def test_names_are_expanded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("d/b.jsonl", "d/a.csv", "d/notes.txt", "d/.hidden.csv", "d/e/c.parquet", "d/.h/x.csv", "x[1].csv"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a\n")
    assert expand(["x[1].csv", "d"]) == ["x[1].csv", "d/a.csv", "d/b.jsonl", "d/e/c.parquet"]
    assert expand(["d/*.txt", "d/**/*.parquet"]) == ["d/notes.txt", "d/e/c.parquet"]
    (tmp_path / "link.csv").symlink_to("d/a.csv")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    os.mkfifo("pipe")
    for names, words in [
        ([], "expected at least one file"),
        (["d/a.csv", "d/*.csv"], "each file once; d/a.csv is also there as d/a.csv"),
        (["d/a.csv", "link.csv"], "each file once; link.csv is also there as d/a.csv"),
        (["nothing.csv"], "nothing.csv: expected a file that can be read: No such file"),
        (["broken"], "broken: expected a file that can be read"),
        (["*.nothing"], "expected a pattern that some file matches"),
        (["empty"], "empty: expected a folder with files of rows"),
        (["pipe"], "pipe: expected a regular file"),
    ]:
        with pytest.raises(ConfigError, match=words):
            expand(names)


def test_a_place_is_a_line_or_a_row():
    assert Row(0, "F", 7, {}).place == "F, line 7" and Row(0, "F", 7, {}, unit="row").place == "F, row 7"


# ---- without the extra -----------------------------------------------------------------------------------------------
