"""Tenants apart: what one does to another with its key, and what it can find out."""

import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from hibachi.engine.health import Health
from hibachi.request import Terms
from hibachi.server.flight import of_tenant
from hibachi.server.web.tenants import Tenant, Tenants, salt_of

from ...engine.models import until
from ...serve.conftest import ENGINES, site

KEYS = (("k-a", "a"), ("k-b", "b"), ("k-ops", "ops"))
NAMED = {"a": Tenant(max_requests=None), "ops": Tenant(admin=True)}
A, B, OPS = ({"Authorization": f"Bearer k-{name}"} for name in ("a", "b", "ops"))
SECRET = "The password of the vault in the cellar of the house at Hartfield is seventeen swans and a goose."
WHICH = pytest.mark.parametrize("which", ENGINES)


@pytest.fixture(params=ENGINES)
def shared(request):
    """Rows and places for few, and a policy as the server has it with several keys."""
    with (
        ENGINES[request.param]("tiny", max_num_seqs=8, max_num_queued_reqs=24, scheduling_policy="shares") as texts,
        site(texts, tenants=Tenants(KEYS, NAMED)) as here,
    ):
        yield here


# ---- what one does to another (finding 9) --------------------------------------------------------------------------

QUIET = {"prompt": "Emma", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
GREEDY = {"prompt": "Anne", "max_tokens": 400, "ignore_eos": True}


class Flood:
    """Tenant a keeps sending until the block ends: `clients` at once, each again as soon as it is answered."""

    def __init__(self, here, clients, body, headers=A):
        self.here, self.clients, self.body, self.headers = here, clients, body, headers
        self.over, self.answers, self.threads = threading.Event(), [], []

    def _run(self):
        with httpx.Client(base_url=self.here.url, timeout=120) as client:
            while not self.over.is_set():
                with client.stream(
                    "POST", "/v1/completions", json=self.body | {"stream": True}, headers=self.headers
                ) as x:
                    self.answers.append(x.status_code)
                    for _ in x.iter_lines():
                        if self.over.is_set():
                            break
                if x.status_code == 429:
                    time.sleep(0.01)

    def __enter__(self):
        self.threads = [threading.Thread(target=self._run, daemon=True) for _ in range(self.clients)]
        for thread in self.threads:
            thread.start()
        until(lambda: self.here.texts.stats().running >= 8)
        return self

    def __exit__(self, *_):
        self.over.set()
        for thread in self.threads:
            thread.join(60)


FLOODS = {
    "many": (30, GREEDY),
    "with a better priority": (30, GREEDY | {"priority": -1}),
    "more than there is room for": (60, GREEDY),
    "continuations": (4, GREEDY | {"n": 8}),
}


@pytest.mark.parametrize(
    "clients, body",
    [
        pytest.param(*flood, id=name, marks=[pytest.mark.slow] if name.startswith("more than") else [])
        for name, flood in FLOODS.items()
    ],
)
def test_9_a_quiet_tenant_is_served_beside_a_greedy_one(shared, clients, body):
    def ask(times):
        took = []
        for _ in range(times):
            began = time.monotonic()
            answer = shared.post("/v1/completions", QUIET, headers=B)
            took.append(time.monotonic() - began)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == text
        return took

    text = shared.post("/v1/completions", QUIET, headers=B).json()["choices"][0]["text"]
    alone = statistics.median(ask(5))
    with Flood(shared, clients, body) as flood:
        beside = statistics.median(ask(25))
    # A step of eight rows takes longer than one of one row, on a machine that others use; a turn of the others
    # (400 tokens) takes a hundred times as long.
    assert beside < 10 * alone + 2.0
    assert set(flood.answers) <= {200, 429}


def test_9_many_quiet_requests_at_once_get_their_share_of_rows(shared):
    with Flood(shared, 30, GREEDY), ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(shared.post, "/v1/completions", QUIET, headers=B) for _ in range(12)]
        assert [a.result().status_code for a in asked] == [200] * 12


def test_9_a_priority_may_only_worsen():
    with ENGINES["own"]("tiny") as texts, site(texts, tenants=Tenants(KEYS, {"a": Tenant(priority=5)})) as here:
        for given, tenant, become in ((-9, "a", 5), (0, "a", 5), (9, "a", 9), (-9, "b", 0), (9, "b", 9), (-9, "", -9)):
            assert here.served.terms(Terms(priority=given), tenant).priority == become


@pytest.mark.parametrize("body", [{"n": 3}, {"prompt": ["x", "y", "z"]}, {"best_of": 3}])
@WHICH
@pytest.mark.slow
def test_9_continuations_count_as_requests(which, body):
    tenants = Tenants(KEYS, {"a": Tenant(max_requests=4)})
    with ENGINES[which]("tiny", max_num_seqs=8) as texts, site(texts, tenants=tenants) as here:
        open_ = GREEDY | body | ({"stream": True} if "best_of" not in body else {"stream": False})
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(here.post, "/v1/completions", open_, headers=A)
            until(lambda: tenants.served["a"] == 3 or running.done())
            assert not running.done()
            refused = here.post("/v1/completions", QUIET | body, headers=A)
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "tenant_limit"
            assert here.post("/v1/completions", QUIET, headers=A).status_code == 200, "one is free"
            assert here.post("/v1/completions", QUIET | body, headers=B).status_code == 200
            assert running.result().status_code == 200
        refused = here.post("/v1/completions", QUIET | {"n": 5}, headers=A)
        assert refused.status_code == 400 and "Ask for fewer" in refused.json()["error"]["message"]
        refused = here.post("/v1/embeddings", {"input": ["x"] * 5}, headers=A)
        assert refused.status_code == 400
        assert not tenants.served.total()


# ---- what one finds out about another (finding 10) -----------------------------------------------------------------


