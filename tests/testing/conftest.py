import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def conformance(tmp_path):
    """Runs the command in a folder of its own; returns exit status and all that it printed."""

    def run(*arguments, program=("-m", "hibachi.testing.run"), stderr=subprocess.STDOUT):
        done = subprocess.run(
            [sys.executable, *program, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        return done.returncode, done.stdout

    return run


@pytest.fixture
def sick(conformance, tmp_path):
    """The same on backends of `sick`, by the names of their classes."""
    (tmp_path / "sick.py").write_text(Path(__file__).with_name("sick.py").read_text())

    def run(*names, arguments=(), **options):
        return conformance(*(f"--backend=sick:{name}" for name in names), *arguments, **options)

    return run
