"""Several tokens a step, over HTTP: figures by who proposed, a chunk a step, an event a token."""

import json

import pytest

from hibachi.llm.own import open_texts

from .conftest import ENGINES, site
from .test_metrics import Figures, calm, scrape

TEXT = "Mr. Darcy, Mr. Darcy, Mr. Darcy, Mr. Darcy, Mr. Darcy,"  # the answer repeats itself
TOKENS = 48
CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2}


@pytest.fixture(scope="module", params=ENGINES)
def fast(request):
    """A server whose answers repeat their prompts, several tokens a step."""
    with ENGINES[request.param]("tiny", max_num_seqs=4, speculative_config=CONFIG) as texts, site(texts) as here:
        yield here


def since(now, before, name, *labels):
    return now[(name, *labels)] - before[(name, *labels)]


def data(answer):
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data:").strip() for line in answer.text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_proposals_are_counted_by_drafter_and_position(fast):
    before = calm(fast)
    fast.complete(TEXT, max_tokens=TOKENS, ignore_eos=True)
    now = calm(fast)
    drafts, tokens, kept = (
        since(now, before, f"hibachi_{name}_total", "ngram")
        for name in ("drafts", "draft_tokens", "draft_accepted_tokens")
    )
    steps = since(now, before, "hibachi_steps_total", "decode")
    assert 0 < drafts <= steps and drafts <= tokens <= 4 * drafts and 20 < kept <= tokens
    # The prompt's step and each other one bring a token, and what was kept.
    assert steps + kept == TOKENS - 1
    name = "hibachi_draft_accepted_by_position_total"
    places = [since(now, before, name, "ngram", str(i)) for i in range(4)]
    assert sum(places) == kept and places == sorted(places, reverse=True) and places[0] <= drafts
    assert {key[1] for key in now if key[0].startswith("hibachi_draft")} == {"ngram"}


def test_how_many_a_step_kept(fast):
    before = calm(fast)
    fast.complete(TEXT, max_tokens=TOKENS, ignore_eos=True)
    now = calm(fast)
    drafts, kept = (since(now, before, f"hibachi_{n}_total", "ngram") for n in ("drafts", "draft_accepted_tokens"))
    steps = since(now, before, "hibachi_step_accepted_tokens_count")
    none, four = (since(now, before, "hibachi_step_accepted_tokens_bucket", le) for le in ("0", "4"))
    assert since(now, before, "hibachi_step_accepted_tokens_sum") == kept and steps + kept == TOKENS == four + kept
    right = since(now, before, "hibachi_draft_accepted_by_position_total", "ngram", "0")
    assert steps - none == right <= drafts  # each of the others has kept at least one


def test_the_time_between_tokens_counts_each_token_of_a_step(fast):
    before = calm(fast)
    fast.complete(TEXT, max_tokens=TOKENS, ignore_eos=True)
    now = calm(fast)
    assert since(now, before, "hibachi_inter_token_seconds_count") == TOKENS - 1
    between = since(now, before, "hibachi_inter_token_seconds_sum")
    decode = since(now, before, "hibachi_request_decode_seconds_sum")
    assert between == pytest.approx(decode, rel=1e-3)
    assert since(now, before, "hibachi_generation_tokens_total") == TOKENS


def test_a_stream_has_a_chunk_for_each_step(fast):
    whole = fast.complete(TEXT, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    before = calm(fast)
    body = {"prompt": TEXT, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0, "temperature": 0, "stream": True}
    chunks = [event["choices"][0] for event in data(fast.post("/v1/completions", body)) if event["choices"]]
    now = calm(fast)
    steps = 1 + since(now, before, "hibachi_steps_total", "decode")
    tokens = [c["logprobs"]["tokens"] for c in chunks if c["logprobs"] and c["logprobs"]["tokens"]]
    assert [token for chunk in tokens for token in chunk] == whole["choices"][0]["logprobs"]["tokens"]
    assert "".join(c["text"] for c in chunks) == whole["choices"][0]["text"]
    assert len(tokens) <= steps < TOKENS * 0.7
    assert len(tokens) > 0.2 * steps, "chunks wait for each other"


def test_tgi_has_an_event_for_each_token(fast):
    body = {"inputs": TEXT, "parameters": {"max_new_tokens": TOKENS, "details": True}}
    whole = fast.post("/generate", body).json()
    events = data(fast.post("/generate_stream", body))
    ids = [token["id"] for token in whole["details"]["tokens"]]
    assert [event["token"]["id"] for event in events] == ids
    assert [event["token"]["logprob"] for event in events] == [t["logprob"] for t in whole["details"]["tokens"]]
    assert [event["index"] for event in events] == list(range(1, len(ids) + 1))
    assert all(event["generated_text"] is None for event in events[:-1])
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert events[-1]["details"]["generated_tokens"] == len(ids)


def test_under_vllms_names_there_are_totals():
    with open_texts("tiny", speculative_config=CONFIG) as texts, site(texts, metric_names="vllm") as here:
        names = [f"vllm:spec_decode_num_{n}_total" for n in ("drafts", "draft_tokens", "accepted_tokens")]
        nothing = Figures(here.client.get("/metrics").text)
        assert [nothing.sum(name) for name in names] == [0, 0, 0] and all(n in {k[0] for k in nothing} for n in names)
        here.complete(TEXT, max_tokens=TOKENS, ignore_eos=True)
        now, ours = scrape(here), texts.engine.meters().drafted
        assert [now.sum(name) for name in names] == [ours.steps, ours.proposed, ours.accepted]
        by_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert now.sum(by_position) == ours.accepted > 20
        assert sum(key[0] == by_position for key in now) == len(ours.by_position)
