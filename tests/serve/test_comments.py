"""Streams that wait say so: they begin with 200 and a comment, and errors from then on are events."""

import asyncio
import json
from functools import partial

import httpx
import pytest

from hibachi.llm.remote.llm import RemoteLLM
from hibachi.request import SamplingParams
from hibachi.server.web import comments
from hibachi.server.web.exchange import Exchange

from .conftest import SLOW, Gate, site
from .test_streams import until


@pytest.fixture
def gated(tmp_path, monkeypatch):
    monkeypatch.setattr(comments, "EVERY", 0.05)
    gate = Gate(tmp_path)
    with (
        RemoteLLM(gate.model, max_num_seqs=1, max_num_queued_reqs=1) as texts,
        site(texts, chat_template=FIRST) as here,
    ):
        yield here, gate
        gate.open()
    gate.close()


FIRST = "{{ messages[0].content }}"


def lines_of(answer):
    return (line for line in answer.iter_lines() if line)


BODY = {"prompt": "a", "max_tokens": 2, "temperature": 0, "stream": True}


@pytest.mark.parametrize("path, more", [("/v1/completions", {}), ("/v1/chat/completions", {})])
def test_a_stream_that_waits_sends_comments_and_then_its_events(gated, path, more):
    here, gate = gated
    if "chat" in path:
        more = {"messages": [{"role": "user", "content": "a"}]}
    body = {**BODY, **more}
    if more:
        body.pop("prompt")
    with httpx.stream("POST", here.url + path, json=body, timeout=30) as answer:
        lines = lines_of(answer)
        assert answer.status_code == 200 and answer.headers["x-accel-buffering"] == "no"
        assert [next(lines), next(lines)] == [": waiting"] * 2
        gate.let()
        first = next(line for line in lines if line.startswith("data"))
        assert next(lines) is not None  # between events as well
        gate.open()
        rest = [line for line in lines if line != ": waiting"]
    assert json.loads(first[6:])["choices"] and rest[-1] == "data: [DONE]"


def test_a_stream_of_tgis_that_waits_has_its_headers(gated):
    here, gate = gated
    body = {"inputs": "abc", "parameters": {"max_new_tokens": 1}}
    with httpx.stream("POST", here.url + "/generate_stream", json=body, timeout=30) as answer:
        lines = lines_of(answer)
        assert next(lines) == ": waiting" and answer.headers["x-compute-characters"] == "3"
        gate.open()
        events = [json.loads(line[6:]) for line in lines if line != ": waiting"]
    assert [e["generated_text"] for e in events] == ["d"]


def test_no_comment_overtakes_the_head_of_an_answer():
    """It may wait for a client that has not read the answer before it, on the same connection."""

    async def sent():
        found, room = [], asyncio.Event()

        async def send(message):
            await room.wait()
            found.append(message["type"])

        x = Exchange({"headers": [], "path": "/", "method": "POST"}, None, send)
        waiting = comments.Comments(x, every=0.001)
        beginning = asyncio.ensure_future(x.begin(200, b"text/event-stream"))
        await asyncio.sleep(0.01)
        before = len(asyncio.all_tasks())
        room.set()
        await beginning
        waiting.stop()
        return found, before

    assert asyncio.run(sent()) == (["http.response.start"], 2)


@pytest.fixture
def busy(tmp_path, monkeypatch):
    """A request runs for a long time, so that others wait."""
    monkeypatch.setattr(comments, "EVERY", 0.05)
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    with RemoteLLM(f"{file}:Slow", max_num_seqs=1) as texts, site(texts) as here:
        running = texts.stream("a", SamplingParams(max_tokens=400))
        yield here
        running.close()


def test_an_error_after_a_comment_is_an_event(busy, caplog):
    caplog.set_level("INFO", "hibachi.request")
    with httpx.stream("POST", busy.url + "/v1/completions", json={**BODY, "timeout": 0.3}, timeout=30) as answer:
        lines = [line for line in lines_of(answer) if line != ": waiting"]
    assert answer.status_code == 200
    assert json.loads(lines[0][6:])["error"]["code"] == "deadline_exceeded" and lines[1:] == ["data: [DONE]"]
    until(lambda: caplog.records)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "hibachi.request"]
    assert line.startswith("POST /v1/completions 200 ") and " error=DeadlineExceeded code=deadline_exceeded " in line


def test_an_answer_that_is_no_stream_gets_no_comment(busy):
    answer = busy.post("/v1/completions", {**BODY, "stream": False, "timeout": 0.3})
    assert answer.status_code == 408 and answer.json()["error"]["code"] == "deadline_exceeded"


def test_what_is_refused_has_its_status_though_others_wait(gated):
    here, gate = gated
    stream = partial(httpx.stream, "POST", here.url + "/v1/completions", json=BODY, timeout=30)
    with stream() as one, stream() as two:
        lines = [lines_of(one), lines_of(two)]  # kept: httpx closes a connection when nobody iterates
        assert [next(each) for each in lines] == [": waiting"] * 2
        assert here.post("/v1/completions", BODY).status_code == 429
        assert here.post("/v1/completions", {**BODY, "temperature": -1}).status_code == 400
        here.served.draining = True
        assert here.post("/v1/completions", BODY).status_code == 503
        here.served.draining = False
        gate.open()


class Slow:
    """An exchange whose client reads when it is told to."""

    def __init__(self):
        self.begun = self.writing = False
        self.written, self.sent, self.reads = None, [], asyncio.Event()

    async def begin(self, status, kind, more=None):
        self.begun = True

    async def write(self, data):
        self.sent.append(data)
        await self.reads.wait()


async def came(x):
    while not x.sent:
        await asyncio.sleep(0.001)


def test_an_event_waits_until_a_comment_is_out():
    async def settling():
        x = Slow()
        told = comments.Comments(x, every=0.005)
        await came(x)
        settled = asyncio.ensure_future(told.settled())
        await asyncio.sleep(0.01)
        assert not settled.done()
        x.reads.set()
        await settled
        told.stop()

    asyncio.run(settling())


def test_nothing_is_said_after_the_end():
    async def ended():
        x = Slow()
        x.reads.set()
        told = comments.Comments(x, every=0.005)
        await came(x)
        await told.settled()
        told.stop()
        said = len(x.sent)
        await asyncio.sleep(0.03)
        assert len(x.sent) == said

    asyncio.run(ended())
