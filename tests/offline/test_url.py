"""Rows that go to a server: the same results as from a model here, and servers that are slow, broken or gone."""

import asyncio
import dataclasses
import gc
import json
import math
import os
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

import numpy as np
import pytest

for name in ("starlette", "uvicorn", "msgspec", "prometheus_client", "httpx"):
    pytest.importorskip(name)

from hibachi.engine.sampling.uniforms import fork  # noqa: E402
from hibachi.errors import ConfigError, EngineFailed  # noqa: E402
from hibachi.llm.dialects.openai import parse as asking  # noqa: E402
from hibachi.llm.dialects.openai.bodies import Bounds, CompletionBody, read  # noqa: E402
from hibachi.llm.own import open_texts  # noqa: E402
from hibachi.offline import Batch, Columns, run_batch  # noqa: E402
from hibachi.offline.files.rows import Row  # noqa: E402
from hibachi.offline.settings import settle  # noqa: E402
from hibachi.offline.tasks import sender  # noqa: E402
from hibachi.offline.tasks.choose import task_of, text_task  # noqa: E402
from hibachi.offline.tasks.lines import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES  # noqa: E402
from hibachi.offline.tasks.sender import Patience, refusal  # noqa: E402
from hibachi.offline.tasks.task import Lost, RowError  # noqa: E402
from hibachi.offline.tasks.url_answers import Used, used_of  # noqa: E402
from hibachi.offline.tasks.url_columns import UrlAnswer, UrlColumns  # noqa: E402
from hibachi.offline.tasks.url_lines import UrlLines  # noqa: E402
from hibachi.offline.tasks.url_task import begins, signed  # noqa: E402
from hibachi.request import SamplingParams  # noqa: E402

from ..serve.conftest import CHATML, site  # noqa: E402
from ..serve.saying import THINKS, saying, told  # noqa: E402

QUICK = Patience(tries=3, pause=0.005, factor=1.5, busy=0.1, timeout=5.0, back=0.3)
KEY = "sk-secret-123"


def rows_of(values):
    return [Row(i, "in.jsonl", i + 1, v, size=100) for i, v in enumerate(values)]


def drained(work, n, within=20.0):
    """What became of n rows that were started."""
    found, end = {}, time.monotonic() + within
    while len(found) < n:
        assert time.monotonic() < end, f"{len(found)} of {n} rows were done"
        for number in work.wait(0.5):
            try:
                found[number] = work.take(number)
            except RowError as e:
                found[number] = e
    return found


def computed(work, rows):
    """The values of each row, and "failed" with those of an error."""
    found = {}
    for row in rows:
        try:
            prepared = work.prepare(row)
        except RowError as e:
            found[row.number] = e
        else:
            work.start(row.number, prepared)
    found |= drained(work, len(rows) - len(found))
    return [
        ("failed", v.values or {"error": str(v)}) if isinstance(v, RowError) else v.values
        for v in (found[row.number] for row in rows)
    ]


def batch_of(**options):
    return Batch(inputs=["in"], output="out", **options)


def url_task(url, *, lines=False, created=1234, patience=QUICK, **options):
    return (UrlLines if lines else UrlColumns)(batch_of(url=url, **options), created, patience)


@contextmanager
def opened(url, **options):
    work = url_task(url, **options)
    try:
        work.open()
        yield work
    finally:
        work.close()


def both(texts, template, url, rows, *, lines=False, created=99, **options):
    """What becomes of rows here, after it was seen that a server makes the same of them."""
    here = text_task(batch_of(openai=lines, **options), lambda: (texts, template), created)
    here.open()
    with opened(url, lines=lines, created=created, **options) as there:
        assert list(there.fields) == list(here.fields)
        expected = computed(here, rows)
        for one, other in zip(computed(there, rows), expected, strict=True):
            assert json.dumps(one) == json.dumps(other)  # the order of fields as well
    return expected


# ---- a server of ours ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts():
    with open_texts("tiny", max_num_seqs=8, max_num_queued_reqs=256) as found:
        yield found


@pytest.fixture(scope="module")
def server(texts):
    with site(texts, chat_template=CHATML) as here:
        yield here


