"""Models that make no text, in this process and in one of their own: the same tokens, the same errors."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from hibachi import SamplingParams, StopRule, Trie
from hibachi.engine import conversions
from hibachi.errors import (
    ConfigError,
    EngineFailed,
    InvalidModelOutput,
    InvalidRequest,
    ModelError,
    NonFiniteOutput,
    PromptTooLong,
    QueueFull,
    UnsupportedOperation,
)
from hibachi.llm.own import open_model
from hibachi.llm.remote.llm import open_remote
from hibachi.llm.remote.rows import Gathered, each
from hibachi.llm.texts import Texts
from hibachi.llm.tokens import Tokens
from hibachi.request import Finish, Request
from tests.engine.models import until
from tests.remote.token_models import Own

FILE = Path(__file__).with_name("token_models.py")
PLACES = {"own": open_model, "child": open_remote}
GREEDY = SamplingParams(temperature=0, max_tokens=40)
OPTIONS = {"Steps": dict(max_num_queued_reqs=64, pause_after=8, max_num_seqs=4), "Kinds": dict(max_num_seqs=4)}


class Unread:
    """Says that it is an array, and cannot be read."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("planted")


class Opened(dict):
    """Models in a place, each opened when it is first asked for."""

    def __init__(self, place):
        super().__init__()
        self.open = PLACES[place]

    def __missing__(self, name):
        found = self[name] = self.open(name if ":" in name else f"{FILE}:{name}", **OPTIONS.get(name, {}))
        return found

    def __call__(self, name):
        return self[name]

    def close(self):
        for found in self.values():
            found.close()


@pytest.fixture(scope="module")
def there():
    """In processes of their own, which all tests share."""
    made = Opened("child")
    yield made
    made.close()


@pytest.fixture(params=PLACES)
def model(request, there):
    if request.param == "child":
        yield there
        return
    made = Opened("own")
    yield made
    made.close()


def came(tokens, stream):
    return [tokens.host(item).tolist() for item in stream.collect()]


# ---- each rung, and feed-forward -------------------------------------------------------------------------------------


def test_any_kind_of_token_in_one_engine(model):
    steps = model("Steps")
    assert isinstance(steps, Tokens) and steps.engine.facts.token is None and not steps.engine.facts.feedforward
    for dtype in (np.int8, np.uint16, np.int64, np.float32, np.float64):
        for shape in ((), (3,), (2, 1, 2)):
            prompt = np.arange(2 * int(np.prod(shape))).reshape(2, *shape).astype(dtype)
            stream = steps.submit(prompt, max_tokens=3)
            items = [steps.host(item) for item in stream.collect()]
            assert [i.dtype for i in items] == [dtype] * 3 and [i.shape for i in items] == [shape] * 3
            assert np.array_equal(items, [prompt[-1] + n for n in (1, 2, 3)])
            assert stream.finish_reason == "length" and stream.started is not None
    assert came(steps, steps.submit([[1, 2]], max_tokens=1)) == [[2, 3]]  # a list will do


def test_real_values_end_where_the_predicate_of_the_class_says_so(model):
    falling = model("Falling")
    assert falling.engine.facts.token == ((2,), "float64")
    streams = [falling.submit([[height, 0.0]]) for height in (100.0, 500.0, 1000.0)]
    paths = [came(falling, stream) for stream in streams]
    assert [len(path) for path in paths] == [6, 11, 15] and {s.finish_reason for s in streams} == {"stop"}
    speed = paths[0][2][1]
    near = falling.submit([[100.0, 0.0]], stop_rule=StopRule([[100 - 2.9, speed + 0.05]], atol=30.0))
    assert len(came(falling, near)) < 6
    exact = falling.submit([[100.0, 0.0]], stop_rule=StopRule([paths[0][2]]))
    assert came(falling, exact) == paths[0][:3]


