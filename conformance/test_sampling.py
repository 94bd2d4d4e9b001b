"""From logits to tokens: the parameters of each request, and nobody else's (levels 1 and 2)."""

import math
from typing import Any

import numpy as np
import pytest

from hibachi import SamplingParams
from hibachi.testing.toys import SURE, VOCAB, SumLogits, SumPaged, Toy, expected

from .serving import PARTS, toy

pytestmark = pytest.mark.promise("sampling", parts=PARTS)

GREEDY = SamplingParams(temperature=0, max_tokens=None)
# Tenths of the numbers 2 to 13 (the first token comes at position 2) of the SplitMix64 generators with these seeds.
DRAWN = {7: [9, 5, 4, 2, 4, 3, 1, 4, 1, 9, 9, 8], 2**63 + 1: [5, 4, 6, 3, 7, 8, 8, 7, 6, 8, 6, 0]}


class Fixed(Toy):
    """Level 1. The same logits whatever came before."""

    def __init__(self, backend, row):
        super().__init__(backend)
        self.row, self.vocab_size = np.array([row], "float32"), len(row)

    def logits(self, tokens, lengths):
        return self.backend.put(np.repeat(self.row, tokens.shape[0], 0))


class PlainPaged(SumPaged):
    """Logits of 1 for the right token and 0 for the others: little more likely than these."""

    def step(self, params, cache, x):
        logits, cache = super().step(params, cache, x)
        return logits / SURE, cache


FLAT = [0.0] * VOCAB
TWO = [-1.0, -1.0, -1.0, 2.0, -1.0, 2.0, -1.0, -1.0]  # tokens 3 and 5 have 87 percent together


def drawn(serve, engine, n, prompt=(1, 2), **params):
    """n tokens, sampled."""
    items, ending = serve.read(stream := engine.run(list(prompt), SamplingParams(max_tokens=n, **params)))
    if ending != "length":
        raise AssertionError(f"it ended with {ending}") from stream.error
    return items


def test_temperature_zero_takes_the_most_likely_token(serve):
    """The first one among equals."""
    for model in (SumLogits(serve.backend, margin=0.5), toy(PlainPaged, serve.backend)):
        serve.expect(serve.cached(model).run([1, 2], GREEDY, max_tokens=5), expected([1, 2], 5))
    assert drawn(serve, serve(Fixed(serve.backend, TWO)), 3, temperature=0) == [3, 3, 3]


def test_a_seed_gives_the_same_tokens_on_every_backend(serve):
    """Here the logits, and so the whole draw, are exact. A number belongs to a position, whatever the prompt."""
    engine = serve(Fixed(serve.backend, FLAT))
    for seed, tokens in DRAWN.items():
        assert drawn(serve, engine, 12, seed=seed) == tokens
        assert drawn(serve, engine, 11, seed=seed, prompt=(1, 2, 5)) == tokens[1:]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(serve):
    for model in (SumLogits(serve.backend, margin=1.0), toy(PlainPaged, serve.backend)):
        engine = serve.cached(model, padding_token=7)
        params = [SamplingParams(seed=seed, max_tokens=6, temperature=1.0 + seed / 2) for seed in range(4)]
        prompts = [1, 2], [3, 3, 1, 5, 8], [6], [2, 5, 1]
        alone = [serve.read(engine.run(*each)) for each in zip(prompts, params, strict=True)]
        for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
            gate = serve.hold(engine, [1])
            streams = [engine.run(prompts[i], params[i]) for i in order]
            gate.open()
            assert [serve.read(stream) for stream in streams] == [alone[i] for i in order]


def test_without_a_seed_every_request_draws_afresh(serve):
    engine = serve(Fixed(serve.backend, FLAT))
    one, other = (drawn(serve, engine, 40) for _ in range(2))
    assert one != other and len({*one}) > 3
    assert drawn(serve, engine, 40, seed=1) != drawn(serve, engine, 40, seed=2)


def test_every_row_has_its_own_parameters(serve):
    """Greedy beside sampled beside filtered."""
    engine = serve(Fixed(serve.backend, TWO))
    asked: list[dict[str, Any]] = [
        dict(temperature=0),
        dict(seed=3),
        dict(seed=3, top_k=1),
        dict(seed=4, temperature=9.0),
    ]
    edited: list[dict[str, Any]] = [
        dict(seed=5, presence_penalty=2.0),
        dict(seed=6, logit_bias={1: 3.0}),
        dict(seed=7, min_p=0.5),
    ]
    for some in (asked, [asked[0], *edited]):
        alone = [drawn(serve, engine, 8, **params) for params in some]
        gate = serve.hold(engine, [1])
        streams = [engine.run([1, 2], SamplingParams(max_tokens=8, **params)) for params in some]
        gate.open()
        for stream, tokens in zip(streams, alone, strict=True):
            serve.expect(stream, tokens)