PROMPTS = [{"prompt": p} for p in ("Once upon a time", "The dog", "Tom and Ann went", "Größe 12 €", "x " * 30)]
CONVERSATIONS = [
    {"messages": [{"role": "user", "content": "Hello"}], "t": 0.0, "s": 7},
    {"messages": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Who?"}], "t": 1.5, "s": None},
]
TABLES = {
    "plain": (Columns(), PROMPTS),
    "params": (Columns(params={"temperature": 0.8, "top_p": 0.9, "top_k": 40, "max_tokens": 24}), PROMPTS),
    "greedy": (Columns(params={"temperature": 0, "max_tokens": 5, "seed": 2**64 - 3}), PROMPTS),
    "seed": (Columns(params={"seed": 2**64 - 3}), PROMPTS),
    "n": (Columns(params={"n": 3, "max_tokens": 6}), PROMPTS),
    "stop": (
        Columns(params={"stop": ["e", "a"], "include_stop": True, "min_tokens": 2, "max_tokens": 30}),
        PROMPTS,
    ),
    "ids": (Columns(params={"stop_token_ids": [5, 6], "logit_bias": {5: 2.5}, "bad_words": ["the"]}), PROMPTS),
    "form": (Columns(params={"structured_outputs": {"regex": "[a-z]{3}"}, "max_tokens": 9}), PROMPTS),
    "schemas": (
        Columns(chat=True, param_columns={"structured_outputs": "form"}, params={"max_tokens": 30}),
        [
            {**p, "form": form}
            for p, form in zip(PROMPTS, ({"json": {"type": "integer"}}, {"json_object": True}), strict=False)
        ],
    ),
    "chat": (Columns(messages="messages", param_columns={"temperature": "t", "seed": "s"}), CONVERSATIONS),
    "system": (Columns(system="Be brief.", params={"max_tokens": 9}), PROMPTS),
    "template": (Columns(template="{prompt}!", param_columns={"n": "n"}), [{**p, "n": "2"} for p in PROMPTS]),
    "tokens": (Columns(tokens="ids"), [{"ids": [5, 6, 7]}, {"ids": "[8, 9]"}]),
}


@pytest.mark.parametrize("kind", TABLES)
def test_rows_have_the_results_that_the_model_gives_here(kind, texts, server):
    columns, values = TABLES[kind]
    ids = kind in ("n", "stop", "chat")
    found = both(texts, CHATML, server.url, rows_of(values), columns=columns, seed=3, token_ids=ids)
    assert all(isinstance(v, dict) and ("output_token_ids" in v) == ids for v in found)


def line(i, url, **body):
    return {"custom_id": f"r{i}", "method": "POST", "url": url, "body": body}


HELLO = [{"role": "user", "content": "Hello"}]
SCORED = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL, CHAT_TOOL = {"type": "function", **FUNCTION}, {"type": "function", "function": FUNCTION}
CUSTOM = {"name": "f", "input_schema": FUNCTION["parameters"]}
THOUGHT = told(f"<think>\nHm.\n</think>\n\nLook: {CALL}\n{CALL}")
ADAPTIVE = {"type": "adaptive"}
TURNS = [
    line(0, CHAT, messages=THOUGHT, tools=[CHAT_TOOL]),
    line(1, RESPONSES, input=THOUGHT, tools=[TOOL], store=True, metadata={"a": "b"}, reasoning={"effort": "low"}),
    line(2, RESPONSES, model="tiny", input="Hello", instructions="Be kind", max_output_tokens=4),
    line(3, RESPONSES, input=told("<think>\nHm.\n</think>\n\nHi."), **SCORED),
    line(4, RESPONSES, input=told("Hi, you."), stop=["you"], **SCORED),
    line(8, RESPONSES, input="x", background=True),
    line(9, RESPONSES, input=told("x"), max_output_tokens=9999),
    line(10, RESPONSES, input="", made_up=1),
    line(11, MESSAGES, model="tiny", messages=THOUGHT, tools=[CUSTOM], max_tokens=300, thinking={"type": "enabled"}),
    line(12, MESSAGES, model="tiny", messages=THOUGHT, tools=[CUSTOM], max_tokens=40, thinking={"type": "enabled"}),
    line(
        13, MESSAGES, messages=told("Hi, you."), max_tokens=9999, stop_sequences=["you"], thinking={"type": "adaptive"}
    ),
    line(14, MESSAGES, model="tiny", messages=HELLO, max_tokens=0),
    line(15, MESSAGES, model="tiny", messages=[{"role": "user", "content": "x " * 3000}], max_tokens=5),
    line(16, MESSAGES, messages=HELLO, max_tokens=5),
]


@pytest.fixture(scope="module")
def says(tmp_path_factory):
    with saying(tmp_path_factory.mktemp("says")) as here:
        yield here


def test_turns_are_answered_as_by_the_model_here(says):
    """Of any API: the server draws ids and keeps responses, and no line tells of that."""
    rows = rows_of(TURNS)
    expected = both(says.texts, THINKS, says.url, rows, lines=True, seed=3)
    answers = {r.values["custom_id"]: v for r, v in zip(rows, expected, strict=True)}
    good = [own for own, v in answers.items() if not isinstance(v, tuple)]
    assert good == [f"r{i}" for i in (0, 1, 2, 3, 4, 11, 12, 13, 16)]
    response = answers["r1"]["response"]["body"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert response["store"] is False and response["created_at"] == response["completed_at"] == 99
    assert not says.served.responses.of("")
    stopped = answers["r4"]["response"]["body"]["output"][0]["content"][0]
    assert stopped["text"] == "Hi, " and [p["token"] for p in stopped["logprobs"]][:4] == ["H", "i", ",", " "]
    message = answers["r11"]["response"]["body"]
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answers["r12"]["response"]["body"]["stop_reason"] == "max_tokens"
    assert answers["r13"]["response"]["body"]["stop_reason"] == "stop_sequence"
    ids = [item["call_id"] for item in response["output"][2:]] + [block["id"] for block in message["content"][2:]]
    assert len({*ids}) == 4
    refused = {own: v[1]["response"]["body"] for own, v in answers.items() if isinstance(v, tuple)}
    assert refused["r15"]["error"]["message"].startswith("prompt is too long: This model")


TALKS = [
    {"messages": THOUGHT, "tools": [CHAT_TOOL]},
    {"messages": THOUGHT},
    {"messages": told("<think>\n\n</think>\n\nHi."), "tools": None, "kw": {"enable_thinking": False}},
    {"messages": told("Hi."), "effort": "low"},
    {"messages": told("x"), "tools": [CHAT_TOOL, CHAT_TOOL]},
    {"messages": told("x"), "tools": [CHAT_TOOL], "choice": {"type": "function", "function": {"name": "other"}}},
    {"messages": told(CALL), "tools": [CHAT_TOOL], "choice": "required"},
]
OF = {"tool_choice": "choice", "chat_template_kwargs": "kw", "reasoning_effort": "effort"}


@pytest.mark.parametrize("params", [{}, {"n": 2}])
def test_rows_of_conversations_are_answered_as_by_the_model_here(says, params):
    """The server draws ids of answers, of which those of calls are made, and no row tells of that."""
    columns = Columns(messages="messages", params={"max_tokens": 300, **params}, param_columns=OF)
    expected = both(says.texts, THINKS, says.url, rows_of(TALKS), columns=columns, seed=3)
    assert [isinstance(v, tuple) for v in expected] == 4 * [False] + 2 * [True] + [False]
    if not params:
        assert expected[0]["reasoning_content"] == "Hm." and len(expected[0]["tool_calls"]) == 2


def test_a_server_that_tells_reasoning_apart_though_it_is_to_stay_in_the_text(says):
    settings = settle({"reasoning_parser": "none"}, {})
    with opened(says.url, columns=Columns(messages="messages"), settings=settings) as work:
        assert "reasoning_content" not in [f.name for f in work.fields]
        [row] = rows_of(TALKS[1:2])
        work.start(0, work.prepare(row))
        work.wait(10)
        with pytest.raises(ConfigError, match="tells reasoning apart from the text"):
            work.take(0)


# ---- a server of anybody ---------------------------------------------------------------------------------------------


class Mock:
    """Answers by `says(path, body, times that this body came)`: (status, answer) or (status, answer, headers); bytes as
    they are; None: a reset. asked: paths and bodies, as they came."""

    def __init__(self, says=lambda path, body, n: (200, completion()), models=({"id": "m"},), port=0):
        self.says, self.models = says, models
        self.asked, self.heads, self.cut = [], [], 0
        self._times = Counter()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self.port = port

    def __enter__(self):
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def _main(self):
        self._loop, self._over, self._writers = asyncio.get_running_loop(), asyncio.Event(), set()
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._begun.set()
        await self._over.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                _, path, _ = head.split("\r\n")[0].split()
                size = [int(h.split(":")[1]) for h in head.lower().split("\r\n") if h.startswith("content-length")]
                body = json.loads(await reader.readexactly(size[0])) if size else None
                if body is None:
                    said = self.models if callable(self.models) else lambda: (200, {"data": list(self.models)})
                    await self._write(writer, said())
                    continue
                self.asked.append((path, body))
                key = json.dumps(body)
                self._times[key] += 1
                said = self.says(path, body, self._times[key])
                if asyncio.iscoroutine(said):
                    waiting = asyncio.ensure_future(said)
                    gone = asyncio.ensure_future(reader.read(1))
                    await asyncio.wait([waiting, gone], return_when=asyncio.FIRST_COMPLETED)
                    if not waiting.done():
                        waiting.cancel()
                        self.cut += 1
                        return
                    gone.cancel()
                    await asyncio.gather(gone, return_exceptions=True)
                    said = waiting.result()
                if said is None:
                    writer.transport.abort()
                    return
                await self._write(writer, said)
                if isinstance(said, bytes):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _write(self, writer, said):
        if not isinstance(said, bytes):
            status, answer, *headers = said
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            more = "".join(f"{k}: {v}\r\n" for k, v in (headers[0] if headers else {}).items())
            said = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n{more}\r\n".encode() + data
        writer.write(said)
        await writer.drain()


def completion(*texts, **more):
    choices = [{"index": i, "text": t, "finish_reason": "stop"} for i, t in enumerate(texts or ("fine",))]
    usage = {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0, "accepted_prediction_tokens": 2},
    }
    return {"id": "cmpl-x", "created": 5, "model": "m", "choices": choices, "usage": usage, **more}


def fault(message, **more):
    return {"error": {"message": message, "type": "t", "param": None, "code": 7, **more}}


def asks(*prompts):
    return rows_of([{"prompt": p} for p in prompts])


FINE = {"output": "fine", "finish_reason": "stop", "prompt_tokens": 2, "completion_tokens": 3}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ((400, fault("Too long.")), "Too long."),
        ((404, fault("No such model, req_0123456789abc.")), "No such model, (id)."),
        ((413, b"<html>\n  Too  large"), "<html> Too large"),
        ((422, {"detail": [{"loc": ["n"]}]}), '[{"loc": ["n"]}]'),
        ((400, {"object": "error", "message": f"It is {KEY}"}), "It is ***"),
        ((418, b""), "HTTP 418, and no word why"),
        ((200, b"<html>"), "The server's answer cannot be read: expected JSON; got '<html>'."),
        ((200, b"[" * 100_000), "The server's answer cannot be read: expected JSON"),
        ((200, [1]), "The server's answer cannot be read: expected an object; got [1]."),
        ((200, {}), "The server's answer cannot be read: expected choices; got None."),
        ((200, fault("no")), "expected choices; got {'message': 'no'"),
        ((200, completion("a", "b")), "expected 1 continuations; got 2."),
        ((200, completion(5)), "expected a text"),
        ((200, {"choices": [{"text": "a", "finish_reason": "abort"}]}), "The server broke off (finish_reason abort)."),
        ((200, {"choices": [{"text": "a", "finish_reason": 3}]}), "expected a finish_reason"),
        ((204, b""), "HTTP 204, and no word why"),
    ],
)
def test_what_is_wrong_with_a_row_is_its_error_and_touches_no_other(said, expected):
    if len(said[1]) > 1000:  # else what other tests have left is finalised in the depth of that answer, and fails there
        gc.collect()
    with (
        Mock(lambda path, body, n: said if body["prompt"] == "bad" else (200, completion())) as mock,
        opened(mock.url, api_key=KEY) as work,
    ):
        found = computed(work, asks("a", "bad", "b"))
    assert found[0] == found[2] == FINE
    kind, values = found[1]
    assert kind == "failed" and expected in values["error"] and KEY not in values["error"]
    assert [body["prompt"] for _, body in mock.asked].count("bad") == 1


