"""`benchmarks/gpu.py` runs from end to end on the CPU, and says what is missing where it cannot."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def script(*arguments, **env):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | env)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    return importlib.import_module("gpu")


def test_every_stage_runs_dry_and_no_claim_is_reached(tmp_path, gpu):
    out = tmp_path / "gpu.json"
    done = script("--dry", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert set(results) == {*gpu.STAGES, "verdicts"}
    assert set(results["verdicts"].values()) == {gpu.NOT_REACHED}
    text = results["text"]["float32"]
    assert text["equal"] == text["texts"] and text["largest_difference"] < 1e-3
    assert all(
        r[way]["tokens_per_s"] > 0 for r in results["decode_8b"].values() for way in ("eager", "graphs", "in turn")
    )
    assert not any(one["differ"] for one in results["company"]["of"] if one["what"] == "again")
    assert results["conformance_torch"]["paged"]["kept"] and not results["conformance_torch"]["paged"]["broken"]
    assert results["mixture"]["equal"] and results["memory"] == {"short": True, "long": "answered", "afterwards": True}


def test_stages_that_the_file_has_are_not_run_again_and_verdicts_follow_from_it(tmp_path, gpu, monkeypatch, capsys):
    said = ["attention: varlen, where it can", "CUDA graphs: for decode steps"]
    texts = {"texts": 4, "equal": 4, "largest_difference": 1e-6, "remarks": said}
    rate, less = {"tokens_per_s": 1.0}, {"tokens_per_s": 0.9}
    had = {
        "text": {"float32": texts, "bfloat16": texts | {"equal": 3}},
        "waits": {"failed": "RuntimeError: called a synchronizing CUDA operation"},
        "company": {"of": [{"differ": 0.0}], "remarks": said},
        "decode_135m": {"1": {"eager": rate, "graphs": rate, "in turn": less}},
        "mixture": {"equal": True, "remarks": [said[0], "CUDA graphs: for decode steps, but not all (it waits)"]},
        "memory": {"short": True, "long": {"failed": "out of memory"}, "afterwards": True},
        "conformance_torch": {"paged": {"kept": 60, "broken": []}, "others": {"stopped_after_s": 20}},
        "conformance_jax": {"skipped": "JAX sees no device"},
    }
    found = gpu.verdicts(had, dry=False)
    assert [found[claim.text] for claim in gpu.CLAIMS] == [
        *("shown", "shown", "not reached", "shown", "refuted", "shown", "shown"),
        *("refuted", "refuted", "shown", "not reached", "shown"),
    ]
    out, ran = tmp_path / "gpu.json", []
    out.write_text(json.dumps(had))
    for name in gpu.STAGES:
        monkeypatch.setitem(gpu.STAGES, name, lambda run, name=name: ran.append(name) or had.get(name, {}))
    monkeypatch.setattr(gpu, "device", lambda asked: torch.device("cpu"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(out)])
    assert gpu.main() == 0
    assert ran == ["environment", "waits", "bandwidth", "decode_8b", "beside_transformers"]  # what failed, once more
    assert "| no decode step waits for the device before its tokens | refuted |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, env, said",
    [
        ((), {}, "built without CUDA" if torch.version.cuda is None else "There is no CUDA device"),
        ((), {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES is '', which hides every device"),
        (("--device", "cpu"), {}, "must be a CUDA device, as cuda or cuda:1; got cpu"),
        (("--stages", "txt"), {}, "invalid choice: 'txt'"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_what_is_missing_is_said_in_a_sentence(arguments, env, said):
    done = script(*arguments, **env)
    assert done.returncode and said in done.stderr and "Traceback" not in done.stderr


def test_the_page_has_a_line_for_each_claim(gpu):
    page = (ROOT / "docs" / "accelerators.md").read_text(encoding="utf-8")
    assert [c.text for c in gpu.CLAIMS if f"| {c.text} |" not in page] == []
