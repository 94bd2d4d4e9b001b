"""OpenAI's predicted outputs over HTTP: they save steps, and `usage` says how many tokens were right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .conftest import CHATML, ENGINES, Site, site

CHAT = [{"role": "user", "content": "Go on: It is a truth"}]
BODY = {"messages": CHAT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
USED = "accepted_prediction_tokens", "rejected_prediction_tokens"


@pytest.fixture(scope="module", params=ENGINES)
def server(request: Any) -> Iterator[Site]:
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 64}  # which nothing repeats
    with (
        ENGINES[request.param]("tiny", max_num_seqs=4, speculative_config=config) as texts,
        site(texts, chat_template=CHATML) as here,
    ):
        yield here


def chat(server: Site, prediction: Any = None, **more: Any) -> Any:
    answer = server.post("/v1/chat/completions", {**BODY, "prediction": prediction, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def content(text: Any) -> dict[str, Any]:
    return {"type": "content", "content": text}


def used(usage: Any) -> tuple[int, int]:
    return tuple(usage["completion_tokens_details"][name] for name in USED)


def test_a_right_one_saves_steps_and_changes_nothing(server):
    plain = chat(server)
    assert "completion_tokens_details" not in plain["usage"]
    text = plain["choices"][0]["message"]["content"]
    before = server.texts.stats().steps
    told = chat(server, content(text))
    assert told["choices"] == plain["choices"]
    right, wrong = used(told["usage"])
    assert right > 25 and wrong <= 4 and told["usage"]["completion_tokens"] == 40
    if server.texts.engine.pid is None:  # another process tells of its steps a little later
        assert server.texts.stats().steps - before < 20
    parts = [{"type": "text", "text": text[: len(text) // 2]}, {"type": "text", "text": text[len(text) // 2 :]}]
    assert used(chat(server, content(parts))["usage"])[0] > 20


def test_a_stream_tells_the_same(server):
    text = chat(server)["choices"][0]["message"]["content"]
    body = {**BODY, "prediction": content(text), "stream": True, "stream_options": {"include_usage": True}}
    lines = server.post("/v1/chat/completions", body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == text
    assert used(chunks[-1]["usage"]) == used(chat(server, content(text))["usage"])


def test_a_wrong_one_is_counted_and_harms_nothing(server):
    plain = chat(server)
    told = chat(server, content("qqqq " * 50))
    assert told["choices"] == plain["choices"] and used(told["usage"])[0] == 0
    for nothing in ("", []):
        assert used(chat(server, content(nothing))["usage"]) == (0, 0)
    text = plain["choices"][0]["message"]["content"]
    assert used(chat(server, content(text), num_speculative_tokens=0)["usage"]) == (0, 0)


def test_a_megabyte_of_it_is_cut_to_the_context(server):
    text = chat(server)["choices"][0]["message"]["content"]
    told = chat(server, content(text + "word " * 200_000))
    assert used(told["usage"])[0] > 25