def head(status, size, *lines):
    return "\r\n".join([f"HTTP/1.1 {status} X", f"Content-Length: {size}", *lines, "", ""]).encode()


def test_a_sound_answer_is_read_whoever_gives_it():
    answer = {"choices": [{"index": 1, "text": "b", "finish_reason": None}, {"index": 0, "text": "a"}]}
    with (
        Mock(lambda path, body, n: (200, answer)) as mock,
        opened(mock.url, columns=Columns(params={"n": 2})) as work,
    ):
        [values] = computed(work, asks("x"))
    assert values == {
        "output": ["a", "b"],
        "finish_reason": [None, None],
        "prompt_tokens": None,
        "completion_tokens": None,
    }


TRANSIENT = {
    "503": (503, fault("later")),
    "500": (500, b""),
    "408": (408, b""),
    "502": (502, b"<html>"),
    "504": (504, b""),
    "429": (429, fault("busy"), {"Retry-After": "0"}),
    "reset": None,
    "garbage": b"\x00\x01 garbage\r\n\r\n",
    "half a head": b"HTTP/1.1 200 X\r\nConte",
    "half an answer": head(200, 100) + b'{"choices": [{"te',
    "half a chunk": b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n20\r\nhalf",
}


@pytest.mark.parametrize("kind", TRANSIENT)
def test_what_may_pass_is_tried_again(kind):
    with (
        Mock(lambda path, body, n: TRANSIENT[kind] if n < 3 else (200, completion())) as mock,
        opened(mock.url) as work,
    ):
        assert computed(work, asks("a", "b", "c")) == 3 * [FINE]
    assert len(mock.asked) == 9 or kind in ("reset", "garbage")  # where nothing came, the client asks once more itself


