"""POST /v1/generate: tokens of any kind over HTTP, on every rung; the same wherever the engine is."""

import base64
import io
import json
import socket
import struct
import time
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from hibachi.llm.own import open_model
from hibachi.llm.remote.llm import open_remote
from hibachi.server import generate
from hibachi.server.web import comments
from hibachi.server.web.tenants import Tenant, Tenants

from .conftest import site
from .test_streams import until

FILE = Path(__file__).parent / "anytoken.py"
ENGINES = {"own": open_model, "child": open_remote}
PATH = "/v1/generate"
JSON = "application/json"
MSGPACK, NDJSON, NPY, SSE = "application/msgpack", "application/x-ndjson", "application/x-npy", "text/event-stream"
pack = msgspec.msgpack.encode
START = [[0, 0, 0, 0], [1, 2, 3, 4]]


def opened(name, engine="own", tenants=None, **options):
    return Opened(ENGINES[engine](f"{FILE}:{name}", **options), {} if tenants is None else {"tenants": tenants})


class Opened:
    def __init__(self, model, options):
        self._model, self._site = model, site(model, served_model_name=("m",), **options)

    def __enter__(self):
        self._model.__enter__()
        return self._site.__enter__()

    def __exit__(self, *error):
        self._site.__exit__(*error)
        self._model.__exit__(*error)


@pytest.fixture(scope="module", params=ENGINES)
def codebooks(request):
    with opened("Codebooks", request.param, max_num_seqs=8) as here:
        yield here


@pytest.fixture(scope="module", params=ENGINES)
def rising(request):
    with opened("Rising", request.param, max_num_seqs=4) as here:
        yield here


@pytest.fixture(scope="module")
def classifier():
    with opened("Classifier") as here:
        yield here


@pytest.fixture(scope="module")
def slow():
    tenants = Tenants((("k-anne", "anne"), ("k-emma", "emma")), {"emma": Tenant(max_requests=1)})
    with opened("Slow", max_num_seqs=3, max_num_queued_reqs=2, pause_after=4, tenants=tenants) as here:
        here.client.headers["Authorization"] = "Bearer k-anne"
        yield here


def ahead(start, n):
    """What the codebooks say, by a loop over NumPy."""
    tokens, last = [], np.asarray(start[-1], np.int32)
    for _ in range(n):
        last = (last + np.arange(4)) % 16
        tokens.append(last.tolist())
    return tokens


def unpacked(data):
    """Objects of msgpack, one after another."""
    data = data.strip(b"\xc0") if data.endswith(b"\xc0") else data
    for n in range(1, 400):
        try:
            return msgspec.msgpack.decode(b"\xdc" + struct.pack(">H", n) + data)
        except msgspec.DecodeError:
            continue
    raise AssertionError(data[:200])


def events_of(answer, data=None):
    """(the first event, tokens, the last event) of a stream in any form."""
    kind, data = answer.headers["content-type"].partition(";")[0], answer.content if data is None else data
    if kind == MSGPACK:
        events = [e for e in unpacked(data) if e is not None]
    elif kind == NDJSON:
        events = [json.loads(line) for line in data.split(b"\n") if line]
    else:
        assert data.endswith(b"\n\n")
        events = [json.loads(e[6:]) for e in data.split(b"\n\n") if e.startswith(b"data: ")]
    first, *middle, last = events
    assert all(e.keys() <= {"tokens", "logprobs"} for e in middle)
    return first, [t for e in middle for t in tokens_of(e["tokens"], first)], last


def tokens_of(told, about):
    if isinstance(told, list):
        return told
    data = base64.b64decode(told) if isinstance(told, str) else told
    return np.frombuffer(data, about["dtype"]).reshape(-1, *about["shape"]).tolist()


def npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def post(here, content, kind, query="", **headers):
    return here.client.post(PATH + query, content=content, headers={"Content-Type": kind, **headers})


