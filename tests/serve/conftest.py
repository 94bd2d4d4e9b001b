"""A server in this process, on a port of its own; its engine here and in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

for name in ("starlette", "uvicorn", "msgspec", "prometheus_client", "httpx"):
    pytest.importorskip(name)

import httpx  # noqa: E402
import uvicorn  # noqa: E402

from hibachi.engine.custom import open_texts  # noqa: E402
from hibachi.engine.remote import RemoteLLM  # noqa: E402
from hibachi.engine.texts import Texts  # noqa: E402
from hibachi.serve.app import application  # noqa: E402
from hibachi.serve.state import Served  # noqa: E402

ENGINES = {"own": open_texts, "child": RemoteLLM}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
    served = Served(texts, settings.pop("names", ["tiny"]), "tiny", settings.pop("max_len", 512), **settings)
    config = uvicorn.Config(application(served), host="127.0.0.1", port=0, log_level="warning", lifespan="off")
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
    with ENGINES[request.param]("tiny", max_batch_size=16, max_waiting=256, pause_after=64) as found:
        yield found


@pytest.fixture(scope="session")
def server(texts: Texts) -> Iterator[Site]:
    with site(texts, chat_template=CHATML) as here:
        yield here


@pytest.fixture
def tiny_copy(tmp_path: Path) -> Path:
    """A folder with the tiny model, to change."""
    import shutil

    import hibachi

    to = tmp_path / "tiny"
    shutil.copytree(Path(hibachi.__file__).parent / "data" / "tiny", to)
    return to
