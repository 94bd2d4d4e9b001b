"""OpenAI's routes: what is answered is what the engine says, and what is not served is refused by its name."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from hibachi import LLM, SamplingParams
from hibachi.llm.own import open_texts

from .conftest import CHATML, site
from .saying import CALL, THOUGHT, saying, told

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny") as found:
        yield found


def events(response):
    """The chunks of a stream, which must end as OpenAI's do."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *lines, end = [line for line in response.text.split("\n\n") if line]
    assert end == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def stream(server, path, **body):
    response = server.post(path, {"stream": True, **body})
    assert response.status_code == 200, response.text
    return events(response)


def refused(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---- models --------------------------------------------------------------------------------------------------------


def test_the_models_served(server):
    (model,) = server.client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["object"] == "model" and model["max_model_len"] == 512
    assert server.client.get("/v1/models/tiny").json() == model
    assert "tiny" in refused(server.client.get("/v1/models/other"), 404)["message"]


def test_an_unknown_model_is_told_which_are_served(server):
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        error = refused(server.post(path, {**body, "model": "gpt-9"}), 404)
        assert error["code"] == "model_not_found" and error["param"] == "model" and "tiny" in error["message"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/v1/messages", "leave it out of the address"),  # a client of Anthropic's with the address of OpenAI's
        ("/chat/completions", "Add /v1 to the address"),
        ("/responses", "Add /v1 to the address"),
        ("/v1/v1/nothing", "does not exist."),
        ("/nothing", "does not exist."),
    ],
)
def test_a_path_with_a_wrong_v1_is_told_of(server, path, words):
    error = refused(server.post(path, {}), 404)
    assert error["code"] == "not_found" and words in error["message"]
    assert ("base_url" in error["message"]) == ("nothing" not in path)


def test_version(server):
    from importlib.metadata import version

    assert server.client.get("/version").json() == {"version": version("hibachi")}


# ---- completions ---------------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_engine_says(server, llm):
    answer = server.complete("It is a truth")
    (expected,) = llm.generate("It is a truth", GREEDY)
    assert answer["object"] == "text_completion" and answer["model"] == "tiny" and answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": expected.text,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 8, 12)


def test_prompts_come_as_texts_and_as_token_ids(server, llm):
    texts = ["It is a truth", "Emma"]
    ids = [llm.tokenizer.encode(t) for t in texts]
    expected = [c.text for c in llm.generate(texts, GREEDY)]
    for prompt in (texts, ids, [texts[0], ids[1]]):
        answer = server.complete(prompt)
        assert [c["index"] for c in answer["choices"]] == [0, 1]
        assert [c["text"] for c in answer["choices"]] == expected
    assert server.complete(ids[0])["choices"][0]["text"] == expected[0]


def test_n_continuations_of_each_prompt(server):
    body = dict(temperature=1, seed=5, n=3)
    answer = server.complete(["Emma", "Anne"], **body)
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    alone = [server.complete(p, **body)["choices"] for p in ("Emma", "Anne")]
    assert [c["text"] for c in answer["choices"]] == [c["text"] for some in alone for c in some]
    assert len({c["text"] for c in answer["choices"]}) == 6
    assert answer["usage"]["completion_tokens"] == 48


def test_a_stream_is_the_same_text_in_chunks(server):
    body = dict(prompt=["It is a truth", "Emma"], temperature=0, max_tokens=12)
    chunks = stream(server, "/v1/completions", **body, stream_options={"include_usage": True})
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 24
    texts, ends = {0: "", 1: ""}, {}
    for chunk in chunks:
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    whole = server.complete(**body)
    assert [texts[0], texts[1]] == [c["text"] for c in whole["choices"]]
    assert ends == {0: "length", 1: "length"} and last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert len({c["id"] for c in chunks}) == 1