@pytest.mark.parametrize("kind", TRANSIENT)
def test_a_row_that_always_fails_while_others_do_not_becomes_an_error(kind):
    gate, let = SimpleQueue(), SimpleQueue()

    async def fail():
        gate.put(None)
        while let.empty():
            await asyncio.sleep(0.001)
        let.get()
        return TRANSIENT[kind]

    with (
        Mock(lambda path, body, n: fail() if body["prompt"] == "bad" else (200, completion())) as mock,
        opened(mock.url) as work,
    ):
        bad, *others = asks("bad", "a", "b")
        work.start(0, work.prepare(bad))
        done = []
        while not done:
            with suppress(Empty):
                gate.get(timeout=0.02)
                assert computed(work, others) == 2 * [FINE]  # before each time that it fails
                let.put(None)
                continue
            done = work.wait(0)
        with pytest.raises(RowError, match="The server answered others, but not this request"):
            work.take(*done)


def test_when_nobody_is_answered_the_server_is_lost_and_waited_for():
    with Mock(lambda path, body, n: (500, b"")) as mock, opened(mock.url) as work:
        for row in asks("a", "b"):
            work.start(row.number, work.prepare(row))
        numbers = work.wait(10)
        for number in numbers:
            with pytest.raises(Lost, match=r"has answered nothing for a while\. The last time: HTTP 500"):
                work.take(number)
        with pytest.raises(Lost):
            work.start(5, work.prepare(asks("c")[0]))
        work.abandon()
        mock.says = lambda path, body, n: (200, completion())
        work.open()
        assert computed(work, asks("a", "b")) == 2 * [FINE]


def test_a_server_that_is_gone_is_waited_for_and_then_an_engine_that_failed():
    mock = Mock().__enter__()
    with opened(mock.url) as work:
        assert computed(work, asks("a")) == [FINE]
        mock.__exit__()
        work.start(1, work.prepare(asks("a")[0]))
        assert work.wait(10) == [1]
        with pytest.raises(Lost):
            work.take(1)
        work.abandon()
        with pytest.raises(EngineFailed, match="The server is away"):
            work.open()
        again = Mock(port=mock.port)
        timer = threading.Timer(0.1, again.__enter__)
        timer.start()
        work.open()  # it comes back while it is waited for
        assert computed(work, asks("a")) == [FINE]
        timer.join()
        again.__exit__()


def test_a_server_that_comes_back_as_another_ends_the_run():
    with Mock(models=[{"id": "m", "numerics": "a"}]) as mock, opened(mock.url) as work:
        work.abandon()
        mock.models = [{"id": "m", "numerics": "b"}]
        with pytest.raises(ConfigError, match="came back as another"):
            work.open()


@pytest.mark.parametrize("after", ["1", "Fri, 01 Jan 2100 00:00:00 GMT"])
def test_retry_after_is_honoured(after, monkeypatch):
    slept = []
    monkeypatch.setattr(sender, "LONGEST_PAUSE", 0.3)
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda s, *a: (slept.append(s), sleep(min(s, 0.3), *a))[1])
    said = (429, b"", {"Retry-After": after})
    with Mock(lambda path, body, n: said if n == 1 else (200, completion())) as mock, opened(mock.url) as work:
        assert computed(work, asks("a")) == [FINE]
    assert max(slept) == 0.3  # what the header asks for, up to the longest


def test_a_busy_server_does_not_use_up_tries():
    quick = dataclasses.replace(QUICK, busy=30)
    answers = [(429, b"", {"Retry-After": "0"})] * 9 + [(503, b""), (503, b""), (200, completion())]
    with Mock(lambda path, body, n: answers[n - 1]) as mock, opened(mock.url, patience=quick) as work:
        assert computed(work, asks("a")) == [FINE]


async def _later(seconds):
    await asyncio.sleep(seconds)
    return 200, completion()


def test_a_row_without_an_answer_in_time_is_an_error_and_its_connection_is_closed():
    patience = dataclasses.replace(QUICK, timeout=0.3)
    with (
        Mock(lambda path, body, n: _later(30) if body["prompt"] == "slow" else (200, completion())) as mock,
        opened(mock.url, patience=patience) as work,
    ):
        slow, other = asks("slow", "a")
        work.start(0, work.prepare(slow))
        assert computed(work, [other]) == [FINE]
        while len(mock.asked) < 3:  # it has failed once
            time.sleep(0.002)
        assert computed(work, [other]) == [FINE]
        with pytest.raises(RowError, match=r"no answer within 0\.3 s"):
            work.take(*work.wait(10))
        assert len(mock.asked) == 4 and mock.cut >= 1


