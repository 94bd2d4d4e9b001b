"""Which rung of the ladder a model stands on, where its backend comes from, and a whole decoder against slow NumPy."""

from typing import Any

import numpy as np
import pytest

from hibachi import ConfigError, SamplingParams
from hibachi.testing.toys import Count, SumLogits, SumPaged, SumTokens, TinyDecoder, Toy, expected, tiny_weights

from .serving import PARTS, toy

pytestmark = pytest.mark.promise("models", parts=PARTS)


# the ladder


def never(*_):
    raise AssertionError("a lower rung was used")


class TwoRungs(SumLogits):
    forward: Any = never


class ThreeRungs(SumPaged):
    forward = logits = never


def test_the_highest_rung_that_a_model_has_is_used(serve):
    for model in (TwoRungs(serve.backend), toy(ThreeRungs, serve.backend)):
        serve.expect(serve.cached(model).run([1, 2], max_tokens=3), expected([1, 2], 3))


def test_each_rung_answers_alike(serve):
    for model in (SumTokens(serve.backend), SumLogits(serve.backend), toy(SumPaged, serve.backend)):
        serve.expect(serve.cached(model).run([1, 2], max_tokens=3), expected([1, 2], 3))


def test_lengths_are_passed_only_to_a_model_that_asks_for_them(serve):
    for model in (Count(serve.backend), SumTokens(serve.backend)):
        assert serve.read(serve(model).run([1, 2], max_tokens=1))[1] == "length"
        assert (model.seen[0][1] is not None) == isinstance(model, SumTokens)


def test_what_is_no_model_is_refused(serve):
    class NoSize(Toy):
        def logits(self, tokens, lengths):
            raise AssertionError

    class NoSpec(Toy):
        def step(self, params, cache, x):
            raise AssertionError

    for model, word in (
        (object(), "forward"),
        (Toy(serve.backend), "forward"),
        (NoSize(serve.backend), "vocab_size"),
        (NoSpec(serve.backend), "cache_spec"),
    ):
        with pytest.raises(ConfigError, match=word):
            serve(model)
    with pytest.raises(ConfigError, match="forward"):
        serve.single(object())


def test_a_model_may_say_how_long_its_context_is(serve):
    class Short(Count):
        max_model_len = 4

    for options, n in (({}, 4), ({"max_model_len": 3}, 3)):
        with serve.autoregressive(Short(serve.backend), **options) as engine:
            serve.expect(engine.run([1]), range(2, n + 1))


# the backend


class Homeless:
    """Knows no backend: its arrays say where they are from."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def forward(self, tokens):
        return tokens[:, -1, ...] + 1


def test_the_backend_is_found_from_the_arrays(serve):
    """Those of the weights, of the padding or stop token, or of the first prompt."""
    put, prompt = serve.backend.put, np.array([1, 2], "int32")
    for attributes, options, given in (
        ({"params": {"layers": [{"w": put(prompt)}]}}, {}, [1, 2]),
        ({}, {"stop_token": put(np.array([9], "int32"))}, [1, 2]),
        ({}, {"padding_token": put(np.array([0], "int32"))}, [1, 2]),
        ({}, {}, put(prompt)),
        ({"backend": serve.backend}, {}, prompt),
        ({}, {"backend": serve.backend}, prompt),
    ):
        stream = serve(Homeless(**attributes), **options).run(given, max_tokens=2)
        items = stream.collect()
        assert all(serve.backend.owns(item) for item in items), f"with {[*attributes, *options]}: {type(items[0])}"
        assert [serve.host(item) for item in items] == [3, 4]


def test_a_feed_forward_model_finds_its_backend_alike(serve):
    class Same:
        def forward(self, x):
            return x

    item = serve.single(Same(), backend=None).run(serve.backend.put(np.ones(2, "float32"))).result(serve.patience)
    assert serve.backend.owns(item) and serve.host(item) == [1.0, 1.0]


# a decoder


def slow_logits(weights, tokens):
    """What a TinyDecoder makes of a whole sequence, in float64 and one position after the other: [n, vocab]."""
    t, rows = TinyDecoder, [weights["embed"][token].astype("float64") for token in tokens]
    group = t.heads // t.kv_heads

    def norm(x, weight):
        return x / np.sqrt((x * x).mean() + t.eps) * weight

    def rotate(head, at):
        half = t.head_dim // 2
        angle = at * t.theta ** (-2 * np.arange(half) / t.head_dim)
        a, b = head[:half], head[half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

    for layer in weights["layers"]:
        keys, values, new = [], [], []
        for at, row in enumerate(rows):
            heads = (layer["qkv"] @ norm(row, layer["attn_norm"])).reshape(-1, t.head_dim)
            queries = [rotate(head, at) for head in heads[: t.heads]]
            keys.append([rotate(head, at) for head in heads[t.heads : t.heads + t.kv_heads]])
            values.append(heads[t.heads + t.kv_heads :])
            seen = []
            for h, query in enumerate(queries):
                scores = np.array([key[h // group] @ query for key in keys]) / np.sqrt(t.head_dim)
                share = np.exp(scores - scores.max())
                seen.append(sum(s * value[h // group] for s, value in zip(share / share.sum(), values, strict=True)))
            row = row + layer["o"] @ np.concatenate(seen)
            gate, up = np.split(layer["gate_up"] @ norm(row, layer["mlp_norm"]), 2)
            new.append(row + layer["down"] @ (gate / (1 + np.exp(-gate)) * up))
        rows = new
    return np.array([weights["embed"] @ norm(row, weights["norm"]) for row in rows])


def slow_logprobs(weights, tokens):
    logits = slow_logits(weights, tokens)
    above = logits - logits.max(-1, keepdims=True)
    return above - np.log(np.exp(above).sum(-1, keepdims=True))


def precision(backend, weights):
    """How far results may be off: 1e-4, or more where the library multiplies float32 with less precision."""
    w = weights["layers"][0]["qkv"]
    got = backend.get(backend.linear(backend.put(w), backend.put_weight(w, "float32")))
    return max(1e-4, 30 * float(np.abs(got - w.astype("float64") @ w.T.astype("float64")).max()))


def test_a_decoder_gives_the_logits_of_slow_numpy(serve):
    """Two layers, grouped heads, rotary positions; prompts of mixed lengths in chunks, through shared paged memory."""
    weights = tiny_weights()
    prompts = [[5, 3, 30], [1], [*range(7, 29, 2)], [2, 2]]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=TinyDecoder.vocab_size)
    engine = serve(TinyDecoder(serve.backend, weights), max_model_len=32, block_size=8, max_num_batched_tokens=8)
    gate = serve.hold(engine, [1])
    streams = [engine.run(prompt, params) for prompt in prompts]
    gate.open()
    allowed = precision(serve.backend, weights)
    for prompt, stream in zip(prompts, streams, strict=True):
        tokens, ending = serve.read(stream)
        assert (len(tokens), ending) == (6, "length"), f"{tokens} and {ending}"
        want = slow_logprobs(weights, [*prompt, *tokens])[len(prompt) - 1 : -1]
        got = np.array([[logs[i] for i in range(len(logs))] for logs in stream.logprobs])
        off = np.abs(got - want).max(1)
        assert off.max() < allowed, f"after {prompt} the logits of tokens 0 to 5 are off by {off}"
        assert tokens == got.argmax(1).tolist()
