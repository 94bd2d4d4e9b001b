"""MLX's own ways, where MLX is installed; tests/install/test_mlx.py makes an environment that has it."""

import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
import mlx.nn as nn  # noqa: E402

import hibachi  # noqa: E402
from hibachi import (  # noqa: E402
    LLM,
    AutoregressiveBatchInference,
    ConfigError,
    FeedforwardBatchInference,
    ModelError,
    Paged,
    SamplingParams,
    StepInputs,
)
from hibachi.engine.scheduler.lower import lower  # noqa: E402
from hibachi.testing.toys import SumPaged, TinyDecoder, expected, tiny_weights  # noqa: E402
from hibachi_mlx import MlxBackend, array_api  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["She was perfectly convinced that", "The letter was from", "Emma", "On the following morning, Mr. Darcy"]


@pytest.fixture
def mlx():
    return MlxBackend()


def elsewhere(call):
    """What a call returns in a thread of its own, or its error."""
    out = []

    def run():
        try:
            out.append(call())
        except Exception as e:
            out.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return out[0]


# ---- found, and on its devices ---------------------------------------------------------------------------------------


def test_an_array_finds_the_backend_and_the_doctor_lists_it():
    assert isinstance(hibachi.backend_for(mx.ones(2)), MlxBackend)
    assert (
        "mlx" in hibachi.available_backends()
        and hibachi.load_backend("mlx").versions()["library"] == f"mlx {mx.__version__}"
    )


def test_devices_by_name_and_as_mlx_has_them():
    for device in ("cpu", mx.cpu, mx.Device(mx.cpu, 0)):
        assert MlxBackend(device).device == mx.Device(mx.cpu, 0) and "cpu (" in MlxBackend(device).fingerprint()
    for wrong in ("tpu", 3, *(() if mx.is_available(mx.gpu) else ("gpu", mx.gpu))):
        with pytest.raises(ConfigError, match="Here MLX has 'cpu'"):
            hibachi.load_backend("mlx", device=wrong)


def test_a_step_computes_on_the_device_that_was_named(mlx, monkeypatch):
    assert isinstance(mlx.guard(), nullcontext)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    with MlxBackend("cpu").guard() as inside:
        assert inside is None or not isinstance(inside, nullcontext)


def test_errors_that_mean_that_memory_ran_out(mlx):
    told = [
        "[malloc] Unable to allocate 99 bytes.",
        "[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum allowed buffer size",
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPU...).",
    ]
    assert all(mlx.out_of_memory(RuntimeError(text)) for text in told) and mlx.out_of_memory(MemoryError())
    assert not mlx.out_of_memory(RuntimeError("[METAL] Command buffer execution failed: Caused GPU Hang Error."))
    assert not mlx.out_of_memory(ValueError(told[0]))


# ---- arrays ----------------------------------------------------------------------------------------------------------


def test_arrays_that_mlx_refuses_or_mistakes_are_put_all_the_same(mlx):
    for a in (np.arange(6).reshape(2, 3)[:, ::-1], np.ones(1)[::-1], np.ones((1, 2))[::-1], np.array(3), np.eye(3).T):
        assert mlx.get(mlx.put(a)).tolist() == a.tolist()
    fixed = np.arange(3)
    fixed.flags.writeable = False
    assert mlx.get(mlx.put(fixed, "bfloat16")).tolist() == [0, 1, 2]


@pytest.mark.parametrize("name, nothing", [("all", True), ("any", False), ("sum", 0), ("prod", 1)])
def test_nothing_is_reduced_to_what_it_should_be(mlx, name, nothing):
    """MLX leaves what was in the memory, so some is left there first."""
    some = mx.zeros((3, 2, 2), dtype=mx.bool_)
    empties = [
        mlx.put(np.zeros((2, 0, 2), bool)),
        mx.array(np.zeros((2, 0, 2), bool)),
        mx.take(some, mx.zeros((0,), dtype=mx.int32), axis=0).transpose(1, 0, 2),
        some[1:1].swapaxes(0, 1),
    ]
    for _ in range(20):
        for value, empty in ((v, e) for v in (0, 7) for e in empties):
            mx.eval([mx.full((n,), value, dtype=t) for n in range(1, 9) for t in (mx.uint8, mx.float32)])
            for axis, shape in (((0, 1), (2,)), ((1, 2), (2,)), (1, (2, 2))):
                for module in (array_api, *([mx] if empty is empties[0] else [])):
                    got = np.array(getattr(module, name)(empty, axis=axis))
                    assert np.array_equal(got, np.full(shape, nothing))


