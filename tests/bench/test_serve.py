"""`hibachi bench serve`: the parser of events, when requests go out, what is made of the answers, and the command."""

import asyncio
import json
import os
import random
import signal
from contextlib import asynccontextmanager, contextmanager
from itertools import islice, pairwise

import pytest

from benchmarks.bench import work
from benchmarks.bench.__main__ import main as bench
from benchmarks.bench.plot import load_title
from hibachi.cli import main
from hibachi.engine.simulator.trace import read_trace
from hibachi.errors import ConfigError
from hibachi.server.web.client import Client, Unreachable, Url
from hibachi.testing.bench import report, traffic
from hibachi.testing.bench.events import Events
from hibachi.testing.bench.generator import Generator, check, model_of
from hibachi.testing.bench.report import Slo
from hibachi.testing.bench.traffic import Ask, RequestForm

from ..router.mocks import CLOSE, Mock, chunk, of_json
from ..serve.conftest import ENGINES, site


def splits(data, seed):
    """The bytes in pieces; at first one by one."""
    rng = random.Random(seed)
    most = 1 if seed == 0 else rng.choice((2, 7, 50, 10_000))
    at = 0
    while at < len(data):
        n = rng.randint(1, most)
        yield data[at : at + n]
        at += n


# ---- server-sent events --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("eol", ["\n", "\r\n", "\r"])
def test_events_however_they_are_split(seed, eol):
    lines = ["\ufeffdata: one", "", ": a comment", "event: x", "id: 7", "data:two", "data:  lines", "data", "", ""]
    lines += ["retry: 10", "", "data: {'ü': 1}", "", "data: [DONE]", "", "data: lost"]
    events, out = Events(), []
    for part in splits(eol.join(lines).encode(), seed):
        out += events.feed(part)
    assert [data.decode() for data in out] == ["one", "two\n lines\n", "{'ü': 1}", "[DONE]"]


def test_the_short_way_of_events_gives_the_same():
    plain = b"".join(b'data: {"n": %d}\n\n' % i for i in range(50))
    for seed in range(20):
        events, out = Events(), []
        for part in splits(plain, seed):
            out += events.feed(part)
        assert out == Events().feed(plain) == [b'{"n": %d}' % i for i in range(50)]


def test_an_event_is_given_as_soon_as_it_is_whole():
    assert Events().feed(b"data: a\r\r") == [b"a"]
    assert Events().feed(b"data: a\n\ndata: b") == [b"a"]


# ---- what is sent, and when ----------------------------------------------------------------------------------------


def test_arrivals():
    constant = list(islice(traffic.arrivals("constant", 4.0, 0), 5))
    assert constant == [0.0, 0.25, 0.5, 0.75, 1.0]
    poisson = list(islice(traffic.arrivals("poisson", 50.0, 3), 20_001))
    gaps = [b - a for a, b in pairwise(poisson)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.02, rel=0.05) and spread == pytest.approx(0.02, rel=0.05)  # exponential
    assert poisson == list(islice(traffic.arrivals("poisson", 50.0, 3), 20_001))
    assert next(traffic.arrivals("poisson", None, 0)) is None
    with pytest.raises(ConfigError, match="poisson, constant"):
        next(traffic.arrivals("bursty", 1.0, 0))


def test_random_prompts_share_what_they_should():
    made = traffic.Random(40, 10, spread=0.5, prefix=8, vocab_size=100, seed=1)
    asks = list(islice(made.asks(traffic.arrivals("constant", None, 0)), 200))
    assert all(a.prompt[:8] == asks[0].prompt[:8] for a in asks)
    assert len({tuple(a.prompt[8:]) for a in asks}) == 200
    assert {len(a.prompt) for a in asks} <= set(range(20, 61)) and len({len(a.prompt) for a in asks}) > 20
    assert {a.new for a in asks} == set(range(5, 16)) and all(3 <= t < 100 for a in asks for t in a.prompt)
    with pytest.raises(ConfigError, match="spread"):
        traffic.Random(10, 10, prefix=11)


