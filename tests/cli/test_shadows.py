"""Files of the user's that are called as modules of Python's lie in the working directory, and do no harm."""

import http.client
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SHADOWS = "json", "queue", "token", "logging", "selectors", "signal", "pickle"
LETTERS = '''
import numpy as np
from alphabet import SIZE  # what lies beside it

class Tokenizer:
    def encode(self, text):
        return [ord(c) - 97 for c in text]
    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)

class Letters:
    """Says the next letter of the alphabet."""
    vocab_size, max_model_len, tokenizer = SIZE, 64, Tokenizer()
    def logits(self, tokens, lengths):
        return np.eye(26, dtype=np.float32)[(tokens[:, -1] + 1) % 26] * 10
'''


@pytest.fixture
def folder(tmp_path):
    """Here everybody starts; elsewhere/ is on PYTHONPATH."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text('raise SystemExit("shadowed")')
    (tmp_path / "elsewhere").mkdir()
    for place, name in ((tmp_path, "letters"), (tmp_path / "elsewhere", "afar")):
        (place / f"{name}.py").write_text(LETTERS)
        (place / "alphabet.py").write_text("SIZE = 26\n")
    return tmp_path


@pytest.fixture
def start(folder):
    def start(*words, program=("-m", "hibachi")):
        here = Path(__file__).parents[2]
        path = os.pathsep.join([str(here), str(folder / "elsewhere"), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            [sys.executable, *program, *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


NAMES = "letters.py:Letters", "letters:Letters", "afar:Letters"


@pytest.mark.parametrize(
    "program",
    [
        ("-m", "hibachi"),
        *(pytest.param(p, marks=pytest.mark.slow) for p in (("-mhibachi",), ("-m", "hibachi.__main__"))),
    ],
    ids=str,
)
def test_a_command_starts(start, program):
    out, err = (process := start("doctor", program=program)).communicate()
    assert process.returncode == 0 and "shadowed" not in out + err, out + err


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_ones_own_generates(start, name):
    words = "generate", "--model", name, "--prompt", "0 1 2", "--max-tokens", "3", "--temperature", "0"
    out, err = (process := start(*words)).communicate()
    assert (process.returncode, out, err) == (0, "3 4 5 \n", "")


@pytest.mark.parametrize("engine", ["own", "child"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_a_model_of_ones_own_is_served(start, name, engine):
    for package in ("starlette", "uvicorn", "msgspec", "prometheus_client"):
        pytest.importorskip(package)
    process = start("serve", name, "--engine", engine, "--port", "0")
    try:
        log = []
        while not (found := re.search(r"on http://(.+):(\d+) ", log[-1] if log else "")):
            log.append(process.stderr.readline())
            assert log[-1], log
        connection = http.client.HTTPConnection(found[1], int(found[2]), timeout=30)
        body = json.dumps({"prompt": "abc", "max_tokens": 3, "temperature": 0})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        assert answer["choices"][0]["text"] == "def", answer
        connection.close()
    finally:
        process.terminate()
        process.communicate()


def test_the_engine_of_a_script_finds_the_modules_of_the_script(folder, start):
    """Python puts the script's folder first on the path, and the engine's process has the path of the script."""
    (folder / "scripts").mkdir()
    (folder / "scripts" / "rules.py").write_text(
        "class Skips:\n    def __call__(self, tokens, logits):\n        logits[6] += 1000\n        return logits\n"
    )
    (folder / "scripts" / "run.py").write_text(
        "from hibachi import SamplingParams\nfrom hibachi.llm.remote.llm import RemoteLLM\nfrom rules import Skips\n"
        "if __name__ == '__main__':\n    with RemoteLLM('letters.py:Letters') as texts:\n"
        "        params = SamplingParams(temperature=0, max_tokens=2, logits_processors=[Skips()])\n"
        "        print(texts.generate('abc', params)[0].text)\n"
    )
    out, err = start(program=("scripts/run.py",)).communicate()
    assert (out, err) == ("gg\n", "")


def test_python_m_of_another_package_keeps_its_path(folder, start):
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").write_text("import sys, hibachi\n")
    (folder / "mine" / "__main__.py").write_text("import sys; print(sys.path[0])\n")
    for name in SHADOWS:
        (folder / f"{name}.py").unlink()
    out, err = start("hibachi", program=("-m", "mine")).communicate()
    assert (Path(out.strip()), err) == (folder, "")


def test_a_chat_template_is_rendered_in_a_process_of_its_own(start):
    pytest.importorskip("minijinja")
    script = "from hibachi import LLM; print(LLM('tiny').tokenizer.render_chat([], chat_template='{{ 6 * 7 }}'))"
    out, err = start(program=("-P", "-c", script)).communicate()
    assert (out, err) == ("42\n", "")
