"""POST /v1/warm: a prompt's beginning is in the cache before somebody asks with it; the answer is kvboost's."""

from __future__ import annotations

import pytest

from hibachi import KVTiers
from hibachi.llm.own import open_texts
from hibachi.server.web.tenants import Tenant, Tenants
from tests.lib.waits import until

from .conftest import ENGINES, site

TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"
CHAT = [{"role": "system", "content": TEXT}]


def refused(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["param"], error["code"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_what_was_warmed_is_found(server):
    """K-30: the usage adds up, and tells what was found."""
    text = "warmed: " + TEXT
    answer = server.post("/v1/warm", {"text": text, "model": "tiny"}).json()
    count, block = answer["token_count"], answer["chunk_size"]
    assert answer["status"] == "warmed" and answer["chars"] == len(text) and block >= 1
    assert count == server.post("/tokenize", {"prompt": text}).json()["count"] > block
    assert answer["chunks_stored"] == count // block and answer["partial_tail_tokens"] == count % block
    assert answer["chunk_boundary_aligned"] is (count % block == 0)
    assert (answer["alignment_warning"] is None) is answer["chunk_boundary_aligned"]
    used = answer["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]) == (count, 0, count)
    assert cached(answer) == 0
    assert cached(server.complete(text + " must be", max_tokens=1)) == count // block * block
    again = server.post("/v1/warm", {"text": text}).json()
    assert again["chunks_stored"] == count // block - cached(again) // block < 2


def test_only_what_is_new_is_stored(server):
    """Of a longer text that begins like one that was warmed."""
    first = server.post("/v1/warm", {"text": "longer: " + TEXT}).json()
    answer = server.post("/v1/warm", {"text": "longer: " + 3 * TEXT}).json()
    count, block = answer["token_count"], answer["chunk_size"]
    shared = first["token_count"] // block
    assert shared >= 1 and cached(answer) // block >= shared - 1
    assert answer["chunks_stored"] == count // block - cached(answer) // block >= 2


def test_a_conversation_is_warmed_as_a_chat_renders_it(server):
    answer = server.post("/v1/warm", {"messages": CHAT}).json()
    asked = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1}).json()
    block = answer["chunk_size"]
    assert answer["token_count"] == asked["usage"]["prompt_tokens"]
    assert cached(asked) == (answer["token_count"] - 1) // block * block
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert server.post("/v1/warm", {"messages": CHAT, "tools": tools}).json()["token_count"] > answer["token_count"]


def test_a_salt_keeps_it_apart(server):
    text = "salted: " + TEXT
    server.post("/v1/warm", {"text": text, "cache_salt": "s"})
    assert cached(server.complete(text, max_tokens=1, cache_salt="other")) == 0
    assert cached(server.complete(text, max_tokens=1, cache_salt="s")) > 0


def test_special_tokens_are_added_to_a_text_and_not_to_a_template_s(server, monkeypatch):
    encode, asked = server.served.reading.encode, []

    def spied(*args, special, **more):
        asked.append(special)
        return encode(*args, special=special, **more)

    monkeypatch.setattr(server.served.reading, "encode", spied)
    for given in ({"text": "a"}, {"messages": CHAT}):
        for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            server.post("/v1/warm", {**given, **more})
    assert asked == [True, True, False, False, True, False]


def test_what_is_wrong_is_told_by_name(server):
    """K-31: without a text, 400."""
    assert refused(server.post("/v1/warm", {})) == ("text", "missing_required_parameter")
    assert refused(server.post("/v1/warm", {"text": ""})) == ("text", "missing_required_parameter")
    assert refused(server.post("/v1/warm", {"text": None})) == ("text", "missing_required_parameter")
    assert refused(server.post("/v1/warm", {"text": 7})) == ("text", "invalid_type")
    assert refused(server.post("/v1/warm", {"text": "a", "messages": CHAT})) == ("messages", "invalid_value")
    assert refused(server.post("/v1/warm", {"messages": []})) == ("messages", "empty_array")
    assert refused(server.post("/v1/warm", {"text": "a", "chars": 1})) == ("chars", "unknown_parameter")
    assert refused(server.post("/v1/warm", {"text": "a", "timeout": -1})) == ("timeout", "invalid_value")
    assert refused(server.post("/v1/warm", {"text": "a " * 2000})) == (None, "context_length_exceeded")
    assert refused(server.post("/v1/warm", {"text": "a", "model": "x"}), 404) == ("model", "model_not_found")


def test_what_kvboost_answers_otherwise(server):
    """K-29: its 422, 422 and 503 are our 400, 400 and 429 (the last: tests/serve/test_overload.py); a stream has an
    event for each token and ends as OpenAI's do; an answer that is cut says so."""
    assert refused(server.post("/v1/completions", {"prompt": "a", "model": "x"}), 404)[0] == "model"
    assert refused(server.post("/v1/completions", {"prompt": []})) == ("prompt", "empty_array")
    assert refused(server.post("/v1/completions", {"prompt": "a", "max_tokens": 0}))[0] == "max_tokens"
    body = {"prompt": "Emma", "max_tokens": 6, "temperature": 0, "stream": True}
    *events, end, rest = server.post("/v1/completions", body).text.split("\n\n")
    assert len(events) >= 2 and (end, rest) == ("data: [DONE]", "") and '"finish_reason":"length"' in events[-1]


def test_it_is_limited_as_a_request(texts):
    tenants = Tenants((("k", "one"),), {"one": Tenant(max_requests=1)})
    with site(texts, tenants=tenants) as here:
        assert refused(here.post("/v1/warm", {"text": "a"}), 401)[1] == "invalid_api_key"
        key = {"Authorization": "Bearer k"}
        here.served.tenants.served["one"] += 1
        assert refused(here.post("/v1/warm", {"text": "a"}, headers=key), 429) == (None, "tenant_limit")
        here.served.tenants.served["one"] -= 1
        assert here.post("/v1/warm", {"text": "a"}, headers=key).status_code == 200
        page = here.client.get("/metrics", headers=key).text
    (rejected,) = [line for line in page.splitlines() if "tenant_limit" in line]
    assert rejected.startswith("hibachi_requests_rejected_total{") and rejected.endswith(" 1")


def test_a_model_without_a_cache_has_nothing_to_warm(slow_model):
    with open_texts(slow_model, max_num_seqs=2) as model, site(model) as here:
        assert refused(here.post("/v1/warm", {"text": "a"})) == (None, "unsupported")
        with pytest.raises(AssertionError):  # but text it makes
            refused(here.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))


