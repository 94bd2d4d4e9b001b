"""A server attacked in this process, or as a process of its own."""

from __future__ import annotations

import pytest

from ...serve.test_run import Process

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def start():
    """start(*args): a server, not ready yet, on a port that is free."""
    running = []

    def make(*args):
        running.append(Process("--port", "0", *args))
        return running[-1]

    yield make
    for server in running:
        server.clear()