# ---- forms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept, more", [(SSE, {}), (NDJSON, {}), (SSE, {"encoding": "base64"}), (MSGPACK, {})])
def test_tokens_come_as_events_in_every_form(codebooks, accept, more):
    body = {"prompt": START, "max_tokens": 20, "stream": True, **more}
    answer = codebooks.post(PATH, body, headers={"Accept": accept, "X-Request-Id": "r1"})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(accept)
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
    first, tokens, last = events_of(answer)
    about = {"id": "gen-r1", "object": "generation.chunk", "model": "m", "dtype": "int32", "shape": [4]}
    assert first.items() >= about.items() and first["created"] > 1e9 and first.get("encoding") == more.get("encoding")
    assert tokens == ahead(START, 20)
    usage = {"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22}
    assert last == {"finish_reason": "length", "stop_reason": None, "usage": usage}
    packed = codebooks.post(PATH, {**body, "encoding": "base64"}, headers={"Accept": MSGPACK})
    assert "encoding" not in events_of(packed)[0]  # bytes are bytes there


def test_a_whole_answer_in_every_form(codebooks):
    body, expected = {"prompt": START, "max_tokens": 5}, ahead(START, 5)
    told = codebooks.post(PATH, body).json()
    assert told["tokens"] == expected and (told["object"], told["finish_reason"]) == ("generation", "length")
    told = codebooks.post(PATH, {**body, "encoding": "base64"}).json()
    assert told["encoding"] == "base64" and tokens_of(told["tokens"], told) == expected
    told = msgspec.msgpack.decode(codebooks.post(PATH, body, headers={"Accept": MSGPACK}).content)
    assert isinstance(told["tokens"], bytes) and tokens_of(told["tokens"], told) == expected
    answer = codebooks.post(PATH, body, headers={"Accept": "application/json;q=0.5, application/x-npy"})
    found = np.load(io.BytesIO(answer.content))
    assert found.dtype == np.int32 and found.tolist() == expected and answer.headers["content-type"] == NPY
    headers = {"x-finish-reason": "length", "x-prompt-tokens": "2", "x-completion-tokens": "5"}
    assert answer.headers.items() >= headers.items()


# ---- what ends it --------------------------------------------------------------------------------------------------


def test_stop_tokens_and_the_class_s_own(codebooks):
    body = {"prompt": START, "max_tokens": 9, "stop": [[7, 7, 7, 7], ahead(START, 2)[1]]}
    told = codebooks.post(PATH, body).json()
    assert (told["tokens"], told["finish_reason"]) == (ahead(START, 2), "stop")
    told = codebooks.post(PATH, {**body, "include_stop": False}).json()
    assert (told["tokens"], told["usage"]["completion_tokens"]) == (ahead(START, 1), 1)
    own = codebooks.post(PATH, {"prompt": [[9, 8, 7, 6]], "stop": [[1, 1, 1, 1]], "include_stop": False}).json()
    assert (own["tokens"], own["shape"], own["dtype"], own["finish_reason"]) == ([], [4], "int32", "stop")
    stream = codebooks.post(PATH, {"prompt": [[9, 8, 7, 6]], "include_stop": False, "stream": True})
    first, tokens, last = events_of(stream)
    assert (first["shape"], tokens, last["finish_reason"]) == ([4], [], "stop")


def test_tokens_go_out_as_they_go_back_into_the_model():
    """In the dtype that the answer says, whatever the model returns."""
    one = np.float32([1, 2]) + 0.1
    two = (one.astype(np.float32).astype(float) + 0.1).astype(np.float32)
    expected = [np.float32(one).tolist(), two.tolist()]
    body = {"prompt": [[1, 2]], "max_tokens": 2, "encoding": "base64"}
    with opened("Double") as here:
        told = here.post(PATH, body).json()
        assert told["dtype"] == "float32" and tokens_of(told["tokens"], told) == expected
        first, tokens, _ = events_of(here.post(PATH, {**body, "stream": True}))
        assert first["dtype"] == "float32" and tokens == expected
        assert np.load(io.BytesIO(here.post(PATH, body, headers={"Accept": NPY}).content)).dtype == np.float32


def test_long_lists_are_written_beside_the_event_loop(monkeypatch):
    monkeypatch.setattr(generate, "ASIDE", 1)
    with opened("Slow") as here:
        body = {"prompt": np.zeros((1, 256)).tolist(), "max_tokens": 3}
        expected = [[n] * 256 for n in (1, 2, 3)]
        assert events_of(here.post(PATH, {**body, "stream": True}))[1] == expected
        assert here.post(PATH, body).json()["tokens"] == expected


def test_what_writes_may_write_there_too():
    with opened("Constant") as here:
        body = {"prompt": [1], "max_tokens": 1}
        assert here.post(PATH, body, headers={"Accept": "text/plain"}).text == "10"
        answer = here.post(PATH, body, headers={"Accept": "text/csv, application/json;q=0.1"})
        assert answer.json()["tokens"] == [5.0]


# ---- bytes of its own ----------------------------------------------------------------------------------------------


def test_a_class_reads_and_writes_types_of_its_own(rising):
    samples = np.int16([1, 2]).tobytes()  # 0.5, 1.0
    assert post(rising, samples, "audio/pcm", Accept="application/json").json()["tokens"] == [1.5, 2.0, 2.5, 3.0]
    assert post(rising, samples, "Audio/PCM; rate=8000", "?max_tokens=1", Accept=JSON).json()["tokens"] == [1.5]
    for accept in ("*/*", "audio/wav;q=0, */*"):  # who sends its own type and names no other gets it
        assert post(rising, samples, "audio/pcm", Accept=accept).content == np.int16([3, 4, 5, 6]).tobytes()
    assert rising.post(PATH, {"prompt": [2.5]}, headers={"Accept": "*/*"}).json()["tokens"] == [3.0]
    first, tokens, _ = events_of(post(rising, samples, "audio/pcm", "?stream=true", Accept="*/*"))
    assert (first["dtype"], tokens) == ("float32", [1.5, 2.0, 2.5, 3.0])
    answer = post(rising, samples, "audio/pcm", Accept="audio/*, application/json;q=0.5")
    assert answer.headers["content-type"] == "audio/pcm" and answer.headers["x-finish-reason"] == "stop"
    assert np.frombuffer(answer.content, "<i2").tolist() == [3, 4, 5, 6]
    assert rising.post(PATH, {"prompt": [2.5]}, headers={"Accept": "audio/pcm"}).content == np.int16([6]).tobytes()
    # What comes of it is not what was named: then one of ours, where that is taken.
    answer = rising.post(PATH, {"prompt": [2.5]}, headers={"Accept": "audio/wav, application/json;q=0.1"})
    assert answer.json()["tokens"] == [3.0]


@pytest.mark.parametrize(
    "content, kind, accept, status, says",
    [
        (b"abc", "audio/pcm", "*/*", 400, "half a sample is missing"),
        (b"ab", "text/csv", "*/*", 400, "expected audio/pcm; got text/csv"),
        (b"ab", "audio/pcm", "audio/wav", 406, "audio/pcm"),
        (b"", "audio/pcm", "*/*", 400, "at least one token"),
    ],
)
def test_what_its_own_reader_refuses(rising, content, kind, accept, status, says):
    answer = post(rising, content, kind, Accept=accept)
    assert answer.status_code == status and says in answer.json()["error"]["message"]


# ---- other rungs ---------------------------------------------------------------------------------------------------


def test_a_feed_forward_model_gives_one_output(classifier):
    told = classifier.post(PATH, {"input": [1, 2, 3]}).json()
    assert (told["object"], told["output"], told["shape"], told["dtype"]) == ("output", [-6, 6], [2], "float32")
    assert np.load(io.BytesIO(post(classifier, npy(np.ones(3, "f4")), NPY, Accept=NPY).content)).tolist() == [-3, 3]
    told = msgspec.msgpack.decode(classifier.post(PATH, {"input": [1, 2, 3]}, headers={"Accept": MSGPACK}).content)
    assert np.frombuffer(told["output"], "<f4").tolist() == [-6, 6]
    assert classifier.post(PATH, {"input": [1, 2, 3]}, headers={"Accept": "text/plain"}).text == "large"
    for name, value in {"max_tokens": 2, "stop": [[1, 2]], "stream": True, "temperature": 0.5}.items():
        answer = classifier.post(PATH, {"input": [1, 2, 3], name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name


@pytest.mark.parametrize("engine", ENGINES)
def test_several_outputs_are_an_object_of_them(engine):
    with opened("Several", engine) as here:
        told = here.post(PATH, {"input": [3, 1, 2]}).json()
        assert told["output"] == {"ids": [1, 2, 0], "scores": [[1, 2, 3], 3]}
        assert told["shape"] == {"ids": [3], "scores": [[3], []]} and told["dtype"]["scores"] == ["float32"] * 2
        told = msgspec.msgpack.decode(here.post(PATH, {"input": [3, 1, 2]}, headers={"Accept": MSGPACK}).content)
        assert np.frombuffer(told["output"]["scores"][0], "<f4").tolist() == [1, 2, 3]
        answer = here.post(PATH, {"input": [3, 1, 2]}, headers={"Accept": NPY})
        assert answer.status_code == 406 and "of several arrays" in answer.json()["error"]["message"]


def test_no_numbers_are_blamed_on_who_sent_them(classifier):
    answer = classifier.post(PATH, {"input": [1, "NaN", 3]})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "not_finite"


def test_ids_of_a_model_that_gives_logits():
    with opened("Next", max_num_seqs=2) as here:
        told = here.post(PATH, {"prompt": [1], "temperature": 0}).json()
        assert (told["tokens"], told["shape"], told["finish_reason"]) == ([2, 3, 4, 5, 6, 7, 8, 9], [], "stop")
        assert told["stop_reason"] is None  # its own
        told = here.post(PATH, {"prompt": [1], "stop": [5], "logprobs": 1, "seed": 3, "include_stop": False}).json()
        assert (told["tokens"], told["stop_reason"]) == ([2, 3, 4], 5)
        assert [list(one) for one in told["logprobs"]] == [["2"], ["3"], ["4"]]
        answer = here.post(PATH, {"prompt": [1], "max_tokens": 64})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "0 to 9" in here.post(PATH, {"prompt": [10]}).json()["error"]["message"]


def test_beams_of_ids(server):
    body = {"prompt": [5, 6, 7], "max_tokens": 5, "n": 3, "use_beam_search": True}
    told = server.post(PATH, body).json()["samples"]
    scores = [one["score"] for one in told]
    assert scores == sorted(scores, reverse=True) and len({*map(str, told)}) == 3
    texts = server.complete([5, 6, 7], max_tokens=5, n=3, use_beam_search=True, return_token_ids=True)["choices"]
    assert [one["tokens"] for one in told] == [one["token_ids"] for one in texts]
    assert server.post(PATH, body | {"logprobs": 1}).json()["error"]["param"] == "logprobs"
    with opened("Next", max_num_seqs=2) as here:
        refused = here.post(PATH, {"prompt": [1], "n": 3, "use_beam_search": True}).json()["error"]
        assert refused["param"] == "n" and "max_num_seqs=2; got 3" in refused["message"]


def test_a_text_model_says_the_ids_of_its_completions(server):
    whole = server.complete([5, 6, 7], return_token_ids=True, logprobs=0)["choices"][0]
    body = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 8, "logprobs": 0}
    told = server.post(PATH, body).json()
    assert (told["tokens"], told["dtype"]) == (whole["token_ids"], "int32")
    scores = [p for one in told["logprobs"] for p in one.values()]
    np.testing.assert_allclose(scores, whole["logprobs"]["token_logprobs"])
    _, tokens, last = events_of(server.post(PATH, {**body, "stream": True}, headers={"Accept": MSGPACK}))
    assert tokens == whole["token_ids"] and last["usage"]["prompt_tokens"] == 3
    lines = server.post(PATH, {**body, "stream": True}, headers={"Accept": NDJSON}).text.splitlines()
    events = [json.loads(line) for line in lines[1:-1]]
    assert [one for event in events for one in event["logprobs"]] == told["logprobs"]


def test_a_model_without_text_says_so_elsewhere(codebooks):
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/embeddings", {"input": "a"})):
        answer = codebooks.post(path, body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_text"
        assert PATH in answer.json()["error"]["message"]
    assert [codebooks.client.get(path).status_code for path in ("/v1/models", "/health", "/debug/flight")] == [200] * 3


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers, stream, status, says",
    [
        ({"Accept": "text/html"}, False, 406, "application/json, application/x-npy, application/msgpack"),
        ({"Accept": "application/x-npy"}, True, 406, SSE),
        ({"Accept": SSE}, False, 406, "stream=true"),
        ({"Accept": "audio/wav"}, False, 406, "application/x-npy"),
        ({"Content-Encoding": "br"}, False, 415, "gzip, deflate"),
    ],
)
def test_headers_that_are_refused(codebooks, headers, stream, status, says):
    answer = codebooks.post(PATH, {"prompt": START, "stream": stream}, headers=headers)
    assert answer.status_code == status and says in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", [None, "", "text/plain;charset=UTF-8", "multipart/form-data; boundary=a"])
def test_a_page_sends_nothing_for_which_its_browser_does_not_ask(codebooks, kind):
    """Such a body goes out to any server, whatever origins it allows; only the answer is hidden from the page."""
    headers = {"Origin": "https://evil.example"} | ({} if kind is None else {"Content-Type": kind})
    content = json.dumps({"prompt": START, "max_tokens": 2}).encode()
    answer = codebooks.client.post(PATH, content=content, headers=headers)
    assert answer.status_code == 415 and answer.json()["error"]["code"] == "unsupported_media_type"
    if kind is None:  # programs that are no browser say no origin
        assert codebooks.client.post(PATH, content=content).status_code == 200


# ---- life ----------------------------------------------------------------------------------------------------------

LONG = {"prompt": np.zeros((1, 256)).tolist(), "max_tokens": 900, "stream": True}


def at_rest(here):
    stats = here.served.what.stats()
    return not stats.running and not stats.waiting


def send(here, body, key="k-anne"):
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", here.port))
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_its_place(slow, stream):
    sock = send(slow, {**LONG, "stream": stream})
    until(lambda: slow.served.what.stats().running)
    sock.close()
    until(lambda: at_rest(slow), 2)


def test_who_does_not_read_is_paused():
    data = base64.b64encode(bytes(1 << 18)).decode()
    body = {"prompt": {"dtype": "float32", "shape": [1, 1 << 16], "data": data}}
    with opened("Wide", pause_after=2) as here:
        stats = here.served.what.stats
        with send(here, {**body, "max_tokens": 200, "stream": True, "encoding": "base64"}):
            until(lambda: stats().new_tokens and paused(here))
            assert stats().new_tokens < 150 and not at_rest(here)  # some megabytes lie in the sockets
        until(lambda: at_rest(here))


def paused(here):
    before = here.served.what.stats().new_tokens
    time.sleep(0.1)
    return here.served.what.stats().new_tokens == before


@pytest.mark.parametrize("accept", [SSE, NDJSON, MSGPACK])
def test_an_error_in_the_middle_is_an_event(slow, accept, monkeypatch):
    monkeypatch.setattr(generate, "EACH", 1.0)  # so that the last tokens come together with the error
    for more, code in (({"timeout": 0.1}, "deadline_exceeded"), ({"max_tokens": 20}, "model_fault")):
        start = 0 if "timeout" in more else 997
        body = {**LONG, "prompt": np.full((1, 256), start).tolist(), **more}
        answer = slow.post(PATH, body, headers={"Accept": accept})
        first, tokens, last = events_of(answer)
        assert answer.status_code == 200 and first["shape"] == [256] and tokens
        assert last["error"]["code"] == code
    assert [token[0] for token in tokens] == [998, 999, 1000]
    until(lambda: at_rest(slow))


def test_an_error_before_the_first_token_has_its_status(slow):
    assert slow.post(PATH, {**LONG, "prompt": np.full((1, 256), -1).tolist()}).status_code == 500
    assert slow.post(PATH, {**LONG, "timeout": 1e-9}).status_code == 408
    assert slow.client.post(PATH, json=LONG, headers={"Authorization": "Bearer no"}).status_code == 401


@pytest.mark.parametrize("accept, comment", [(SSE, b": waiting\n\n"), (NDJSON, b"\n"), (MSGPACK, b"\xc0")])
def test_a_stream_that_waits_says_so_in_its_form(slow, accept, comment, monkeypatch):
    monkeypatch.setattr(comments, "EVERY", 0.01)
    monkeypatch.setattr(slow.served.what.engine.model, "pause", 0.05)
    body = {**LONG, "max_tokens": 2}
    with slow.client.stream("POST", PATH, json=body, headers={"Accept": accept}) as answer:
        assert answer.headers["content-type"].startswith(accept) and answer.headers["cache-control"] == "no-cache"
        data = b"".join(answer.iter_raw())
    assert data.startswith(comment * 2)
    assert len(events_of(answer, data)[1]) == 2


def test_a_record_is_kept_of_it(codebooks):
    def counted():
        told = codebooks.client.get("/metrics").text
        rows = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
        routes = [float(v) for name, v in rows.items() if PATH in name and 'status="200"' in name]
        refused = [float(v) for name, v in rows.items() if name.startswith("hibachi_requests_rejected_total")]
        totals = (float(rows[f"hibachi_{of}_tokens_total"]) for of in ("generation", "prompt"))
        return *totals, sum(routes), sum(refused)

    before = counted()
    codebooks.post(PATH, {"prompt": START, "max_tokens": 6, "stream": True})
    codebooks.post(PATH, {"prompt": [1]})
    until(lambda: np.subtract(counted(), before).tolist() == [6, 2, 1, 1])
    assert httpx.get(codebooks.url + PATH).status_code == 405


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_that_were_found_computed_are_told(engine):
    """Also of a model with a cache of its own."""
    prompt = [i % 10 for i in range(40)]
    with opened("Remembers", engine) as here:
        told = [post(here, json.dumps({"prompt": prompt, "max_tokens": 2}), "application/json").json() for _ in "ab"]
    assert told[0]["tokens"] == told[1]["tokens"]
    assert [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in told] == [0, 32]
