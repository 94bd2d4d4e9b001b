"""Every program in examples/gallery/, in an environment of its own that is made as its docstring says: sixteen requests
at once have the tokens that the library gives them one by one, also where the class is served over HTTP.
"""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import numpy as np
import pytest

from ..install import venvs
from ..install.venvs import OFFLINE, ROOT, VERSIONS, run

GALLERY = ROOT / "examples" / "gallery"
HELPERS = {"side_by_side"}
OWN_CACHE = {
    "xtransformers_own": 8,
    "onnx_gpt": 8,
    "flax_gpt": 8,
    "bart": 16,
    "musicgen": 16,
    "csm": 18,
    "moshi": 16,
    "deepar": 20,
    "pocket_speech": 25,
    "chronos_t5": 15,
    "dia_speech": 20,
    "tiger_items": 15,
}  # lines that a class may have
LEVEL_2 = {"xtransformers_attend": 24, "musicgen_attend": 25, "equinox_gru": 10, "torch_lstm": 10, "g2p_gru": 32}
FROM_FILES = {"meds_events": 15}
LINES = OWN_CACHE | LEVEL_2 | FROM_FILES
MORE = {
    "xtransformers_attend": ("Attended",),
    "musicgen_attend": ("Attended",),
    "pocket_speech": ("Kept",),
    "meds_events": ("Continuous",),
}  # of the class that is served
DRAWN = {"deepar", "pocket_speech"}  # their tokens are real values
ALONE_AS_IN_COMPANY = LEVEL_2.keys() | FROM_FILES.keys() | {"deepar"}
SAID = re.compile(
    r"(\d+) of (\d+) equal; at once ([\d.]+) times as fast(?:, [\d.]+ times as in its own batch)?; "
    r"bits alone = in company: (yes|no)"
)


class Entry(NamedTuple):
    """What the docstring of a program says. ours: the checkout with extras; theirs: other packages; served: a class."""

    path: Path
    ours: str
    theirs: tuple[str, ...]
    served: str


def entry(name):
    path = GALLERY / f"{name}.py"
    told = ast.get_docstring(ast.parse(path.read_text()))
    ours, *theirs = shlex.split(re.search(r"pip install (.*)", told)[1])
    return Entry(path, ours, tuple(theirs), re.search(rf"hibachi serve examples/gallery/{name}\.py:(\w+)", told)[1])


def lines_of(path, name):
    """Of the body of a class: each statement on one line, without docstrings, comments and empty lines."""
    (found,) = (node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == name)
    for node in ast.walk(found):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return sum(bool(line.strip()) for line in ast.unparse(found).splitlines()) - 1


# ---- what is written -------------------------------------------------------------------------------------------------


def test_every_program_of_the_gallery_is_run_here():
    assert {path.stem for path in GALLERY.glob("*.py")} == LINES.keys() | HELPERS


@pytest.mark.parametrize("name", LINES)
def test_the_class_is_small_and_listed_with_its_lines(name):
    found = entry(name)
    lines = sum(lines_of(found.path, part) for part in [found.served, *MORE.get(name, ())])
    assert lines <= LINES[name]
    page = (ROOT / "examples" / "README.md").read_text()
    (row,) = (line for line in page.splitlines() if f"(gallery/{name}.py)" in line)
    assert f"| {lines} |" in row and f"{name}.py`" in row


def test_lines_are_counted_without_docstrings_comments_and_breaks(tmp_path):
    path = tmp_path / "one.py"
    text = [
        "class A:",
        '    """Doc."""',
        "",
        "    x = [",
        "        1,  # one",
        "    ]",
        "    def f(self):",
        "        return 1",
    ]
    path.write_text("\n".join(text))
    assert lines_of(path, "A") == 3


# ---- what happens ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    yield venvs.checkout(home := tmp_path_factory.mktemp("gallery") / "checkout")
    shutil.rmtree(home)


@pytest.fixture
def home(tmp_path):
    yield tmp_path
    shutil.rmtree(tmp_path)


def programs(home, checkout, found):
    """The folder of an environment's programs. Where pip cannot install what is not ours, the test is skipped."""
    run(sys.executable, "-m", "venv", home / "venv", cwd=home)
    python, limits = home / "venv" / "bin" / "python", {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    pip = python, "-m", "pip", "install", "--quiet"
    run(*pip, found.ours.replace(".", str(checkout), 1), cwd=home, **limits)
    try:
        if found.theirs:
            run(*pip, *found.theirs, cwd=home, **limits)
    except (AssertionError, subprocess.TimeoutExpired) as e:
        pytest.skip(f"pip cannot install {', '.join(found.theirs)}: {str(e)[-300:].strip()}")
    names = [re.split(r"[^\w-]", package)[0] for package in found.theirs]
    print(f"\n{run(python, '-c', VERSIONS, 'hibachi', *names, cwd=home).strip()}")
    return home / "venv" / "bin"


@contextmanager
def served(command, log):
    """The address of a server. log: a file that it writes."""
    with log.open("w") as file:  # a pipe that nobody reads would fill up
        server = subprocess.Popen(command, cwd=log.parent, stderr=file, env=os.environ | OFFLINE)
    try:
        while not (listening := re.search(r" on (http://[\d.]+:\d+) ", log.read_text())):
            assert server.poll() is None, log.read_text()
            time.sleep(0.05)
        yield listening[1]
    finally:
        server.terminate()
        status = server.wait(60)
    assert status == 0 and "Traceback" not in log.read_text(), log.read_text()


def streamed(url, asked, most):
    """The tokens that a server streams. asked: the rest of a body."""
    asked = {**asked, "max_tokens": most, "stream": True}
    headers = {"Content-Type": "application/json", "Accept": "application/x-ndjson"}
    with urlopen(Request(f"{url}/v1/generate", json.dumps(asked).encode(), headers), timeout=300) as answer:
        events = [json.loads(line) for line in answer if line.strip()]
    assert events[-1]["finish_reason"] in ("length", "stop"), events[-1]
    return [token for event in events for token in event.get("tokens", [])]


@pytest.mark.install
@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_sixteen_at_once_and_served_have_the_tokens_of_the_library(name, checkout, home):
    found = entry(name)
    bin = programs(home, checkout, found)
    said = run(bin / "python", found.path, "--size", "tiny", "--rounds", "1", "--show", cwd=home, OMP_NUM_THREADS="1")
    *others, line, shown = said.splitlines()
    assert all(SAID.fullmatch(guided)[1] == "16" for guided in re.findall("guided: (.*)", "\n".join(others)))
    equal, of, ratio, bits = SAID.fullmatch(line).groups()
    print(line)
    assert (equal, of) == ("16", "16") and float(ratio) > 0
    assert bits == "yes" or name not in ALONE_AS_IN_COMPANY
    asked = json.loads(shown)
    wanted = [each.pop("tokens") for each in asked]
    assert len(wanted) == 16 and all(wanted)
    command = [bin / "hibachi", "serve", f"{found.path}:{found.served}", "--host", "127.0.0.1", "--port", "0"]
    with served(command, home / "log") as url, ThreadPoolExecutor(16) as pool:
        most = max(map(len, wanted))
        got = list(pool.map(lambda asked: streamed(url, asked, most), asked))
    assert [*map(len, got)] == [*map(len, wanted)]
    assert np.allclose(np.concatenate(got), np.concatenate(wanted), 1e-4 * (name in DRAWN), 1e-5 * (name in DRAWN))