def test_when_nobody_has_an_answer_in_time_the_server_is_lost_at_once():
    with Mock(lambda path, body, n: _later(30) if body["prompt"] == "slow" else (200, completion())) as mock:
        work = task_of(batch_of(url=mock.url, request_timeout=0.1))
        work.open()
        try:
            assert computed(work, asks("a")) == [FINE]  # before, which says nothing
            work.start(1, work.prepare(asks("slow")[0]))
            with pytest.raises(Lost, match=r"no answer within 0\.1 s"):
                work.take(*work.wait(10))
            assert len(mock.asked) == 2
        finally:
            work.close()


def test_withdraw_and_wake_before_the_server_is_asked_and_when_it_was_abandoned():
    with Mock() as mock:
        work = url_task(mock.url)
        assert work.withdraw() == []
        work.open()
        work.abandon()
        work.wake()
        assert work.withdraw() == []


def test_no_part_of_a_key_is_told():

    for body in (
        {"detail": [{"loc": ["n"], "input": "x" * 170 + KEY}]},
        fault("no", type="x" * 190 + KEY, param=f"{KEY}[0]", code=KEY),
        {"error": "x" * 1995 + KEY},
    ):
        why = refusal(400, json.dumps(body).encode(), KEY)
        assert not any("sk-" in str(part) for part in (why, why.kind, why.param, why.code))
    for size in (195, 1995):
        assert "sk-" not in str(refusal(400, b"x" * size + KEY.encode(), KEY))
    assert "sk-" not in str(refusal(400, b"x" + b" " * 1995 + KEY.encode(), KEY))
    assert KEY not in repr(batch_of(url="http://127.0.0.1:1", api_key=KEY))


def test_a_huge_answer_is_bounded(monkeypatch):
    monkeypatch.setattr(sender, "LARGEST", 10_000)
    with (
        Mock(lambda p, body, n: (200, completion("x" * 20_000 if body["prompt"] == "big" else "fine"))) as mock,
        opened(mock.url) as work,
    ):
        found = computed(work, asks("a", "big"))
    assert found == [FINE, ("failed", {"error": "The answer has more than 10000 bytes."})]


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_ends_the_run_after_what_is_done(status):
    for pause in (0.05, 0.3, 2.0):  # until both are done by then
        with (
            Mock(lambda p, b, n: _later(0.02) if b["prompt"] == "a" else (status, fault(f"{KEY} is wrong"))) as mock,
            opened(mock.url, api_key=KEY) as work,
        ):
            for row in asks("a", "b"):
                work.start(row.number, work.prepare(row))
            time.sleep(pause)
            if len(done := work.wait(5)) < 2:
                continue
            assert list(done) == [0, 1]
            assert work.take(0).values == FINE
            with pytest.raises(ConfigError, match="--api-key") as caught:
                work.take(1)
            assert KEY not in str(caught.value)
            with pytest.raises(ConfigError, match="--api-key"):
                work.start(2, work.prepare(asks("c")[0]))
        assert all(f"\r\nAuthorization: Bearer {KEY}\r\n" in h for h in mock.heads)
        return
    raise AssertionError("The answers did not come.")


def test_closing_and_abandoning_close_connections_so_that_the_server_stops():
    for end in ("close", "abandon"):
        patience = dataclasses.replace(QUICK, timeout=60)
        with Mock(lambda path, body, n: _later(30)) as mock, opened(mock.url, patience=patience) as work:
            for row in asks("a", "b"):
                work.start(row.number, work.prepare(row))
            while len(mock.asked) < 2:
                time.sleep(0.005)
            getattr(work, end)()
            stop = time.monotonic() + 10
            while mock.cut < 2:
                assert time.monotonic() < stop
                time.sleep(0.005)


def test_withdraw_takes_back_what_waits_for_its_next_try_and_nothing_else():
    patience = dataclasses.replace(QUICK, pause=30.0)
    with (
        Mock(lambda path, body, n: (503, b"") if body["prompt"] == "bad" else _later(0.3)) as mock,
        opened(mock.url, patience=patience) as work,
    ):
        for row in asks("bad", "a", "bad"):
            work.start(row.number, work.prepare(row))
        while len(mock.asked) < 3:
            time.sleep(0.005)
        time.sleep(0.1)
        assert sorted(work.withdraw()) == [0, 2]
        assert work.withdraw() == []
        assert drained(work, 1)[1].values == FINE
        assert work.wait(0.05) == []


def test_wake_ends_a_wait():
    with Mock() as mock, opened(mock.url) as work:
        threading.Timer(0.05, work.wake).start()
        began = time.monotonic()
        assert work.wait(30) == []
        assert time.monotonic() - began < 10


def test_so_many_requests_at_a_time_as_places():
    with Mock(lambda path, body, n: _later(0.05)) as mock, opened(mock.url, concurrency=3) as work:
        assert work.places == 3
        assert computed(work, asks(*"abc")) == 3 * [FINE]


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sender, "Patience", lambda **_: QUICK)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(20)))
    return source


def test_a_run_outlives_a_server_that_is_away_for_a_while(file):

    away, out = [], file.with_name("out.jsonl")

    def says(path, body, n):
        if body["prompt"] == "p7" and n == 1:
            away.extend(range(30))
        if away:
            away.pop()
            return 500, b""
        return 200, completion(body["prompt"])

    with Mock(says) as mock:
        done = run_batch(Batch(inputs=[str(file)], output=str(out), url=mock.url, concurrency=4))
    assert (done.status, done.rows, done.failed) == ("done", 20, 0)
    assert done.counts.losses >= 1
    assert [json.loads(line)["output"] for line in out.read_text().splitlines()] == [f"p{i}" for i in range(20)]