def cached(here, prompt, headers, **more):
    body = {"prompt": prompt, "max_tokens": 1, **more}
    usage = here.post("/v1/completions", body, headers=headers).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_10_nobody_sees_what_another_has_sent(shared):
    assert cached(shared, SECRET, A) == 0
    assert cached(shared, SECRET, B) == 0, "it was told that somebody had sent this"
    assert cached(shared, SECRET, A) > 30 and cached(shared, SECRET, B) > 30, "but of one's own"
    assert cached(shared, SECRET, B, cache_salt="") > 0
    for salt in ("a", "1:a", "1:", "b"):
        assert cached(shared, SECRET, B, cache_salt=salt) == 0


def test_10_unless_it_is_wanted():
    tenants = Tenants(KEYS, NAMED, share_prefixes=True)
    with ENGINES["own"]("tiny") as texts, site(texts, tenants=tenants) as here:
        assert cached(here, SECRET, A) == 0 and cached(here, SECRET, B) > 30
        assert cached(here, SECRET, B, cache_salt="mine") == 0


def test_10_no_name_and_salt_are_those_of_another():
    names, salts = ("a", "b", "1", "1:a", "a1", "", "11:", "ü"), (None, "a", "b", "1:a", "a1:a", ":", "x")
    made = {salt_of(name, salt) for name in names[:-3] + names[-2:] for salt in salts}
    assert len(made) == 7 * len(salts), "two of them share"
    assert salt_of("", "x") == "x" and salt_of("", None) is None
    assert salt_of("a", "") == salt_of("a", None), "no salt is an empty one"


def test_10_the_flight_recorder_shows_ones_own(shared):
    for headers in (A, B):
        assert shared.post("/v1/completions", QUIET | {"prompt": SECRET}, headers=headers).status_code == 200
    everything = shared.client.get("/debug/flight", headers=OPS).json()
    own = shared.client.get("/debug/flight", headers=B).json()
    assert {e["tenant"] for e in everything["events"] if e["event"] == "add"} == {"a", "b"}
    assert {e["tenant"] for e in own["events"] if e["event"] == "add"} == {"b"}
    mine = {e["seq"] for e in own["events"] if e["event"] == "add"}
    planned = {seq for e in own["events"] if e["event"] == "plan" for seq in e["plan"]["seqs"]}
    assert planned == mine
    told = json.dumps(own)
    assert not any(f'"{name}"' in told for name in ("keys", "salt", "rows", "grown", "limits"))
    assert shared.client.get("/debug/flight").status_code == 401


def test_10_blocks_have_other_names_under_another_salt(shared):
    for headers in (A, B):
        shared.post("/v1/completions", QUIET | {"prompt": SECRET}, headers=headers)
    events = shared.client.get("/debug/flight", headers=OPS).json()["events"]
    keys = {e["tenant"]: e["keys"] for e in events if e["event"] == "add" and e["keys"]}
    assert keys["a"] and keys["b"] and not set(keys["a"]) & set(keys["b"])


DUMP = {
    "policy": "Shares",
    "limits": {"rows": 2},
    "complete": True,
    "events": [
        {"event": "add", "seq": 1, "tenant": "a", "keys": [5], "salt": 3, "prompt_len": 7, "now": 1.0},
        {"event": "add", "seq": 2, "tenant": "b", "keys": [6], "salt": 4, "prompt_len": 8, "now": 1.5},
        {
            "event": "plan",
            "now": 2.0,
            "grown": [[1, 0, 5]],
            "plan": {
                "seqs": [1, 2],
                "rows": [0, 1],
                "start": [3, 4],
                "q": [5, 6],
                "emit": [1],
                "fresh": [1, 2],
                "preempted": [[1, 0]],
            },
        },
        {"event": "plan", "now": 2.1, "grown": [], "plan": None},
        {"event": "commit", "stopped": [0], "seconds": 1.0},
        {"event": "fail", "seq": 1, "sent": [[2, 1]], "error": "ModelError"},
        {"event": "fail", "seq": 2, "sent": [[1, 0]], "error": "ModelError"},
        {"event": "expire", "now": 3.0, "ended": [1, 2]},
        {"event": "room", "sent": [[2, 1]]},
        {"event": "limit", "budget": 7},
        {"event": "cancel", "seq": 2, "reason": "cancelled"},
    ],
}


def test_10_what_is_left_of_a_recording_for_one_tenant():
    assert of_tenant(DUMP, "b") == {
        "policy": "Shares",
        "complete": False,
        "events": [
            {"event": "add", "seq": 1, "tenant": "b", "prompt_len": 8, "now": 1.5},
            {
                "event": "plan",
                "now": 2.0,
                "plan": {"seqs": [1], "start": [4], "q": [6], "emit": [0], "fresh": [1], "preempted": []},
            },
            {"event": "fail", "seq": 1, "error": "ModelError"},
            {"event": "expire", "now": 3.0, "ended": [1]},
            {"event": "cancel", "seq": 1, "reason": "cancelled"},
        ],
    }
    assert of_tenant(DUMP, "c")["events"] == []
    assert of_tenant({"complete": True, "events": []}, "a") == {"events": []}


def test_10_health_says_what_failed_to_admins_only(monkeypatch):
    tenants = Tenants(KEYS, NAMED)
    with ENGINES["own"]("tiny") as texts, site(texts, tenants=tenants) as here:
        monkeypatch.setattr(here.served.what, "health", lambda: Health("failed", "The secret of the device."))
        for headers, reason in ((OPS, "secret"), (A, "is failed"), ({}, "is failed")):
            answer = here.client.get("/health", headers=headers)
            assert answer.status_code == 503 and reason in answer.json()["reason"]
            assert ("secret" in answer.text) is (headers is OPS)