@pytest.mark.parametrize("descending", [False, True])
def test_sorting_is_stable_in_both_directions(descending):
    x = np.random.default_rng(0).integers(0, 4, (3, 40)).astype(np.float32)
    order = np.argsort(-x if descending else x, axis=-1, stable=True)
    given = dict(axis=-1, descending=descending)
    assert np.array_equal(np.array(array_api.argsort(mx.array(x), **given)), order)
    assert np.array_equal(np.array(array_api.sort(mx.array(x), **given)), np.take_along_axis(x, order, -1))


def test_what_was_read_stays_as_it_was(mlx):
    t = mlx.zeros((4,), "float32")
    host = mlx.get(t)
    other = mlx.scatter_rows(t, mlx.put(np.array([1])), mx.ones(1))
    assert mlx.get(other).tolist() == [0, 1, 0, 0] and not mlx.get(t).any()
    t[mx.array([2])] = 1.0
    mlx.settle([t])
    assert not host.any() and mlx.get(t).tolist() == [0, 0, 1, 0]


def test_what_is_made_in_one_thread_is_used_in_another(mlx):
    made = elsewhere(lambda: (mlx.zeros((2,), "float32"), mlx.put(np.ones(2), "bfloat16")))
    assert [mlx.get(t).tolist() for t in made] == [[0, 0], [1, 1]]
    late = mx.ones(2) + 1
    assert isinstance(elsewhere(lambda: mlx.get(late)), RuntimeError)  # which is why all this is done


# ---- attention -------------------------------------------------------------------------------------------------------