def test_a_work_is_repeated_at_its_own_times():
    requests = [work.TimedRequest(i, float(i), [5, 6 + i], 3) for i in range(3)]
    none = traffic.arrivals("poisson", None, 0)
    assert [a.due for a in islice(traffic.of_work(requests, none, 2.0), 6)] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert [a.due for a in islice(traffic.of_work(requests, none, None), 4)] == [None] * 4
    at_once = [work.TimedRequest(0, 0.0, [5], 3)]
    even = traffic.arrivals("constant", 2.0, 0)
    assert [a.due for a in islice(traffic.of_work(at_once, even, 2.0), 3)] == [0, 0.5, 1]


def test_a_trace_keeps_its_times_lengths_and_shared_pieces(tmp_path):
    file = tmp_path / "mooncake.jsonl"
    rows = [(1000, 1100, 4, [7, 8]), (1500, 1030, 9, [7, 8, 9]), (3000, 500, 2, [10])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    asks = list(traffic.of_trace(read_trace(file), vocab_size=500))
    assert [(a.due, len(a.prompt), a.new) for a in asks] == [(0.0, 1100, 4), (0.5, 1030, 9), (2.0, 500, 2)]
    assert asks[0].prompt[:1024] == asks[1].prompt[:1024] and asks[0].prompt[1024:1030] != asks[1].prompt[1024:]
    short = list(traffic.of_trace(read_trace(file).faster(4), vocab_size=500, longest=600, new=3))
    assert [(a.due, len(a.prompt), a.new) for a in short] == [(0.0, 600, 3), (0.125, 600, 3), (0.5, 500, 2)]


def test_bodies():
    ask = Ask(0, None, [3, 4, 5], 9)
    body = json.loads(RequestForm("completions", "m").body(ask))
    assert body["prompt"] == [3, 4, 5] and body["max_tokens"] == 9 and body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True} and body["model"] == "m" and body["temperature"] == 0
    chat = json.loads(RequestForm("chat", None, stream=False, ignore_eos=False, more={"top_p": 0.5}).body(ask))
    assert chat.pop("messages") == [{"role": "user", "content": "to in is"}]
    assert chat == {"max_tokens": 9, "temperature": 0, "stream": False, "top_p": 0.5}
    assert len(json.loads(RequestForm("completions", None, words=True).body(ask))["prompt"].split()) == 3


@pytest.mark.parametrize(
    "text, shown",
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host/v1/", "http://host:80"),
        ("https://host/deep/v1", "https://host:443/deep"),
        ("http://[::1]:7", "http://[::1]:7"),
    ],
)
def test_urls(text, shown):
    assert str(Url.of(text)) == shown


@pytest.mark.parametrize("text", ["host:80", "ftp://x", "http://", "http://h:99999", "http://a b"])
def test_bad_urls(text):
    with pytest.raises(ConfigError, match="Expected a URL"):
        Url.of(text)


# ---- against a server that says what it is told to ------------------------------------------------------------------


def event(text="", usage=None, **more):
    choices = [] if usage else [{"index": 0, "text": text, "finish_reason": None}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage, **more}).encode() + b"\n\n"


def stream(*parts):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *(p if isinstance(p, float) else chunk(p) for p in (*parts, b""))]


def refusal(status, message="no"):
    return [of_json({"error": {"message": message}}, status)]


DONE = b"data: [DONE]\n\n"
GOOD = stream(event("a"), event("b"), event(usage={"prompt_tokens": 3, "completion_tokens": 4}), DONE)


@contextmanager
def answering(*answers):
    """A server that answers each request in turn, with the last again and again: parts to send, seconds to wait."""
    left = list(answers)
    mock = Mock(script=lambda _: left.pop(0) if len(left) > 1 else left[0]).start()
    try:
        yield mock
    finally:
        mock.close()


@asynccontextmanager
async def against(mock, **options):
    client = Client(Url.of(mock.url))
    try:
        yield Generator(client, RequestForm("completions", "m"), **options)
    finally:
        await client.close()


