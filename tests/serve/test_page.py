"""What docs/serving.md tells a reader to send is answered."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from .conftest import site

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
CURL = re.findall(r"^curl (?:.*\\\n)*.*$", PAGE, re.MULTILINE)
(TEMPLATE,) = re.findall(r"^hibachi serve --chat-template '(.*)'$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def here(texts):
    with site(texts, chat_template=TEMPLATE) as found:
        yield found


def test_the_commands_are_answered(here):
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    assert len(CURL) >= 5
    for command in CURL:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        words = [word.replace("127.0.0.1:8000", f"127.0.0.1:{here.port}") for word in words]
        done = subprocess.run([*words, "-sS", "--fail-with-body"], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        if "-N" in words:
            assert done.stdout.count("data: {") >= 2 and done.stdout.endswith("data: [DONE]\n\n")
        else:
            assert json.loads(done.stdout)


def test_the_fields_that_are_refused_are(here):
    """By their names, as the page says; and those that change nothing change nothing."""
    (refused,) = re.findall(r"<!-- refused fields, .*?-->\n(.*?)<!--", PAGE, re.DOTALL)
    (ignored,) = re.findall(r"<!-- ignored fields, .*?-->\n(.*?)<!--", PAGE, re.DOTALL)
    routes = {
        "/v1/completions": {"prompt": "She was"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "She was"}]},
    }
    for route, body in routes.items():
        body |= {"temperature": 0, "max_tokens": 3}
        plain = here.post(route, body).json()["choices"]
        for name in re.findall(r"`(\w+)`", refused):
            answer = here.post(route, {**body, name: "x"})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name, (route, name)
        for name in re.findall(r"`(\w+)`", ignored):
            assert here.post(route, {**body, name: "x"}).json()["choices"] == plain
