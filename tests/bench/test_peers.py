"""The scripts of the engines. Ours and transformers' run; that of llama.cpp runs against a stand-in of its server, with
the names and the meaning that these had in b11434. Those of vLLM and OpenVINO run where these are installed."""

import stat
import sys

import pytest

from benchmarks.bench.process import EngineSetup, Process
from benchmarks.bench.work import at_rate
from hibachi import LLM, SamplingParams
from hibachi.errors import EngineFailed
from hibachi.testing.bench.work import TimedRequest

WORK = [TimedRequest(0, 0.0, [5, 6, 7], 6), TimedRequest(1, 0.0, [9] * 20, 3), TimedRequest(2, 0.0, [11, 12], 9)]
LATER = [TimedRequest(i, 0.05 * i, [5 + i] * 4, 3) for i in range(4)]

LLAMA = """#!{python}
import json, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
if "--version" in sys.argv:
    print("version: 11434 (abc)", file=sys.stderr)
    sys.exit()
assert sys.argv[sys.argv.index("-np") + 1] == "4" and "--no-such-thing" not in sys.argv
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass
    def do_GET(self):
        self.send_response(200 if time.monotonic() > ready else 503)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["ignore_eos"] and asked["stream"] and not asked["cache_prompt"]
        self.send_response(200)
        self.end_headers()
        n = asked["n_predict"]
        for i in range(n):
            tokens = [asked["prompt"][-1] + i]
            if i == n - 2:
                tokens = []  # half of a character is held back
            self.say(tokens=tokens, stop=False, tokens_predicted=i + 1)
        self.say(tokens=[], stop=True, tokens_predicted=n)
    def say(self, **what):
        self.wfile.write(b"data: " + json.dumps(what).encode() + b"\\n\\n")
ready = time.monotonic() + 0.2
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def setup(engine, model="somewhere", **options):
    return EngineSetup(
        engine, str(model), "float32", rows=4, max_model_len=64, threads=2, backend="numpy", options=options
    )


def check(answers, work, tokens=None):
    """All tokens came, in order, and not before their requests were due."""
    for answer, request in zip(sorted(answers, key=lambda a: a.id), work, strict=True):
        assert len(answer.times) == request.max_tokens
        assert answer.due == pytest.approx(request.arrival) and answer.times[0] > request.arrival
        assert answer.times == sorted(answer.times)
        if tokens is not None:
            assert answer.tokens == tokens[request.id]


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a script")
def test_llamacpp(tmp_path):
    server = tmp_path / "llama-server"
    server.write_text(LLAMA.replace("{python}", sys.executable))
    server.chmod(server.stat().st_mode | stat.S_IEXEC)
    with Process(setup("llamacpp", server=str(server))) as p:
        assert p.version == "11434 (abc)"
        check(p.run(WORK).answers, WORK)
        check(p.run(LATER).answers, LATER)
        if sys.platform == "linux":
            assert p.run(WORK).use.peak_rss_mib > 15  # two processes of Python


def test_an_engine_that_is_not_there():
    with pytest.raises(EngineFailed, match="No such file or directory: 'no-llama-server'"):
        Process(setup("llamacpp", server="no-llama-server"))


@pytest.fixture(scope="module")
def expected():
    """What hibachi itself writes, request by request."""
    with LLM("tiny") as llm:
        out = {}
        for r in [*WORK, *LATER]:
            params = SamplingParams(temperature=0, max_tokens=r.max_tokens, ignore_eos=True)
            out[tuple(r.prompt)] = llm.generate([r.prompt], params)[0].choices[0].token_ids
        return out


def test_hibachi(expected):
    from hibachi.llm.model.files import TINY

    with Process(setup("hibachi", TINY, profile=True, max_num_batched_tokens=32)) as p:
        ran = p.run(WORK)
        check(ran.answers, WORK, {r.id: expected[tuple(r.prompt)] for r in WORK})
        assert sum(step["tokens"] for step in ran.more["profile"]) >= sum(len(r.prompt) for r in WORK)
        check(p.run(LATER).answers, LATER, {r.id: expected[tuple(r.prompt)] for r in LATER})
        assert p.about["library"].startswith("numpy") and p.start_up["total"] > p.start_up["load"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["static", "continuous"])
def test_transformers_writes_the_same(expected, way):
    from hibachi.llm.model.files import TINY

    pytest.importorskip("transformers")
    with Process(setup("transformers", TINY, way=way, batch=2)) as p:
        check(p.run(WORK).answers, WORK, {r.id: expected[tuple(r.prompt)] for r in WORK})
        if way == "continuous":
            check(p.run(LATER).answers, LATER, {r.id: expected[tuple(r.prompt)] for r in LATER})
        assert p.version and at_rate(LATER, None)[0].arrival == 0
