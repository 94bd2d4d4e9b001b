"""How busy a server is, and a cache that forgets when an operator says so."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai.answers import Forgotten
from hibachi.server.operating import reset_prefix_cache
from hibachi.server.web.tenants import Tenant, Tenants

from .conftest import site

TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune "


def cached(here, salt, **more):
    body = {"prompt": TEXT, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
    answer = here.post("/v1/completions", body, **more).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_reset_cache_has_nothing(server):
    """V-14: the next request finds nothing. Also while others run: they go on, where vLLM refuses."""
    assert cached(server, "reset") == 0 and cached(server, "reset") > 0
    answer = server.client.post("/reset_prefix_cache")
    assert answer.status_code == 200 and answer.json() == {"success": True}
    assert cached(server, "reset") == 0


def test_who_runs_meanwhile_does_not_notice(server):
    body = {"prompt": TEXT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    expected = server.post("/v1/completions", body).json()["choices"]
    found = []
    running = threading.Thread(target=lambda: found.append(server.post("/v1/completions", body).json()["choices"]))
    running.start()
    for _ in range(5):
        assert server.client.post("/reset_prefix_cache").status_code == 200
    running.join()
    assert found == [expected]


def test_only_an_admin_s_key_resets_it(texts):
    tenants = Tenants((("a", "ops"), ("b", "other")), {"ops": Tenant(admin=True)})
    with site(texts, tenants=tenants) as here:
        assert here.client.post("/reset_prefix_cache").status_code == 401
        mine = {"Authorization": "Bearer b"}
        assert cached(here, "keys", headers=mine) == 0 and cached(here, "keys", headers=mine) > 0
        refused = here.client.post("/reset_prefix_cache", headers=mine)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_only"
        assert cached(here, "keys", headers=mine) > 0
        assert here.client.post("/reset_prefix_cache", headers={"Authorization": "Bearer a"}).status_code == 200
        assert cached(here, "keys", headers=mine) == 0


@pytest.mark.parametrize(
    "client, may",
    [
        (("127.0.0.1", 5), True),
        (("127.8.9.1", 5), True),
        (("::1", 5), True),
        (("::ffff:127.0.0.1", 5), True),
        (("10.0.0.1", 5), False),
        (("::ffff:10.0.0.1", 5), False),
        (("192.168.1.7", 5), False),
        (("localhost.evil", 5), False),
        (("", 0), False),
        (None, False),
    ],
)
def test_without_keys_only_this_machine_resets_it(client, may):
    done = []

    async def ask(what):
        done.append(what())

    async def answered(answer):
        done.append(answer)

    served = SimpleNamespace(
        tenants=Tenants(),
        check_open=lambda: None,
        ask=ask,
        what=SimpleNamespace(engine=SimpleNamespace(reset_cache=int)),
    )
    x = SimpleNamespace(client=client, headers={}, scope={}, json=answered)
    if may:
        asyncio.run(reset_prefix_cache(served, x))
        assert done == [0, Forgotten(True)]
    else:
        with pytest.raises(Refused) as caught:
            asyncio.run(reset_prefix_cache(served, x))
        assert caught.value.status == 403 and not done


def test_a_page_of_a_browser_may_not(server):
    """It could ask for it of whoever looks at it."""
    assert server.client.post("/reset_prefix_cache", headers={"Origin": "http://x.example"}).status_code == 403
    assert server.client.get("/reset_prefix_cache").status_code == 405


def test_what_it_does_not_take_is_refused(server):
    answer = server.client.post("/reset_prefix_cache?reset_running_requests=true")
    assert answer.status_code == 400 and "reset_running_requests" in answer.json()["error"]["message"]


def test_how_busy_it_is(gated):
    gate, here = gated
    assert here.client.get("/load").json() == {"server_load": 0}
    ends = []
    body = {"prompt": "a", "max_tokens": 3}
    asking = threading.Thread(target=lambda: ends.append(here.post("/v1/completions", body).status_code))
    asking.start()
    while here.client.get("/load").json() != {"server_load": 1}:
        pass
    gate.open()
    asking.join()
    assert ends == [200]
    while here.client.get("/load").json() != {"server_load": 0}:  # its answer comes before its end
        pass


def test_the_load_takes_a_key(texts):
    with site(texts, tenants=Tenants((("a", "ops"),))) as here:
        assert here.client.get("/load").status_code == 401
        assert here.client.get("/load", headers={"Authorization": "Bearer a"}).json() == {"server_load": 0}
