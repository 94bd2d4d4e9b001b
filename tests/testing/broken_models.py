"""Models that are not safe to batch, each with the promise that is to find it, and what it is to say.

Most are toys that sum: the next token is one more than the sum of all before, modulo 10.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hibachi import NumpyBackend
from hibachi.testing.toys import SURE, SumLogits, SumPaged, SumState, SumTokens, Toy

NUMPY = NumpyBackend()
VALUES = [[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]]


class Broken(NamedTuple):
    model: type
    promise: str  # the first that it breaks
    says: str  # pattern of what came
    options: dict[str, Any] = {}  # noqa: RUF012  # of Own

    def __str__(self) -> str:
        return self.model.__name__


def one_hot(ids: Any) -> Any:
    return np.eye(10, dtype=np.float32)[ids % 10] * SURE


# ---- what a model must do --------------------------------------------------------------------------------------------


class NanForOddLengths(SumLogits):
    def logits(self, tokens, lengths):
        return np.where(lengths[:, None] % 2, np.nan, super().logits(tokens, lengths))


class FloatsForInts(SumTokens):
    def forward(self, tokens, lengths):
        return super().forward(tokens, lengths) * 1.0


class DropsTheBatchOfOne(SumLogits):
    def logits(self, tokens, lengths):
        return super().logits(tokens, lengths).squeeze()


class ReturnsATuple(SumTokens):
    def forward(self, tokens, lengths):
        return super().forward(tokens, lengths), None


class RaisesItself(SumTokens):
    def forward(self, tokens, lengths):
        return [][len(tokens)]


class WritesIntoItsInput(SumTokens):
    def forward(self, tokens, lengths):
        out = super().forward(tokens, lengths)
        tokens[:, 0] = 99
        return out


class WritesIntoItsPositions(SumState):
    def step(self, params, cache, x):
        out, cache = super().step(params, cache, x)
        if x.last.flags.writeable:
            x.last[...] = 0
        return out, cache


class KeepsACounter(SumTokens):
    calls = 0

    def forward(self, tokens, lengths):
        self.calls += 1
        return (super().forward(tokens, lengths) + self.calls) % 10


class HasAGenerator(SumLogits):
    def __init__(self, backend):
        super().__init__(backend)
        self.random = np.random.default_rng(0)

    def logits(self, tokens, lengths):
        return super().logits(tokens, lengths) + self.random.normal(size=(len(tokens), 10))


class AddsToWhatItKeeps(SumPaged):
    """A sum for each row, begun anew where a prompt begins."""

    def __init__(self, backend):
        super().__init__(backend)
        self.sums = np.zeros(100, int)

    def step(self, params, cache, x):
        for tok, pos, seg in zip(x.tok, x.pos, x.seg, strict=True):
            self.sums[x.row[seg]] = self.sums[x.row[seg]] * (pos > 0) + tok
        return one_hot(self.sums[x.row[x.seg[x.last]]] + 1), cache


class ReadsWhatOthersLeft(SumPaged):
    """Its own table of tokens, of which it reads more than the request wrote."""

    def __init__(self, backend):
        super().__init__(backend)
        self.table = np.zeros((100, 100), int)

    def step(self, params, cache, x):
        self.table[x.row[x.seg], x.pos] = x.tok
        return one_hot(self.table[x.row[x.seg[x.last]]].sum(1) + 1), cache


# ---- whoever shares the batch ----------------------------------------------------------------------------------------


class MixesRows(SumLogits):
    def logits(self, tokens, lengths):
        out = super().logits(tokens, lengths)
        return out + out.mean(0)


class ReversesRows(SumTokens):
    def forward(self, tokens, lengths):
        return super().forward(tokens, lengths)[::-1]


class DependsOnTheBatchSize(SumTokens):
    def forward(self, tokens, lengths):
        return (super().forward(tokens, lengths) + len(tokens)) % 10


class TakesTheLongestForAll(SumPaged):
    def step(self, params, cache, x):
        sums, layer = self._sums(x.tok, cache[0], x)
        return one_hot((sums[:, 0] + x.kv_len.max()).astype(int)), [layer]


class AnswersForTheFirstTokens(SumPaged):
    def step(self, params, cache, x):
        return super().step(params, cache, replace(x, last=np.arange(len(x.last))))


class SwapsStates(SumState):
    def step(self, params, cache, x):
        out, (state,) = super().step(params, cache, x)
        return out, [state[::-1]]


class IgnoresLengths(SumLogits):
    def logits(self, tokens, lengths):
        return super().logits(tokens, lengths * 0 + tokens.shape[1])


class PadsOnTheRight(SumTokens):
    def forward(self, tokens, lengths):
        real = np.arange(tokens.shape[1]) < lengths[:, None]
        return ((tokens * real).sum(1) + 1) % 10


class CountsPaddingInItsMean(Toy):
    def forward(self, tokens, lengths):
        real = np.arange(tokens.shape[1]) >= tokens.shape[1] - lengths[:, None]
        return (tokens * real).sum(1) // tokens.shape[1]


class RemembersByPlace(SumPaged):
    """Its own table, by the place in this step's batch, which is another at the next."""

    def __init__(self, backend):
        super().__init__(backend)
        self.table = np.zeros((100, 100), int)

    def step(self, params, cache, x):
        self.table[x.seg, x.pos] = x.tok
        sums = [self.table[seg, : pos + 1].sum() for seg, pos in zip(x.seg[x.last], x.pos[x.last], strict=True)]
        return one_hot(np.array(sums) + 1), cache


# ---- short and long prompts ------------------------------------------------------------------------------------------


class CountsPositionsInTheChunk(SumPaged):
    def step(self, params, cache, x):
        sums, layer = self._sums(x.tok, cache[0], x)
        place = x.pos - x.start[x.seg]
        return one_hot((sums[:, 0] + place[x.last]).astype(int)), [layer]


