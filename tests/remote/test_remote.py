"""An engine in a process of its own: the same answers, and what its death is to its streams."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from ..lib.waits import until

pytest.importorskip("tokenizers")

from hibachi import LLM, SamplingParams
from hibachi.common.named import object_named
from hibachi.errors import (
    ConfigError,
    EngineClosed,
    EngineFailed,
    InvalidRequest,
    ModelError,
    PromptTooLong,
    QueueFull,
)
from hibachi.llm.own import is_own, open_texts
from hibachi.llm.remote.llm import RemoteLLM
from hibachi.request import Finish

PARAMS = SamplingParams(max_tokens=20, seed=3)
LONG = PARAMS.with_(max_tokens=500, ignore_eos=True)


@pytest.fixture
def here():
    with LLM("tiny") as llm:
        yield llm


@pytest.fixture(scope="module")
def there():
    with RemoteLLM("tiny", max_num_queued_reqs=8) as llm:
        yield llm


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0},
        {"n": 3},
        {"n": 2, "best_of": 4},
        {"n": 3, "beams": {"width": 5, "length_penalty": 0.4}},
        {"beams": {}, "stop": ["the"]},
        {"n": 2, "beams": {"early_stopping": True}, "include_stop": True, "bad_words": ["the"]},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"stop": ["the"]},
        {"bad_words": ["the"]},
        {"stop": ["the"], "include_stop": True, "min_tokens": 5},
    ],
)
def test_it_answers_as_an_engine_here_does(here, there, changes):
    params = PARAMS.with_(**changes)
    ours, theirs = (llm.generate(["It is a truth", [5, 6, 7]], params) for llm in (here, there))
    assert ours == theirs
    assert all((choice.score is not None) == ("beams" in changes) for out in ours for choice in out.choices)


def test_of_beams_each_can_be_left_and_all_are_counted():
    wanted = PARAMS.with_(n=3, beams={}, ignore_eos=True)
    with RemoteLLM("tiny") as there:
        whole = there.generate([[5, 6, 7]], wanted)[0].choices
        stream = there.stream([5, 6, 7], wanted)
        stream.choices[0].tokens.close()
        assert [c.tokens.collect() for c in stream.choices[1:]] == [c.token_ids for c in whole[1:]]
        until(lambda: there.stats().finished == 6 and not there.stats().running)
        assert there.stats().new_tokens == 5 * 20


def test_so_do_vectors_scores_and_streams(here, there):
    ours, theirs = (llm.embed(["Emma", "Anne Elliot"]) for llm in (here, there))
    assert all(np.array_equal(a.embedding, b.embedding) for a, b in zip(ours, theirs, strict=True))
    assert here.score("It is", " a truth") == there.score("It is", " a truth")
    ours, theirs = ("".join(piece.text for piece in llm.stream("Emma", PARAMS)) for llm in (here, there))
    assert ours == theirs
    embeds = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    ours, theirs = (llm.generate({"prompt_embeds": embeds}, PARAMS)[0].text for llm in (here, there))
    assert ours == theirs
    assert there.dump()["events"] and there.engine.facts.deterministic == here.deterministic


def test_what_is_wrong_is_said_at_the_call(there):
    for prompt, params, error in (
        ([5] * 600, PARAMS, PromptTooLong),
        ([99999], PARAMS, InvalidRequest),
        ("a", PARAMS.with_(allowed_token_ids=[99999]), InvalidRequest),
    ):
        with pytest.raises(error):
            there.stream(prompt, params)
    with pytest.raises(InvalidRequest, match="embed"):
        there.generate({"prompt_embeds": np.zeros((3, 7), np.float32)}, PARAMS)
    assert there.generate("a", PARAMS)[0].token_ids


def test_the_queue_is_bounded_and_closing_makes_room(there):
    rows = there.engine.facts.limits.rows
    streams = [there.stream("a", LONG) for _ in range(rows + 8)]
    with pytest.raises(QueueFull, match=f"at most {rows + 8}"):
        there.stream("a", LONG)
    streams.pop().close()
    streams.append(there.stream("a", LONG))
    for stream in streams:
        stream.close()
    until(lambda: there.stats().running == 0 and there.stats().free_blocks == there.stats().blocks)


def test_a_consumer_that_is_behind_pauses_its_request():
    with RemoteLLM("tiny", pause_after=8) as llm:
        stream = llm.stream("a", LONG)
        until(lambda: llm.health().paused == 1)
        came = llm.stats().new_tokens
        assert came < 400
        assert sum(len(piece.token_ids) for piece in stream) == 500


def test_when_it_joined_and_what_it_reused_are_known(there):
    before = time.monotonic()
    stream = there.stream("It is a truth universally acknowledged, that a single man in possession", PARAMS)
    list(stream)
    again = there.stream("It is a truth universally acknowledged, that a single man in possession", PARAMS)
    list(again)
    assert before < stream.tokens.started < time.monotonic()
    assert again.tokens.reused >= 16 and again.tokens.reused % 16 == 0


# ---- its end -------------------------------------------------------------------------------------------------------


def test_its_death_reaches_every_stream():
    with RemoteLLM("tiny") as llm:
        streams = [llm.stream("a", LONG) for _ in range(3)]
        next(streams[0].tokens)
        os.kill(llm.engine.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineFailed, match="signal 9"):
                list(stream)
        assert llm.health().state == "failed" and not llm.health().ok
        with pytest.raises(EngineFailed):
            llm.stream("a", PARAMS)
        with pytest.raises(EngineFailed):
            llm.dump()


def test_one_that_hangs_is_found_out():
    with RemoteLLM("tiny", stall_after=0.5) as llm:
        assert llm.health().ok
        os.kill(llm.engine.pid, signal.SIGSTOP)
        until(lambda: llm.health().state == "stalled")
        os.kill(llm.engine.pid, signal.SIGCONT)
        until(lambda: llm.health().ok)


def test_closing_ends_streams_and_the_process():
    llm = RemoteLLM("tiny")
    stream = llm.stream("a", LONG)
    next(stream.tokens)
    llm.close()
    assert stream.finish_reason is Finish.CLOSED or stream.finish_reason is Finish.CANCELLED
    assert llm.health().state == "closed"
    with pytest.raises(ProcessLookupError):
        os.kill(llm.engine.pid, 0)
    with pytest.raises(EngineClosed):
        llm.stream("a", PARAMS)
    llm.close()


def test_draining_finishes_what_runs():
    with RemoteLLM("tiny") as llm:
        stream = llm.stream("a", LONG)
        assert not llm.drain(0.01)
        with pytest.raises(EngineClosed, match="draining"):
            llm.stream("a", PARAMS)
        assert llm.drain(30) and len(stream.tokens.collect()) == 500


def test_it_does_not_outlive_its_parent():
    script = (
        "from hibachi.llm.remote.llm import RemoteLLM; import os; llm = RemoteLLM('tiny');"
        "print(llm.engine.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    child = int(done.stdout)

    def gone():
        try:
            with open(f"/proc/{child}/stat") as file:
                return file.read().split()[2] == "Z"
        except OSError:
            return True

    until(gone)


def test_what_making_the_model_raises_is_raised_here():
    with pytest.raises(ConfigError, match="no-such-place"):
        RemoteLLM("./no-such-place")
    with pytest.raises(ConfigError, match="policy"):
        RemoteLLM("tiny", scheduling_policy="none of them")


# ---- models of one's own -------------------------------------------------------------------------------------------

OWN = '''
import numpy as np

class Letters:
    """Says the next letter of the alphabet."""

    vocab_size, max_model_len = 26, 64

    class tokenizer:
        encode = staticmethod(lambda text: [ord(c) - 97 for c in text])
        decode = staticmethod(lambda ids: "".join(chr(97 + i) for i in ids))

    deterministic = False  # no calls but those of requests

    def logits(self, tokens, lengths):
        return np.eye(26, dtype=np.float32)[(tokens[:, -1] + 1) % 26] * 10

class Mute(Letters):
    tokenizer = None

class Nearly:
    """A tokenizer that is an object."""
    def encode(self, text):
        return [ord(c) - 97 for c in text]
    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)

class Over(Letters):
    def __init__(self, backend):
        self.backend, self.tokenizer = backend, Nearly()

class TooFar(Exception):
    pass

class Ends(Letters):
    deterministic = False  # no calls but those of requests

    def logits(self, tokens, lengths):
        if (tokens[:, -1] == 25).any():
            raise TooFar("there is no letter after z")
        return super().logits(tokens, lengths)

class Skips:
    """A logits processor: after an e comes g."""
    def __call__(self, tokens, logits):
        if tokens[-1:] == [4]:
            logits[6] += 1000
        return logits

class Forward:
    def forward(self, tokens):
        return tokens[:, -1]

def broken():
    raise RuntimeError("no such weights")
'''


@pytest.fixture
def own(tmp_path):
    (tmp_path / "letters.py").write_text(OWN)
    return f"{tmp_path}/letters.py"


def test_a_tokenizer_may_stand_in_a_module_beside_the_model(own, tmp_path, monkeypatch):
    """It is sent by the engine's process, and the folder is not the working directory of either."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_it.py").write_text("from letters import Nearly\nclass Spells(Nearly):\n    pass\n")
    (tmp_path / "spelled.py").write_text(
        "from beside_it import Spells\nfrom letters import Letters\nclass Spelled(Letters):\n    tokenizer = Spells()\n"
    )
    with RemoteLLM(f"{tmp_path}/spelled.py:Spelled") as texts:
        (out,) = texts.generate("abc", SamplingParams(temperature=0, max_tokens=2))
        assert out.text == "de"


