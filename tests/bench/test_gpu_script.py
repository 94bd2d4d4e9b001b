"""`benchmarks/gpu.py` runs from end to end on the CPU, so that it does so where a GPU is lent for minutes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_the_script_measures_every_part(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=160)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    results = json.loads(out.read_text())
    for dtype, least in (("float32", 1.0), ("bfloat16", 0.0)):
        found = results["agreement"][dtype]
        assert found["same_tokens"] >= least and found["largest_difference"] < 0.1 * found["spread_of_logits"], dtype
    assert {(r["model"], r["rows"]) for r in results["decoding"]} == {(m, n) for m in ("135m", "8b") for n in (1, 3)}
    assert all(r[way]["tokens_per_s"] > 0 for r in results["decoding"] for way in ("eager", "graphs"))
    assert results["company"]["logits_that_differ_between_equal_steps"] == 0
    assert all("continuous" in r or "skipped" in r for r in results["transformers"])