def test_echo_and_logprobs_score_a_prompt(server, llm):
    prompt = "It is a truth universally acknowledged"
    ids = llm.tokenizer.encode(prompt)
    for given in (prompt, ids):
        (choice,) = server.complete(given, echo=True, logprobs=1, max_tokens=1)["choices"]
        scores = choice["logprobs"]
        assert choice["text"].startswith(prompt) and scores["token_logprobs"][0] is None
        assert "".join(scores["tokens"]) == choice["text"] and len(scores["tokens"]) == len(ids) + 1
        assert [choice["text"][a:].startswith(t) for a, t in zip(scores["text_offset"], scores["tokens"], strict=True)]
        expected = llm.score(prompt[:5], prompt[5:])[0]
        assert scores["token_logprobs"][2 : len(ids)] == pytest.approx(expected.logprobs, abs=1e-4)
    (choice,) = server.complete(prompt, echo=True, max_tokens=0, logprobs=0)["choices"]
    assert choice["text"] == prompt and len(choice["logprobs"]["tokens"]) == len(ids)
    assert refused(server.post("/v1/completions", {"prompt": "a", "max_tokens": 0}))["param"] == "max_tokens"


@pytest.mark.parametrize("end", [True, False])
def test_harnesses_find_the_scores_of_a_continuation(server, llm, end):
    """As lm-eval does it: all scores behind the context but the last, which is of the one new token, whatever it is."""
    context, continuation = "It is a", " truth"
    before, after = (llm.tokenizer.encode(text) for text in (context, context + continuation))
    bias = {str(llm.eos_ids[0]): 100} if end else {}
    body = {"prompt": [after], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "logit_bias": bias}
    answer = server.complete(**body)
    [choice], lists = answer["choices"], answer["choices"][0]["logprobs"]
    assert choice["finish_reason"] == ("stop" if end else "length")
    assert {len(each) for each in lists.values()} == {len(after) + 1} == {answer["usage"]["total_tokens"]}
    expected = llm.score(context, continuation)[0].logprobs
    assert lists["token_logprobs"][len(before) : -1] == pytest.approx(expected, abs=1e-4)
    assert lists["text_offset"] == sorted(lists["text_offset"]) and lists["text_offset"][-1] <= len(choice["text"])
    chunks = stream(server, "/v1/completions", **body)
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"] and c["choices"][0]["logprobs"]]
    assert [x for part in parts for x in part["token_logprobs"]] == pytest.approx(lists["token_logprobs"][:], abs=1e-6)


