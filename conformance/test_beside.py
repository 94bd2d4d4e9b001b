"""What comes beside tokens, or as several at once: frames of codebooks, random numbers, and inputs of requests."""

from typing import Any

import numpy as np
import pytest

from hibachi import Input, OwnCache, SamplingParams, State
from hibachi.testing.toys import SURE, VOCAB, SumFrames, SumTokens, Toy

from .drawing import codebook_seeds, drawn, uniform
from .ownpasts import bits
from .serving import PARTS, toy

pytestmark = pytest.mark.promise("frames, draws and inputs", parts=PARTS)

CODES, LIKELY, DRAWS = SumFrames.codes, 4, 2
FRAMES = [[1, 2, 3]], [[1, 0, 5], [3, 6, 2], [1, 1, 1]], [[0, 2, 6], [3, 1, 5]], [[7, 7, 7], [0, 0, 1]]
SEEDS = 3, 7, 2**63 + 1, 5


# frames


def choices(backend: Any, first: Any) -> Any:
    """Logits [n, CODES, VOCAB]: equal for `first` [n, CODES] and the three ids after it, no chance for the others."""
    xp, ids = backend.xp, backend.put(np.arange(VOCAB, dtype=np.int32))
    first = xp.astype(first, ids.dtype)[:, :, None]
    return backend.float32((ids[None, None, :] + VOCAB - first) % VOCAB >= LIKELY) * -SURE


class FramesWhole(Toy):
    """Level 1. Each codebook is a sequence of its own: of four ids from one more than its sum on, one is drawn."""

    vocab_size, codebooks = VOCAB, CODES

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.inner = SumTokens(backend)

    def logits(self, tokens: Any, lengths: Any) -> Any:
        return self.scored(self.inner.forward(tokens, lengths))

    def scored(self, first: Any) -> Any:
        return self.backend.program(choices)(first)


class FramesOwn(FramesWhole):
    """The same with a cache of its own: the frames."""

    max_model_len, past = 64, OwnCache()

    def step(self, tokens: Any, lengths: Any, past: Any) -> tuple[Any, Any]:
        whole = tokens if past is None else self.backend.xp.concat([past, tokens], axis=1)
        return super().logits(whole, lengths), whole


class FramesPaged(SumFrames):
    """The same at level 2."""

    vocab_size: Any = VOCAB
    codebooks = CODES

    def step(self, params: Any, cache: Any, x: Any) -> Any:
        sums, layer = self._sums(x.tok, cache[0], x)
        return self.scored((sums + 1) % VOCAB), [layer]

    def scored(self, first: Any) -> Any:
        return choices(self.backend, first)


class InDepth:
    """The same, drawn in depth: the ids of each codebook begin further on, by all ids before it in the frame."""

    backend: Any

    def scored(self, first: Any) -> Any:
        return {"first": first}

    def depth(self, k: Any, given: Any, codes: Any, past: Any) -> Any:
        xp, books = self.backend.xp, self.backend.put(np.arange(CODES, dtype=np.int32))[None, :]
        one = xp.astype(books == k - 1, codes.dtype)
        drawn = xp.sum(codes * one, axis=1, keepdims=True)
        past = drawn if past is None else past + drawn
        first = xp.astype(given["first"], past.dtype) + past
        every = choices(self.backend, first % VOCAB)
        mine = xp.astype(books == k, every.dtype)[:, :, None]
        return xp.sum(every * mine, axis=1), past


class DeepWhole(InDepth, FramesWhole):
    pass


class DeepOwn(InDepth, FramesOwn):
    pass


class DeepPaged(InDepth, FramesPaged):
    pass


def right_frames(prompt, seed, n, greedy=(), deep=False):
    """What a seed gives. greedy: codebooks of which the first of the likeliest ids is taken. deep: drawn in depth."""
    frames = [list(frame) for frame in prompt]
    for _ in range(n):
        sums = np.sum(frames, axis=0).tolist()
        seeds, new = codebook_seeds(seed, CODES), list[int]()
        for k in range(CODES):
            ids = sorted((sums[k] + 1 + i + deep * sum(new)) % VOCAB for i in range(LIKELY))
            new.append(ids[0 if k in greedy else int(LIKELY * uniform(seeds[k], len(frames)))])
        frames.append(new)
    return frames[len(prompt) :]


def rungs(serve, kinds=(FramesWhole, FramesOwn, FramesPaged), **options):
    """Engines for models of frames at each level that has logits."""
    for i, kind in enumerate(kinds):
        more = {"enable_prefix_caching": False} | options if i else options
        yield serve.cached(toy(kind, serve.backend) if i == 2 else kind(serve.backend), **more)


def asked(n, **params):
    return [
        {"prompt": np.array(frames, "int32"), "params": SamplingParams(seed=seed, max_tokens=n, **params)}
        for frames, seed in zip(FRAMES, SEEDS, strict=True)
    ]


