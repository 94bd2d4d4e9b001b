"""The server's application by itself, as another ASGI server runs it."""

import asyncio
import pickle

import httpx
import pytest

from hibachi.errors import ConfigError
from hibachi.server import asgi

TINY = {"model": "tiny", "backend": "numpy", "max_num_seqs": 4}
LONG = {"prompt": "She was", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


class Life:
    """What a server says to an application by the protocol `lifespan`, and hears of it."""

    def __init__(self, app):
        self.said, self.heard = asyncio.Queue(), asyncio.Queue()
        self.task = asyncio.ensure_future(app({"type": "lifespan"}, self.said.get, self.heard.put))

    async def tell(self, what):
        await self.said.put({"type": f"lifespan.{what}"})
        return await asyncio.wait_for(self.heard.get(), 60)


@pytest.mark.parametrize("engine", ["own", "child"])
def test_it_opens_the_model_answers_on_all_routes_and_ends_when_requests_have_ended(engine):
    app = pickle.loads(pickle.dumps(asgi(TINY | {"engine": engine, "drain_timeout": 30})))  # as frameworks carry it

    async def live():
        life = Life(app)
        assert (await life.tell("startup"))["type"] == "lifespan.startup.complete"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://any.example") as client:
            assert (await client.get("/ready")).json()["status"] == "ok"
            assert (await client.get("/nothing")).json()["error"]["code"] == "not_found"
            assert "hibachi_requests_running" in (await client.get("/metrics")).text
            answer = asyncio.ensure_future(client.post("/v1/completions", json=LONG, timeout=60))
            while not app.open_requests():
                await asyncio.sleep(0.001)
            ending = asyncio.ensure_future(life.tell("shutdown"))
            while not app.served.draining:
                await asyncio.sleep(0.001)
            assert (await client.post("/v1/completions", json=LONG)).status_code == 503
            assert not ending.done()
            assert (await answer).json()["usage"]["completion_tokens"] == 60
            assert (await ending)["type"] == "lifespan.shutdown.complete"
        assert app.served.what.health().state == "closed"
        await life.task

    asyncio.run(live())


def test_what_cannot_be_is_said_before_the_model_is_loaded_or_when_it_is():
    for wrong, said in (
        ({"max_seqs": 4}, "There is no setting 'max_seqs'"),
        ({"port": 80}, "port is for `hibachi serve`"),
        ({"max_num_seqs": 0}, "--max-num-seqs: expected"),
        ({"root_path": "llm"}, "--root-path: expected"),
    ):
        with pytest.raises(ConfigError, match=said):
            asgi(wrong)

    async def live():
        return await Life(asgi({"model": "/no/such/folder"})).tell("startup")

    failed = asyncio.run(live())
    assert failed["type"] == "lifespan.startup.failed" and "/no/such/folder" in failed["message"]
