"""Requests that were begun elsewhere: their keys and values go into blocks, and nobody can tell the difference."""

from dataclasses import replace

import numpy as np
import pytest

import hibachi
from hibachi import InvalidRequest, NumpyBackend, PromptTooLong, SamplingParams, UnsupportedOperation
from hibachi.request import Begun, Request
from hibachi.testing.toys import SumLogits, SumPaged, SumState, expected

from .models import Soft
from .test_overlap import Late, Lost, finish

GREEDY = SamplingParams(temperature=0)
LIBRARIES = ["numpy", "torch", pytest.param("jax", marks=pytest.mark.slow)]


def kv_of(values):
    """What `SumPaged` keeps of these tokens."""
    values = np.array(values, np.float32).reshape(1, -1, 1)
    return [(np.zeros((1, values.shape[1], 2), np.float32), values)]


def begun(prompt, n, *, values=None, known=False, params=GREEDY, kept=None):
    """A request whose first token came elsewhere, and what it must bring: n tokens, that one among them."""
    first, *others = expected(prompt if values is None else values, n)
    given = Begun(kv_of(prompt if values is None else values), first, known)
    return Request(np.array(prompt), params.with_(max_tokens=n), begun=given, kept=kept), others


def submit(engine, request):
    return engine.submit(engine.check(request))


@pytest.fixture
def paged(serve):
    def make(backend=None, toy=SumPaged, **options):
        backend = NumpyBackend() if backend is None else backend
        options = dict(max_num_seqs=4, max_num_batched_tokens=24, block_size=4) | options
        return serve(toy(backend), backend=backend, **options)

    return make


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("n", [1, 4, 7, 30])
def test_the_tokens_are_those_of_the_whole_prompt(paged, library, n):
    engine, prompt = paged(hibachi.load_backend(library)), [(3 * i + 1) % 10 for i in range(n)]
    request, wanted = begun(prompt, 12)
    assert submit(engine, request).collect() == wanted == engine.run(prompt, GREEDY, max_tokens=12).collect()[1:]
    stats = finish(engine)
    assert stats.prompt_tokens == n  # of the one that was computed here


def test_only_tokens_that_are_not_given_are_computed(paged):
    engine = paged()
    request, wanted = begun([1] * 21, 6)
    assert submit(engine, request).collect() == wanted
    assert engine.meters().computed == 5  # the first to the fifth new token; nobody asks what follows on the sixth


def test_they_are_written_again_when_the_cache_was_lost(paged):
    troubles = [None, None, None, Lost("gone"), None, Lost("gone again")]
    backend = Late(lambda: troubles.pop(0) if troubles else None)
    engine = paged(backend, overlap=True, restart="on_failure")
    pairs = [begun([i] * (5 * i), 15, known=i > 1) for i in range(1, 4)]
    for stream, wanted in [(submit(engine, r), wanted) for r, wanted in pairs]:
        assert stream.collect() == wanted
    assert engine.health().restarts == 2 and not troubles
    finish(engine)


@pytest.mark.parametrize("seed", range(6))
def test_a_storm_of_all_kinds(paged, seed):
    """Given and computed prompts that begin alike, in a small cache, while some leave and the prefixes are dropped."""
    random = np.random.default_rng(seed)
    overlap = bool(seed % 2)
    engine = paged(
        Late() if overlap else None, overlap=overlap, kv_cache_memory_bytes=14 * 12 * 4, max_num_batched_tokens=9
    )
    streams = []
    for i in range(40):
        prompt = [int(random.integers(1, 3))] * int(random.integers(1, 26))
        if random.random() < 0.5:
            request, wanted = begun(prompt, int(random.integers(2, 20)), known=bool(random.random() < 0.6))
        else:
            n = int(random.integers(1, 20))
            request, wanted = Request(np.array(prompt), GREEDY.with_(max_tokens=n)), expected(prompt, n)
        stream = submit(engine, request)
        if random.random() < 0.2:
            assert [t for _, t in zip(range(2), stream, strict=False)] == wanted[:2]
            stream.close()
        else:
            streams.append((stream, wanted))
        if i % 10 == 9:
            engine.reset_cache()
    for stream, wanted in streams:
        assert stream.collect() == wanted
    assert finish(engine).failed == 0


# ---- who shares them -------------------------------------------------------------------------------------------------


def test_blocks_whose_ids_are_not_known_are_never_found(paged):
    engine = paged()
    lies = [7] * 13
    request, wanted = begun([1] * 13, 5, values=lies)  # the ids hold places only
    assert submit(engine, request).collect() == wanted
    assert engine.stats().cached_blocks == 0
    for prompt in ([1] * 13, [7] * 13, [0] * 13):
        assert engine.run(prompt, GREEDY, max_tokens=5).collect() == expected(prompt, 5)
    assert finish(engine).prefix_hits == 0


