"""Models with one fault each, as people write them, and the cause that is to be named.

(More small ones are in `broken_models.py`.)
"""

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from hibachi import NumpyBackend, OwnCache, Paged
from hibachi.testing.toys import SumPaged, SumState, TinyDecoder, tiny_weights

NUMPY = NumpyBackend(native=False)
VOCAB, WIDTH = 23, 8


class Faulty(NamedTuple):
    model: Any
    cause: str
    trial: str  # the first that finds it
    where: str = ""  # pattern of where that is
    saw: str = ""  # pattern of the evidence
    options: dict[str, Any] = {}  # noqa: RUF012  # of the subject

    def __str__(self) -> str:
        return self.model.__name__


def draw(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# ---- level 1 ---------------------------------------------------------------------------------------------------------


class Attends:
    """Good: one layer of attention with learned positions, masked."""

    vocab_size = VOCAB
    embed, places, head = draw(0, VOCAB, WIDTH), draw(1, 64, WIDTH), draw(2, WIDTH, VOCAB)

    def logits(self, tokens, lengths):
        real = self.real(tokens, lengths)
        x = self.embed[tokens] + self.places[self.positions(real)]
        scores = np.where(real[:, None, :], x[:, -1:] @ x.transpose(0, 2, 1), -1e9)
        return (softmax(scores) @ x)[:, 0] @ self.head

    def real(self, tokens, lengths):
        return np.arange(tokens.shape[1]) >= tokens.shape[1] - lengths[:, None]

    def positions(self, real):
        return np.maximum(real.cumsum(1) - 1, 0)


class AttendsToPadding(Attends):
    def logits(self, tokens, lengths):
        real = self.real(tokens, lengths)
        x = self.embed[tokens] + self.places[self.positions(real)]
        return (softmax(x[:, -1:] @ x.transpose(0, 2, 1)) @ x)[:, 0] @ self.head


class CountsPositionsFromThePadding(Attends):
    def positions(self, real):
        return np.arange(real.shape[1])[None, :]


class TakesManyForTwoHalves(Attends):
    """A bug that needs many rows."""

    def logits(self, tokens, lengths):
        out = super().logits(tokens, lengths)
        return out if len(out) < 6 else np.concatenate([out[:4], out[:4]])[: len(out)]


class BatchNormed(torch.nn.Module):
    """Nobody called .eval(): the statistics are those of the batch."""

    vocab_size = VOCAB

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Linear(WIDTH, VOCAB)
        self.norm = torch.nn.BatchNorm1d(WIDTH)

    def logits(self, tokens, lengths):
        real = torch.arange(tokens.shape[1]) >= tokens.shape[1] - lengths[:, None]
        x = torch.cat(
            [self.embed.weight[:1].expand(len(tokens), 1, -1), self.embed(tokens.long()) * real[..., None]], 1
        )
        return self.head(self.norm(x.transpose(1, 2)).sum(2))


class BatchNormedLast(BatchNormed):
    """Here PyTorch itself refuses a batch of one row."""

    def logits(self, tokens, lengths):
        return self.head(self.norm(self.embed(tokens.long())[:, -1]))


class DropsOut(torch.nn.Module):
    vocab_size = VOCAB

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Linear(WIDTH, VOCAB)
        self.drop = torch.nn.Dropout(0.1)

    def logits(self, tokens, lengths):
        return self.head(self.drop(self.embed(tokens.long())[:, -1]))


class Drifts(Attends):
    """Draws its own noise."""

    def logits(self, tokens, lengths):
        return super().logits(tokens, lengths) + np.random.normal(size=(len(tokens), VOCAB))


CACHE: dict[str, Any] = {}


class CachesInItsModule(Attends):
    """A cache beside the class, as models for one request at a time have it: a new prompt begins it anew."""

    def logits(self, tokens, lengths):
        n = tokens.shape[1]
        if len(CACHE.get("x", ())) != n - 1 or n == 1:
            CACHE["x"] = np.zeros((0, len(tokens), WIDTH), np.float32)
        new = range(len(CACHE["x"]), n)
        more = np.stack([self.embed[tokens[:, i]] + self.places[i] for i in new])
        x = CACHE["x"] = np.concatenate([CACHE["x"], more])
        x = x.transpose(1, 0, 2)
        return (softmax(x[:, -1:] @ x.transpose(0, 2, 1)) @ x)[:, 0] @ self.head


class AppendsToItself(Attends):
    """A cache in the model that nobody ever empties."""

    def __init__(self):
        self.past = np.zeros(WIDTH, np.float32)

    def logits(self, tokens, lengths):
        self.past = 0.5 * self.past + self.embed[tokens[:, -1]].sum(0)
        return super().logits(tokens, lengths) + self.past @ self.head


# ---- level 2 ---------------------------------------------------------------------------------------------------------


class Seeing:
    """The backend, with attention over other inputs than the model is shown elsewhere."""

    def __init__(self, backend, x):
        self._backend, self._x = backend, x

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def attend(self, q, k, v, layer, x, **options):
        return self._backend.attend(q, k, v, layer, self._x, **options)


class Decoder(TinyDecoder):
    """A small Llama, good. shown: the inputs as rotary embeddings see them; attended: as attention does."""

    def __init__(self):
        super().__init__(NUMPY, tiny_weights())

    def shown(self, x):
        return x

    def attended(self, x):
        return x

    def step(self, params, cache, x):
        other = copy.copy(self)
        other.backend = Seeing(self.backend, self.attended(x))
        return TinyDecoder.step(other, params, cache, self.shown(x))


class PositionsFromZero(Decoder):
    def shown(self, x):
        return replace(x, pos=x.pos - x.start[x.seg])


class PositionsInTheStep(Decoder):
    def shown(self, x):
        return replace(x, pos=np.arange(len(x.pos)))


class PositionsFromTheFirstRow(Decoder):
    def shown(self, x):
        return replace(x, pos=x.start[0] + np.arange(len(x.pos)) - x.cu_q[x.seg])


class SeesThisCallOnly(Decoder):
    """Attends over a scratch cache, as if every call began a sequence; its rotary embeddings are right."""

    def attended(self, x):
        fresh = replace(x, pos=x.pos - x.start[x.seg], kv_len=x.kv_len - x.start, start=x.start * 0)
        return replace(fresh, slot=x.block_table[x.seg, fresh.pos // 4] * 4 + fresh.pos % 4)

    def step(self, params, cache, x):
        out, _ = super().step(params, copy.deepcopy(cache), x)
        return out, cache


class LooksAhead(Decoder):
    def attended(self, x):
        return replace(x, pos=(x.kv_len - 1)[x.seg])


class NeighbouringBlocks(Decoder):
    """Takes a row's blocks for one piece of memory."""

    def attended(self, x):
        table = x.block_table[:, :1] + np.arange(x.block_table.shape[1], dtype=np.int32)
        return replace(x, block_table=table, slot=table[x.seg, x.pos // 4] * 4 + x.pos % 4)


class WritesByRow(Decoder):
    """Finds its slots by the number of the row, whatever the block table says."""

    def attended(self, x):
        table = np.arange(20, 20 + x.block_table.shape[1], dtype=np.int32) + 3 * x.row[:, None]
        return replace(x, block_table=table, slot=table[x.seg, x.pos // 4] * 4 + x.pos % 4)


class ReadsBehindTheEnd(SumPaged):
    """Sums whole blocks: what is behind its own tokens is zero only in a new cache."""

    def cache_spec(self):
        return [Paged(1, 1, 1)]

    def __init__(self):
        super().__init__(NUMPY)

    def step(self, params, cache, x):
        keys, values = cache[0]
        keys.reshape(-1)[x.slot] = x.tok
        seen = keys[x.block_table[x.seg[x.last]], :, 0, 0]  # [n_out, blocks, block size]
        place = np.arange(seen.shape[1] * 4).reshape(1, -1, 4)
        ahead = x.kv_len.max()  # of the others' tokens none, of the past all that lies there
        total = (seen * ((place <= x.pos[x.last][:, None, None]) | (place >= ahead))).sum((1, 2))
        return np.eye(10, dtype=np.float32)[(total.astype(int) + 1) % 10], [(keys, values)]


class OwnMemory(SumPaged):
    """Keeps the tokens by row, so it never sees those that another row has computed."""

    def __init__(self):
        super().__init__(NUMPY)
        self.memory = np.zeros((100, 100), int)

    def step(self, params, cache, x):
        self.memory[x.row[x.seg], x.pos] = x.tok
        sums = [self.memory[x.row[x.seg[t]], : x.pos[t] + 1].sum() for t in x.last]
        return np.eye(10, dtype=np.float32)[(np.array(sums, int) + 1) % 10], cache


class KnowsItsRow(Decoder):
    def step(self, params, cache, x):
        out, cache = super().step(params, cache, x)
        return out + 0.1 * x.row[x.seg[x.last]][:, None] * out[:, ::-1], cache


class ThinksOneTokenIsAPrompt(Decoder):
    """Where others have several tokens, a row with one is taken for one that begins."""

    def shown(self, x):
        q = np.diff(x.cu_q)[x.seg]
        return replace(x, pos=np.where((q == 1) & (q.max() > 1), 0, x.pos))


class ForgetsToReturnItsState(SumState):
    def __init__(self):
        super().__init__(NUMPY)

    def step(self, params, cache, x):
        return super().step(params, cache, x)[0], cache


class LosesALayer(Decoder):
    def step(self, params, cache, x):
        out, cache = super().step(params, cache, x)
        return out, cache[:1]


class CentresTheStep(Decoder):
    """The mean over all tokens of a step is a mean over rows."""

    def step(self, params, cache, x):
        out, cache = super().step(params, cache, x)
        return out - (params["embed"][x.tok].mean(0) @ params["embed"].T), cache


class BelievesAllRowsEmit(Decoder):
    def step(self, params, cache, x):
        out, cache = super().step(params, cache, replace(x, last=x.cu_q[1:] - 1))
        return out[: len(x.last)], cache


class OwnPast:
    """Right: attention over a past of its own, {"k", "v"} [B, positions, WIDTH]."""

    vocab_size, max_model_len, past = VOCAB, 64, OwnCache()

    def __init__(self):
        self.tokens, self.places = draw(1, VOCAB, WIDTH), draw(2, 64, WIDTH)
        self.weights = draw(3, 3, WIDTH, WIDTH) / 3

    def step(self, tokens, lengths, past):
        place = lengths[:, None] - tokens.shape[1] + np.arange(tokens.shape[1])
        x = self.tokens[tokens] + self.places[np.maximum(place, 0)]
        q, k, v = x @ self.weights[:, None]
        if past is not None:
            k, v = (np.concatenate([past[name], new], axis=1) for name, new in (("k", k), ("v", v)))
        column = np.arange(k.shape[1]) - (k.shape[1] - lengths[:, None])
        seen = (column[:, None] >= 0) & (column[:, None] <= place[..., None])
        x = x + softmax(np.where(seen, q @ k.swapaxes(1, 2), -1e30)) @ v
        return x[:, -1] @ self.tokens.T, {"k": k, "v": v}


class ForgetsItsPast(OwnPast):
    def step(self, tokens, lengths, past):
        return super().step(tokens, np.full_like(lengths, tokens.shape[1]), None)


class ForgetsWhereAChunkFollows(OwnPast):
    def step(self, tokens, lengths, past):
        if tokens.shape[1] > 1:
            lengths, past = np.full_like(lengths, tokens.shape[1]), None
        return super().step(tokens, lengths, past)


class LooksAtTheLongest(OwnPast):
    """As LongRoPE of transformers; `logits_to_keep` as there."""

    window = 32

    def step(self, tokens, lengths, past, logits_to_keep=1):
        logits, past = super().step(tokens, lengths, past)
        return logits[:, None] * (1 + (lengths.max() > self.window)), past


class WritesIntoItsLengths(OwnPast):
    def step(self, tokens, lengths, past):
        found = super().step(tokens, lengths, past)
        lengths += 1
        return found


class ShowsThePadding(OwnPast):
    def step(self, tokens, lengths, past):
        width = tokens.shape[1] + (0 if past is None else past["k"].shape[1])
        return super().step(tokens, np.full_like(lengths, width), past)


class TurnsItsRows(OwnPast):
    def step(self, tokens, lengths, past):
        logits, past = super().step(tokens, lengths, past)
        return logits[::-1].copy(), past


class TurnsItsPast(OwnPast):
    def step(self, tokens, lengths, past):
        logits, past = super().step(tokens, lengths, past)
        return logits, {name: a[::-1].copy() for name, a in past.items()}


class KeepsItsPast(OwnPast):
    last = None

    def step(self, tokens, lengths, past):
        if past is not None and self.last is not None and self.last["k"].shape == past["k"].shape:
            past = self.last
        logits, self.last = super().step(tokens, lengths, past)
        return logits, self.last


class SharesItsPast(OwnPast):
    """All rows get the first one's."""

    def step(self, tokens, lengths, past):
        logits, past = super().step(tokens, lengths, past)
        return logits, {name: np.broadcast_to(a[:1], a.shape) for name, a in past.items()}


class WritesIntoItsPast(OwnPast):
    """Keeps the arrays of its last call, and clears them in the next one."""

    last = ()

    def step(self, tokens, lengths, past):
        for array in self.last:
            array[...] = 0
        logits, past = super().step(tokens, lengths, past)
        self.last = [*past.values()]
        return logits, past


class TurnsItsAxes(OwnPast):
    def step(self, tokens, lengths, past):
        logits, new = super().step(tokens, lengths, past)
        return logits, new if past is None else {name: a.swapaxes(1, 2) for name, a in new.items()}


class WidensItsPast(OwnPast):
    def step(self, tokens, lengths, past):
        logits, new = super().step(tokens, lengths, past)
        return logits, new if past is None else {name: a.astype(np.float64) for name, a in new.items()}


class WeighsAllRows(OwnPast):
    """Adds the last values of all rows, those of others with the weight 0."""

    def step(self, tokens, lengths, past):
        logits, new = super().step(tokens, lengths, past)
        return logits + (np.eye(len(tokens)) @ new["v"][:, 0])[:, :1] * 0, new


class GrowsByTwo(OwnPast):
    def step(self, tokens, lengths, past):
        logits, new = super().step(tokens, lengths, past)
        if past is not None:
            new = {name: np.concatenate([a, a[:, -1:]], axis=1) for name, a in new.items()}
        return logits, new


FAULTY = [
    Faulty(ForgetsItsPast, "past-not-continued", "decode"),
    Faulty(ForgetsWhereAChunkFollows, "chunk-not-continued", "chunks", "", "Of the prompt: chunks of 3"),
    Faulty(LooksAtTheLongest, "long-neighbour", "borders", "32", "rows of one length only share calls"),
    Faulty(WritesIntoItsLengths, "writes-input", "inputs", "", "a call has written into lengths"),
    Faulty(ShowsThePadding, "past-padding", "ragged", "^beside a longer prompt: row a, new token 2"),
    Faulty(TurnsItsRows, "row-order", "neighbours"),
    Faulty(TurnsItsPast, "rows-mixed", "neighbours"),
    Faulty(KeepsItsPast, "shared-state", "after", "turn by turn", r"KeepsItsPast\.last"),
    Faulty(SharesItsPast, "rows-mixed", "neighbours"),
    Faulty(WritesIntoItsPast, "comings-and-goings", "engine", "", "in memory that nothing writes to later"),
    Faulty(TurnsItsAxes, "fails-alone", "alone", r"must return a past whose array \['k'\]"),
    Faulty(WidensItsPast, "fails-alone", "alone", r"must return a past whose array \['k'\] .*dtype float32"),
    Faulty(WeighsAllRows, "past-nan", "spoilt", "^it comes second: row a, new token 2"),
    Faulty(GrowsByTwo, "fails-alone", "alone", r"or the 1 new ones only"),
    Faulty(AttendsToPadding, "padding-leaks", "padding", r"1 in front of a prompt of 11: row a, new token 1, output"),
    Faulty(CountsPositionsFromThePadding, "padding-counts", "padding"),
    Faulty(TakesManyForTwoHalves, "rows-mixed", "neighbours", "^8 rows: row e, new token 1"),
    Faulty(BatchNormed, "batch-statistics", "neighbours", "^2 rows", "training mode: BatchNorm1d"),
    Faulty(BatchNormedLast, "batch-statistics", "alone", "", "Expected more than 1 value per channel"),
    Faulty(DropsOut, "training-mode", "again", "", "training mode: Dropout"),
    Faulty(Drifts, "random", "again"),
    Faulty(CachesInItsModule, "shared-state", "after", "turn by turn", r"faulty_models.*\.CACHE"),
    Faulty(AppendsToItself, "shared-state", "again", "time 2", r"AppendsToItself\.past"),
    Faulty(PositionsFromZero, "resume-position", "decode", "", "layer 0, keys .* position 5 .*from position 0"),
    Faulty(PositionsInTheStep, "resume-position", "decode", "", "from position 0"),
    Faulty(PositionsFromTheFirstRow, "other-length", "ragged"),
    Faulty(SeesThisCallOnly, "past-lost", "decode"),
    Faulty(LooksAhead, "looks-ahead", "wanted"),
    Faulty(NeighbouringBlocks, "block-table", "slots", "blocks in no order"),
    Faulty(WritesByRow, "wrong-slot", "slots"),
    Faulty(ReadsBehindTheEnd, "stale-cache", "used"),
    Faulty(OwnMemory, "own-cache", "prefix"),
    Faulty(KnowsItsRow, "row-index", "row", "in row 1"),
    Faulty(ForgetsToReturnItsState, "state-not-returned", "wanted", "", "layer 0"),
    Faulty(LosesALayer, "fails-alone", "alone", "all 2 layers in a list; got 1"),
    Faulty(CentresTheStep, "batch-statistics", "wanted"),
    Faulty(BelievesAllRowsEmit, "wrong-output", "wanted"),
    Faulty(ThinksOneTokenIsAPrompt, "other-place", "mixed", "^while another is prefilled: row a, new token 2"),
]
