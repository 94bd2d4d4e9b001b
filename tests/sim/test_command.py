"""`hibachi sim`: the table, the JSON, the picture, and what is refused."""

import io
import json
import sys

import pytest

from benchmarks.bench.__main__ import main as bench

from ..lib.command import called

CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{i},{200 + 9 * i},{20 + i}\n" for i in range(40))


@pytest.fixture
def trace(tmp_path):
    (tmp_path / "trace.csv").write_text(CSV)
    return str(tmp_path / "trace.csv")


@pytest.fixture
def sim(capsys, monkeypatch):
    """sim(*args): exit status, standard output and standard error."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return lambda *args: called(capsys, "sim", *args)


def test_a_grid_is_a_line_for_each(sim, trace, tmp_path):
    file = tmp_path / "out.json"
    grid = ["--scheduling-policy", "fcfs", "fair", "priority:age=5", "--max-num-seqs", 2, 4, "--num-blocks", 60]
    status, out, err = sim(trace, *grid, "--json", file)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("trace.csv: 40 requests in 39 s, 15,020 tokens of prompts, 1,580 of answers")
    table = [line.split()[:4] for line in lines[3:9]]
    assert table == [[p, r, "60", "40"] for p in ("fcfs", "fair", "priority:age=5") for r in ("2", "4")]
    data = json.loads(file.read_text())
    assert [run["setup"]["max_num_seqs"] for run in data["runs"]] == [2, 4] * 3
    assert data["trace"] == {"name": "trace.csv", "requests": 40, "seconds": 39.0}
    one = data["runs"][0]
    assert one["served"] == 40 and one["ttft"]["p50"] <= one["ttft"]["p99"] and one["itl"]["p50"] > 0
    assert len(one["over_time"]["waiting"]) == len(one["over_time"]["seconds"]) == 300


def test_proposed_tokens(sim, trace, tmp_path):
    file = tmp_path / "out.json"
    steps = []
    for more in ([], ["--speculate", 4], ["--speculate", 4, "--right", 0.5]):
        status, out, err = sim(trace, "--json", file, *more)
        assert (status, err) == (0, "")
        [run] = json.loads(file.read_text())["runs"]
        steps.append(run["steps"])
        assert run["new_tokens"] == 1580
        says = f"fcfs: {run['proposed_tokens']:,} tokens proposed, "
        assert (says in out) is (run["proposed_tokens"] > 0) is bool(more)
    assert steps[1] < steps[2] < steps[0]
    assert "--right goes with --speculate" in sim(trace, "--right", 0.5)[2]


def test_tiers(sim, tmp_path):
    file, trace = tmp_path / "out.json", tmp_path / "trace.jsonl"
    talks = [[(i % 9) * 100 + n for n in range(6)] for i in range(60)]
    record = {"input_length": 3072, "output_length": 5}
    trace.write_text(
        "".join(json.dumps(record | {"timestamp": 9000 * i, "hash_ids": t}) + "\n" for i, t in enumerate(talks))
    )
    status, out, err = sim(trace, "--num-blocks", 12, "--kv-host-blocks", 18, "--kv-disk-blocks", 200, "--json", file)
    assert (status, err) == (0, "")
    [run] = json.loads(file.read_text())["runs"]
    assert run["hit_tokens"] == run["disk_hit_tokens"] == 51 * 5 * 512 and run["disk_loads"] == run["loads"] == 51 * 5
    assert "fcfs: hits of 0 tokens on the device, 0 in host memory, 130,560 on disk; 255 blocks loaded, 255 " in out


def test_the_same_command_gives_the_same_figures(sim, tmp_path):
    found = []
    for name in ("a.json", "b.json"):
        command = ["--synthetic", 300, "--tenants", 3, "--priorities", 2, "--scheduling-policy", "fair", "--seed", 5]
        status, out, _ = sim(*command, "--json", tmp_path / name)
        assert status == 0 and "fair: TTFT p99 by tenant: tenant 1 " in out
        [run] = json.loads((tmp_path / name).read_text())["runs"]
        for of_the_wall in ("wall_seconds", "requests_per_wall_second"):
            del run[of_the_wall]
        found.append(run)
    assert found[0] == found[1] and set(found[0]["tenants"]) == {"tenant 1", "tenant 2", "tenant 3"}


def test_replicas_are_lines_for_each_number_and_router(sim, trace, tmp_path):
    file = tmp_path / "out.json"
    grid = ["--replicas", 1, 3, "--router", "round-robin", "prefix-affine", "--max-num-seqs", 2]
    status, out, err = sim(trace, *grid, "--speed", 90, "--max-connections", 4, "--json", file)
    assert (status, err) == (0, "") and out.splitlines()[2].split()[:2] == ["replicas", "router"]
    names = [line.split()[:4] for line in out.splitlines()[3:7]]
    assert names == [[n, r, "fcfs", "2"] for n in "13" for r in ("round-robin", "prefix-affine")]
    runs = json.loads(file.read_text())["runs"]
    assert [run["setup"]["replicas"] for run in runs] == [1, 1, 3, 3] and {run["served"] for run in runs} == {40}
    assert runs[2]["ttft"]["mean"] < runs[0]["ttft"]["mean"]


def test_a_step_time_from_a_file(sim, trace, tmp_path):
    file = tmp_path / "time.json"
    file.write_text(json.dumps({"seconds": {"step": 2.0, "token": 0, "row": 0, "position": 0, "pair": 0}}))
    status, out, _ = sim(trace, "--requests", 1, "--step-time", file)
    assert status == 0 and out.splitlines()[3].split()[5:7] == ["2", "s"]
    for text in ("x", "{}", '{"seconds": {"step": 1}}', "[]"):
        file.write_text(text)
        status, out, err = sim(trace, "--step-time", file)
        assert status == 1 and 'expected JSON with "seconds": an object with step, token, row, position, pair' in err
    file.write_text(json.dumps({"seconds": {"step": -1, "token": 0, "row": 0, "position": 0, "pair": 0}}))
    assert "step must be seconds, from 0 to 1000; got -1" in sim(trace, "--step-time", file)[2]


@pytest.mark.parametrize("suffix, head", [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_picture(trace, tmp_path, suffix, head):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"picture{suffix}"
    grid = ["sim", trace, "--scheduling-policy", "fcfs", "fair", "--max-num-seqs", "1", "2", "--plot"]
    assert bench([*grid, str(file)]) == 0
    assert file.read_bytes().startswith(head) and file.stat().st_size > 10_000
    if suffix == ".svg":
        again = tmp_path / "again.svg"
        bench([*grid, str(again)])
        assert again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "args, status, message",
    [
        ([], 2, "give a TRACE or --synthetic N"),
        (["TRACE", "--synthetic", "5"], 2, "give a TRACE or --synthetic N"),
        (["TRACE", "--repeat", "0"], 2, "--repeat must be at least 1; got 0"),
        (["TRACE", "--speed", "0"], 2, "--speed must be above 0"),
        (["TRACE", "--max-num-seqs", "0"], 2, "argument --max-num-seqs: expected an integer >= 1; got '0'"),
        (
            ["TRACE", "--max-num-seqs", "99", "--max-num-batched-tokens", "50"],
            1,
            "expected max_num_batched_tokens of at least 99; got 50",
        ),
        (["TRACE", "--scheduling-policy", "best"], 1, "No policy is called 'best': expected one of fair, fcfs, "),
        (
            ["TRACE", "--scheduling-policy", "priority:age"],
            1,
            "Options of a policy are name:option=number,...; got 'priority:age'",
        ),
        (
            ["TRACE", "--scheduling-policy", "fcfs:age=1"],
            1,
            "Options of a policy are name:option=number,...; got 'fcfs:age=1'",
        ),
        (
            ["TRACE", "--scheduling-policy", "best:age=1"],
            1,
            "Only fcfs, priority, fair, shares, waiting-served take options",
        ),
        (["--synthetic", "9", "--rate", "0"], 1, "rate must be above 0"),
        (["no-such.csv"], 1, "no-such.csv"),
        (["TRACE", "--replicas", "65536"], 2, "argument --replicas: expected an integer from 1 to 65535; got '65536'"),
        (["TRACE", "--router", "round-robin"], 1, "expected replicas with router='round-robin'; got none"),
        (["TRACE", "--max-connections", "3"], 1, "expected replicas with max_connections=3; got none"),
        (["TRACE", "--replicas", "2", "--router", "best"], 1, "--router best: expected one of least-connection, "),
        (["TRACE", "--replicas", "2", "--order", "file"], 1, "with replicas=2; got order='file', samples=1"),
    ],
)
def test_what_is_refused(sim, trace, args, status, message):
    given = [trace if a == "TRACE" else a for a in args]
    got, out, err = sim(*given)
    assert got == status and message in err and not out and "Traceback" not in err