def test_a_run_that_a_wrong_key_ended_goes_on_with_the_right_one(file):

    out, valid = file.with_name("out.jsonl"), [True]

    def says(path, body, n):
        if body["prompt"] == "p7" and n == 1:
            valid.clear()
        return (200, completion()) if valid else (401, fault("expired"))

    batch = Batch(inputs=[str(file)], output=str(out), url="", api_key=KEY, concurrency=1)
    with Mock(says) as mock:
        batch.url = mock.url
        with pytest.raises(ConfigError, match="--api-key"):
            run_batch(batch)
        n = len(mock.asked)
        valid.append(True)
        done = run_batch(batch)
        assert 1 < n <= 20 and len(mock.asked) == 21  # nothing twice but what was refused
    assert (done.status, done.rows, done.failed, done.resumed) == ("done", 20, 0, n - 1)
    assert not any(KEY.encode() in path.read_bytes() for path in file.parent.iterdir())


# ---- what is asked for -----------------------------------------------------------------------------------------------


def sent(values, lines=False, **batch):
    """The path and the body of a row."""
    with Mock() as mock, opened(mock.url, lines=lines, **batch) as work:
        computed(work, rows_of([values]))
        [(path, body)] = mock.asked
        return path, body


def test_only_what_somebody_says_is_sent():
    columns = Columns(
        params={"temperature": 1.0, "include_stop": False}, param_columns={"top_p": "p", "stop": "s", "logit_bias": "b"}
    )
    values = {"prompt": "x", "p": "", "s": "a", "b": {"5": 1}}
    assert sent(values, columns=columns, seed=5) == (
        "/v1/completions",
        {
            "model": "m",
            "prompt": "x",
            "max_tokens": 16,
            "temperature": 1.0,
            "include_stop_str_in_output": False,
            "stop": ["a"],
            "logit_bias": {"5": 1},
            "seed": signed(fork(5, 1)),
        },
    )


def test_chats_token_ids_and_inputs_go_where_they_belong():
    path, body = sent({"prompt": "x"}, columns=Columns(chat=True, params={"max_tokens": None}), token_ids=True)
    assert (path, body["messages"]) == ("/v1/chat/completions", [{"role": "user", "content": "x"}])
    assert "max_tokens" not in body and body["return_token_ids"] is True
    assert sent({"t": [1, 2]}, columns=Columns(tokens="t"))[1]["prompt"] == [1, 2]
    assert sent({"prompt": "x"}, task="embed") == ("/v1/embeddings", {"model": "m", "input": "x"})


def test_lines_are_sent_as_they_are_with_what_they_lack():
    own = {"prompt": "x", "seed": 1, "made_up": {"a": [1]}, "model": "other"}
    assert sent(line(0, COMPLETIONS, **own), lines=True) == (COMPLETIONS, own)
    path, body = sent(line(0, CHAT, messages=[], model="alias"), lines=True, served_names=["alias"], seed=2)
    assert (path, body) == (CHAT, {"messages": [], "model": "m", "seed": signed(fork(2, 1))})
    assert sent(line(0, EMBEDDINGS, input="x"), lines=True) == (EMBEDDINGS, {"input": "x", "model": "m"})


def test_answers_to_lines_hold_nothing_of_time_and_company():
    def says(path, body, n):
        call = {"id": os.urandom(4).hex(), "function": {"name": "f"}}
        answer = completion(timings={"ms": time.time()}, id=os.urandom(4).hex(), created=time.time())
        answer["choices"][0]["message"] = {"tool_calls": [call, call]}
        return 200, answer

    found = []
    for _ in range(2):
        with Mock(says) as mock, opened(mock.url, lines=True, served_names=["alias"]) as work:
            found += computed(work, rows_of([line(0, CHAT, messages=[], model="alias")]))
    assert found[0] == found[1]
    body = found[0]["response"]["body"]
    assert body["created"] == 1234 and body["model"] == "alias" and body["id"].startswith("chatcmpl-")
    assert "timings" not in body and "prompt_tokens_details" not in body["usage"]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    ids = [c["id"] for c in body["choices"][0]["message"]["tool_calls"]]
    assert all(i.startswith("call_") for i in ids) and ids[0] != ids[1]


def test_responses_and_messages_of_a_foreign_server():
    """It is sent no seed and keeps nothing; ids, times and what its cache had are left out."""
    path, body = sent(line(0, RESPONSES, input="x", store=True), lines=True)
    assert (path, body) == (RESPONSES, {"input": "x", "store": False, "model": "m"})
    assert sent(line(0, MESSAGES, messages=HELLO), lines=True)[1] == {"messages": HELLO, "model": "m"}
    asked = []

    def says(path, body, n):
        asked.append(body)
        drawn = os.urandom(4).hex()
        if path == RESPONSES:
            item = {"type": "function_call", "id": f"fc_{drawn}", "call_id": drawn}
            details = {"cached_tokens": len(asked), "cache_write_tokens": 0}
            usage = {"input_tokens": 9, "input_tokens_details": details, "output_tokens": 2}
            times = {"created_at": time.time(), "completed_at": time.time()}
            return 200, {"id": drawn, "object": "response", **times, "output": [item, item], "usage": usage}
        block = {"type": "tool_use", "id": f"toolu_{drawn}"}
        usage = {"input_tokens": 9 - n, "cache_read_input_tokens": n, "output_tokens": 2}
        return 200, {"id": drawn, "type": "message", "content": [{"type": "text"}, block], "usage": usage}

    found = []
    rows = rows_of([line(0, RESPONSES, input="x"), line(1, MESSAGES, messages=HELLO)])
    for _ in range(2):
        with Mock(says) as mock, opened(mock.url, lines=True) as work:
            found.append(computed(work, rows))
    assert found[0] == found[1] and all("seed" not in body for body in asked)
    response, message = (v["response"]["body"] for v in found[0])
    assert response["created_at"] == response["completed_at"] == 1234 and response["id"].startswith("resp_")
    assert len({item["call_id"] for item in response["output"]}) == 2
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert message["usage"] == {"input_tokens": 9, "cache_read_input_tokens": 0, "output_tokens": 2}
    assert message["content"][1]["id"] != message["id"]