def asks(*due):
    return [Ask(i, at, [5, 6, 7], 4) for i, at in enumerate(due)]


def drive(answers, asked, duration=None, **options):
    async def inner():
        async with against(mock, **options) as generator:
            return await generator.run(asked, duration=duration)

    with answering(*answers) as mock:
        return mock, asyncio.run(inner())


def test_times_and_tokens_of_an_answer():
    slow = stream(
        0.05, event(""), event("a"), 0.1, event("b"), 0.1, event("c"), event(usage={"completion_tokens": 5}), DONE
    )
    _, loaded = drive([slow], asks(None))
    [s] = loaded.samples
    assert s.ok and s.status == 200 and s.tokens == 5 and len(s.chunks) == 3
    assert 0.05 <= s.ttft < 3 and all(0.05 < gap < 3 for gap in s.itl)  # on a busy machine, too
    assert s.tpot == pytest.approx(sum(s.itl) / 4) and s.e2e >= s.chunks[-1] - s.sent
    of = report.figures(loaded, Slo(ttft=0.04, itl=1.0))
    assert of["ok"] == 1 and of["new_tokens"] == 5 and of["goodput"] == 0 and of["complete"]
    assert of["short"] == 0 and report.figures(loaded, Slo(1.0, 1.0))["slo_share"] == 1


def test_a_connection_serves_one_request_after_the_other():
    mock, loaded = drive([GOOD], asks(*[None] * 20), concurrency=2)
    assert len(mock.requests) == 20 and mock.connections == loaded.connections == 2 and loaded.peak == 2


def test_a_connection_that_the_server_dropped_is_made_anew():
    async def inner():
        async with against(mock) as generator:
            return [await generator.one(ask) for ask in asks(None, None)]

    with answering(GOOD, [CLOSE], GOOD) as mock:
        samples = asyncio.run(inner())
    assert all(s.ok for s in samples) and mock.connections == 2 and len(mock.requests) == 3


@pytest.mark.parametrize(
    "answer, kind, message",
    [
        (refusal(429, "full"), "rejected (429)", "full"),
        (refusal(500, "broken"), "HTTP 500", "broken"),
        ([b"HTTP/1.1 502 X\r\nContent-Length: 3\r\n\r\n<p>"], "HTTP 502", "<p>"),
        (stream(event("a"), event(error={"message": "died"}), DONE), "error in the stream", "died"),
        (stream(event("a")), "cut off", "DONE"),
        ([*GOOD[:2], CLOSE], "bad answer", "middle"),
        (stream(b"data: {nonsense\n\n", DONE), "bad answer", ""),
        (stream(b"data: 5\n\n", DONE), "bad answer", "chunk"),
        ([b"junk\r\n\r\n"], "bad answer", "status line"),
        ([CLOSE], "connection lost", "instead of answering"),
        (stream(event("a"), 5.0, DONE), "timed out", "0.3"),
    ],
)
def test_errors_by_kind(answer, kind, message):
    _, loaded = drive([answer], asks(None, None), timeout=0.3)
    assert [s.error for s in loaded.samples] == [kind] * 2 and message in loaded.samples[0].message
    of = report.figures(loaded, Slo())
    assert of["ok"] == 0 and of["rejected"] + of["failed"] == 2 and of["goodput"] == 0
    assert kind.split(" (")[0] in report.text(of)


def test_the_client_says_who_it_is():
    async def ask(**options):
        client = Client(Url.of(mock.url), {"X-A": "b"}, **options)
        await client.get("/")
        await client.close()

    with answering([b"HTTP/1.1 204 No Content\r\n\r\n"]) as mock:
        asyncio.run(ask())
        asyncio.run(ask(agent="mine"))
    assert [(r[b"user-agent"], r[b"x-a"]) for r in mock.requests] == [(b"hibachi", b"b"), (b"mine", b"b")]


