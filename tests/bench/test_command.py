"""`python -m benchmarks.bench` from the command line to its files, and what `hibachi bench` says of it."""

import json
import re

import pytest

from benchmarks.bench import work
from benchmarks.bench.__main__ import main
from hibachi.cli import main as hibachi

TINY_WORK = ["--requests", "3", "--repeat", "1", "--max-num-seqs", "4", "--no-bound"]


def test_throughput_and_compare(tmp_path, capsys):
    out, picture, page = (tmp_path / name for name in ("r.json", "r.png", "RESULTS.md"))
    profile = tmp_path / "p.png"
    command = ["throughput", "--backend", "numpy", "--work", "W1", *TINY_WORK]
    assert main([*command, "--out", str(out), "--profile", str(profile)]) == 0
    shown = capsys.readouterr().out
    assert "hibachi (numpy" in shown and "W1: a step of hibachi" in shown and "attention" in shown
    data = json.loads(out.read_text())
    [run] = data["runs"]
    assert run["complete"] and run["tokens_per_second"] > 0 and run["model"] == "tiny" and run["rows"] == 3
    assert data["machine"]["cores"] and data["profiles"]["W1"] and "profile" not in run
    assert main(["compare", str(out), "--results", str(page), "--plot", str(picture)]) == 0
    assert re.search(r"\| W1 \| hibachi \(numpy[^|]*\) \| float32 \|", page.read_text())  # with its kernels, perhaps
    assert profile.read_bytes()[:4] == picture.read_bytes()[:4] == b"\x89PNG"


def test_latency_of_a_file(tmp_path, capsys):
    work.write(work.make("W3", 2048, requests=3), tmp_path / "mine.jsonl")
    out = tmp_path / "r.json"
    command = ["latency", "--backend", "numpy", "--work", str(tmp_path / "mine.jsonl"), "--rates", "20", "40"]
    assert main([*command, *TINY_WORK, "--slo-ttft", "60000", "--slo-itl", "60000", "--out", str(out)]) == 0
    assert "mine 20/s" in capsys.readouterr().out
    runs = json.loads(out.read_text())["runs"]
    assert [(r["work"], r["rate"], r["slo_share"]) for r in runs] == [("mine", 20.0, 1.0), ("mine", 40.0, 1.0)]


def test_when_nothing_works_the_status_says_so(tmp_path, capsys):
    peer = ["--no-hibachi", "--peer", "llamacpp", "--peer-option", "llamacpp", "server", "no-such-server"]
    assert main(["throughput", "--work", "W4", *peer, *TINY_WORK]) == 1
    assert "failed: FileNotFoundError" in capsys.readouterr().out.replace("its process ended with status 1: ", "")


def test_growth(tmp_path, capsys):
    out, picture = tmp_path / "g.json", tmp_path / "g.svg"
    sizes = ["--rows", "1", "2", "--contexts", "16", "32", "--rounds", "1"]
    assert main(["growth", *sizes, "--out", str(out), "--plot", str(picture)]) == 0
    assert "tokens/s" in capsys.readouterr().out
    points = json.loads(out.read_text())["points"]
    assert {(p["rows"], p["context"]) for p in points} == {(1, 16), (2, 16), (1, 32), (2, 32)}
    assert picture.read_text().startswith("<?xml")


def test_a_work_as_a_file(tmp_path, capsys):
    file = tmp_path / "w.jsonl"
    assert main(["work", "W2", str(file), "--vocab-size", "500", "--requests", "4"]) == 0
    assert "4 requests, 2,112 tokens in, 128 out" in capsys.readouterr().out
    assert work.read(file, 500) == work.make("W2", 500, requests=4)


@pytest.mark.parametrize(
    "args, status, message",
    [
        (["throughput", "--work", "W2"], 1, "W2 has requests of 560 tokens; the model takes 512"),
        (["throughput", "--work", "W3"], 1, "a rate is needed"),
        (["throughput", "--peer", "other"], 1, "A peer must be one of llamacpp, openvino, transformers, vllm"),
        (["throughput", "--peer", "hibachi"], 1, "A peer must be one of"),
        (["throughput", "--numerics", "amx-1"], 1, "got 'amx-1'"),
        (["throughput", "--no-hibachi"], 1, "There is no engine to measure"),
        (["throughput", "--peer-model", "vllm=x"], 1, "There is no --peer vllm"),
        (["throughput", "--peer", "vllm", "--peer-model", "vllm"], 1, "must be ENGINE=VALUE"),
        (["throughput", "--repeat", "0"], 2, "must be at least 1"),
        (["throughput", "--plot", "x.pdf"], 1, ".png or .svg"),
        (["latency", "--rates", "0"], 2, "rates must be above 0"),
        (["compare", "no-such-file.json"], 1, "no-such-file.json"),
        (["growth", "--contexts", "4000"], 1, "no room for a context of 4000"),
        (["growth", "--rounds", "0"], 2, "must be at least 1"),
        (["growth", "--kernels", "nowhere.json"], 1, "There is no file nowhere.json to take kernels from"),
        (["work", "W1", "x", "--vocab-size", "2"], 1, "more than 3 tokens"),
        (["model", "x", "--shape", "1t"], 2, "invalid choice"),
        ([], 2, "WHAT"),
    ],
)
def test_what_is_refused(args, status, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    try:
        got = main([*args, *(["--no-bound"] if args and args[0] in ("throughput", "latency") else [])])
    except SystemExit as e:
        got = e.code
    assert got == status and message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words, said",
    [
        (["bench", "throughput", "--model", "m135"], "`python -m benchmarks.bench throughput`"),
        (["bench", "work", "W1", "--help"], "`python -m benchmarks.bench work`"),
        (["sim", "--synthetic", "5", "--plot", "a.png"], "`python -m benchmarks.bench sim`"),
        (["bench", "serve", "--url", "http://127.0.0.1:9", "--plot", "a.png"], "`python -m benchmarks.bench picture"),
    ],
)
def test_what_is_in_a_checkout_only(words, said, capsys):
    assert hibachi(words) == 1
    told = capsys.readouterr()
    assert said in told.err and not told.out


def test_a_file_of_kernels_that_is_not_there(capsys):
    assert hibachi(["bench", "fit", "--kernels", "nowhere.json"]) == 1
    assert "There is no file nowhere.json to take kernels from" in capsys.readouterr().err