def test_what_anthropics_usage_says():
    usage = {"input_tokens": 2, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 4, "output_tokens": 5}
    assert used_of({"usage": usage}) == Used(9, 5, 3)
    usage = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 3}, "output_tokens": 5}
    assert used_of({"usage": usage}) == Used(9, 5, 3)


def test_a_line_that_fails_has_the_status_and_words_of_the_server():
    with Mock(lambda path, body, n: (404, fault("none", param="model"))) as mock, opened(mock.url, lines=True) as work:
        [(kind, values)] = computed(work, rows_of([line(0, CHAT, messages=[])]))
        assert kind == "failed" and values["custom_id"] == "r0"
        assert values["response"]["status_code"] == 404
        error = {"message": "none", "type": "t", "param": "model", "code": "7"}
        assert values["response"]["body"] == {"error": error}
        assert values["error"] == {"code": "7", "message": "none"}
        lost = work.lost(0, work.prepare(rows_of([line(1, CHAT, messages=[])])[0]), "gone")
        assert lost.values["error"] == {"code": "engine_failed", "message": "gone"}


NONE = [
    *({}, {"data": []}, {"data": [{"embedding": ["a"]}]}, {"data": [{"embedding": "!"}]}, {"data": [{}]}, {"data": 1}),
    *({"output": "x"}, {"output": [], "status": "failed", "error": {"code": "x"}}),
]


@pytest.mark.parametrize("answer", NONE)
def test_vectors_and_responses_that_are_none(answer):
    with Mock(lambda path, body, n: (200, answer)) as mock:
        with opened(mock.url, task="embed") as work:
            [(kind, values)] = computed(work, asks("x"))
        assert kind == "failed" and "cannot be read" in values["error"]
        with opened(mock.url, lines=True) as work:
            [(kind, values)] = computed(work, rows_of([line(0, RESPONSES, input="x")]))
        assert kind == "failed" and values["response"]["status_code"] == 502


def test_vectors_may_come_in_base64():
    answer = {"data": [{"embedding": "AAAAP83MzD0="}]}
    with Mock(lambda path, body, n: (200, answer)) as mock, opened(mock.url, task="embed") as work:
        [values] = computed(work, asks("x"))
    assert values == {"embedding": [0.5, float(np.float32(0.1))], "prompt_tokens": None}


@pytest.mark.parametrize(
    "value", [{"prompt": 5}, {"prompt": []}, {"prompt": ["a"]}, {"prompt": [[1]]}, {"prompt": [True]}, {"x": 1}, {}]
)
def test_what_is_no_prompt_is_not_sent(value):
    with Mock() as mock, opened(mock.url) as work:
        [row] = rows_of([value])
        assert work.wrong(row).startswith("in.jsonl, line 1: ")
        assert computed(work, [row])[0][0] == "failed"
        assert not mock.asked


def test_what_json_has_not_is_an_error_of_the_row():
    with Mock() as mock, opened(mock.url, lines=True) as work:
        [(kind, values)] = computed(work, rows_of([line(0, COMPLETIONS, prompt=float("nan"))]))
        assert kind == "failed" and "JSON" in values["error"]["message"] and not mock.asked


def test_token_ids_that_a_server_does_not_tell_end_the_run():
    for says in (
        lambda path, body, n: (200, completion()),
        lambda path, body, n: (400, fault("Unknown field: return_token_ids")),
    ):
        with Mock(says) as mock, opened(mock.url, token_ids=True) as work:
            [row] = asks("x")
            work.start(0, work.prepare(row))
            work.wait(10)
            with pytest.raises(ConfigError, match="tells no token ids"):
                work.take(0)


# ---- before anything is sent -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"url": "localhost"}, "Expected a URL"),
        ({"task": "forward"}, "model of your own"),
        ({"columns": Columns(params={"logprobs": 1})}, "logprobs"),
        ({"columns": Columns(param_columns={"logprobs": "l"})}, "logprobs"),
        ({"columns": Columns(params={"max_tokens": None})}, "no limit"),
        ({"task": "embed", "columns": Columns(chat=True)}, "conversations"),
        ({"concurrency": 0}, "concurrency"),
        ({"request_timeout": 0}, "request timeout"),
        ({"request_timeout": float("nan")}, "request timeout"),
    ],
)
def test_what_concerns_all_rows_is_refused_first(batch, words):
    with pytest.raises(ConfigError, match=words):
        task_of(batch_of(**{"url": "http://127.0.0.1:1", **batch}))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (line(0, CHAT), "messages is empty"),
        (line(0, CHAT, messages=[]), "messages is empty"),
        (line(0, COMPLETIONS, prompt=[]), "prompt is empty"),
        (line(0, COMPLETIONS, prompt="x", temperature=math.nan), "JSON"),
        (line(0, COMPLETIONS, prompt="x", made_up=1, model="any"), None),  # that is for the server to judge
        (line(0, CHAT, messages=HELLO), None),
    ],
)
def test_lines_are_judged_before_the_server_is_asked(row, words):
    why = url_task("http://127.0.0.1:1", lines=True).wrong(*rows_of([row]))
    assert why is None if words is None else why.startswith("in.jsonl, line 1: ") and words in why