def test_a_classifier(model):
    kinds = model("Kinds")
    facts = kinds.engine.facts
    assert facts.feedforward and facts.labels == ("first", "second", "third") and facts.token == ((3,), "float32")
    stream = kinds.submit(np.array([1.0, 1, 2]))  # cast to what the class takes
    (out,) = [kinds.host(item) for item in stream.collect()]
    assert out.dtype == np.float32 and out.tolist() == [0.25, 0.25, 0.5] and stream.finish_reason is not None
    for more in ({"max_tokens": 2}, {"params": GREEDY}, {"stop_rule": [1]}):
        with pytest.raises(InvalidRequest, match=f"one output for each input.*{next(iter(more))}"):
            kinds.submit(np.ones(3), **more)


def test_logits_of_ids_and_a_cache_of_frames(model):
    texts = model("Ids")
    assert isinstance(texts, Texts)
    ids = Tokens(texts.engine, "Ids", GREEDY)  # whatever is served can be asked as tokens
    assert [int(i) for i in ids.submit(np.array([3, 4]), max_tokens=3)] == [5, 6, 7]
    assert ids.host(next(ids.submit([4]))).tolist() == 5
    stream = ids.submit([17], params=GREEDY.with_(stop_token_ids=[20]))
    assert came(ids, stream) == [18, 19, 20]
    with pytest.raises(InvalidRequest, match="from 0 to 31"):
        ids.submit([32])
    sums = model("hibachi.testing.toys:SumFrames")
    assert isinstance(sums, Tokens) and sums.engine.facts.cached
    assert came(sums, sums.submit([[1, 2, 3]], max_tokens=3)) == [[2, 3, 4], [4, 6, 8], [8, 2, 6]]


# ---- rules for the end -----------------------------------------------------------------------------------------------


def test_a_tolerance_is_that_of_the_rule_that_has_it(model):
    steps = model("Steps")
    near = StopRule([np.float32([3.4])], atol=0.5)
    assert came(steps, steps.submit(np.float32([[0]]), stop_rule=near)) == [[1], [2], [3]]
    exact = StopRule([np.float32([3.4])])
    assert len(came(steps, steps.submit(np.float32([[0]]), stop_rule=exact, max_tokens=6))) == 6
    wraps = StopRule([250], atol=2)  # 1 - 250 is not 7 in eight bits
    assert len(came(steps, steps.submit(np.uint8([0]), stop_rule=wraps, max_tokens=6))) == 6
    with pytest.raises(InvalidRequest, match="shape of one token"):
        steps.submit(np.float32([[0]]), stop_rule=[[1, 2]]).collect()


def test_the_rule_of_a_class_keeps_its_own_tolerance():
    from hibachi import AutoregressiveBatchInference

    class Up:
        def forward(self, tokens):
            return tokens[:, -1] + 1

    with AutoregressiveBatchInference(Up(), backend="numpy", stop_rule=StopRule([7.0], atol=0.25)) as engine:
        far = [float(x) for x in engine.run([0.1], stop_rule=StopRule([40.0], atol=2.5))]
        assert far[-1] == 7.1
        far = [float(x) for x in engine.run([0.3], stop_rule=StopRule([40.0], atol=2.5))]
        assert far[-1] == 38.3
    both = AutoregressiveBatchInference(Up(), backend="numpy", stop_rule=lambda now: now >= 5)
    with both as engine:
        assert [int(x) for x in engine.run([0], stop_rule=lambda now: now == 3)] == [1, 2, 3]
        assert [int(x) for x in engine.run([3], stop_rule=lambda now: now == 3)] == [4, 5]
        assert [int(x) for x in engine.run([0], stop_rule=[2])] == [1, 2]


# ---- bad input, beside an innocent request ---------------------------------------------------------------------------


