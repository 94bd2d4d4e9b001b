"""Models that are not safe to batch, each with the cause that is to be named.

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
    cause: str
    options: dict[str, Any] = {}  # noqa: RUF012  # of the subject

    def __str__(self) -> str:
        return self.model.__name__

    def made(self) -> Any:
        return self.model() if hasattr(self.model, "example_inputs") else self.model(NUMPY)


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


IDS = {"vocab_size": 10}
BROKEN = [
    Broken(NanForOddLengths, "not-finite"),
    Broken(FloatsForInts, "fails-alone", IDS),
    Broken(DropsTheBatchOfOne, "batch-of-one"),
    Broken(ReturnsATuple, "fails-alone", IDS),
    Broken(RaisesItself, "fails-alone", IDS),
    Broken(WritesIntoItsInput, "writes-input", IDS),
    Broken(WritesIntoItsPositions, "writes-input"),
    Broken(KeepsACounter, "shared-state", IDS),
    Broken(HasAGenerator, "random"),
    Broken(AddsToWhatItKeeps, "shared-state"),
    Broken(ReadsWhatOthersLeft, "shared-state"),
    Broken(MixesRows, "batch-statistics"),
    Broken(ReversesRows, "row-order", IDS),
    Broken(DependsOnTheBatchSize, "batch-size", IDS),
    Broken(TakesTheLongestForAll, "other-length"),
    Broken(SwapsStates, "rows-mixed"),
    Broken(AnswersForTheFirstTokens, "wrong-output"),
    Broken(RemembersByPlace, "shared-state"),
    Broken(IgnoresLengths, "padding-leaks"),
    Broken(PadsOnTheRight, "padding-right", IDS),
    Broken(CountsPaddingInItsMean, "padding-counts", IDS),
    Broken(CountsPositionsInTheChunk, "resume-position"),
    Broken(ForgetsTheChunkBefore, "past-lost"),
    Broken(MixesPromptsOfOneToken, "batch-statistics"),
    Broken(TakesPaddingForTheTokenBefore, "padding-leaks"),
    Broken(HasTooFewPositions, "longest-context"),
    Broken(NormalisesTheBatch, "batch-statistics"),
    Broken(RanksTheBatch, "rows-mixed"),
    Broken(AddsUp, "shared-state"),
]