def test_names_of_the_model_make_the_run():
    assert batch_of(url="http://x", openai=True, served_names=["alias"]).facts()["served_names"] == ["alias"]


def test_columns_are_checked_before_the_server_is_asked():
    work = url_task("http://127.0.0.1:1")
    work.check(["prompt"])
    with pytest.raises(ConfigError, match="prompts"):
        work.check(["x"])
    lines = url_task("http://127.0.0.1:1", lines=True)
    with pytest.raises(ConfigError, match="custom_id"):
        lines.check(["body"])
    work.close(), work.wake()


def test_nobody_listens(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda s: pytest.fail("It waits for what was never there."))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
        with pytest.raises(ConfigError, match="No server answers"), opened(url):
            pass


@pytest.mark.parametrize(
    ("models", "name", "words"),
    [
        (lambda: (401, fault(KEY)), None, "--api-key"),
        (lambda: (404, b""), None, "--url-model"),
        (lambda: (200, {"data": []}), None, "--url-model"),
        (lambda: (200, {"data": [{"id": 3}, 4]}), None, "--url-model"),
        (lambda: (200, b"x"), None, "--url-model"),
        (lambda: (301, b"", {"Location": "x"}), None, "--url-model"),
        (lambda: (200, {"data": [{"id": "m"}]}), "x", "It has: m"),
        (lambda: (503, fault("loading")), None, "loading"),
        (lambda: b"garbage\r\n\r\n", None, "No server answers"),
    ],
)
def test_a_server_that_serves_nothing(models, name, words):
    with (
        Mock(models=models) as mock,
        pytest.raises(ConfigError, match=words) as caught,
        opened(mock.url, url_model=name, api_key=KEY),
    ):
        pass
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("models", "name", "facts"),
    [
        (lambda: (200, {"data": [{"id": "a"}, {"id": "b"}]}), None, {"model": "a"}),
        (
            lambda: (200, {"data": [{"id": "a"}, {"id": "b", "max_model_len": 9}]}),
            "b",
            {"model": "b", "max_model_len": 9},
        ),
        (lambda: (200, {"data": [{"id": "a", "numerics": "x"}]}), None, {"model": "a", "numerics": "x"}),
        (lambda: (404, b""), "c", {"model": "c"}),
    ],
)
def test_what_a_server_tells_of_itself(models, name, facts):
    with Mock(models=models) as mock:
        work = url_task(mock.url, url_model=name)
        told = work.open()
        work.close()
        assert told.facts == facts and told.about == f"{facts['model']} at {mock.url}"


def test_a_server_that_is_loading_is_waited_for():
    times = []

    def models():
        times.append(0)
        return (503, b"") if len(times) < 2 else (200, {"data": [{"id": "m"}]})

    with Mock(models=models) as mock, opened(mock.url, patience=dataclasses.replace(QUICK, back=10)):
        assert len(times) == 2


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_parameters_know_which_were_named():
    said = UrlAnswer().with_(temperature=0.5, max_tokens=16).with_(top_k=-1, seed=4)
    assert said.named == {"temperature", "max_tokens", "top_k", "seed"} and said.seed == 4
    assert said.as_body() == {"max_tokens": 16, "temperature": 0.5, "top_k": -1}


SCHEMA = {"type": "object", "properties": {"b": {"const": None}, "a": {}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    "form, said",
    [
        ({"json": SCHEMA}, {"response_format": NAMED}),
        ({"json": json.dumps(SCHEMA)}, {"response_format": NAMED}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
        ({"json": "true"}, {"structured_outputs": {"json": "true"}}),
        ({"json": {}, "whitespace_pattern": ""}, {"structured_outputs": {"json": "{}", "whitespace_pattern": ""}}),
        ({"json": {}, "one_of_as_any_of": True}, {"structured_outputs": {"json": "{}", "one_of_as_any_of": True}}),
        ({"regex": "[ab]+"}, {"structured_outputs": {"regex": "[ab]+"}}),
        ({"choice": ["a", "b"]}, {"structured_outputs": {"choice": ("a", "b")}}),
        ({"grammar": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        (None, {}),
    ],
)
def test_a_form_is_said_as_most_servers_know_it(form, said):
    """And ours means the same by it."""
    params = UrlAnswer().with_(structured_outputs=form, max_tokens=5)
    assert params.as_body() == {"max_tokens": 5, **said}
    body = read(CompletionBody, json.dumps({"prompt": "a", **params.as_body()}).encode())
    assert asking.completion(body, SamplingParams(), Bounds()).params.structured_outputs == params.structured_outputs


def test_seeds_have_a_sign_as_others_expect_them():
    for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64 + 5):
        assert -(2**63) <= signed(seed) < 2**63 and signed(seed) % 2**64 == seed % 2**64


def test_prompts_that_begin_alike_have_keys_that_do():
    a, b = begins("x" * 200 + "a")[0], begins("x" * 200 + "b" * 500)[0]
    assert len(a) == 3 and a == b[:3] and begins("y" + "x" * 200)[0][0] != a[0]
    assert begins(list(range(40)))[0][:2] == begins(list(range(100)))[0][:2] and begins([1, 2])[1] == 2
    assert begins([{"role": "user", "content": "x" * 100}])[0]


def test_words_of_a_server_are_short_and_the_same_each_time():
    for data in (
        b"a" * 10_000,
        json.dumps({"error": "b" * 10_000}).encode(),
        b"\xff\xfe",
        b"[" * 10_000,
        b"null",
        b"5",
    ):
        assert 0 < len(str(refusal(400, data))) <= 2000
    assert str(refusal(500, b'{"error": {"message": "cmpl-0123456789ab failed"}}')) == "(id) failed"
