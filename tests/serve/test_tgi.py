"""TGI's routes: what is answered is what the engine says, in TGI's shapes. Its facts by their numbers (T-..)."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from hibachi import LLM, SamplingParams
from hibachi.llm.own import open_texts
from hibachi.server.tgi_settings import TgiAsked
from hibachi.server.web.tenants import Tenants

from .conftest import CHATML, ENGINES, site
from .test_streams import at_rest, send, until

PROMPT = "It is a truth"


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny") as found:
        yield found


def generate(server, inputs=PROMPT, path="/generate", **parameters):
    """An answer that must be good."""
    response = server.post(path, {"inputs": inputs, "parameters": {"max_new_tokens": 6, **parameters}})
    assert response.status_code == 200, response.text
    return response.json()


def events(response):
    assert response.status_code == 200 and response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def stream(server, inputs=PROMPT, **parameters):
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 6, **parameters}}
    return events(server.post("/generate_stream", body))


def refused(response, status=422, kind="validation"):
    assert response.status_code == status, response.text
    error = response.json()
    assert set(error) == {"error", "error_type"} and error["error_type"] == kind
    return error["error"]


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_a_text_is_what_the_engine_says(server, llm):
    (expected,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6))
    assert generate(server) == {"generated_text": expected.text}
    assert generate(server, return_full_text=True) == {"generated_text": PROMPT + expected.text}
    details = generate(server, details=True)["details"]
    assert details["finish_reason"] == "length" and details["generated_tokens"] == 6 and details["seed"] is None
    assert [t["id"] for t in details["tokens"]] == list(expected.token_ids)
    assert "".join(t["text"] for t in details["tokens"]) == expected.text


def test_a_stream_has_an_event_for_each_token(server):
    """T-34."""
    found = stream(server, details=True, top_n_tokens=2)
    whole = generate(server, details=True, top_n_tokens=2)
    assert [e["index"] for e in found] == [1, 2, 3, 4, 5, 6]
    assert [e["generated_text"] for e in found] == [None] * 5 + [whole["generated_text"]]
    assert [e["token"] for e in found] == whole["details"]["tokens"]
    assert [e["top_tokens"] for e in found] == whole["details"]["top_tokens"]
    assert found[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 6,
        "seed": None,
        "input_length": len(server.texts.tokenizer.encode(PROMPT)),
    }
    assert all(e["details"] is None for e in found[:-1])


def test_headers_tell_the_times(server):
    response = server.post("/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 6}})
    told = {name: value for name, value in response.headers.items() if name.startswith("x-") and "request" not in name}
    assert told.pop("x-compute-type") == server.served.numerics
    assert told.pop("x-compute-characters") == str(len(PROMPT)) and float(told.pop("x-compute-time")) > 0
    assert told.pop("x-generated-tokens") == "6"
    assert told.pop("x-prompt-tokens") == str(len(server.texts.tokenizer.encode(PROMPT)))
    names = ("total-time", "validation-time", "queue-time", "inference-time", "time-per-token")
    times = [int(told.pop(f"x-{name}")) for name in names]
    assert not told and abs(times[0] - sum(times[1:4])) <= 2 and times[4] <= times[3]
    response = server.post("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 1}})
    assert response.headers["x-compute-characters"] == str(len(PROMPT)) and "x-total-time" not in response.headers


def test_the_best_of_several(server):
    answer = generate(server, best_of=3, do_sample=True, details=True)
    others = answer["details"].pop("best_of_sequences")
    assert len(others) == 2

    def mean(tokens):
        return sum(t["logprob"] for t in tokens) / len(tokens)

    assert all(mean(answer["details"]["tokens"]) >= mean(o["tokens"]) for o in others)
    for one in (answer, *others):
        seed = one.get("details", one)["seed"]
        assert generate(server, do_sample=True, seed=seed)["generated_text"] == one["generated_text"]


ENDS = '''
import numpy as np

class Ends:
    """Counts from the last byte on; "z" is its end."""

    vocab_size, max_model_len, eos_ids = 128, 4096, (122,)

    class tokenizer:
        encode = staticmethod(lambda text: list(text.encode()))
        decode = staticmethod(lambda ids: bytes(ids).decode("latin-1"))

    def logits(self, tokens, lengths):
        last = tokens[np.arange(len(lengths)), np.asarray(lengths) - 1]
        if (last == 33).any():
            raise RuntimeError("a secret of the model")
        following = np.where(last == 35, 35, last + 1) % 128  # "#" goes on for ever
        return np.eye(128, dtype=np.float32)[following] * 50
'''


@pytest.fixture(scope="module", params=ENGINES)
def ends(request, tmp_path_factory):
    """A server of a model that says the alphabet; it goes on for ever behind "#", and fails at "!"."""
    file = tmp_path_factory.mktemp("ends") / "ends.py"
    file.write_text(ENDS)
    with ENGINES[request.param](f"{file}:Ends", max_num_seqs=4) as texts, site(texts) as here:
        yield here


@pytest.mark.parametrize("most", (1100, pytest.param(3000, marks=pytest.mark.slow)))
def test_many_tokens_are_one_stream(ends, most, monkeypatch):
    """T-42: beyond TGI's 1,024 at a time, and the text is cut into tokens once."""
    tokenizer, cut = ends.texts.tokenizer, []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: cut.append(text) or encode(text, **more))
    found = stream(ends, "#", max_new_tokens=most, details=True)
    assert [e["index"] for e in found] == list(range(1, most + 1))
    assert found[-1]["generated_text"] == "#" * most
    assert found[-1]["details"]["finish_reason"] == "length" and found[-1]["details"]["generated_tokens"] == most
    assert cut == ["#"]