def refused(model, name):
    """(what is sent, what becomes of it): at the call or from the stream, but before any item."""
    broad = np.broadcast_to(np.float32(0), (10**9, 4))
    none_of_them = {
        "an object": np.array([{}, 1], object),
        "a huge int": [2**70],
        "texts": ["a", "b"],
        "ragged": [[1], [1, 2]],
        "dates": np.array(["2020"], "datetime64[D]"),
        "structs": np.zeros(2, "i4,i4"),
        "an iterator": (x for x in [1.0]),
        "nothing": None,
        "huge": broad,
        "endless": np.broadcast_to(np.float32(0), (10**12,)),
    }
    more = {
        "Steps": {"a scalar": 5, "an empty one": [], "empty rows": np.zeros((0, 3)), "complex": np.array([1j])},
        "Frames": {"rank": [1, 2, 3, 4], "shape": [[1, 2, 3]], "floats": [[1.5, 2, 3, 4]], "range": [[70_000] * 4]},
        "Kinds": {"rank": [[1.0, 2, 3]], "shape": [1.0, 2], "ints": [1, 2, 3], "range": [1e300, 1, 1]},
    }
    return none_of_them | more[name]


@pytest.mark.parametrize("name", ["Steps", "Frames", "Kinds"])
def test_what_is_no_prompt_of_this_model_is_refused_and_harms_nobody(model, name):
    tokens = model(name)
    good = {"Steps": [1000, 5], "Frames": [[9, 9, 9, 9]], "Kinds": [1.0, 1.0, 2.0]}[name]
    innocent = tokens.submit(good)
    for what, given in refused(model, name).items():
        with pytest.raises((InvalidRequest, PromptTooLong)) as e:
            item = tokens.submit(given).collect()
            pytest.fail(f"{what} gave {item[:1]}")
        assert len(str(e.value)) < 800, what
    assert tokens.host(next(innocent)).tolist() in (6, [8, 7, 6, 5], [0.25, 0.25, 0.5])


def test_parameters_that_mean_nothing_here(model):
    steps = model("Steps")
    with pytest.raises(InvalidRequest, match="samples by itself"):
        steps.submit([1], params=GREEDY)
    for wrong in (0, -1, True, 1.5, "3"):
        with pytest.raises(InvalidRequest, match="max_tokens"):
            steps.submit([1], max_tokens=wrong)
    for terms in ("x", 5):
        with pytest.raises(InvalidRequest, match=r"Terms"):
            steps.submit([1], terms=terms)


def test_one_that_fails_harms_no_other(model):
    steps = model("Steps")
    good = [steps.submit([i, 100], max_tokens=20) for i in range(3)]
    bad, nan = steps.submit([5, -13]), steps.submit(np.array([-7.0]))
    with pytest.raises(ModelError, match="thirteen"):
        bad.collect()
    items = []
    with pytest.raises(NonFiniteOutput):
        items += iter(nan)
    assert [float(x) for x in items] == [-6, -5] and len(bad.come()) == 0
    assert [came(steps, stream) for stream in good] == [list(range(101, 121))] * 3
    kinds = model("Kinds")
    one, wrong, strange = (kinds.submit(x) for x in (np.ones(3), np.full(3, 13.0), np.full(3, 99.0)))
    with pytest.raises(ModelError, match="thirteen"):
        wrong.collect()
    with pytest.raises(NonFiniteOutput):
        strange.collect()
    assert np.allclose(came(kinds, one), 1 / 3)


# ---- bodies of types of its own --------------------------------------------------------------------------------------