def test_the_temperature_makes_likely_tokens_more_or_less_likely(serve):
    engine = serve(Fixed(serve.backend, TWO))
    assert {*drawn(serve, engine, 40, seed=0, temperature=0.1)} == {3, 5}
    assert {*drawn(serve, engine, 60, seed=0, temperature=1e6)} == {*range(8)}


def test_top_k_and_top_p_leave_the_most_likely_tokens(serve):
    engine = serve(Fixed(serve.backend, TWO))
    for params in (dict(top_k=2), dict(top_p=0.8), dict(top_k=5, top_p=0.8), dict(top_k=2, temperature=50.0)):
        assert {*drawn(serve, engine, 40, seed=0, **params)} == {3, 5}, f"with {params}"
    sloped = serve(Fixed(serve.backend, [0.0, 1.0, 2.0, 3.0]))
    for params in (dict(top_k=1), dict(top_p=0.01), dict(top_p=0.6)):
        assert {*drawn(serve, sloped, 20, seed=0, **params)} == {3}, f"with {params}"
    assert {*drawn(serve, sloped, 60, seed=0, top_k=3)} == {1, 2, 3}


def test_min_p_and_typical_p_leave_tokens_by_their_probability(serve):
    """typical_p: those whose information is nearest to the entropy, so not the most likely one."""
    engine = serve(Fixed(serve.backend, [math.log(p) for p in (0.5, 0.3, 0.1, 0.1)]))
    for params, left in (
        (dict(min_p=0.59), {0, 1}),
        (dict(min_p=0.61), {0}),
        (dict(typical_p=0.2), {1}),
        (dict(typical_p=0.5), {0, 1}),
        (dict(typical_p=0.9, top_k=2), {0, 1}),
    ):
        assert {*drawn(serve, engine, 40, seed=0, **params)} == left, f"with {params}"


def test_penalties_make_what_was_there_less_likely(serve):
    """presence and frequency: of the output; repetition: of the prompt as well."""
    engine = serve(Fixed(serve.backend, [2.0, 1.5, 0.8, -1.0]))
    for params, tokens in (
        (dict(presence_penalty=0.6), [0, 1, 0, 0]),
        (dict(presence_penalty=2.0), [0, 1, 2, 0]),
        (dict(frequency_penalty=0.6), [0, 1, 0, 1]),
        (dict(repetition_penalty=3.0), [0, 2, 0, 0]),
    ):
        got = drawn(serve, engine, 4, prompt=(1, 3), temperature=0, **params)
        assert got == tokens, f"with {params} it gave {got}, expected {tokens}"


def test_tokens_may_be_forbidden_or_favoured(serve):
    engine = serve(Fixed(serve.backend, [3.0, 2.0, 1.0, 0.0]), stop_token=0)
    for params, tokens in (
        (dict(logit_bias={3: 4.0, 1: -1.0}), [3, 3, 3]),
        (dict(logit_bias={0: -100.0}), [1, 1, 1]),
        (dict(allowed_token_ids=[2, 3]), [2, 2, 2]),
        (dict(min_tokens=3), [1, 1, 1]),
    ):
        got = drawn(serve, engine, 3, temperature=0, **params)
        assert got == tokens, f"with {params} it gave {got}, expected {tokens}"
    serve.expect(engine.run([1], GREEDY.with_(min_tokens=2)), [1, 1, 0], "stop")


def test_a_logits_processor_changes_the_logits_of_its_request(serve):
    """It gets the tokens so far and a native array of one row; if it fails, its request does."""
    seen = []

    def negative(output, logits):
        seen.append((output, serve.backend.owns(logits), serve.backend.shape(logits)))
        return -logits

    def failing(output, logits):
        raise RuntimeError("no idea")

    engine = serve(Fixed(serve.backend, [3.0, 2.0, 1.0, 0.0]))
    gate = serve.hold(engine, [1])
    streams = [engine.run([1, 2], GREEDY.with_(logits_processors=[f]), max_tokens=3) for f in (negative, failing)]
    plain = engine.run([1, 2], GREEDY, max_tokens=3)
    gate.open()
    serve.expect(streams[0], [3, 3, 3])
    serve.expect(streams[1], [], "InvalidRequest")
    serve.expect(plain, [0, 0, 0])
    assert seen == [([3] * n, True, (4,)) for n in range(3)]


