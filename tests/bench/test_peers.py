"""The scripts of the engines. Ours and transformers' run; the others run against stand-ins that take the calls of the
real ones, with the names and the meaning that these had in vLLM 0.32, OpenVINO GenAI 2026.4 and llama.cpp b11434."""

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

VLLM = """
import os, types
__version__ = "0.32"
class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens
class Engine:
    def __init__(self):
        self.live = {}
    def add_request(self, name, prompt, params):
        assert name not in self.live
        self.live[name] = [prompt["prompt_token_ids"], params.max_tokens, []]
    def step(self):
        assert self.live
        out = []
        for name, (prompt, most, ids) in list(self.live.items()):
            ids.append(prompt[-1] + len(ids))
            if done := len(ids) == most:
                del self.live[name]
            text = types.SimpleNamespace(token_ids=tuple(ids))
            out.append(types.SimpleNamespace(request_id=name, outputs=[text], finished=done))
        return out
class LLM:
    def __init__(
        self, *, model, dtype, max_num_seqs, max_model_len, enable_prefix_caching,
        disable_log_stats, seed, enforce_eager,
    ):
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and enforce_eager is True
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
        self.llm_engine = Engine()
"""

OPENVINO = """
class Tensor:
    def __init__(self, array):
        assert array.dtype == "int64" and array.ndim == 2
        self.array = array
"""

GENAI = """
import types
__version__ = "2026.4"
class SchedulerConfig: pass
class GenerationConfig: pass
class Handle:
    def __init__(self):
        self.unread = []
    def can_read(self):
        return bool(self.unread)
    def read(self):
        return {0: types.SimpleNamespace(generated_ids=[self.unread.pop(0)])}
class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, properties):
        assert device == "CPU" and properties["INFERENCE_PRECISION_HINT"] == "f32"
        assert scheduler.enable_prefix_caching is False and scheduler.max_num_seqs == 4 and scheduler.cache_size == 1
        self.live = []
    def add_request(self, name, tensor, how):
        assert how.max_new_tokens == how.min_new_tokens and how.ignore_eos and not how.do_sample
        handle = Handle()
        self.live.append([int(tensor.array[0, -1]), how.max_new_tokens, handle])
        return handle
    def step(self):
        for each in self.live:
            each[2].unread.append(each[0])
            each[0] += 1
            each[1] -= 1
        self.live = [each for each in self.live if each[1]]
    def has_non_finished_requests(self):
        return bool(self.live)
"""

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


def counting(work):
    """What the stand-ins answer: numbers from the last of the prompt on."""
    return {r.id: [r.prompt[-1] + i for i in range(r.max_tokens)] for r in work}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """installed(name, source): a module that the processes can import."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def install(**modules):
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)

    return install


def both(setup):
    with Process(setup) as p:
        check(p.run(WORK).answers, WORK, counting(WORK))
        check(p.run(LATER).answers, LATER, counting(LATER))
        return p.version


def test_vllm(installed):
    installed(vllm=VLLM)
    assert both(setup("vllm", enforce_eager=True)) == "0.32"


def test_openvino(installed):
    installed(openvino=OPENVINO, openvino_genai=GENAI)
    assert both(setup("openvino", cache_gib=1)) == "2026.4"


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


def test_an_engine_that_is_not_there(installed):
    installed(vllm="raise ImportError('libsomething.so.1 is missing')")
    with pytest.raises(EngineFailed, match=r"ImportError: libsomething\.so\.1 is missing"):
        Process(setup("vllm"))
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