def test_a_stream_of_a_prompt_alone_has_no_other_text(server):
    chunks = stream(server, "/v1/completions", prompt="Emma", echo=True, max_tokens=0)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "Emma"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_in_a_stream_of_several_each_is_told_of_its_end_when_it_comes(server, llm):
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    (one,), (first, *_) = (llm.generate("She was", params)), llm.generate("The", params)[0].token_ids
    assert first not in one.token_ids
    body = {"prompt": ["The", "She was"], "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    told = stream(server, "/v1/completions", **body, stop_token_ids=[first])
    choices = [choice for chunk in told for choice in chunk["choices"]]
    (ended,) = [n for n, c in enumerate(choices) if c["index"] == 0 and c["finish_reason"]]
    assert sum(c["index"] == 1 and bool(c["text"]) for c in choices[ended:]) > 3  # busy machines join tokens


def test_a_stream_echoes_first(server):
    chunks = stream(server, "/v1/completions", prompt="Emma", echo=True, max_tokens=3, temperature=0, logprobs=1)
    assert chunks[0]["choices"][0]["text"] == "Emma" and chunks[0]["choices"][0]["logprobs"]["tokens"]
    scores = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    offsets = [offset for each in scores for offset in each["text_offset"]]  # a chunk may bring several tokens
    assert offsets[0] == 0 and offsets == sorted(offsets) and len(set(offsets)) == len(offsets)
    assert sum(len(each["tokens"]) for each in scores[1:]) == 3


def test_a_stream_echoes_the_scores_of_each_prompt_also_of_one_that_waits():
    body = {"prompt": ["Emma", "It is", "a"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    with open_texts("tiny", max_num_seqs=1) as texts, site(texts) as here:
        whole = [c["logprobs"]["token_logprobs"] for c in here.complete(**body)["choices"]]
        told: list[list[float | None]] = [[] for _ in whole]
        for choice in (c for chunk in stream(here, "/v1/completions", **body) for c in chunk["choices"]):
            told[choice["index"]] += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
    assert told == [pytest.approx(each) for each in whole]


def test_half_a_letter_is_shown_as_bytes(server):
    told = server.post("/tokenize", {"prompt": "a — b", "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) and "bytes:\\xe2" in told["token_strs"]
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "a — b"}


# ---- what stopped it, and special tokens -----------------------------------------------------------------------------


def test_nothing_stops_a_prompt_alone(server):
    """Not the token either that is made anyhow and left out."""
    body = {"prompt": "Emma", "echo": True, "max_tokens": 0, "stop_token_ids": [5], "logit_bias": {"5": 100}}
    (whole,) = server.post("/v1/completions", body).json()["choices"]
    last = stream(server, "/v1/completions", **body)[-1]["choices"][0]
    for choice in (whole, last):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_a_prompt_may_be_cut(server, llm):
    """truncate_prompt_tokens: the last of them, or with truncation_side the first; -1: what the context holds."""
    ids = llm.tokenizer.encode("It is a truth universally acknowledged")
    for given in (ids, llm.tokenizer.decode(ids)):
        for more, kept in (({}, ids[-3:]), ({"truncation_side": "right"}, ids[:3])):
            answer = server.complete(given, truncate_prompt_tokens=3, **more, echo=True, max_tokens=2, logprobs=0)
            assert answer["usage"]["prompt_tokens"] == 3
            choice = answer["choices"][0]
            assert choice["text"].startswith(llm.tokenizer.decode(kept))
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    long = server.complete("a " * 3000, truncate_prompt_tokens=-1, max_tokens=12)["usage"]
    assert (long["prompt_tokens"], long["completion_tokens"]) == (500, 12)
    chat = {"messages": [{"role": "user", "content": "a " * 3000}], "max_tokens": 1}
    assert refused(server.post("/v1/chat/completions", chat))["code"] == "context_length_exceeded"
    answer = server.post("/v1/chat/completions", {**chat, "truncate_prompt_tokens": 7}).json()
    assert answer["usage"]["prompt_tokens"] == 7
    too_long = {"prompt": "a " * 3000, "truncate_prompt_tokens": 600}
    assert refused(server.post("/v1/completions", too_long))["code"] == "context_length_exceeded"


# ---- chats ---------------------------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How do you do?"}]


def test_a_chat_goes_through_the_template(server, llm):
    body = {"messages": CHAT, "temperature": 0, "max_tokens": 8}
    answer = server.post("/v1/chat/completions", body).json()
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT) + "<|im_start|>assistant\n"
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    (expected,) = llm.generate([ids], GREEDY)
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["usage"]["prompt_tokens"] == len(ids)
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    parts = [{**CHAT[0]}, {"role": "user", "content": [{"type": "text", "text": "How do you do?"}]}]
    again = server.post("/v1/chat/completions", {**body, "messages": parts, "max_completion_tokens": 8})
    assert again.json()["choices"] == answer["choices"]
    tokens = server.post("/tokenize", {"messages": CHAT}).json()["tokens"]
    assert tokens == ids


# ---- vectors -------------------------------------------------------------------------------------------------------


def test_embeddings(server, llm):
    answer = server.post("/v1/embeddings", {"input": ["Emma", "Anne Elliot"]}).json()
    expected = [e.embedding for e in llm.embed(["Emma", "Anne Elliot"])]
    found = [np.array(d["embedding"], np.float32) for d in answer["data"]]
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 2
    packed = server.post("/v1/embeddings", {"input": "Emma", "encoding_format": "base64"}).json()["data"][0][
        "embedding"
    ]
    assert np.array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), found[0])


# ---- what is not served --------------------------------------------------------------------------------------------


def test_the_official_client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asks_for_everything(openai, client)


def asks_for_everything(openai, client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    whole = client.completions.create(model="tiny", prompt="Emma", max_tokens=6, temperature=0, logprobs=2)
    chunks = client.completions.create(model="tiny", prompt="Emma", max_tokens=6, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=6, temperature=0, n=2)
    assert answer.choices[0].message.content == answer.choices[1].message.content
    how = dict(
        model="tiny", prompt="Emma", max_tokens=6, n=3, extra_body={"use_beam_search": True, "length_penalty": 0.5}
    )
    beams = [c.text for c in client.completions.create(**how).choices]
    pieces = ["", "", ""]
    for chunk in client.completions.create(**how, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert pieces == beams and len({*beams}) == 3
    best = dict(how, n=1, extra_body={"use_beam_search": True}, temperature=5.0)
    assert len({client.completions.create(**best, seed=i).choices[0].text for i in range(3)}) == 1, "it is drawn"
    with pytest.raises(openai.BadRequestError, match="max_num_seqs"):
        client.completions.create(**dict(how, n=128))
    parts, used = "", None
    for chunk in client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=6, temperature=0, stream=True, stream_options={"include_usage": True}
    ):
        parts += chunk.choices[0].delta.content or "" if chunk.choices else ""
        used = chunk.usage or used
    assert parts == answer.choices[0].message.content and used.completion_tokens == 6
    vector = client.embeddings.create(model="tiny", input="Emma")  # it asks for base64
    assert len(vector.data[0].embedding) == 256
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="tiny", prompt="a", suffix="b")
    with client.completions.create(model="tiny", prompt="Emma", max_tokens=400, stream=True) as some:
        next(iter(some))
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"


def test_settings_of_chats_reach_them(tmp_path):
    """More of what is thought and called is in tests/api/test_answered.py."""
    fields = {"reasoning_field": "both", "reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes"}
    with saying(tmp_path, **fields) as here:
        look = {"type": "function", "function": {"name": "look"}}
        body = {"messages": told(THOUGHT + CALL), "tools": [look], "temperature": 0}
        [choice] = here.post("/v1/chat/completions", body).json()["choices"]
        assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "Let me see."
        assert choice["finish_reason"] == "tool_calls"
        chunks = stream(here, "/v1/chat/completions", **body)
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/warm", "/chat_tokenize"])
def test_where_only_the_prompt_is_wanted_tools_are_checked_and_shown_alike(texts, path):
    tool = {"type": "function", "function": {"name": "visit", "parameters": {"type": "object"}}}
    with site(texts, chat_template=CHATML, tool_call_parser="generic") as here:
        answer = here.post(path, {"messages": CHAT, "tools": [tool]})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        body = {"messages": CHAT, "tools": [tool], "max_tokens": 1}
        wanted = here.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
        assert wanted == found.get("count", found.get("token_count", len(found.get("tokenize_response", ()))))
        for tools in ([{"type": "function"}], [tool, tool], [{"function": 7}]):
            wrong = here.post(path, {"messages": CHAT, "tools": tools})
            assert wrong.status_code in (400, 422) and "tools[" in wrong.text


def test_b27_a_path_may_name_the_model(server):
    """B-27: `/v1/engines/MODEL/...`, and a model in the body comes before it."""
    for path, body in (("completions", {"prompt": "Emma", "max_tokens": 1}), ("embeddings", {"input": "Emma"})):
        answer = server.post(f"/v1/engines/tiny/{path}", body)
        assert answer.status_code == 200 and answer.json()["model"] == "tiny"
        assert refused(server.post(f"/v1/engines/other/{path}", body), 404)["code"] == "model_not_found"
        assert refused(server.post(f"/v1/engines/tiny/{path}", {**body, "model": "other"}), 404)["param"] == "model"
