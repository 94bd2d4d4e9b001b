"""Too much work, too little time, and who may come at all."""

from __future__ import annotations

import threading
import time

import pytest

from hibachi.server.web.tenants import Tenant, Tenants

from .conftest import ENGINES, site
from .test_streams import LONG, at_rest, send, until


@pytest.fixture(scope="module", params=ENGINES)
def small(request):
    """Two rows, and two that may wait; without kernels, so that a long answer takes a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIBACHI_VARIANT", "none")
        texts = ENGINES[request.param]("tiny", max_num_seqs=2, max_num_queued_reqs=2, scheduling_policy="fair")
    with texts, site(texts) as here:
        yield here


def test_a_full_queue_is_said_at_once(small):
    """And what is taken is served."""
    sockets = [send(small, {**LONG, "stream": True}) for _ in range(4)]
    until(lambda: small.texts.stats().running + small.texts.stats().waiting == 4)
    began = time.monotonic()
    answer = small.post("/v1/completions", {"prompt": "a"})
    assert time.monotonic() - began < 1.0
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "queue_full" and answer.json()["error"]["type"] == "rate_limit_error"
    many = small.post("/v1/completions", {"prompt": ["a", "b", "c"]})
    assert many.status_code == 429
    for sock in sockets:
        sock.close()
    until(lambda: at_rest(small))
    assert small.complete("Emma")["usage"]["completion_tokens"] == 8


def test_a_request_that_does_not_fit_in_leaves_nothing_behind(small):
    """Three prompts where two may come: none of them runs on."""
    sock = [send(small, {**LONG, "stream": True}) for _ in range(2)]
    until(lambda: small.texts.stats().running == 2)
    assert small.post("/v1/completions", {"prompt": ["a", "b", "c"]}).status_code == 429
    until(lambda: not small.texts.stats().waiting)
    for s in sock:
        s.close()
    until(lambda: at_rest(small))


def test_a_deadline_that_passes(small):
    answer = small.post("/v1/completions", {**LONG, "timeout": 0.02})
    assert answer.status_code == 408 and answer.json()["error"]["code"] == "deadline_exceeded"
    busy = [send(small, {**LONG, "stream": True}) for _ in range(2)]
    until(lambda: small.texts.stats().running == 2)
    answer = small.post("/v1/completions", {**LONG, "queue_timeout": 0.05})
    assert answer.status_code == 408
    for sock in busy:
        sock.close()
    until(lambda: at_rest(small))
    late = small.post("/v1/completions", {**LONG, "timeout": 0.1, "stream": True})
    assert late.status_code in (200, 408)
    assert "deadline_exceeded" in late.text


def test_priorities_go_first(small):
    busy = [send(small, {**LONG, "stream": True}) for _ in range(2)]
    until(lambda: small.texts.stats().running == 2)
    order = []

    def ask(priority):
        small.complete("Emma", priority=priority)
        order.append(priority)

    threads = []
    for priority in (5, -5):
        threads.append(threading.Thread(target=ask, args=(priority,)))
        threads[-1].start()
        until(lambda: small.texts.stats().waiting == len(threads))
    busy[0].close()
    for t in threads:
        t.join(20)
    busy[1].close()
    assert order == [-5, 5]
    until(lambda: at_rest(small))


# ---- keys ----------------------------------------------------------------------------------------------------------

KEYS = Tenants((("k-anne", "anne"), ("k-emma", "emma")), {"emma": Tenant(max_requests=1, priority=3)})


@pytest.fixture(scope="module")
def locked():
    with ENGINES["own"]("tiny", max_num_seqs=4, scheduling_policy="fair") as texts, site(texts, tenants=KEYS) as here:
        yield here


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_without_a_key_nobody_comes_in(locked):
    basic, nothing = {"Authorization": "Basic k-anne"}, {"Authorization": "Bearer"}
    for headers in ({}, bearer("k-ann"), basic, nothing, bearer("k-anne k-emma")):
        for path in ("/v1/completions", "/tokenize"):
            answer = locked.post(path, {"prompt": "a"}, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/debug/flight"):
            assert locked.client.get(path, headers=headers).status_code == 401
    assert locked.post("/tokenize", {"prompt": "a"}, headers=bearer("k-anne")).status_code == 200
    for more in ({}, basic):  # of a proxy in front
        assert locked.post("/tokenize", {"prompt": "a"}, headers=more | {"x-api-key": "k-anne"}).status_code == 200
    assert locked.post("/tokenize", {"prompt": "a"}, headers=basic | {"x-api-key": "k-ann"}).status_code == 401
    assert locked.client.get("/debug/flight", headers=bearer("k-anne")).json()["events"] is not None
    for path in ("/health", "/ready", "/version"):
        assert locked.client.get(path).status_code == 200


def test_a_tenant_has_its_limit(locked):
    import httpx

    with httpx.stream(
        "POST", f"{locked.url}/v1/completions", json={**LONG, "stream": True}, headers=bearer("k-emma")
    ) as response:
        lines = response.iter_lines()  # dropping it would close the connection
        next(lines)
        answer = locked.post("/v1/completions", {"prompt": "a"}, headers=bearer("k-emma"))
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "tenant_limit"
        assert locked.post("/v1/completions", {"prompt": "a"}, headers=bearer("k-anne")).status_code == 200
    until(lambda: not locked.served.tenants.running["emma"])
    assert locked.post("/v1/completions", {"prompt": "a"}, headers=bearer("k-emma")).status_code == 200


def test_requests_bear_their_tenants_terms(locked):
    from hibachi.request import Terms

    terms = locked.served.terms(Terms(priority=-9, timeout=3.0), "emma")
    assert (terms.tenant, terms.priority, terms.timeout) == ("emma", 3, 3.0)
    assert locked.served.terms(Terms(priority=9), "emma").priority == 9, "a worse place may be asked for"
    assert locked.served.terms(Terms(priority=-9), "anne").priority == 0
    assert locked.served.terms(Terms(priority=-9), "").priority == -9, "without keys there is nobody else"


# ---- draining ------------------------------------------------------------------------------------------------------


def test_a_server_that_drains_takes_no_more():
    with ENGINES["own"]("tiny") as texts, site(texts) as here:
        here.served.draining = True
        answer = here.post("/v1/completions", {"prompt": "a"})
        assert answer.status_code == 503 and answer.headers["retry-after"]
        assert here.client.get("/ready").status_code == 503 and "shutting down" in here.client.get("/ready").text
        assert here.client.get("/health").status_code == 200