@pytest.mark.parametrize("which", ENGINES)
def test_a_restarted_server_has_what_was_pinned_and_computed_and_tells_what_it_keeps(which, tmp_path):
    """K-23, K-24, over HTTP; and the folder of a server that has ended."""
    tiers = {"kv_tiers": KVTiers(disk=tmp_path, disk_bytes=1 << 26, eviction="importance"), "cache_tokens": 16 * 40}
    tenants = Tenants((("k", "a"), ("ops", "ops")), {"ops": Tenant(admin=True)})
    key, ops = ({"Authorization": f"Bearer {name}"} for name in ("k", "ops"))
    with ENGINES[which]("tiny", **tiers) as texts, site(texts, tenants=tenants) as here:
        first = here.post("/v1/warm", {"text": TEXT * 3, "pin": True, "importance": 2.5}, headers=key).json()
        assert first["pinned_tokens"] == first["token_count"] // 16 * 16 and first["usage"]
        for n in range(6):
            here.post("/v1/warm", {"text": f"{n} {TEXT}" * 3}, headers=key)
        again = here.post("/v1/warm", {"text": TEXT * 3}, headers=key).json()
        assert again["chunks_stored"] == 0 and again["pinned_tokens"] is None
        assert here.post("/v1/warm", {"text": TEXT * 3, "pin": False}, headers=key).json()["pinned_tokens"] == 0
        assert refused(here.client.get("/v1/cache/events", headers=key), 403) == (None, "admin_only")

        def written():
            tiers = [event["tier"] for event in here.client.get("/v1/cache/events", headers=ops).json()["events"]]
            return 2 * tiers.count("host") == len(tiers)

        until(written)
        told = here.client.get("/v1/cache/events", headers=ops).json()
        assert {e["event"] for e in told["events"]} == {"stored"} and {e["tier"] for e in told["events"]} > {"host"}
        assert here.client.get(f"/v1/cache/events?since={told['next']}", headers=ops).json()["events"] == []
        assert refused(here.client.get("/v1/cache/events?since=x", headers=ops))[0] == "since"
    with ENGINES[which]("tiny", **tiers) as texts, site(texts, tenants=tenants) as here:
        assert here.post("/v1/warm", {"text": TEXT * 3}, headers=key).json()["chunks_stored"] == 0
        assert here.post("/v1/warm", {"text": TEXT * 3}, headers=ops).json()["chunks_stored"], "another tenant's"
        assert "hibachi_tier_hit_tokens_total" in here.client.get("/metrics", headers=ops).text
    with ENGINES[which]("tiny") as texts, site(texts) as here:
        assert refused(here.post("/v1/warm", {"text": TEXT, "pin": True})) == (None, "unsupported")
        assert refused(here.post("/v1/warm", {"text": TEXT, "importance": 2})) == (None, "unsupported")
        assert here.client.get("/v1/cache/events?since=3").json() == {"events": [], "next": 3}