def test_frames_are_drawn_by_seed_position_and_codebook_at_each_level(serve):
    """As NumPy draws them from these logits, whoever shares the batch."""
    for engine in rungs(serve):
        streams = serve.at_once(engine, asked(5))
        for frames, seed, stream in zip(FRAMES, SEEDS, streams, strict=True):
            serve.expect(stream, right_frames(frames, seed, 5))


def test_frames_drawn_in_depth_see_the_ids_before_them_at_each_level(serve):
    """Sampled and greedy, whoever shares the batch."""
    for engine in rungs(serve, (DeepWhole, DeepOwn, DeepPaged)):
        for each, greedy in (((), ()), ([{}, {"temperature": 0}, {"temperature": 2.0}], {1})):
            streams = serve.at_once(engine, asked(3, codebooks=each))
            for frames, seed, stream in zip(FRAMES, SEEDS, streams, strict=True):
                serve.expect(stream, right_frames(frames, seed, 3, greedy, deep=True))


def test_each_codebook_may_have_parameters_of_its_own(serve):
    each = [{}, {"temperature": 0}, {"temperature": 2.0}]
    for engine in rungs(serve):
        streams = serve.at_once(engine, asked(3, codebooks=each))
        for frames, seed, stream in zip(FRAMES, SEEDS, streams, strict=True):
            serve.expect(stream, right_frames(frames, seed, 3, greedy={1}))


def test_log_probabilities_belong_to_the_ids_of_their_codebook(serve):
    for engine in rungs(serve):
        stream = serve.at_once(engine, asked(2, logprobs=1))[1]
        frames, ending = serve.read(stream)
        assert (len(frames), ending) == (2, "length"), f"it ended with {ending}"
        for frame, scores in zip(frames, stream.logprobs, strict=True):
            found = [each.get(int(token)) for token, each in zip(frame, scores, strict=True)]
            assert all(p is not None and abs(p - np.log(1 / LIKELY)) < 1e-5 for p in found), f"{frame}: {scores}"


def test_nan_in_one_codebook_fails_its_request_alone(serve):
    class Spoilt(FramesWhole):
        def logits(self, tokens, lengths):
            hit = (self.backend.get(tokens) == 7).all(axis=2).any(axis=1)  # the frame of one prompt only
            nan = np.zeros((len(hit), CODES, VOCAB), np.float32)
            nan[hit, 1, 4] = np.nan
            return super().logits(tokens, lengths) + self.backend.put(nan)

    streams = serve.at_once(serve(Spoilt(serve.backend), padding_token=np.zeros((1, CODES), "int32")), asked(3))
    for frames, seed, stream in zip(FRAMES, SEEDS, streams, strict=True):
        if [7, 7, 7] in frames:
            serve.expect(stream, [], "NonFiniteOutput")
        else:
            serve.expect(stream, right_frames(frames, seed, 3))


# random numbers


class DrawsWhole(Toy):
    """Level 0. Its tokens are the random numbers that it is given: uniform ones, and then normal ones."""

    draws = DRAWS

    def forward(self, tokens: Any, uniform: Any, normal: Any) -> Any:
        return self.backend.xp.concat([uniform, normal], axis=1)


class DrawsOwn(Toy):
    """The same, with a cache of its own."""

    draws, vocab_size, max_model_len, past = DRAWS, None, 64, OwnCache()

    def step(self, tokens: Any, lengths: Any, past: Any, uniform: Any, normal: Any) -> tuple[Any, Any]:
        return self.backend.xp.concat([uniform, normal], axis=1), tokens


class DrawsState(Toy):
    """The same at level 2."""

    draws, vocab_size, params, max_model_len = DRAWS, None, None, 64

    def cache_spec(self) -> list[State]:
        return [State(shape=(1,))]

    def step(self, params: Any, cache: Any, x: Any) -> Any:
        return self.backend.xp.concat([x.uniform, x.normal], axis=1), [cache[0] + 1]


def test_random_numbers_arrive_bit_equal_at_each_level(serve):
    """By seed and position, whoever shares the batch."""
    token = np.zeros(2 * DRAWS, np.float32)
    for kind in (DrawsWhole, DrawsOwn, DrawsState):
        options = {"token": token, "enable_prefix_caching": False} if kind is DrawsOwn else {}
        engine = serve.cached(toy(kind, serve.backend), **{"max_num_batched_tokens": 4} | options)
        lengths = 1, 6, 3, 2
        requests = [
            {"prompt": np.zeros((n, 2 * DRAWS), "float32"), "params": SamplingParams(seed=seed, max_tokens=3)}
            for n, seed in zip(lengths, SEEDS, strict=True)
        ]
        for n, seed, stream in zip(lengths, SEEDS, serve.at_once(engine, requests), strict=True):
            got, ending = serve.read(stream)
            assert ending == "length", f"{kind.__name__} ended with {ending}"
            want = np.array([drawn(seed, n + i, DRAWS) for i in range(3)])
            same = np.array_equal(np.array(got, "float32"), want)
            assert same, f"{kind.__name__} was given {got} for {want.tolist()}"


# inputs


