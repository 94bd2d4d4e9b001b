"""The tool that compares what users see before and after a change of the code."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest
from hibachi.cli import main
from hibachi.errors import InvalidRequest

def test_a_command():
    with pytest.raises(SystemExit):
        main(["--version"])

def test_an_error(tmp_path):
    InvalidRequest(f"expected a WORD in {tmp_path}")
"""


@pytest.mark.slow
def test_a_change_of_a_message_is_found_and_nothing_else(tmp_path):
    def replay(*words):
        return subprocess.run(
            [sys.executable, "tools/replay.py", *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=300
        )

    def recording(name, tests):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "test_two.py"
        file.write_text(tests)
        done = replay("record", tmp_path / f"{name}.gz", file, "-n", "0", "-p", "no:cacheprovider")
        assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
        return tmp_path / f"{name}.gz"

    before = recording("before", TESTS)
    after = recording("after", TESTS.replace("WORD", "number"))
    same = replay("compare", before, before, before)
    assert same.returncode == 0 and "0 tests differ of 2" in same.stdout, same.stdout + same.stderr
    found = replay("compare", before, before, after)
    assert found.returncode == 1 and "1 tests differ of 2" in found.stdout, found.stdout + found.stderr
    assert "test_an_error" in found.stdout and "+ 'InvalidRequest: expected a number in <path>'" in found.stdout