def test_a_class_reads_and_writes_bodies(model):
    kinds = model("Kinds")
    assert kinds.engine.facts.reads and kinds.engine.facts.writes
    given = kinds.engine.read(b"1 1 2", "text/plain")
    assert given.tolist() == [1, 1, 2] and came(kinds, kinds.submit(given)) == [[0.25, 0.25, 0.5]]
    assert kinds.engine.write(np.float32([0.25, 0.5])) == (b"0.25|0.5", "text/plain; charset=utf-8")
    for data, kind, error, words in (
        (b"1 x", "text/plain", InvalidRequest, "could not convert string to float: b'x'"),
        (b"1", "audio/wav", InvalidRequest, "send text/plain, not audio/wav"),
        (b"object", "", ModelError, "Kinds.read must return an array of numbers; got the dtype object"),
        (b"exit", "", ModelError, "Kinds.read raised SystemExit: 3"),
    ):
        with pytest.raises(error) as e:
            kinds.engine.read(data, kind)
        assert words in str(e.value) and type(e.value) is error
    for n, words in (
        (1, "must return .bytes, media type.*'no bytes'"),
        (2, r"media type.*\\r\\n"),
        (3, "ZeroDivision"),
    ):
        with pytest.raises(ModelError, match=words):
            kinds.engine.write(np.array([n]))
    steps = model("Steps")
    assert not steps.engine.facts.reads and not steps.engine.facts.writes
    for call in (lambda: steps.engine.read(b"", "x/y"), lambda: steps.engine.write(np.zeros(1))):
        with pytest.raises(UnsupportedOperation, match="Steps has no `"):
            call()


def test_nothing_of_a_class_of_its_own_leaves_its_process(model, monkeypatch):
    """What the other side cannot read would end the process, and all requests with it."""
    own = model("Own")
    for name in [name for name in sys.modules if "token_5f_models" in name]:  # of other tests, in this process
        monkeypatch.delitem(sys.modules, name)
    assert own.engine.facts.labels == ("text/plain",) and type(own.engine.facts.labels[0]) is str
    innocent = own.submit([1.0])
    for bad in (13.0, 99.0):
        with pytest.raises((ModelError, InvalidModelOutput)):
            came(own, own.submit([bad]))
    with pytest.raises(ModelError):
        own.engine.read(b"a", "x/y")
    with pytest.raises(InvalidRequest) as e:
        own.engine.read(b"", "x/y")
    assert str(e.value).encode()[:6] == b"\\udcff" and len(str(e.value)) < 20_000
    data, kind = own.engine.write(np.zeros(1))
    assert (data, kind, type(kind)) == (b"", "text/plain", str)
    assert came(own, innocent) == [[1.0]] and own.health().ok
    assert not [name for name in sys.modules if "token_5f_models" in name]  # it was not imported for them


def test_a_class_says_how_to_sample_where_a_request_does_not(model):
    assert model("Ids").default_params == SamplingParams(temperature=0, max_tokens=3)


def test_without_a_thread_no_place_is_lost(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    ours = conversions.Conversions(Own())
    with monkeypatch.context() as m:
        m.setattr(threading.Thread, "start", start)
        for _ in range(conversions.AT_ONCE + 1):
            with pytest.raises(QueueFull, match="can't start new thread"):
                ours.write(np.zeros(1))
    assert ours.write(np.zeros(1)) == (b"", "text/plain")


def test_a_body_that_takes_long_holds_up_nobody(there):
    kinds = there("Kinds")

    def read():
        with pytest.raises(InvalidRequest):
            kinds.engine.read(b"slow", "text/plain")

    slow = [threading.Thread(target=read) for _ in range(3)]
    for thread in slow:
        thread.start()
    assert kinds.engine.read(b"1", "text/plain").tolist() == [1] and kinds.health().ok
    assert came(kinds, kinds.submit([1.0, 0, 0])) == [[1, 0, 0]]
    assert all(thread.is_alive() for thread in slow)
    for thread in slow:
        thread.join()


def test_conversions_are_few_at_a_time_and_end(monkeypatch):
    monkeypatch.setattr(conversions, "ANSWER", 0.05)
    let = threading.Event()

    class Hangs:
        def read(self, data, kind):
            let.wait(10)
            return [1]

    ours = conversions.Conversions(Hangs())
    try:
        for _ in range(conversions.AT_ONCE):
            with pytest.raises(EngineFailed, match=r"Hangs.read took more than 0.05 s"):
                ours.read(b"", "x/y")
        with pytest.raises(QueueFull, match="4 calls run already"):
            ours.read(b"", "x/y")
    finally:
        let.set()
    until(lambda: not any(t.name == "hibachi-conversion" for t in threading.enumerate()))
    assert ours.read(b"", "x/y").tolist() == [1]  # their places are free again
    monkeypatch.setattr(conversions, "CALLERS", 0)
    with pytest.raises(QueueFull, match="0 calls"):
        conversions.Conversions(Hangs()).read(b"", "x/y")


@pytest.mark.parametrize("kind", ["audio/wav", "text/plain; charset=utf-8", 'a/b;c="d e"', "application/vnd.x+json"])
def test_media_types(kind):
    class Model:
        def write(self, tokens):
            return bytearray(b"x"), tokens

    assert conversions.Conversions(Model()).write(kind) == (b"x", kind)
    for wrong in ("", "audio", "a/b\n", "a/b; c", "a b/c", "a/b;c=d\r\nX: 1", "ä/b", 5, None):
        with pytest.raises(ModelError, match="media type"):
            conversions.Conversions(Model()).write(wrong)


# ---- how models are opened -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "name, options, words",
    [
        ("Strange", {}, "Strange.labels must be a list of texts"),
        ("Misfit", {}, "Misfit: The stop token must have the shape"),
        ("Steps", {"quantization": "int8"}, "quantization is for models from files"),
        ("Steps", {"numerics": "cpu-1"}, "numerics is for models from files"),
        ("Steps", {"max_model_len": 0}, "max_model_len must be an integer"),
        ("Ids", {"feedforward": True}, "feed-forward model needs `forward"),
    ],
)
def test_what_is_wrong_with_a_class_is_said_when_it_is_opened(place, name, options, words):
    if place == "child" and name not in ("Strange", "Misfit"):
        pytest.skip("one process a kind of error is enough")
    with pytest.raises(ConfigError, match=words):
        PLACES[place](f"{FILE}:{name}", **options)