def test_no_server_is_an_error_of_its_own():
    async def inner():
        client = Client(Url.of("http://127.0.0.1:9"))
        generator = Generator(client, RequestForm("completions", "m"))
        with pytest.raises(Unreachable):
            await client.get("/")
        with pytest.raises(ConfigError, match="Is it running"):
            await model_of(client)
        sample = await generator.one(asks(None)[0])
        assert sample.error == "unreachable"
        with pytest.raises(ConfigError, match="Is it running"):
            check(sample, client.url, "m")
        await client.close()

    asyncio.run(inner())


@pytest.mark.parametrize("status, said", [(401, "--api-key"), (404, "no model 'm'"), (400, "refuses"), (500, "first")])
def test_the_first_request_says_what_is_wrong(status, said):
    async def inner():
        async with against(mock) as generator:
            check(await generator.one(asks(None)[0]), "http://x", "m")

    with answering(refusal(status)) as mock, pytest.raises(ConfigError, match=said):
        asyncio.run(inner())


def test_requests_go_out_when_they_are_due():
    due, late = [0.0, 0.1, 0.1, 0.25, 0.4], []
    for _ in range(3):  # late only on a busy machine
        mock, loaded = drive([GOOD], asks(*due))
        late.append([r.came - mock.requests[0].came - planned for r, planned in zip(mock.requests, due, strict=True)])
        assert all(s.sent - s.due > -0.002 for s in loaded.samples) and min(late[-1]) > -0.2
    assert max(min(late, key=max)) < 0.2


def test_waiting_for_a_place_counts_for_the_user():
    late = []
    for _ in range(3):
        _, loaded = drive([stream(0.1, event("a"), DONE)], asks(0.0, 0.0, 0.0), concurrency=1)
        assert [s.waited for s in loaded.samples] == [False, True, True]
        assert loaded.samples[2].ttft > 0.28 and loaded.peak == 1
        late.append(report.figures(loaded)["late"]["max"])
    assert min(late) < 0.09  # the server was late, not the generator; on a busy machine the generator, too


def test_nothing_is_sent_after_the_duration():
    _, loaded = drive(
        [stream(0.05, event("a"), DONE)], (Ask(i, None, [5], 1) for i in range(10**9)), 0.3, concurrency=2
    )
    assert 2 <= len(loaded.samples) <= 14 and all(s.ok and s.sent < 0.3 for s in loaded.samples)
    _, loaded = drive([GOOD], asks(0.0, 0.1, 5.0), 0.2)
    assert len(loaded.samples) == 2 and loaded.seconds < 3  # of 5 until the next


def test_cancelled_it_gives_what_it_has():
    async def inner():
        async with against(mock) as generator:
            task = asyncio.ensure_future(generator.run(asks(0.0, 0.1, 60.0)))
            while len(mock.requests) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            task.cancel()
            return await task

    with answering(GOOD, stream(event("a"), 30.0, DONE)) as mock:
        loaded = asyncio.run(inner())
    assert loaded.interrupted and [s.error for s in loaded.samples] == [None, "interrupted"]
    of = report.figures(loaded, Slo())
    assert of["ok"] == 1 and of["interrupted"] == 1 and of["failed"] == 0 and of["slo_share"] == 1


