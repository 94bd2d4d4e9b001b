"""The MLX backend in an environment of its own, as `make` installs no MLX: the conformance suite, the tests of
tests/tensor/test_mlx.py, and every architecture beside NumPy. On Linux with MLX's build for the CPU."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hibachi import NumpyBackend

from ..model.test_agreement import CASES, NEW, PROMPTS, make
from ..model.test_agreement import run as greedy
from .venvs import ROOT, environment, run

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("mlx")]  # what is installed once, serves all

# For each folder: greedy tokens, and the log-probabilities of all before each of them.
SAY = """
import json, sys
from hibachi import AutoregressiveBatchInference, SamplingParams, load_backend, load_model
asked = json.load(open(sys.argv[1]))
params = SamplingParams(temperature=0, max_tokens=asked["new"], ignore_eos=True, logprobs=97)
said, backend = {}, load_backend("mlx")
for name, folder in asked["folders"].items():
    options = dict(max_num_seqs=3, max_num_batched_tokens=12, max_model_len=128, block_size=4, backend=backend)
    with AutoregressiveBatchInference(load_model(folder, backend), **options) as engine:
        streams = [engine.run(prompt, params) for prompt in asked["prompts"]]
        tokens = [list(map(int, stream)) for stream in streams]
        said[name] = tokens, [[[step[i] for i in range(97)] for step in s.logprobs] for s in streams]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of programs of an environment with MLX, and core and backend built from a copy of the checkout."""
    home = tmp_path_factory.mktemp("mlx")
    try:
        found = environment(home, "mlx[cpu]")
    except AssertionError as e:
        pytest.skip(f"MLX cannot be installed here: {str(e).strip().splitlines()[-1]}")
    skip = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "dist")
    copy = shutil.copytree(ROOT, home / "checkout", ignore=skip)
    run(found / "python", "-m", "pip", "install", "--quiet", f"{copy}[mlx,text,test]", cwd=home)
    return found


def test_it_keeps_every_promise(programs, tmp_path):
    said = run(programs / "hibachi", "conformance", "--backend", "mlx", cwd=tmp_path)
    print(said)
    assert " passed" in said and " failed" not in said


def test_its_own_tests_pass(programs):
    file = "tests/tensor/test_mlx.py"
    said = run(programs / "python", "-m", "pytest", "-q", file, cwd=programs.parents[1] / "checkout")
    assert " passed" in said and " skipped" not in said


def test_every_architecture_gives_the_tokens_that_numpy_gives(programs, tmp_path):
    folders = {name: str(tmp_path / str(i)) for i, name in enumerate(CASES)}
    for name, folder in folders.items():
        make(name, folder)
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps({"folders": folders, "new": NEW, "prompts": [p.tolist() for p in PROMPTS]}))
    said = json.loads(run(programs / "python", "-c", SAY, asked, cwd=tmp_path).splitlines()[-1])
    for name, folder in folders.items():
        tokens, logprobs = greedy(Path(folder), NumpyBackend())
        assert said[name][0] == [list(map(int, row)) for row in tokens], name
        for ours, theirs in zip(said[name][1], logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0, err_msg=name)