def test_a_model_that_fails(ends):
    """T-39: nobody else notices, and the next request is served."""
    body = {"inputs": "!", "parameters": {"max_new_tokens": 3}}
    words = refused(ends.post("/generate", body), 424, "generation")
    assert "secret" not in words and words.startswith("Request failed during generation: ")
    assert [e["error_type"] for e in events(ends.post("/generate_stream", body))] == ["generation"]
    # It fails at its second step, when the stream has begun.
    *good, bad = stream(ends, " ", max_new_tokens=5)
    assert [e["token"]["text"] for e in good] == ["!"] and bad["error_type"] == "generation"
    assert generate(ends, "a", max_new_tokens=2) == {"generated_text": "bc"}
    assert ends.client.get("/health").status_code == ends.client.get("/ping").status_code == 200


@pytest.mark.parametrize("path", ("/generate", "/generate_stream"))
def test_who_leaves_is_forgotten(gated, path):
    """T-40: the row is free at the next step."""
    gate, here = gated
    sock = send(here, {"inputs": "a", "parameters": {"max_new_tokens": 50}}, path)
    until(lambda: here.texts.stats().running)
    gate.let(2)
    if path == "/generate_stream":
        assert sock.recv(4096)
    sock.close()
    until(lambda: (gate.let(1), at_rest(here))[1])
    assert here.texts.stats().new_tokens < 50


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_is_refused_is_an_event_of_a_stream(server):
    """T-33; but not what is no request at all."""
    for parameters, word in (({"temperature": 0}, "`temperature`"), ({"best_of": 2}, "streaming"), ({"x": 1}, "x")):
        body = {"inputs": PROMPT, "parameters": parameters}
        (event,) = events(server.post("/generate_stream", body))
        assert set(event) == {"error", "error_type"} and event["error_type"] == "validation" and word in event["error"]
        if "best_of" not in parameters:
            assert refused(server.post("/generate", body)) == event["error"]
    post = server.client.post
    kind = {"content-type": "application/json"}
    assert "JSON" in refused(post("/generate_stream", content=b"{", headers=kind))
    refused(post("/generate_stream", content=b"{}", headers={"content-type": "text/plain"}), 415)
    with site(server.texts, max_body_size=100) as small:
        refused(small.post("/generate_stream", {"inputs": "x" * 200}), 413)


def test_facts_of_validation_over_http(server):
    """T-25, with TGI's own limits; T-26 to T-30 are in tests/api."""
    limits = TgiAsked(2, 3, 4, 5, 6)
    with site(server.texts, tgi=limits) as like:
        for inputs, parameters, words in (
            ("It", {"max_new_tokens": 10}, "must be <= 6. Given: 1 `inputs` tokens and 10"),
            (PROMPT * 2, {"max_new_tokens": 1}, "`max_new_tokens`"),
        ):
            assert words in refused(like.post("/generate", {"inputs": inputs, "parameters": parameters})), words
        assert like.post("/generate", {"inputs": "It"}).headers["x-generated-tokens"] == "5"  # the room that is left
        told = like.client.get("/info").json()
        assert [told[f"max_{n}"] for n in ("best_of", "stop_sequences", "input_tokens", "total_tokens")] == [2, 3, 5, 6]