def test_a_class_is_feed_forward_if_it_or_who_opens_it_says_so():
    with open_model(f"{FILE}:Wide", feedforward=True) as wide:
        assert wide.engine.facts.feedforward and came(wide, wide.submit([[1.0, 2.0]])) == [[1.0, 2.0]]
    with open_model(f"{FILE}:Wide") as wide:
        assert not wide.engine.facts.feedforward


# ---- the pipe, and the end of the process ----------------------------------------------------------------------------


def test_a_token_that_is_kept_keeps_no_others():
    with open_remote(f"{FILE}:Wide", max_num_seqs=32) as wide:
        streams = [wide.submit(np.full((1, 512), i, np.float64), max_tokens=3) for i in range(32)]
        items = [stream.collect() for stream in streams]
    for i, some in enumerate(items):
        assert len(some) == 3
        for item in some:
            assert (item == i).all() and item.flags.writeable
            assert item.base is None or item.base.nbytes <= item.nbytes


def test_batches_that_cannot_come_to_the_host_end_their_streams_and_no_others():
    failed = []

    def to_host(batch):
        if batch is bad:
            raise RuntimeError("the device")
        return np.asarray(batch)

    bad, good = object(), np.arange(6).reshape(3, 2)
    gathered = Gathered(to_host, lambda number, error: failed.append((number, str(error))))
    for number, batch, place in ((1, good, 2), (7, bad, 0), (2, good, 0), (7, bad, 1), (1, good, 1)):
        gathered.add(number, batch, place)
    rows = gathered.taken()
    assert [(n, row.tolist()) for n, row in each(rows)] == [(1, [4, 5]), (2, [0, 1]), (1, [2, 3])]
    assert failed == [(7, "the device")] and not gathered.taken()


def test_the_death_of_the_process_reaches_every_stream_and_another_begins():
    with open_remote(f"{FILE}:Steps", restart="on_failure") as steps:
        first, streams = steps.engine.pid, [steps.submit([1000, i]) for i in range(4)]
        assert [next(stream).item() for stream in streams] == [1, 2, 3, 4]
        os.kill(first, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineFailed, match="signal 9"):
                stream.collect()
            assert stream.finish_reason is Finish.ERROR
        until(lambda: steps.engine.restarts == 1 and steps.health().ok)
        assert steps.engine.pid != first and came(steps, steps.submit([[1, 2]], max_tokens=1)) == [[2, 3]]