def test_a_tokenizer_that_cannot_be_made_here_is_told_by_name(own, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "hidden_away.py").write_text("from letters import Nearly\nclass Spells(Nearly):\n    pass\n")
    (tmp_path / "spelled.py").write_text(
        f"import sys\nsys.path.append({str(tmp_path / 'deep')!r})\nfrom hidden_away import Spells\n"
        "from letters import Letters\nclass Spelled(Letters):\n    tokenizer = Spells()\n"
    )
    with pytest.raises(
        ConfigError, match=r"tokenizer of .*:Spelled .* ModuleNotFoundError: .*'hidden_away'.*--engine own"
    ):
        RemoteLLM(f"{tmp_path}/spelled.py:Spelled")


@pytest.mark.parametrize("make", (open_texts, RemoteLLM))
def test_a_class_of_ones_own_is_served(own, make):
    with make(f"{own}:Letters") as texts:
        (out,) = texts.generate("abc", SamplingParams(temperature=0, max_tokens=5))
        assert out.text == "defgh" and out.token_ids == [3, 4, 5, 6, 7]
        (out,) = texts.generate([[25]], SamplingParams(temperature=0, max_tokens=9, stop=["cd"]))
        assert out.text == "ab"
        with pytest.raises(InvalidRequest, match="0 to 25"):
            texts.generate("a-z", PARAMS)
    with make(f"{own}:Mute") as texts:
        (out,) = texts.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=2))
        assert out.text == "" and out.token_ids == [3, 4]
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            texts.generate("ab", PARAMS)
    for name, said in (("Forward", "logits"), ("broken", "no such weights"), ("Nobody", "Nobody")):
        with pytest.raises(ConfigError, match=said):
            make(f"{own}:{name}")
    with pytest.raises(ConfigError, match="quantization"):
        make(f"{own}:Letters", quantization="int8")