def attended(mlx, dtype, query, keys, values):
    """The last of so many tokens, each with one number for its key and one for its value; they follow in a block whose
    other positions an earlier request has left full of 7."""
    cache = tuple(mx.full((3, 4, 1, 8), 7.0, dtype=mlx.dtype(dtype)) for _ in range(2))
    n = np.array([len(keys)], np.int32)
    packed = lower(np.zeros(1, np.int32), n * 0, n, np.ones(1, bool), np.array([[1, 2]], np.int32), 4)
    fields = {name: mlx.put(getattr(packed, name)) for name in packed.__slots__}
    q, k, v = (
        mlx.put(np.broadcast_to(np.reshape(a, (-1, 1, 1)), (len(keys), 1, 8)), dtype)
        for a in ([query] * len(keys), keys, values)
    )
    out, _ = mlx.attend(q, k, v, cache, StepInputs(tok=fields["pos"], **fields), scale=1.0)
    return mlx.get(out.astype(mx.float32))[-1, 0, 0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scores_that_overflow_show_nobody_what_others_left(mlx, dtype):
    assert attended(mlx, dtype, 1.0, [1.0, 1.0], [2.0, 4.0]) == 3
    got = attended(mlx, dtype, 300.0, [-300.0, -300.0], [2.0, 4.0])
    assert np.isnan(got) if dtype == "float16" else got == 3


def test_a_cache_that_was_given_for_good_is_written_where_it_lies(mlx):
    (keys, _) = mlx.make_cache(Paged(8, 64, 64), blocks=512, block_size=16, rows=1, dtype="float32")
    slot, rows = mlx.put(np.array([33, 70], np.int32)), mx.ones((2, 8, 64))
    mx.eval(rows)
    kept = mlx.compile(mlx.write_cache)(keys, slot, rows)
    assert (float(keys.sum()), float(kept.sum())) == (0, 2 * 8 * 64)
    del kept
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    new = mlx.compile(mlx.write_cache, donate=(0,))(keys, slot, rows)
    mlx.settle([new])
    assert mx.get_peak_memory() < before + keys.nbytes / 2
    assert new is keys and float(keys.sum()) == 2 * 8 * 64


# ---- models ----------------------------------------------------------------------------------------------------------


class Table:
    """Made lazily, as models are."""

    def __init__(self):
        self.next = mx.arange(10) * 3 % 10
        self.layers = [{"one": mx.ones((1,), dtype=mx.int32) + 0}]

    def forward(self, tokens):
        return self.next[tokens[:, -1]] * self.layers[0]["one"]


class Network(nn.Module):
    vocab_size, max_model_len = 20, 16

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def logits(self, tokens, lengths):
        return self.head(self.embedding(tokens[:, -1]))

    def forward(self, x):
        return (self.head(x) * 100).astype(mx.int32)


def test_a_model_that_was_made_lazily_needs_nothing(mlx):
    with AutoregressiveBatchInference(Table(), max_model_len=8) as engine:
        assert [int(token) for token in engine.run(mx.array([1, 2]))] == [6, 8, 4, 2, 6, 8]
    with AutoregressiveBatchInference(Network(), backend=mlx) as engine:
        assert len(list(engine.run([1, 2], GREEDY))) == 14


def test_requests_come_from_any_thread():
    with AutoregressiveBatchInference(Table(), max_model_len=4, backend="mlx") as engine:
        assert elsewhere(lambda: [int(token) for token in engine.run(mx.array([1, 2]))]) == [6, 8]


def test_outputs_are_read_in_any_thread():
    with FeedforwardBatchInference(Network()) as engine:
        items = [engine.run(mx.ones((8,)) * i) for i in range(3)]
        found = [elsewhere(lambda item=item: np.array(item.result() + 1)) for item in items]
    assert all(each.shape == (20,) and each.dtype == np.int32 for each in found)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_prompt_leaves_nothing_put_off(mlx, overlap):
    options = dict(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, overlap=overlap)
    with AutoregressiveBatchInference(SumPaged(mlx), backend=mlx, **options) as engine:
        list(engine.run([1] * 50, GREEDY))
        for half in engine.core.runner.memory.cache[0]:
            assert isinstance(elsewhere(lambda half=half: mlx.get(half)), np.ndarray)


class Poisoned(SumPaged):
    """What the token BAD leads to cannot be computed, which comes up only when it is."""

    BAD = 9

    def __init__(self, backend):
        super().__init__(backend)
        zero = elsewhere(lambda: mx.zeros((1,), dtype=mx.int32) + 0)  # of a thread that has gone
        self.late = SimpleNamespace(zero=zero)  # where `settle` does not find it

    def step(self, params, cache, x):
        if self.BAD in self.backend.get(x.tok):
            x = replace(x, tok=x.tok + self.late.zero)
        return super().step(params, cache, x)


def test_a_step_that_cannot_be_computed_leaves_nothing_behind(mlx):
    """The first one costs the cache; then it is kept."""
    prompts = [[1, 2], [3], [1, Poisoned.BAD], [4, 4, 4]]
    params = SamplingParams(temperature=0, max_tokens=3)
    with AutoregressiveBatchInference(
        Poisoned(mlx), backend=mlx, max_model_len=16, enable_prefix_caching=False
    ) as engine:
        for _ in range(3):
            streams = [engine.run(prompt, params) for prompt in prompts]
            with pytest.raises(ModelError, match="There is no Stream"):
                list(streams.pop(2))
            assert [list(s) for s in streams] == [expected(p, 3) for p in prompts if Poisoned.BAD not in p]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decoder_gives_each_request_alone_what_it_gives_in_company(mlx, dtype):
    model = TinyDecoder(mlx, tiny_weights())
    prompts = [np.random.default_rng(i).integers(0, model.vocab_size, n) for i, n in enumerate((5, 17, 1, 9))]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with AutoregressiveBatchInference(model, backend=mlx, dtype=dtype, max_model_len=32) as engine:
        together = [list(s) for s in [engine.run(p, params) for p in prompts]]
        assert together == [list(engine.run(p, params)) for p in prompts]


@pytest.fixture(scope="module")
def texts():
    pytest.importorskip("tokenizers")
    with LLM("tiny", backend="numpy") as llm:
        return [done.text for done in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("overlap", [None, False])
def test_texts_are_those_of_numpy_at_once_and_one_by_one(texts, overlap):
    with LLM("tiny", backend="mlx", overlap=overlap) as llm:
        assert [done.text for done in llm.generate(PROMPTS, GREEDY)] == texts
        assert [llm.generate([prompt], GREEDY)[0].text for prompt in PROMPTS] == texts