class ForgetsTheChunkBefore(SumState):
    def step(self, params, cache, x):
        (state,) = cache
        return super().step(params, [state * (x.tok.shape[0] == len(state))], x)


class MultipliesWhatIsHidden(SumPaged):
    """Its own sum over the cache, in which positions that are hidden count 0 times."""

    def step(self, params, cache, x):
        keys, values = cache[0]
        values.reshape(-1)[x.slot] = x.tok
        held = values[x.block_table[x.seg[x.last]], :, 0, 0]  # [n_out, blocks, block size]
        place = np.arange(held.shape[1] * held.shape[2]).reshape(1, *held.shape[1:])
        sums = (held * (place <= x.pos[x.last][:, None, None])).sum((1, 2))
        known = one_hot(np.nan_to_num(sums).astype(int) + 1)
        return np.where(np.isnan(sums)[:, None], np.float32(np.nan), known), [(keys, values)]


class MixesPromptsOfOneToken(SumLogits):
    def logits(self, tokens, lengths):
        out = super().logits(tokens, lengths)
        return out - out.mean(0) * 0.1 * (tokens.shape[1] == 1)


class TakesPaddingForTheTokenBefore(SumLogits):
    """Where there was none. Zeros do no harm."""

    def logits(self, tokens, lengths):
        before = tokens[:, -2] if tokens.shape[1] > 1 else tokens[:, 0] * 0
        return one_hot(super().logits(tokens, lengths).argmax(-1) + before * (lengths == 1))


class HasTooFewPositions(SumLogits):
    max_model_len = 64
    positions = np.zeros(48)

    def logits(self, tokens, lengths):
        return super().logits(tokens, lengths) + self.positions[lengths - 1][:, None]


# ---- feed-forward ----------------------------------------------------------------------------------------------------


class Doubles:
    example_inputs = VALUES

    def forward(self, x):
        return x * 2


class NormalisesTheBatch(Doubles):
    def forward(self, x):
        return x - x.mean(0) / 2


class RanksTheBatch(Doubles):
    def forward(self, x):
        return np.sort(x, axis=0)


class AddsUp(Doubles):
    total = 0.0

    def forward(self, x):
        self.total += 1
        return x + self.total


ANSWERED, WRITES, PURE = "a_request_alone_is_answered", "a_call_leaves_its_arguments", "a_call_with_the_same_arguments"
AGAIN, TOGETHER, PADDED = "a_request_asked_again", "requests_together_give", "padding_on_the_left"
IDS = {"vocab_size": 10}
BROKEN = [
    Broken(NanForOddLengths, ANSWERED, "NonFiniteOutput: .* NaN or infinity"),
    Broken(FloatsForInts, ANSWERED, "InvalidModelOutput: .* must return integer tokens.* got float64", IDS),
    Broken(DropsTheBatchOfOne, ANSWERED, r"InvalidModelOutput: .*must return shape \(1, 10\); got \(10,\)"),
    Broken(ReturnsATuple, ANSWERED, r"must return an array of numpy; got builtins.tuple", IDS),
    Broken(RaisesItself, ANSWERED, r"ModelError: .* IndexError: .* \(broken_models.py, line \d+\)", IDS),
    Broken(WritesIntoItsInput, WRITES, "changes in tokens$", IDS),
    Broken(WritesIntoItsPositions, WRITES, r"changes in x\.last$"),
    Broken(KeepsACounter, PURE, "the output changed, off by [19]", IDS),
    Broken(HasAGenerator, PURE, "the output changed, off by"),
    Broken(AddsToWhatItKeeps, PURE, "the output changed, off by 1000"),
    Broken(ReadsWhatOthersLeft, AGAIN, "when it is asked again"),
    Broken(MixesRows, TOGETHER, "a log-probability of .* beside 6 others"),
    Broken(ReversesRows, TOGETHER, "beside 6 others", IDS),
    Broken(DependsOnTheBatchSize, TOGETHER, r"\] beside 6 others", IDS),
    Broken(TakesTheLongestForAll, TOGETHER, r"\] beside 6 others"),
    Broken(SwapsStates, TOGETHER, "beside 6 others"),
    Broken(AnswersForTheFirstTokens, TOGETHER, "beside 6 others"),
    Broken(RemembersByPlace, "who_joins_in_the_midst", "when others join while the first is running, another from"),
    Broken(IgnoresLengths, PADDED, r"padded with \[\d\] beside 6 others"),
    Broken(PadsOnTheRight, PADDED, r"padded with \[0\] beside 6 others", IDS),
    Broken(CountsPaddingInItsMean, PADDED, r"padded with \[0\] beside 6 others", IDS),
    Broken(CountsPositionsInTheChunk, "a_prompt_in_chunks", "in chunks of at most 3 tokens"),
    Broken(ForgetsTheChunkBefore, "a_prompt_in_chunks", "in chunks of at most 3 tokens"),
    Broken(MultipliesWhatIsHidden, "what_others_left_in_the_cache", "NonFiniteOutput"),
    Broken(MixesPromptsOfOneToken, "a_prompt_of_one_token", "a log-probability of .* beside longer ones$"),
    Broken(TakesPaddingForTheTokenBefore, "a_prompt_of_one_token", "beside longer ones, so that it is padded$"),
    Broken(HasTooFewPositions, "the_longest_prompt", "IndexError: .* out of bounds"),
    Broken(NormalisesTheBatch, TOGETHER, "beside 2 others"),
    Broken(RanksTheBatch, TOGETHER, "beside 2 others"),
    Broken(AddsUp, PURE, "the output changed, off by 1$"),
]