def test_blocks_whose_ids_are_given_are_shared(paged):
    engine = paged()
    lies = [7] * 13
    request, wanted = begun([1] * 13, 9, values=lies, known=True)
    assert submit(engine, request).collect() == wanted
    stream = engine.run([1] * 13, GREEDY, max_tokens=5)
    assert stream.collect() == expected([7] * 12 + [1], 5)  # whoever lies is believed
    assert stream.reused == 12
    assert engine.run([1] * 13 + wanted, GREEDY, max_tokens=1).collect()
    stats = finish(engine)
    assert stats.prefix_hits == 24 and stats.prefix_queries == 34  # what was given counts as neither


def test_a_salt_keeps_them_apart(paged):
    engine = paged()
    request, _ = begun([1] * 13, 5, values=[7] * 13, known=True)
    submit(engine, replace(request, terms=hibachi.Terms(cache_salt="a"))).collect()
    assert engine.run([1] * 13, GREEDY, max_tokens=5).collect() == expected([1] * 13, 5)
    assert finish(engine).prefix_hits == 0


# ---- trouble ---------------------------------------------------------------------------------------------------------


def test_a_write_that_fails_is_the_fault_of_one_request(paged, monkeypatch):
    engine = paged(max_num_batched_tokens=64)
    other = engine.run([1, 2], GREEDY, max_tokens=40)
    next(other)
    memory = engine.core.runner.memory
    write = memory.write

    def fails(blocks, kv):
        if kv[0][1].shape[1] == 9:
            raise RuntimeError("no way")
        write(blocks, kv)

    monkeypatch.setattr(memory, "write", fails)
    (bad, _), (good, wanted) = begun([3] * 9, 5, known=True), begun([3] * 10, 5, known=True)
    bad, good = submit(engine, bad), submit(engine, good)
    with pytest.raises(hibachi.HibachiError, match="no way"):
        bad.collect()
    assert good.collect() == wanted and len(other.collect()) == 39
    assert engine.run([3] * 10, GREEDY, max_tokens=5).collect() == expected([3] * 10, 5)
    assert finish(engine).failed == 1


def test_what_the_cache_cannot_hold_ends_its_request_only(paged):
    engine = paged(dtype="float16")
    given = Begun(kv_of([1, 1, 1e6, 1, 1, 1]), 7, known=True)
    request = Request(np.array([1] * 6), GREEDY.with_(max_tokens=5), begun=given)
    other = engine.run([1, 2], GREEDY, max_tokens=20)
    with pytest.raises(hibachi.ModelFault):  # the toy raises where others would return NaN
        submit(engine, request).collect()
    assert other.collect() == expected([1, 2], 20)
    assert engine.run([1] * 6, GREEDY, max_tokens=5).collect() == expected([1] * 6, 5)  # nothing was left of it
    finish(engine)


def test_who_leaves_gives_its_blocks_back(paged):
    engine = paged()
    request, wanted = begun([4] * 20, 40, known=True)
    stream = submit(engine, request)
    assert [next(stream), next(stream)] == wanted[:2]
    stream.close()
    finish(engine)


# ---- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"kv_cache_memory_bytes": 12 * 12 * 4}])
def test_keys_and_values_are_handed_out_at_the_end(paged, options):
    engine = paged(Late(), **options)
    prompts = [[i] * (3 * i) for i in range(1, 6)]
    kept = [[] for _ in range(10)]
    streams = [
        (submit(engine, Request(np.array(p), GREEDY.with_(max_tokens=11), kept=own)), p, expected(p, 11))
        for p, own in zip(prompts, kept, strict=False)
    ]
    for p, own in zip(prompts, kept[5:], strict=True):
        request, wanted = begun(p, 11, kept=own)
        streams.append((submit(engine, request), p, wanted))
    for (stream, prompt, wanted), own in zip(streams, kept, strict=True):
        assert stream.collect() == wanted
        ((keys, values),) = own
        assert values[0, :, 0].tolist() == [*prompt, *expected(prompt, 11)][:-1] and keys.shape == (
            1,
            len(prompt) + 10,
            2,
        )
    finish(engine)


def test_where_they_cannot_be_read_the_request_fails(paged, monkeypatch):
    engine = paged()
    engine.run([1], GREEDY, max_tokens=1).collect()
    monkeypatch.setattr(engine.core.runner.backend, "positions", lambda layer, blocks=None: [])
    with pytest.raises(UnsupportedOperation, match="in a form that `positions` cannot tell apart"):
        submit(engine, Request(np.array([1, 2]), GREEDY, kept=[])).collect()
    assert engine.run([1, 2], GREEDY, max_tokens=3).collect() == expected([1, 2], 3)
    finish(engine)


# ---- the prefix cache is emptied -------------------------------------------------------------------------------------


