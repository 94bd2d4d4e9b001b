"""A server in this process, on a port of its own; its engine here and in a process of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

for name in ("starlette", "uvicorn", "msgspec", "prometheus_client", "httpx"):
    pytest.importorskip(name)

import httpx  # noqa: E402
import uvicorn  # noqa: E402

from hibachi.llm.own import open_texts  # noqa: E402
from hibachi.llm.remote.llm import RemoteLLM  # noqa: E402
from hibachi.llm.texts import Texts  # noqa: E402
from hibachi.server.app import application, tells  # noqa: E402
from hibachi.server.metrics import metrics_for  # noqa: E402
from hibachi.server.served import Served  # noqa: E402
from hibachi.server.server import surrounded  # noqa: E402
from hibachi.server.settings import ServeSettings  # noqa: E402
from hibachi.server.web.cors import Cors, origins_of  # noqa: E402
from hibachi.server.web.deadlines import Arriving  # noqa: E402

from ..lib.described import description  # noqa: E402

ENGINES = {"own": open_texts, "child": RemoteLLM}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


SLOW = '''
import time
import numpy as np

class Slow:
    """Says the next byte, twenty times a second or less: what is asked of it is not done soon on any machine."""

    vocab_size, max_model_len = 256, 512

    class tokenizer:
        encode = staticmethod(lambda text: list(text.encode()))
        decode = staticmethod(lambda ids: bytes(ids).decode("latin-1"))

    deterministic = False  # no calls but those of requests

    def logits(self, tokens, lengths):
        time.sleep(0.05)
        return np.eye(256, dtype=np.float32)[(tokens[:, -1] + 1) % 256] * 10
'''


GATED = '''
import os
import numpy as np

class Gated:
    """Says the next byte, once for each byte that comes through a pipe."""

    vocab_size, max_model_len, pipe = 256, 512, None

    class tokenizer:
        encode = staticmethod(lambda text: list(text.encode()))
        decode = staticmethod(lambda ids: bytes(ids).decode("latin-1"))

    deterministic = False  # no calls but those of requests

    def logits(self, tokens, lengths):
        if self.pipe is None:
            self.pipe = os.open({pipe!r}, os.O_RDONLY)
        os.read(self.pipe, 1)  # nothing at its end: from then on without waiting
        return np.eye(256, dtype=np.float32)[(tokens[:, -1] + 1) % 256] * 10
'''


class Gate:
    """Lets the steps of a model through, one by one, wherever its engine is. model: what names it."""

    def __init__(self, folder: Path) -> None:
        pipe, file = folder / "pipe", folder / "gated.py"
        os.mkfifo(pipe)
        file.write_text(GATED.format(pipe=str(pipe)))
        self.model = f"{file}:Gated"
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # both ends, so that neither side waits for the other

    def let(self, steps: int = 1) -> None:
        os.write(self._pipe, b"." * steps)

    def open(self) -> None:
        """Let every step through from now on: as many as the pipe holds, more than a test takes."""
        with suppress(BlockingIOError):
            self.let(60_000)

    def close(self) -> None:
        os.close(self._pipe)


class Site:
    """A running server. client: sends JSON, and raises nothing for error statuses."""

    def __init__(self, served: Served, port: int) -> None:
        self.served, self.port, self.url = served, port, f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    @property
    def texts(self) -> Texts:
        return self.served.texts

    def post(self, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        answer = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 8, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def site(texts: Texts, **settings: Any) -> Iterator[Site]:
    """settings: of `hibachi serve`, and what is made of others."""
    template, tenants, hosts = (settings.pop(name, None) for name in ("chat_template", "tenants", "hosts"))
    served = Served(texts, ServeSettings(**settings), template, tenants)
    origins = origins_of(served.settings.allowed_origins, "--allowed-origins")
    root_path = served.settings.root_path or ""
    _, routes = metrics_for(served, served.settings.metric_names)
    app = surrounded(application(served, routes), tells(served), origins, hosts, root_path)
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="warning",
        lifespan="off",
        http=partial(
            Arriving,
            seconds=served.settings.arrival_timeout,
            tell=tells(served),
            dress=app.marked if isinstance(app, Cors) else None,
        ),
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.01)
    (listening,) = server.servers
    here = Site(served, listening.sockets[0].getsockname()[1])
    try:
        yield here
    finally:
        here.client.close()
        server.should_exit = server.force_exit = True
        thread.join()


@pytest.fixture(scope="session", params=ENGINES)
def texts(request: Any) -> Iterator[Texts]:
    with ENGINES[request.param]("tiny", max_num_seqs=16, max_num_queued_reqs=256, pause_after=64) as found:
        yield found


@pytest.fixture(scope="session")
def server(texts: Texts) -> Iterator[Site]:
    with site(texts, chat_template=CHATML) as here:
        yield here


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: Any) -> str:
    """The name of a model that takes its time."""
    file = tmp_path_factory.mktemp("slow") / "slow.py"
    file.write_text(SLOW)
    return f"{file}:Slow"


@pytest.fixture(params=ENGINES)
def gated(request: Any, tmp_path: Path) -> Iterator[tuple[Gate, Site]]:
    """A gate and the server of its model."""
    gate = Gate(tmp_path)
    with ENGINES[request.param](gate.model, max_num_seqs=2, max_model_len=64) as texts, site(texts) as here:
        yield gate, here
        gate.open()
    gate.close()


@pytest.fixture(scope="session")
def described():
    """described(name, data): checks that OpenAI's document of responses describes it by this name."""
    return description("openai-responses.json")
