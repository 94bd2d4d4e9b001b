"""What the types say to those who use them: mypy, and in `make test-all` basedpyright."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hibachi

from .install.venvs import environment

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "typing"
KNOWN = 0.95  # of all public names


def marked(name):
    """Numbers of the lines that say so."""
    lines = (FOLDER / name).read_text().splitlines()
    return [n for n, line in enumerate(lines, 1) if line.endswith("# refused")]


def by_mypy(name):
    """Lines with errors. With the project's settings, and what `make check` has found out about the project."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty", f"tests/typing/{name}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    found = re.findall(rf"^tests/typing/{name}:(\d+): error: .*$", run.stdout, re.M)
    return sorted({int(n) for n in found}), run.stdout


def test_mypy_accepts_programs_that_are_right():
    found, said = by_mypy("accepted.py")
    assert not found and "error" not in said, said


def test_mypy_refuses_programs_that_are_not():
    found, said = by_mypy("refused.py")
    assert found == marked("refused.py"), said


def test_what_is_public_is_named_for_type_checkers_too():
    tree = ast.parse(Path(hibachi.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and "_TYPE_CHECKING" in ast.unparse(node.test))
    places = {each.names[0].asname: each.module for each in block.body}
    assert places == hibachi._PLACES


@pytest.fixture(scope="module")
def basedpyright(tmp_path_factory):
    """What it says, run where hibachi is installed as it is for the tests."""
    tool = environment(tmp_path_factory.mktemp("basedpyright"), "basedpyright") / "basedpyright"

    def run(*args):
        ours = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # it asks the first `python` there
        command = [tool, "--outputjson", *args]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PATH": ours})
        assert said.returncode in (0, 1), said.stdout + said.stderr
        return json.loads(said.stdout)

    return run


@pytest.mark.install
def test_the_types_of_public_names_are_known(basedpyright):
    said = basedpyright("--verifytypes", "hibachi", "--ignoreexternal")
    score = said["typeCompleteness"]["completenessScore"]
    print(f"basedpyright knows the types of {score:.1%} of the public names")
    assert score >= KNOWN


@pytest.mark.install
@pytest.mark.parametrize("name", ["accepted.py", "refused.py"])
def test_basedpyright_sees_the_same(basedpyright, name):
    found = basedpyright(str(FOLDER / name))["generalDiagnostics"]
    errors = {d["range"]["start"]["line"] + 1 for d in found if d["severity"] == "error"}
    assert sorted(errors) == marked(name), found