def test_a_request_says_once_whether_it_streams(server):
    assert "`stream`" in refused(server.post("/generate", {"inputs": "a", "stream": True}))
    (event,) = events(server.post("/generate_stream", {"inputs": "a", "stream": False}))
    assert "`stream`" in event["error"]
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    assert server.post("/generate", {**body, "stream": False}).status_code == 200


# ---- POST /, SageMaker -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ("/", "/invocations"))
def test_post_to_the_root(server, path):
    """A list of one, or a stream, and the prompt in front unless it is said not to be."""
    (plain,) = generate(server, path=path, return_full_text=False)
    assert plain == generate(server)
    (whole,) = generate(server, path=path)
    assert whole["generated_text"] == PROMPT + plain["generated_text"]
    body = {"inputs": PROMPT, "stream": True, "parameters": {"max_new_tokens": 6}}
    assert [e["generated_text"] for e in events(server.post(path, body))][-1] == whole["generated_text"]
    (event,) = events(server.post(path, {**body, "parameters": {"top_k": 0}}))
    assert event["error_type"] == "validation"
    refused(server.post(path, {**body, "stream": False, "parameters": {"top_k": 0}}))
    refused(server.post(path, {}))


def test_other_invocations(server):
    """OpenAI's bodies are answered as OpenAI's routes do."""
    options = {"temperature": 0, "max_tokens": 4}
    messages = {"messages": [{"role": "user", "content": "a"}], **options}
    for body, path in (({"prompt": PROMPT, **options}, "/v1/completions"), (messages, "/v1/chat/completions")):
        same, found = server.post(path, body).json(), server.post("/invocations", body).json()
        assert found["choices"] == same["choices"] and found["object"] == same["object"]
        error = server.post("/invocations", {**body, "n": 0})
        assert error.status_code == 400 and error.json()["error"]["param"] == "n"


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_of_a_text(server):
    text = "Grüße, 日本"
    found = server.post("/tokenize", {"inputs": text, "parameters": {"truncate": 1}}).json()
    assert [t["id"] for t in found] == server.texts.tokenizer.encode(text)
    assert all(text.encode()[t["start"] : t["stop"]].decode() == t["text"] for t in found)
    assert server.post("/tokenize", {"prompt": text}).json()["tokens"] == [t["id"] for t in found]  # ours
    assert "x" in refused(server.post("/tokenize", {"inputs": text, "x": 1}))
    assert server.post("/tokenize", {"prompt": text, "x": 1}).json()["error"]["param"] == "x"
    assert server.post("/tokenize", {"inputs": ""}).json() == []


def test_tokens_of_a_conversation(server):
    messages = [{"role": "user", "content": "Is it?"}]
    body = {"messages": messages, "model": "tiny", "max_tokens": 5, "temperature": 0.5}
    found = server.post("/chat_tokenize", body).json()
    text = server.texts.tokenizer.render_chat(messages, chat_template=CHATML)
    assert found["templated_text"] == text
    ids = server.texts.tokenizer.encode(text, add_special_tokens=False)
    assert [t["id"] for t in found["tokenize_response"]] == ids
    tools = {"tools": [{"type": "function", "function": {"name": "look"}}]}
    assert "look" in server.post("/chat_tokenize", {**body, **tools}).json()["templated_text"]
    tools["tool_choice"] = "none"
    assert "look" not in server.post("/chat_tokenize", {**body, **tools}).json()["templated_text"]
    wrong = server.post("/chat_tokenize", {**body, **tools, "response_format": {"type": "json"}})
    assert "mutually exclusive" in refused(wrong, kind="tool_error")
    assert "tool_prompt" in refused(server.post("/chat_tokenize", {**body, "tool_prompt": "a"}))
    assert "top_k" in refused(server.post("/chat_tokenize", {**body, "top_k": 1}))
    refused(server.post("/chat_tokenize", {**body, "messages": []}))
    assert "gpt-9" in refused(server.post("/chat_tokenize", {**body, "model": "gpt-9"}), 404)


