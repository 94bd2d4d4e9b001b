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


MODEL = '''
import logging, re, time
import numpy as np

log = logging.getLogger("hibachi.engine")

class Model:
    """Says the next byte; does what its prompts say."""

    vocab_size, max_model_len = 256, 512

    class tokenizer:
        encode = staticmethod(lambda text: list(text.encode()))
        decode = staticmethod(lambda ids: bytes(ids).decode("latin-1"))

    deterministic = False  # no calls but those of requests

    def logits(self, tokens, lengths):
        for row in tokens.tolist():
            text = bytes(row).decode("latin-1")
            if "raise" in text:
                raise RuntimeError("the weights of /secret/path are gone")
            if "sleep" in text:
                time.sleep(1000)
            if "hog" in text:
                re.match(r"(a+)+$", "a" * 64 + "b")
            if "exit" in text:
                import os
                os._exit(3)
        return np.eye(256, dtype=np.float32)[(tokens[:, -1] + 1) % 256] * 10
'''


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    return f"{file}:Model"