def test_percentiles_and_warnings():
    found = report.summary(range(101))
    assert found == {"mean": 50, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    assert report.summary([]) is None
    _, loaded = drive([stream(event("a"), DONE)], asks(0.0))
    loaded.cpu = loaded.seconds * 0.9
    loaded.samples[0].sent = 0.5
    said = " ".join(report.warnings(report.figures(loaded), 2))
    assert "90% of a core" in said and "sent late" in said and "no usage" in said


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url():
    """Of a real server of the tiny model."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with ENGINES["own"]("tiny", max_num_seqs=8) as texts, site(texts, chat_template=template) as here:
        yield here.url


def test_the_command(url, tmp_path, capsys):
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    sizes = ["--requests", "12", "--input-len", "10", "--output-len", "6"]
    command = ["bench", "serve", "--url", url, *sizes, "--rate", "60", "--out", str(out)]
    assert main([*command, "--slo-ttft", "60000", "--slo-itl", "60000", "--api-key", "secret"]) == 0
    shown = capsys.readouterr().out
    assert "12 requests" in shown and "12 answered" in shown and "TTFT" in shown and "100.0% had" in shown
    said = json.loads(out.read_text())
    assert said["model"] == "tiny" and len(said["requests"]) == 12 and "secret" not in out.read_text()
    assert all(r["tokens"] == 6 and r["prompt_tokens"] == 10 and r["ttft"] > 0 for r in said["requests"])
    of = said["figures"]
    assert of["new_tokens"] == 72 and of["prompt_tokens"] == 120 and of["usage"] and of["goodput"] > 0
    assert {"mean", "p50", "p90", "p95", "p99", "max"} == of["ttft"].keys() == of["tpot"].keys() == of["e2e"].keys()
    assert bench(["picture", str(out), str(picture)]) == 0 and picture.read_bytes()[:4] == b"\x89PNG"
    assert load_title(said) == "tiny: random prompts, 60 requests/s (poisson)"


def test_the_command_with_chats_files_and_whole_answers(url, tmp_path, capsys):
    work.write(work.make("W3", 2048, requests=4), tmp_path / "w.jsonl")
    trace = tmp_path / "azure.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0.0,900,40\n0.05,20,5\n")
    cut = ["--input-len", "30", "--output-len", "8"]
    for more, tokens in (
        (["--work", str(tmp_path / "w.jsonl"), "--rate", "100"], None),
        (["--trace", str(trace), "--speed", "2", *cut], 13),
        (["--endpoint", "chat", "--requests", "3", "--output-len", "5"], 15),
        (["--no-stream", "--requests", "3", "--concurrency", "2", "--output-len", "5"], 15),
    ):
        out = tmp_path / "r.json"
        assert main(["bench", "serve", "--url", url, "--out", str(out), *more]) == 0, more
        of = json.loads(out.read_text())["figures"]
        assert of["failed"] == 0 and of["new_tokens"] == (
            tokens or sum(r.max_tokens for r in work.make("W3", 99, requests=4))
        )
        assert (of["ttft"] is None) == ("--no-stream" in more)
    assert "Whole request" in capsys.readouterr().out


def test_ctrl_c_reports_what_there_is(url, capsys, monkeypatch):
    done, one = [], Generator.one

    async def counted(*args):
        done.append(await one(*args))
        if len(done) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return done[-1]

    monkeypatch.setattr(Generator, "one", counted)
    assert main(["bench", "serve", "--url", url, "--rate", "20", "--requests", "10000", "--output-len", "20"]) == 130
    shown = capsys.readouterr().out
    assert " answered" in shown and "TTFT" in shown


@pytest.mark.parametrize(
    "more, said",
    [
        (["--model", "other"], "no model 'other'"),
        (["--input-len", "900"], "HTTP 400"),
        (["--body", '{"suffix": "x"}'], "suffix"),
        (["--trace", "no-such.csv"], "no-such.csv"),
    ],
)
def test_what_the_server_refuses_is_told(url, capsys, more, said):
    assert main(["bench", "serve", "--url", url, "--requests", "2", *more]) == 1
    told = capsys.readouterr()
    assert said in told.out + told.err and "Traceback" not in told.err


@pytest.mark.parametrize(
    "more, said",
    [
        (["--rate", "0"], "--rate must be above 0"),
        (["--arrivals", "constant"], "needs --rate"),
        (["--duration", "5"], "no end"),
        (["--body", "[1]"], "JSON object"),
        (["--trace", "x.csv", "--rate", "1"], "--speed"),
        (["--trace", "x.csv", "--work", "y"], "not allowed with"),
    ],
)
def test_wrong_arguments(capsys, more, said):
    with pytest.raises(SystemExit) as e:
        main(["bench", "serve", "--url", "http://127.0.0.1:9", *more])
    assert e.value.code == 2 and said in capsys.readouterr().err
