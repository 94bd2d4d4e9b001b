"""A draft model: a small second model that guesses the next tokens of rows.

Its keys and values lie in pools of its own, under the numbers of the main model's blocks. So what rows share for the
main model they share here, and what a row finds in its blocks after it was preempted is found here as well. Nobody
tells this file when a block gets another owner: each full block has a name, made of the tokens up to its end.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.layout import StepInputs
from hibachi.engine.runners.calls import CheckedStep, drop_frames, is_signal
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.memory import Memory
from hibachi.engine.runners.runner import check_output
from hibachi.engine.runners.sampler import RowSampler
from hibachi.engine.runners.tokentable import IDS, TokenTable
from hibachi.engine.sampling.draw import PLAIN, path_of
from hibachi.engine.sampling.rows import pick, total
from hibachi.engine.sampling.uniforms import uniform, uniforms
from hibachi.engine.scheduler.lower import lower, lower_one
from hibachi.engine.scheduler.names import chained
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.speculation.protocol import NOTHING, Tokens
from hibachi.errors import text_of

_quiet = np.errstate(invalid="ignore", over="ignore", divide="ignore")  # rows that are not finite give anything


def scratch_blocks(k: int, size: int) -> int:
    """Blocks of a row for what it guesses beyond its own blocks: k positions, the first at the beginning of a block."""
    return -(-k // size)


class DraftCalls:
    """limits: of the engine. Each row has its own blocks, and behind them so many that it may guess into, which begin
    where the engine's blocks end.
    """

    def __init__(self, model: Any, backend: ArrayBackend, dtype: str, limits: Limits, k: int) -> None:
        self.model, self.backend, self.size = model, backend, limits.block_size
        self._spare, self._first = scratch_blocks(k, limits.block_size), max(limits.blocks, 1)
        blocks = self._first + limits.rows * self._spare
        self.memory: Memory = Memory(model.cache_spec(), backend, replace(limits, blocks=blocks, checkpoints=0), dtype)
        self._name = f"{type(model).__name__}.step"
        self._step = CheckedStep(model.step, backend, self._name)
        self._reach: Any = getattr(model, "reach", None)
        width = -(-limits.max_model_len // limits.block_size) + self._spare
        self._table: HostArray = np.zeros((limits.rows, width), np.int32)
        self._blocks = [0] * limits.rows  # how many each row has of its own

    def own(self, row: int, blocks: Sequence[int], *, anew: bool) -> int:
        """A row has these blocks now: more than when it was last named, or others. Returns the positions in them."""
        have, now = 0 if anew else self._blocks[row], len(blocks)
        if anew or now > have:
            first = self._first + row * self._spare
            self._table[row, have:now] = blocks[have:]
            self._table[row, now : now + self._spare] = range(first, first + self._spare)
            self._table[row, now + self._spare :] = 0
            self._blocks[row] = now
        return now * self.size

    def run(self, rows: Any, start: Any, q: Any, emit: Any, tokens: HostArray) -> Array:
        """Logits behind the last token of the rows that emit, [n, vocab]. rows, start, q, emit [B], tokens [sum of q]:
        rows with one token first.
        """
        if len(tokens) == len(rows) and emit.all():
            return self.ahead(rows, start, tokens)
        packed = lower(rows, start, q, emit, self._table, self.size, tiles=self.backend.shapes.choices)
        return self._call(tokens, packed.arrays(), int((start + q).max()), len(packed.last))

    def ahead(self, rows: Any, pos: Any, tokens: HostArray) -> Array:
        """`run` for one token of each row, at these positions, all of which emit: packed in a third of the time."""
        n, block, most = len(rows), pos // self.size, int(pos.max())
        one, each = _upto(n + 1), _upto(n)
        if self.backend.shapes.tiles[0] != 1:
            packed = lower(
                rows, pos, one[1:] - each, each >= 0, self._table, self.size, tiles=self.backend.shapes.choices
            )
            return self._call(tokens, packed.arrays(), most + 1, n)
        table = self._table[rows, : most // self.size + 1]
        slot, end = table[each, block] * self.size + pos % self.size, pos + 1
        of = rows.astype(np.int32)
        return self._call(
            tokens, [pos, slot, each, of, pos, end, one, table, each, each[:, None], each, each], most + 1, n
        )

    def alone(self, row: int, start: int, tokens: HostArray) -> Array:
        """`run` for the tokens of one row, which emits: logits [1, vocab]. Packed with few small arrays."""
        n = len(tokens)
        packed = lower_one(row, start, n, 1, self._table, self.size, tiles=self.backend.shapes.choices)
        return self._call(tokens, packed.arrays(), start + n, 1)

    def _call(self, tokens: HostArray, packed: list[HostArray], positions: int, wanted: int) -> Array:
        """packed: the fields of `Packed`, in their order. wanted: outputs."""
        if self._reach is not None:
            self._reach(positions)
        arrays = [tokens, *packed]
        tok, *rest = arrays if getattr(self.model, "takes_host", False) else self.backend.put_all(arrays)
        out, self.memory.cache = self._step(self.model.params, self.memory.cache, StepInputs(tok, *rest))
        if wanted:
            return check_output(out, self.backend, (wanted, self.model.vocab_size), self._name, kind="logits")
        self.backend.settle(self.memory.cache)
        return out


@lru_cache
def _upto(n: int) -> HostArray:
    a = np.arange(n, dtype=np.int32)
    a.flags.writeable = False
    return a


@_quiet
def likelihood(backend: ArrayBackend, logits: Array, ids: Array, warmth: Array) -> Array:
    """The probability of the token ids [n] by the logits [n, vocab] times warmth [n]: float32 [n]."""
    xp = backend.xp
    x = backend.float32(logits) * warmth[:, None]
    x = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return pick(backend, x, ids[:, None])[:, 0] / total(backend, x)


@_quiet
def drawn(logits: HostArray, warmth: HostArray, u: HostArray) -> tuple[HostArray, HostArray, HostArray]:
    """What rows without filters draw from logits [n, vocab] times warmth [n], by random numbers u [n]; NaN stands for
    the most likely token. Token ids [n], the probability of each, and which rows are finite.

    `hibachi.engine.sampling.draw.sample` and `likelihood` in one, and in a third of the time. It may round otherwise.
    """
    each, best = _upto(len(logits)), logits.argmax(axis=1)  # a NaN is the largest
    most = logits[each, best]
    weights = np.exp((logits - most[:, None]) * warmth[:, None])
    if (greedy := np.isnan(u)).all():
        ids, whole = best, weights.sum(axis=1)
    else:
        sums = np.cumsum(weights, axis=1)
        whole = sums[:, -1]
        ids = np.where(greedy, best, (sums > (u * whole)[:, None]).argmax(axis=1))
    return ids, weights[each, ids] / whole, np.isfinite(most)


def drawn_alone(logits: HostArray, warmth: float, u: float | None) -> tuple[int, float, bool]:
    """`drawn` for one row, [vocab]; u None stands for the most likely token."""
    best = int(logits.argmax())
    if not math.isfinite(most := logits.item(best)):
        return best, 0.0, False
    weights = logits - np.float32(most)
    weights *= np.float32(warmth)
    np.exp(weights, out=weights)
    if u is None:
        token, whole = best, weights.sum()
    else:
        sums = weights.cumsum()
        whole = sums[-1]
        token = min(int(sums.searchsorted(np.float32(u) * whole, "right")), len(sums) - 1)
    return token, weights.item(token) / float(whole), True


log: logging.Logger = logging.getLogger("hibachi.draft")

PATIENCE = 3  # failures in a row after which the model is off
FEW = 2**16  # logits of a call that are looked at on the host
COLDEST = 1e-6  # temperature; below it, products might leave float32
SURE = 0.03  # a row's guesses end before they are less likely than this, all together


class Timed(Protocol):
    """Learns what a call takes: `hibachi.engine.speculation.howmany.Costs`."""

    def note(self, tokens: int, seconds: float) -> None: ...


@dataclass(slots=True, eq=False)
class _Past:
    """What is computed of a request in its row.

    length: tokens when it was last asked for; the first `done` of them are computed in its own blocks. guess: tokens
    computed behind these, which may come. names: of its full blocks.
    """

    done: int = 0
    length: int = 0
    guess: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    bad: bool = False  # there is nothing to guess from

    def keep(self, tokens: Tokens, size: int) -> None:
        """These are its tokens now: what was guessed right counts as computed, but for the last one, whose output is
        wanted. size: of a block.
        """
        came = tokens[self.length : self.length + len(self.guess)].tolist()
        for guess, token in zip(self.guess, came, strict=False):
            if guess != token:
                break
            self.done += 1
        self.guess, self.length = [], len(tokens)
        self.done = min(self.done, self.length - 1)
        del self.names[self.done // size :]


class _Row(NamedTuple):
    """A row that is to get guesses. i: its place in the question. room: positions in its own blocks."""

    i: int
    seq: Seq
    past: _Past
    tokens: Tokens
    most: int
    room: int


class _Draws(NamedTuple):
    """How n rows are drawn: their numbers, tokens so far, one by the temperature, how likely their guesses are so far,
    and by guess a random number, NaN of a greedy row. u None: the sampler draws.
    """

    rows: HostArray
    length: HostArray
    warmth: HostArray
    odds: HostArray
    u: HostArray | None


class DraftModel:
    """A `hibachi.engine.speculation.protocol.Drafter` whose keys are the scheduler's sequences.

    model: an object with `step` and `cache_spec`, without states; backend, dtype: its own. limits: of the engine. k:
    the most proposals of a row. sure: see `SURE`; 0 means all are made. costs: learns what calls take.

    What it lacks of a row it computes when it is asked for that row, and no more than a step's tokens at once: a row
    with more to compute gets no proposals in this call.
    """

    def __init__(
        self,
        model: Any,
        backend: ArrayBackend,
        dtype: str,
        limits: Limits,
        k: int,
        sure: float = SURE,
        costs: Timed | None = None,
    ) -> None:
        self.backend, self.sure, self.costs, self.name = backend, sure, costs, type(model).__name__
        self.calls: DraftCalls | None = DraftCalls(model, backend, dtype, limits, k)
        self._k, self._size, self._budget = k, limits.block_size, limits.budget
        self._longest: int = getattr(model, "max_model_len", None) or limits.max_model_len
        self._sampler = RowSampler(backend, limits.rows, model.vocab_size, TokenTable(1, *IDS))
        self._warmth = np.ones(limits.rows, np.float32)  # one by the temperature
        self._greedy, self._plain = np.zeros(limits.rows, bool), np.zeros(limits.rows, bool)
        self._seeds = np.zeros(limits.rows, np.uint64)
        # Who has each row, and its length when it got it: with another one it has other blocks.
        self._held: list[tuple[Seq, int] | None] = [None] * limits.rows
        self._names: list[bytes | None] = [None] * max(limits.blocks, 1)  # of what is in each block
        self._pasts: dict[Seq, _Past] = {}
        self._failures = 0

    @property
    def off(self) -> bool:
        return self.calls is None

    # ---- a Drafter -----------------------------------------------------------------------------------------------

    def propose(self, keys: Sequence[Hashable], tokens: Sequence[Tokens], most: Sequence[int]) -> list[Tokens]:
        """As `Drafter.propose`; nothing is raised."""
        found: list[Tokens] = [NOTHING] * len(keys)
        if self.calls is None:
            return found
        began = time.perf_counter()
        try:
            with self.backend.guard():
                rows = [row for i, seq in enumerate(keys) if (row := self._row(i, seq, tokens[i], most[i])) is not None]
                for row, guess in self._guess(self.calls, rows, began):
                    found[row.i] = np.array(guess, np.int32)
        except BaseException as e:
            if is_signal(e):
                raise
            self._fail(e)
            return [NOTHING] * len(keys)
        self._failures = 0
        return found

    def lacks(self, key: Hashable, length: int) -> int:
        """About how many tokens of a row of this length are to be computed before its first guess; 0 means none will
        be made.
        """
        past = self._pasts.get(key) if isinstance(key, Seq) else None
        if self.off or length > self._longest or (past is not None and past.bad):
            return 0
        return length if past is None else max(1, length - past.done - len(past.guess))

    def forget(self, key: Hashable) -> None:
        """A request is over. What its blocks hold may be found again."""
        if isinstance(key, Seq):
            self._pasts.pop(key, None)

    def _fail(self, error: BaseException) -> None:
        """A call raised: what the pools hold is not known."""
        drop_frames(error)
        self._names = [None] * len(self._names)
        self._pasts.clear()
        self._failures += 1
        if self._failures == PATIENCE:
            self.calls = None
            log.warning(
                "The draft model %r is off, as it failed %d times in a row; the last time: %s. Requests go on without "
                "its proposals.",
                self.name,
                PATIENCE,
                text_of(error),
            )

    # ---- what is computed ----------------------------------------------------------------------------------------

    def _row(self, i: int, seq: Any, tokens: Tokens, most: int) -> _Row | None:
        """What is to be done for a row; None if it gets no proposals."""
        assert self.calls is not None
        past, row = self._pasts.get(seq), seq.row
        anew = past is None or self._held[row] != (seq, seq.length)
        if past is None or anew:
            past = self._enter(seq, tokens)
        most = min(most, self._k, self._longest - len(tokens) + 1)
        if past.bad or most < 1:
            return None
        room = self.calls.own(row, seq.blocks, anew=anew)
        past.keep(tokens, self._size)
        for block in seq.blocks[past.done // self._size : (len(tokens) + most) // self._size + 1]:
            self._names[block] = None  # from here on, they are written to
        return _Row(i, seq, past, tokens, most, room)

    def _enter(self, seq: Seq, tokens: Tokens) -> _Past:
        """A request has got a row: what its blocks hold of it already."""
        job: Job = seq.owner
        past = self._pasts[seq] = _Past(length=len(tokens), bad=job.request.embeds is not None)
        self._held[seq.row] = seq, seq.length
        row, params = seq.row, job.sampling
        self._sampler.set(row, params, job.seed)
        self._warmth[row], self._greedy[row] = 1 / max(params.temperature or 1, COLDEST), params.temperature == 0
        self._plain[row], self._seeds[row] = path_of(params, self._sampler.vocab_size) == PLAIN, job.seed
        for block in seq.blocks[: (len(tokens) - 1) // self._size]:
            name = self._next_name(past, tokens)
            if self._names[block] != name:
                break
            past.names.append(name)
        past.done = len(past.names) * self._size
        return past

    def _next_name(self, past: _Past, tokens: Tokens) -> bytes:
        """Of the first block that has none."""
        at, before = len(past.names) * self._size, past.names[-1] if past.names else b""
        return chained(before, tokens[at : at + self._size].tobytes())

    def _computed(self, row: _Row, end: int) -> None:
        """Its first `end` tokens have been computed, as far as they are in its own blocks."""
        past = row.past
        past.done = min(end, row.room)
        while (n := len(past.names)) < past.done // self._size:
            past.names.append(self._next_name(past, row.tokens))
            self._names[row.seq.blocks[n]] = past.names[-1]

    # ---- calls ---------------------------------------------------------------------------------------------------

    def _guess(self, calls: DraftCalls, rows: list[_Row], began: float) -> list[tuple[_Row, list[int]]]:
        """What comes next in each row. began: when the question came."""
        if not rows:
            return []
        if len(rows) == 1 and self._plain[rows[0].seq.row] and self._sampler.vocab_size <= FEW:
            return [(rows[0], self._guess_alone(calls, rows[0], began))]
        rows, logits, computed = self._catch_up(calls, rows)
        guesses: list[list[int]] = [[] for _ in rows]
        draws = self._draws(rows)
        going, depth = np.arange(len(rows)), 0
        while len(going):
            more = self._drawn(rows, guesses, going, logits, draws, depth)
            began, before = time.perf_counter(), began
            if self.costs is not None:
                self.costs.note(computed, began - before)
            depth += 1
            going = np.array([n for n in more if depth < rows[n].most], np.intp)
            if len(going):
                logits = self._go_on(calls, rows, guesses, going, draws)
                computed = len(going)
        return list(zip(rows, guesses, strict=True))

    def _guess_alone(self, calls: DraftCalls, row: _Row, began: float) -> list[int]:
        """`_guess` for a single row, with fewer small arrays."""
        past, at, n, get = row.past, row.seq.row, len(row.tokens), self.backend.get
        start, end = past.done, min(n, past.done + self._budget)
        logits = calls.alone(at, start, row.tokens[start:end])
        self._computed(row, end)
        guess: list[int] = []
        if end < n:
            return guess
        warmth, odds, computed = float(self._warmth[at]), 1.0, end - start
        seed = None if self._greedy[at] else int(self._seeds[at])
        for i in range(row.most):
            u = None if seed is None else uniform(seed, n + i)
            token, likely, good = drawn_alone(np.asarray(get(logits), np.float32)[0], warmth, u)
            began, before = time.perf_counter(), began
            if self.costs is not None:
                self.costs.note(computed, began - before)
            if not good:
                past.bad = True
                return []
            odds *= likely
            if odds < self.sure:
                break
            guess.append(token)
            if i + 1 < row.most:
                if n + i < row.room:
                    past.guess.append(token)
                logits, computed = calls.alone(at, n + i, np.array([token], np.int32)), 1
        return guess

    def _catch_up(self, calls: DraftCalls, rows: list[_Row]) -> tuple[list[_Row], Array, int]:
        """Compute what is lacking. Returns the rows of which nothing is, their logits [n, vocab], and the number of
        tokens that were computed.
        """
        rows = sorted(rows, key=lambda row: len(row.tokens) - row.past.done)  # those with a single token first
        done = np.array([row.past.done for row in rows], np.int32)
        lack = np.array([len(row.tokens) for row in rows], np.int32) - done
        before = np.cumsum(lack) - lack
        q = np.clip(self._budget - before, 0, lack)
        q[(q == 1) & (q < lack) & (q.max() > 1)] = 0  # single tokens stand before all others
        some = int(np.count_nonzero(q))
        rows, done, lack, q = rows[:some], done[:some], lack[:some], q[:some]
        emit = q == lack
        tokens = np.concatenate([row.tokens[d : d + n] for row, d, n in zip(rows, done, q, strict=True)])
        logits = calls.run(np.array([row.seq.row for row in rows]), done, q, emit, tokens)
        for row, end in zip(rows, (done + q).tolist(), strict=True):
            self._computed(row, end)
        return rows[: int(np.count_nonzero(emit))], logits, len(tokens)

    def _draws(self, rows: list[_Row]) -> _Draws:
        of, length = np.array([row.seq.row for row in rows], np.intp), np.array([len(row.tokens) for row in rows])
        u, k = None, max((row.most for row in rows), default=0)
        if self._plain[of].all() and len(rows) * self._sampler.vocab_size <= FEW:
            u = uniforms(self._seeds[of][:, None], length[:, None] + np.arange(k))
            u[self._greedy[of]] = np.nan
        return _Draws(of, length, self._warmth[of], np.ones(len(rows), np.float32), u)

    def _drawn(
        self, rows: list[_Row], guesses: list[list[int]], going: Any, logits: Array, draws: _Draws, depth: int
    ) -> list[int]:
        """Draw the next guess of the rows `going`; returns those that were sure enough."""
        of, put, get = draws.rows[going], self.backend.put, self.backend.get
        if draws.u is not None:
            host = np.asarray(get(logits), np.float32)
            ids, odds, good = drawn(host, draws.warmth[going], draws.u[going, depth])
        else:
            ids, good = self._sampler.choose(logits, of, draws.length[going] + depth)
            odds = get(self.backend.program(likelihood)(logits, put(ids), put(draws.warmth[going])))
        draws.odds[going] *= odds
        sure = good & (draws.odds[going] >= self.sure)
        for n, token, fine, goes in zip(going.tolist(), ids.tolist(), good.tolist(), sure.tolist(), strict=True):
            if not fine:
                rows[n].past.bad = True
                guesses[n].clear()
            elif goes:
                guesses[n].append(token)
        found: list[int] = going[sure].tolist()
        return found

    def _go_on(self, calls: DraftCalls, rows: list[_Row], guesses: list[list[int]], going: Any, draws: _Draws) -> Array:
        """The logits behind the newest guess of each of the rows `going`."""
        tokens, pos = [], []
        for n in going.tolist():
            row, guess = rows[n], guesses[n]
            at = len(row.tokens) + len(guess) - 1
            tokens.append(guess[-1])
            pos.append(at)
            if at < row.room:
                row.past.guess.append(guess[-1])
        return calls.ahead(draws.rows[going], np.array(pos, np.int32), np.array(tokens, np.int32))