VOICES = np.array([[-0.0, 3.4e38, 1.2e-38], [1 / 3, -1.5, 0.0], [2.0, -3.4e38, 1e-10], [7.0, -0.0, 0.1]], np.float32)
COUNTS = np.array([[2**31 - 1, -(2**31)], [0, 1], [-1, 16777217], [5, 6]], np.int32)
HOURS = [np.arange(1, 41, dtype=np.float32).reshape(20, 2) / np.float32(3) * (i + 1) for i in range(4)]
INPUTS = {
    "voice": Input((3,)),
    "count": Input((2,), "int32"),
    "hours": Input((2,), per="position"),
}
STARTS = [2], [4, 4, 4, 4, 4], [6, 6], [8, 8, 8]  # no two begin alike, and all tokens tell whose they are


def given(i):
    return {"voice": VOICES[i], "count": COUNTS[i], "hours": HOURS[i]}


class ToldWhole(Toy):
    """Level 0. The next token is the last one. told: of each call, tokens, lengths, voice, count and hours."""

    inputs = INPUTS
    told: list[Any]

    def forward(self, tokens: Any, lengths: Any, voice: Any, count: Any, hours: Any) -> Any:
        return self._tell(tokens, lengths, voice, count, hours)

    def _tell(self, tokens: Any, *others: Any) -> Any:
        self.told.append([self.backend.get(t).copy() for t in (tokens, *others)])
        return tokens[:, -1, ...] + 0


class ToldOwn(ToldWhole):
    """The same, with a cache of its own."""

    vocab_size, max_model_len, past = None, 64, OwnCache()

    def step(self, tokens: Any, lengths: Any, past: Any, voice: Any, count: Any, hours: Any) -> tuple[Any, Any]:
        return self._tell(tokens, lengths, voice, count, hours), tokens


def told(serve, model, **options):
    """What a model was told in all calls: (whose row, its tokens so far, those of the call, and its inputs)."""
    model.told = []
    engine = serve.cached(model, **options)
    model.told.clear()
    requests = [{"prompt": np.array(p, "int32"), "inputs": given(i), "max_tokens": 3} for i, p in enumerate(STARTS)]
    for prompt, stream in zip(STARTS, serve.at_once(engine, requests), strict=True):
        serve.expect(stream, [prompt[0]] * 3)
    for tokens, lengths, *inputs in model.told:
        for i, n in enumerate(lengths.tolist()):
            yield int(tokens[i, -1]) // 2 - 1, n, tokens.shape[1], [each[i] for each in inputs]


def both(serve):
    """Models told of their inputs: padded, and with a cache of their own."""
    yield from told(serve, ToldWhole(serve.backend), padding_token=np.zeros(1, "int32"))
    own = {"token": np.int32(0), "enable_prefix_caching": False, "max_num_batched_tokens": 8}
    yield from told(serve, ToldOwn(serve.backend), **own)


def test_inputs_of_a_request_arrive_bit_equal_with_its_row(serve):
    for who, _, _, (voice, count, _) in both(serve):
        assert np.array_equal(bits(voice), bits(VOICES[who])), f"request {who} came with the voice {voice.tolist()}"
        assert np.array_equal(count, COUNTS[who]), f"request {who} came with the count {count.tolist()}"


def test_inputs_per_position_arrive_bit_equal_with_zeros_where_rows_are_shorter(serve):
    """Of the positions of the call."""
    for who, n, width, (_, _, hours) in both(serve):
        want = np.zeros((width, 2), np.float32)
        real = HOURS[who][max(n - width, 0) : n]
        want[width - len(real) :] = real
        assert np.array_equal(bits(hours), bits(want)), f"request {who} had the hours {hours.tolist()} at {n} tokens"


class ToldState(Toy):
    """Level 2. Its tokens are what it is told: the voice of their row, and the hours of their position."""

    inputs, vocab_size, params, max_model_len = {"voice": INPUTS["voice"], "hours": INPUTS["hours"]}, None, None, 64

    def cache_spec(self) -> list[State]:
        return [State(shape=(1,))]

    def step(self, params: Any, cache: Any, x: Any) -> Any:
        take = self.backend.take
        voice = take(x.inputs["voice"], take(x.seg, x.last))
        return self.backend.xp.concat([voice, take(x.inputs["hours"], x.last)], axis=1), [cache[0] + 1]


def test_the_inputs_of_a_step_are_those_of_its_rows_and_positions(serve):
    engine = serve.cached(toy(ToldState, serve.backend), max_num_batched_tokens=4)
    requests = [
        {"prompt": np.zeros((len(p), 5), "float32"), "max_tokens": 3}
        | {"inputs": {"voice": VOICES[i], "hours": HOURS[i]}}
        for i, p in enumerate(STARTS)
    ]
    for i, stream in enumerate(serve.at_once(engine, requests)):
        got, ending = serve.read(stream)
        assert ending == "length", f"it ended with {ending}"
        last = len(STARTS[i]) - 1
        want = np.array([[*VOICES[i], *HOURS[i][last + t]] for t in range(3)], "float32")
        assert np.array_equal(bits(np.array(got, "float32")), bits(want)), f"{got} for {want.tolist()}"
