"""Reading traces, changing them, making them up."""

import json

import numpy as np
import pytest

from hibachi.engine.simulator.trace import read_trace, synthetic
from hibachi.errors import InvalidTrace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:51.2224670,879,55
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [0, 7]},
]


@pytest.fixture
def write(tmp_path):
    def call(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return call


def test_azures_columns_and_times(write):
    trace = read_trace(write("conv.csv", AZURE))
    assert trace.arrival.tolist() == [0, 4_314_579_000_000, 4_541_877_000_000]  # in order, in picoseconds
    assert trace.prompt.tolist() == [374, 396, 879] and trace.output.tolist() == [44, 109, 55]
    assert trace.keys is None and trace.tenant is None and trace.block_keys(16)(0) is None


def test_other_names_seconds_tenants_and_priorities(write):
    text = "Arrived_At,prompt_tokens,output_tokens,tenant,priority,more\n0.5,3,4,ann,1,x\n2,5,6,bob,0,y\n\n"
    trace = read_trace(write("own.csv", text))
    assert trace.arrival.tolist() == [0, 1_500_000_000_000]
    assert trace.tenant == ["ann", "bob"] and trace.priority.tolist() == [1, 0]


def test_mooncakes_milliseconds_and_pieces(write):
    trace = read_trace(write("m.jsonl", "\n".join(map(json.dumps, MOONCAKE))))
    assert trace.arrival.tolist() == [0, 3_000_000_000_000]
    of = trace.block_keys(512)
    assert [of(0), of(1)] == [[0, 1], [0]]  # full blocks only
    of = trace.block_keys(256)
    assert of(0) == [(0, 0), (0, 1), (1, 0), (1, 1)] and of(1) == [(0, 0), (0, 1)]
    with pytest.raises(InvalidTrace, match="divides 512; got 100"):
        trace.block_keys(100)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.csv", "", r"a.csv: expected a column TIMESTAMP \(or arrival, .*\); got an empty file"),
        (
            "a.csv",
            "TIMESTAMP,GeneratedTokens\n1,2\n",
            "expected a column ContextTokens .* got timestamp, generatedtokens",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "a.csv: expected at least one request; got none"),
        ("a.csv", AZURE + "1,2\n", "a.csv, line 5: expected 3 columns; got 2"),
        ("a.csv", AZURE + "soon,2,3\n", "a.csv, line 5: expected seconds, or a date and a time; got 'soon'"),
        ("a.csv", AZURE + "nan,2,3\n", "a.csv, line 5: .* got"),
        ("a.csv", AZURE + "1,0,3\n", "a.csv, line 5: ContextTokens must be from 1 to .*; got '0'"),
        ("a.csv", AZURE + "1,2,3.5\n", "a.csv, line 5: GeneratedTokens must be an integer; got '3.5'"),
        ("a.jsonl", "", "a.jsonl: expected at least one request"),
        ("a.jsonl", "{", "a.jsonl, line 1: expected a JSON object; got '{'"),
        ("a.jsonl", "[1]", "a.jsonl, line 1: expected a JSON object"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 2}', "line 1: expected a field output_length; got timestamp, "),
        ("a.jsonl", '{"timestamp": "x", "input_length": 2, "output_length": 1}', "number of milliseconds; got 'x'"),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 2, "output_length": 1, "hash_ids": 7}',
            "hash_ids must be a list",
        ),
        ("a.txt", "x", "expected a file that ends in .csv or .jsonl; got '.txt'"),
    ],
)
def test_what_cannot_be_read_is_named(write, name, text, message):
    with pytest.raises(InvalidTrace, match=message):
        read_trace(write(name, text))


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidTrace, match="expected UTF-8"):
        read_trace(tmp_path / "a.csv")


def test_made_up_traces_depend_on_the_seed_alone():
    one, same, other = synthetic(500, seed=1), synthetic(500, seed=1), synthetic(500, seed=2)
    for field in ("arrival", "prompt", "output", "priority"):
        assert getattr(one, field).tolist() == getattr(same, field).tolist()
    assert one.tenant == same.tenant and one.keys == same.keys
    assert one.arrival.tolist() != other.arrival.tolist()


def test_made_up_traces_are_as_they_were_asked_for():
    trace = synthetic(4000, rate=10, bursts=8, prompt=200, output=50, shared=0.25, tenants=3, priorities=2)
    assert 300 < trace.arrival[-1] / 1e12 < 520  # 400 s
    gaps = np.diff(trace.arrival)
    assert 0.82 < (gaps == 0).mean() < 0.93  # groups of 8
    sharing = np.array([len(keys) for keys in trace.keys]) > 0
    assert 0.22 < sharing.mean() < 0.28
    assert 180 < np.median(trace.prompt[~sharing]) < 220 and 45 < np.median(trace.output) < 55
    assert all(64 * len(keys) < n for keys, n in zip(trace.keys, trace.prompt.tolist(), strict=True))
    counts = [trace.tenant.count(f"tenant {i}") for i in (1, 2, 3)]
    assert counts == sorted(counts, reverse=True) and set(trace.priority.tolist()) == {0, 1}


@pytest.mark.parametrize("wrong", [{"n": 0}, {"rate": 0}, {"shared": 2}, {"bursts": 0.5}])
def test_made_up_traces_that_cannot_be(wrong):
    with pytest.raises(InvalidTrace, match=next(iter(wrong))):
        synthetic(**{"n": 10} | wrong)


def test_shorter_faster_and_in_a_row():
    trace = synthetic(100, tenants=2)
    assert len(trace.head(30)) == 30 and len(trace.head(30).keys) == len(trace.head(30).tenant) == 30
    assert abs(trace.faster(2).arrival - trace.arrival / 2).max() <= 1
    twice = trace.repeated(2)
    assert len(twice) == 200 and (np.diff(twice.arrival) >= 0).all()
    assert twice.arrival[100] > twice.arrival[99] and twice.prompt[100:].tolist() == trace.prompt.tolist()
    assert twice.keys[100:] == trace.keys and twice.tenant[100:] == trace.tenant
