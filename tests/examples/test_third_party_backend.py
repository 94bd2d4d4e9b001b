"""A backend in a distribution of its own: installed, found by its entry point, and judged like ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_backend"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Runs Python where the example is installed; nothing is installed where the tests run."""
    target = tmp_path_factory.mktemp("site")
    # Offline: what it needs is here already.
    offline = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "--target", target, EXAMPLE], check=True)
    path = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(*arguments):
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=target, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_it_is_found_by_its_entry_point(python):
    code = "import hibachi; print('array_api_strict' in hibachi.available(), hibachi.load('array_api_strict'))"
    assert python("-c", code).startswith("True StrictBackend(")


def test_it_is_found_by_its_arrays(python):
    code = "import hibachi, array_api_strict as xp; print(hibachi.backend_for(xp.ones(3)))"
    assert python("-c", code).startswith("StrictBackend(")


def test_it_keeps_every_promise(python):
    said = python("-m", "hibachi.testing.run", "--backend", "array_api_strict").splitlines()
    rows = [line.rsplit(maxsplit=1) for line in said if line.count("/") == 1]
    assert {"nine operations", "continuous batching", "paged and recurrent cache"} <= {group for group, _ in rows}
    for group, count in rows:
        kept, promises = count.split("/")
        assert kept == promises, group
