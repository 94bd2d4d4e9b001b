"""Nowhere to write: logs, and what a command leaves behind. What can go on goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from benchmarks.bench import __main__ as bench
from hibachi.cli import main

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no /dev/full"),
    pytest.mark.usefixtures("kernels_of_the_user"),
]

SERVE = """
import logging, sys
if sys.argv[1]:
    logging.basicConfig(level=logging.DEBUG)
from hibachi import LLM, SamplingParams
with LLM("tiny", record="/dev/full", autotune="off") as llm:  # which is logged as an error
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    counts = [len(llm.generate("Once", params)[0].token_ids) for _ in range(2)]
open(sys.argv[2], "w").write(str(counts))
"""


@pytest.mark.parametrize("logging", ["", "all"])
@pytest.mark.parametrize("streams", ["full", "closed"])
def test_logs_that_cannot_be_written_end_nothing(tmp_path, streams, logging):
    script = f"exec {sys.executable} -c '{SERVE}' '{logging}' {tmp_path / 'done'} "
    script += "2>/dev/full" if streams == "full" else "0<&- 1>&- 2>&-"
    done = subprocess.run(["sh", "-c", script], cwd=ROOT, timeout=60)
    assert done.returncode == 0 and (tmp_path / "done").read_text() == "[20, 20]"


def test_a_completion_that_cannot_be_written_is_one_line(tmp_path):
    command = [
        sys.executable,
        "-m",
        "hibachi",
        "generate",
        "--prompt",
        "Once",
        "--max-tokens",
        "5",
        "--autotune",
        "off",
    ]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "hibachi: [Errno 28] No space left on device\n")


def test_figures_of_a_simulation_are_shown_though_their_file_is_full(capsys):
    assert main(["sim", "--synthetic", "20", "--json", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert "TTFT p99" in out and err == "hibachi: [Errno 28] No space left on device\n"


def test_results_of_a_measurement_are_shown_though_their_file_is_full(monkeypatch, capsys):
    """They were lost with it."""
    runs = [{"engine": "hibachi", "work": "W1", "failed": "it is only played here"}]
    monkeypatch.setattr(bench.Session, "run", lambda *_: runs)
    monkeypatch.setattr(bench, "_show", lambda documents, _: print("shown", documents[0]["runs"]))
    command = ["throughput", "--work", "W1", "--no-bound", "--out", "/dev/full"]
    assert bench.main([*command, "--max-num-seqs", "2", "--requests", "2"]) == 1
    out, err = capsys.readouterr()
    assert "shown" in out and err == "hibachi: the results are not in /dev/full: [Errno 28] No space left on device\n"


def test_a_place_that_is_none_is_told_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.Session, "run", lambda *_: pytest.fail("it ran"))
    for place in (tmp_path, tmp_path / "nowhere" / "file", os.devnull + "/x"):
        assert bench.main(["throughput", "--work", "W1", "--out", str(place)]) == 1
        assert capsys.readouterr().err.count("\n") == 1