def test_a_reset_while_requests_run(paged):
    engine = paged()
    engine.reset_cache()  # nothing was computed
    engine.run([1] * 13, GREEDY, max_tokens=2).collect()
    running = engine.run([1] * 13, GREEDY, max_tokens=45)
    next(running)
    assert running.reused == 12
    engine.reset_cache()
    again = engine.run([1] * 13, GREEDY, max_tokens=5)
    assert again.collect() == expected([1] * 13, 5) and again.reused == 0
    assert engine.run([1] * 13, GREEDY, max_tokens=2).collect() == expected([1] * 13, 2)
    assert running.collect() == expected([1] * 13, 45)[1:]
    assert engine.stats().prefix_hits == 24
    finish(engine)


def test_states_are_forgotten_as_well(paged):
    engine = paged(toy=SumState)
    for _ in range(2):
        assert engine.run([1] * 13, GREEDY, max_tokens=5).collect() == expected([1] * 13, 5)
    hits = engine.stats().prefix_hits
    engine.reset_cache()
    assert engine.run([1] * 13, GREEDY, max_tokens=5).collect() == expected([1] * 13, 5)
    assert engine.stats().prefix_hits == hits > 0


# ---- what is refused -------------------------------------------------------------------------------------------------


def wrong(**changes):
    kv = changes.pop("kv", kv_of([1, 2, 3]))
    given = Begun(kv, changes.pop("token", 7), changes.pop("known", False))
    params = GREEDY.with_(**{"max_tokens": 5} | changes)
    return Request(np.array([1, 2, 3]), params, begun=given)


K, V = kv_of([1, 2, 3])[0]


@pytest.mark.parametrize(
    "changes, error, says",
    [
        ({"kv": []}, InvalidRequest, "each of the 1 layers of SumPaged; got 0"),
        ({"kv": [(K, V), (K, V)]}, InvalidRequest, "got 2 layers"),
        ({"kv": [(K,)]}, InvalidRequest, r"with \[1\] arrays each"),
        ({"kv": None}, InvalidRequest, "must be a list with"),
        ({"kv": [(K[:, :2], V)]}, InvalidRequest, r"Keys of layer 0 must have shape \(1, 3, 2\).*got \(1, 2, 2\)"),
        ({"kv": [(K, np.zeros((2, 3, 1)))]}, InvalidRequest, r"Values of layer 0 must have shape \(1, 3, 1\)"),
        ({"kv": [(K, V.astype(int))]}, InvalidRequest, "must be an array of floats; got int64"),
        ({"kv": [(K, "no")]}, InvalidRequest, "must be an array of floats"),
        ({"kv": [(K, V * np.nan)]}, InvalidRequest, "Values of layer 0 must be finite"),
        ({"token": 10}, InvalidRequest, "an id from 0 to 9; got 10"),
        ({"token": None}, InvalidRequest, "an id from 0 to 9; got None"),
        ({"max_tokens": 1}, PromptTooLong, "must have room for another: expected at least 5 tokens; it may have 4"),
        ({"prompt_logprobs": 1}, InvalidRequest, "prompt_logprobs needs the prompt computed here"),
        ({"repetition_penalty": 1.2}, InvalidRequest, "which are not known here; got 1.2"),
    ],
)
def test_what_is_wrong_is_said_at_the_call(paged, changes, error, says):
    engine = paged()
    with pytest.raises(error, match=says):
        engine.check(wrong(**changes))
    assert submit(engine, wrong(repetition_penalty=1.2, known=True)).collect()


def test_models_without_keys_and_values_are_refused(paged, serve):
    with pytest.raises(UnsupportedOperation, match="layer 0 of SumState keeps a recurrent state"):
        paged(toy=SumState).check(wrong())
    engine = serve(SumLogits(NumpyBackend()))
    with pytest.raises(UnsupportedOperation, match="SumLogits keeps no cache"):
        engine.check(wrong())
    with pytest.raises(UnsupportedOperation, match="cannot be returned: SumLogits keeps no cache"):
        engine.check(Request(np.array([1]), GREEDY, kept=[]))


def test_what_was_given_may_change_afterwards(paged):
    engine = paged()
    request, wanted = begun([1, 2, 3], 5)
    ready = engine.check(request)
    request.begun.kv[0][1][:] = 9
    assert engine.submit(ready).collect() == wanted


def test_the_first_token_counts_as_output(paged):
    engine = paged(toy=type("SoftPaged", (Soft, SumPaged), {}))
    for params in (
        SamplingParams(seed=3, temperature=0.7, presence_penalty=1.5, frequency_penalty=0.5, max_tokens=20),
        SamplingParams(seed=4, top_p=0.8, repetition_penalty=1.3, max_tokens=20),
        SamplingParams(seed=5, min_tokens=7, stop_token_ids=range(5), max_tokens=20),
        SamplingParams(seed=6, logits_processors=[never_twice], max_tokens=20),
    ):
        wanted = engine.run([1, 2, 3], params).collect()
        given = Begun(kv_of([1, 2, 3]), wanted[0], known=True)
        assert submit(engine, Request(np.array([1, 2, 3]), params, begun=given)).collect() == wanted[1:]


def never_twice(output, logits):
    """Forbids the last token."""
    logits = logits.copy()
    logits[output[-1:]] = -1e9
    return logits