def test_a_request_that_allows_no_token_fails_alone(serve):
    engine = serve(Fixed(serve.backend, [3.0, 2.0, -math.inf, 0.0]), stop_token=1)
    gate = serve.hold(engine, [1])
    streams = [engine.run([1], GREEDY.with_(allowed_token_ids=[2])), engine.run([1], GREEDY, max_tokens=2)]
    gate.open()
    serve.expect(streams[0], [], "InvalidRequest")
    serve.expect(streams[1], [0, 0])


def test_the_tokens_of_a_prompt_have_log_probabilities(serve):
    """All but the first: of the most likely tokens after what came before, and of the token itself."""
    engine = serve.cached(PlainPaged, max_num_batched_tokens=5)
    prompt = [3, 1, 4, 1, 5, 9, 2]
    likely = -math.log(1 + 9 / math.e)  # one logit of 1 among nine of 0
    gate = serve.hold(engine, [1])
    stream, other = engine.run(prompt, GREEDY.with_(prompt_logprobs=1), max_tokens=1), engine.run([1, 2], GREEDY)
    gate.open()
    serve.expect(stream, expected(prompt, 1))
    other.close()
    first, *found = stream.prompt_logprobs
    assert first is None and other.prompt_logprobs is None
    assert len(found) == len(prompt) - 1 and None not in found, f"for a prompt of {len(prompt)} tokens it gave {found}"
    for at, got in enumerate(found, 1):
        [best] = expected(prompt[:at], 1)
        wanted = {best: likely} | ({} if prompt[at] == best else {prompt[at]: likely - 1})
        assert [*got] == [*wanted], f"token {at} has {got}, expected {wanted}"
        assert all(abs(got[i] - wanted[i]) < 1e-4 for i in wanted), f"{got} for {wanted}"


def test_a_token_with_minus_infinity_never_comes(serve):
    engine = serve(Fixed(serve.backend, [0.0, -math.inf, 0.0, -math.inf]))
    for params in (dict(), dict(temperature=100.0), dict(top_k=3), dict(top_p=0.99)):
        assert {*drawn(serve, engine, 40, seed=0, **params)} == {0, 2}, f"with {params}"


def test_logprobs_are_the_logarithms_of_the_softmax_of_the_raw_logits(serve):
    """Of the most likely tokens and of the one that came, the most likely first; whatever the temperature."""
    row = [0.0, 1.0, 2.0, 3.0]
    logs = [x - math.log(sum(map(math.exp, row))) for x in row]
    engine = serve(Fixed(serve.backend, row))
    for n in (0, 2, 4, 9):
        stream = engine.run([1, 2], SamplingParams(max_tokens=30, seed=0, temperature=3.0, logprobs=n))
        items, ending = serve.read(stream)
        assert (len(stream.logprobs), ending, {*items}) == (30, "length", {0, 1, 2, 3})
        for token, got in zip(items, stream.logprobs, strict=True):
            wanted = [i for i in (3, 2, 1, 0) if i > 3 - n or i == token]
            assert [*got] == wanted, f"logprobs={n} and token {token} gave {got}"
            assert all(abs(got[i] - logs[i]) < 1e-4 for i in wanted), f"{got} for {logs}"


def test_logprobs_belong_to_the_tokens_of_their_own_stream(serve):
    """Of rows that asked; a stop token that is not delivered has none."""
    for model in (SumLogits(serve.backend), toy(SumPaged, serve.backend)):
        engine = serve.cached(model, padding_token=7)
        gate = serve.hold(engine, [1])
        asked = engine.run([1, 2], GREEDY.with_(logprobs=0), max_tokens=4)
        silent = engine.run([6], GREEDY, max_tokens=4)
        stopped = engine.run([2, 5, 1], GREEDY.with_(logprobs=0), stop_rule=6, include_stop=False)
        gate.open()
        serve.expect(asked, expected([1, 2], 4))
        assert [[*each] for each in asked.logprobs] == [[i] for i in expected([1, 2], 4)]
        serve.expect(silent, expected([6], 4))
        assert not any(silent.logprobs)
        serve.expect(stopped, [9, 8], "stop")
        assert [[*each] for each in stopped.logprobs] == [[9], [8]]


def test_parameters_say_when_to_end(serve):
    engine = serve(SumLogits(serve.backend), stop_token=6)
    serve.expect(engine.run([1, 2], SamplingParams(max_tokens=2)), [4, 8])
    serve.expect(engine.run([1, 2], SamplingParams(max_tokens=2), max_tokens=1), [4])
    serve.expect(engine.run([1, 2], SamplingParams(stop_token_ids=[8, 1])), [4, 8], "stop")
    serve.expect(engine.run([1, 2], SamplingParams(stop_token_ids=[2])), [4, 8, 6], "stop")
    serve.expect(engine.run([1, 2], SamplingParams(stop_token_ids=[2]), stop_rule=8), [4, 8], "stop")