@pytest.mark.parametrize("make", (open_texts, RemoteLLM))
@pytest.mark.parametrize("name", ("letters", "json", "queue", "token"))
@pytest.mark.slow
def test_what_a_file_defines_goes_to_the_engine_and_back_whatever_it_is_called(tmp_path, make, name):
    (tmp_path / f"{name}.py").write_text(OWN)
    file, greedy = f"{tmp_path}/{name}.py", SamplingParams(temperature=0, max_tokens=4)
    skips = object_named(f"{file}:Skips")()
    with make(f"{file}:Over") as texts:
        assert texts.generate("abc", greedy)[0].text == "defg"
        assert texts.generate("bcd", greedy.with_(logits_processors=[skips]))[0].text == "eghi"
    with make(f"{file}:Ends") as texts, pytest.raises(ModelError, match="TooFar: there is no letter after z"):
        texts.generate("xy", greedy)
    assert json.loads(json.dumps([1])) == [1] and queue.SimpleQueue


@pytest.mark.parametrize("make", (open_texts, RemoteLLM))
@pytest.mark.parametrize(
    "name, said",
    [
        ("", "Letters; its classes with a method .* are Letters, Mute"),
        (":Leters", "no 'Leters'. It defines Letters, "),
        (":TooFar", "A model needs one of `forward"),
        (":Skips", "A model needs one of `forward"),
    ],
)
def test_what_is_wrong_with_a_name_is_said_wherever_the_engine_is(own, make, name, said):
    with pytest.raises(ConfigError, match=said):
        make(f"{own}{name}")


def test_what_names_a_class(tmp_path):
    assert is_own("pkg.module:Class") and is_own("some/file.py:make") and is_own("some/file.py:Outer.Inner")
    assert not is_own("tiny") and not is_own("org/name") and not is_own("C:\\models\\x y")
    folder = tmp_path / "a:b"
    folder.mkdir()
    assert not is_own(str(folder))