def test_a_template_that_refuses(server):
    with site(server.texts, chat_template="{{ raise_exception('not you') }}") as picky:
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert "not you" in refused(picky.post("/chat_tokenize", body), kind="template_error")
    with site(server.texts) as none:
        assert "template" in refused(none.post("/chat_tokenize", body), kind="template_error")


# ---- about the server ------------------------------------------------------------------------------------------------


def test_info(server):
    told = server.client.get("/info").json()
    assert told["model_id"] == "tiny" and told["version"] == version("hibachi") and told["router"] == "hibachi"
    assert (told["max_total_tokens"], told["max_input_tokens"]) == (512, 511)
    assert (told["max_best_of"], told["max_stop_sequences"], told["max_client_batch_size"]) == (128, 16, 1024)


def test_health_computes_nothing(server):
    for _ in range(100):  # the last steps of a request that another test left may still come
        before = server.texts.stats().steps
        for call in (server.client.get, server.client.head):
            for path in ("/", "/ping"):
                response = call(path)
                assert response.status_code == 200 and not response.content and response.headers["vary"] == "Accept"
        assert server.client.get("/health").json()["status"] == "ok"
        if server.texts.stats().steps == before:
            return
    raise AssertionError("the engine makes steps whenever somebody asks")


def test_an_engine_that_is_gone_is_unhealthy():
    with open_texts("tiny", max_num_seqs=1) as texts, site(texts) as here:
        texts.close()
        response = here.client.get("/ping")
        assert response.status_code == 503
        assert response.json() == {"error": "unhealthy", "error_type": "healthcheck"}
        assert here.client.head("/").status_code == 503
        response = here.post("/generate", {"inputs": "a"})
        assert response.status_code == 503 and response.json()["error_type"] in ("generation", "incomplete_generation")


def test_who_shuts_down_or_stalls_says_so_with_its_status(server):
    """On streams too: nothing was read, so whoever asked may go to another server."""
    with site(server.texts) as here:
        here.served.draining = True
        for path in ("/generate", "/generate_stream", "/", "/invocations"):
            answer = here.post(path, {"inputs": "a", "stream": path == "/generate_stream"})
            assert "shutting down" in refused(answer, 503, "incomplete_generation") and answer.headers["retry-after"]


def test_a_method_that_a_route_has_not_is_refused_in_its_dialect(server):
    for path, allowed in (("/generate", "POST"), ("/generate_stream", "POST"), ("/", "GET, POST, HEAD")):
        answer = server.client.put(path)
        assert "no such method" in refused(answer, 405) and answer.headers["allow"] == allowed
    answer = server.client.put("/health")
    assert answer.json()["error"]["code"] == "method_not_allowed" and answer.headers["allow"] == "GET, HEAD"


def test_the_log_tells_why_a_stream_was_refused(server, caplog):
    """Its status is 200; figures: T-35 in test_compat.py."""
    with caplog.at_level("INFO", "hibachi.request"):
        server.post("/generate_stream", {"inputs": ""})
        server.post("/generate_stream", {"inputs": "a", "parameters": {"watermark": True}})
        until(lambda: len(caplog.records) == 2)
    lines = [r.getMessage() for r in caplog.records]
    assert all(line.startswith("POST /generate_stream 200 code=") for line in lines)
    assert [line.split()[3] for line in lines] == ["code=invalid_value", "code=unsupported_parameter"]


def test_keys(server):
    """T-38: a wrong one or none is refused in the dialect's own words, but whoever asks for health is answered."""
    with site(server.texts, tenants=Tenants((("k1", "a"),))) as locked:
        body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
        for path in ("/generate", "/generate_stream", "/", "/invocations", "/chat_tokenize"):
            for key in ({}, {"authorization": "Bearer k2"}, {"x-api-key": "k2"}):
                refused(locked.post(path, body, headers=key), 401, "authentication")
        assert locked.post("/tokenize", body).status_code == locked.client.get("/info").status_code == 401
        assert locked.post("/generate", body, headers={"authorization": "Bearer k1"}).status_code == 200
        for path in ("/health", "/ping", "/", "/ready", "/version", "/metrics", "/docs", "/openapi.json"):
            assert locked.client.get(path).status_code == locked.client.head(path).status_code == 200, path


# ---- OpenAI's routes, as TGI's snapshots have them -------------------------------------------------------------------