def test_a_stream_of_wide_tokens_survives_a_process_that_is_stopped(there):
    steps = there("Steps")
    stream = steps.submit(np.zeros((1, 1024), np.float32), max_tokens=50)
    os.kill(steps.engine.pid, signal.SIGSTOP)
    time.sleep(0.02)
    os.kill(steps.engine.pid, signal.SIGCONT)
    assert [item[0].item() for item in stream] == list(range(1, 51))


# ---- seeds and inputs ------------------------------------------------------------------------------------------------

DRIFT = np.linspace(0, 1, 20)


def walk(model, seed, scale=1.0, n=5):
    inputs = {"scale": scale, "drift": DRIFT}
    stream = model("Walks").submit(np.zeros(3), params=SamplingParams(seed=seed), max_tokens=n, inputs=inputs)
    return [float(model("Walks").host(item)) for item in stream.collect()]


def test_seeds_and_inputs_are_those_of_a_request(model):
    with open_model(f"{FILE}:Walks") as here:
        assert here.engine.stats().new_tokens == 2  # of its example, with examples of inputs
        want = walk(lambda name: here, 2)
    assert walk(model, 2) == walk(model, 2 + 2**64) == want
    assert walk(model, 3) != want and walk(model, 2, 0.0) == np.cumsum(DRIFT[2:7]).tolist()


@pytest.mark.parametrize(
    "inputs",
    [None, 3, {"scale": 1.0}, {"scale": Unread(), "drift": DRIFT}, {"scale": 1.0, "drift": DRIFT[:4]}],
    ids=["none", "number", "missing", "unread", "short"],
)
def test_wrong_inputs_are_refused_at_the_call(model, inputs):
    with pytest.raises(InvalidRequest, match="inputs"):
        model("Walks").submit(np.zeros(3), max_tokens=5, inputs=inputs)
    assert len(walk(model, 1)) == 5


def test_inputs_that_are_too_large_for_the_pipe_are_refused(there, monkeypatch):
    monkeypatch.setattr("hibachi.llm.remote.engine.MOST_UNSENT", 200)
    assert len(walk(there, 1)) == 5  # 164 bytes
    with pytest.raises(InvalidRequest, match="inputs must have at most 200 bytes in all; got 244"):
        there("Walks").submit(np.zeros(3), max_tokens=5, inputs={"scale": 1.0, "drift": np.zeros(30)})


def test_only_equal_inputs_share_a_prefix(there):
    engine, prompt = there("Shifted").engine, np.array([1, 2, 3, 4] * 10)

    def ask(shift):
        request = Request(prompt, SamplingParams(temperature=0, max_tokens=2), inputs={"shift": shift})
        stream = engine.submit(engine.check(request))
        return stream.collect(), stream.reused

    first, other, again = ask(0), ask(1), ask(0)
    assert (first[1], other[1]) == (0, 0) and again[1] >= 16
    assert first[0] == again[0] != other[0]


def test_a_catalogue_crosses_the_pipe_up_to_a_size(there, monkeypatch):
    engine, trie = there("Shifted").engine, Trie([[1, 2, 3], [1, 2, 4], [5]])

    def ask(shift):
        request = Request([1, 2], SamplingParams(temperature=0), inputs={"shift": shift}, allowed=trie)
        return engine.submit(engine.check(request)).collect()

    assert [ask(shift) in ([1, 2, 3], [1, 2, 4], [5]) for shift in range(4)] == [True] * 4
    monkeypatch.setattr("hibachi.llm.remote.engine.MOST_UNSENT", 39)
    with pytest.raises(InvalidRequest, match="allowed must take at most 39 bytes; got 40"):
        ask(0)
    with pytest.raises(UnsupportedOperation, match="needs the engine in this process"):
        engine.check(Request([1, 2], inputs={"shift": 0}, fed=True))
