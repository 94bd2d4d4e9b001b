"""A server to send requests to, as a process, and a folder for an environment."""

import importlib.util
import re
import shutil
import subprocess
import sys
import time

import pytest

from .wheels import Builder

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    """Of a server."""
    for name in ("starlette", "uvicorn", "msgspec", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    command = [sys.executable, "-m", "hibachi", "serve", "tiny", "--chat-template", TEMPLATE, "--port", "0"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:  # a pipe that nobody reads would fill up
        server = subprocess.Popen([*command, "--log-level", "warning"], stderr=file)
    try:
        while not (listening := re.search(r" on (http://[\d.]+:\d+) ", log.read_text())):
            assert server.poll() is None, log.read_text()
            time.sleep(0.05)
        yield listening[1]
    finally:
        server.terminate()
        status = server.wait(60)
    assert status == 0 and "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture(scope="session")
def builder(tmp_path_factory):
    """Of wheels. Whoever asks for it is in the xdist group "wheels"."""
    return Builder(tmp_path_factory.mktemp("wheels"))


@pytest.fixture
def home(tmp_path):
    yield tmp_path
    shutil.rmtree(tmp_path)
