"""`hibachi bench fit`: figures that are put in come out, and the real thing runs on the shipped model."""

import json

import numpy as np
import pytest

from hibachi import LLM
from hibachi.cli import main
from hibachi.engine.simulator.steptime import StepTime, read_step_time
from hibachi.errors import ConfigError
from hibachi.testing.bench.fit import Samples, fit, measure

TRUE = StepTime(step=3e-3, token=50e-6, row=20e-6, position=40e-9, pair=2e-9)


def steps(n, rng):
    """What n steps compute, as an engine's do: [n, 5]."""
    rows = rng.integers(1, 64, n)
    start = rng.integers(0, 4000, n)
    q = np.where(rng.random(n) < 0.7, 1, rng.integers(2, 512, n))
    return np.stack([np.ones(n), rows * q, rows, rows * (start + q), rows * (q * start + q * (q + 1) / 2)], axis=1)


def figures(time):
    return np.array([time.step, time.token, time.row, time.position, time.pair])


def test_figures_that_were_put_in_come_out():
    what = steps(400, np.random.default_rng(0))
    found = fit(Samples(what, what @ figures(TRUE)))
    assert figures(found.time) == pytest.approx(figures(TRUE), rel=1e-4)
    assert found.median_error < 1e-6 and found.steps == 400


def test_noise_and_interruptions_do_little():
    rng = np.random.default_rng(1)
    what = steps(1500, rng)
    seconds = what @ figures(TRUE) * rng.normal(1, 0.03, 1500)
    seconds[rng.random(1500) < 0.1] *= 5  # something else had the machine
    found = fit(Samples(what, seconds))
    assert found.time.step == pytest.approx(TRUE.step, rel=0.1)
    assert found.time.token == pytest.approx(TRUE.token, rel=0.1)
    assert 0.01 < found.median_error < 0.05 and found.p90_error > 0.05


def test_no_figure_is_negative():
    rng = np.random.default_rng(2)
    what = steps(300, rng)
    seconds = 1e-3 + 1e-5 * what[:, 1] - 1e-9 * what[:, 3]  # as if reading gave time back
    found = fit(Samples(what, np.maximum(seconds, 1e-4)))
    assert figures(found.time).min() == 0 and found.time.token > 0


def test_too_few_steps():
    with pytest.raises(ConfigError, match="at least 5 steps; got 3"):
        fit(Samples(np.ones((3, 5)), np.ones(3)))


def test_steps_are_read_off_the_engine():
    with LLM("tiny", max_num_seqs=4) as llm:
        samples = measure(llm.engine, 2048, rows=[1, 3], contexts=[20], new_tokens=4, rounds=1)
    assert (samples.seconds > 0).all() and (samples.what[:, 0] == 1).all()
    assert samples.what[0].tolist() == [1, 20, 1, 20, 210]  # a prompt of 20 tokens
    assert samples.what[1].tolist() == [1, 1, 1, 21, 21]
    assert samples.what[:, 2].max() >= 3
    with LLM("tiny") as llm, pytest.raises(ConfigError, match="Nothing to measure"):
        measure(llm.engine, 2048, rows=[1], contexts=[100_000])


def test_the_command_writes_what_the_simulator_reads(tmp_path, capsys):
    file = tmp_path / "time.json"
    small = ["--rows", "1", "2", "--contexts", "16", "64", "--rounds", "1"]
    assert main(["bench", "fit", "--backend", "numpy", *small, "--out", str(file)]) == 0
    out = capsys.readouterr().out
    assert "of each step" in out and "relative error: median" in out
    data = json.loads(file.read_text())
    assert data["model"] == "tiny" and data["machine"]["cores"] and data["rows"] == [1, 2]
    assert read_step_time(file).step == data["seconds"]["step"]
    assert main(["sim", "--synthetic", "50", "--step-time", str(file)]) == 0


@pytest.mark.parametrize(
    "args, status, message",
    [
        (["fit", "--rows", "0"], 2, "must be at least 1"),
        (["weigh"], 2, "invalid choice"),
        (["fit", "--model", "no-such-folder"], 1, "no-such-folder"),
        (["fit", "--model", "hibachi.testing.toys:Nothing"], 1, "has no 'Nothing'"),
    ],
)
def test_what_is_refused(args, status, message, capsys):
    try:
        got = main(["bench", *args])
    except SystemExit as e:
        got = e.code
    assert got == status and message in capsys.readouterr().err
