"""Models that are hostile in calls that hold a hostile row, and otherwise compute one function, exactly.

A row is hostile by a token: each fault of `FAULTS` has one. A call with such a token may go wrong as a whole (raise,
return what no engine can use), or be wrong in the hostile row; what it returns for other rows is right where it is well
formed, as no engine could tell. The function is of integers, the same at every level; at level 2 it is read back
through the paged cache.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hibachi import Input, NumpyBackend, OwnCache, Paged, State, StepInputs

from .drawn import EXCEPTIONS, NAN, WORDS, scribble
from .watch import note_memory, tidy

Array = Any


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One call of a model."""

    compute: Callable[[], Any]  # the right answer: logits or tokens [n, ...]; at level 2 (that, cache)
    rows: Any  # bool [n]: which of its outputs are a hostile row's
    given: list[Array]  # the index arrays that the model was handed
    habits: Mischief
    cache: list[Any] | None = None  # level 2
    slots: Any = None  # level 2: positions of the cache that hold a hostile token, or come after one in this call
    places: Any = None  # level 2: which of the batch's rows are hostile, as indices
    activations: Any = field(default_factory=lambda: np.ones(1 << 18))  # 2 MB, which frames that are kept would keep

    def out(self, change: Callable[[Array], Any]) -> Any:
        """The right answer with the outputs changed."""
        if self.cache is None:
            return change(self.compute())
        out, cache = self.compute()
        return change(out), cache

    def with_cache(self, change: Callable[[Any], Any]) -> Any:
        """The right outputs, with another cache; at other levels there is none, and nothing is wrong."""
        if self.cache is None:
            return self.compute()
        out, cache = self.compute()
        return out, change(cache)

    def host(self, change: Callable[[Any], Any]) -> Any:
        """`out` for changes that need NumPy; other libraries get what they do not own."""
        return self.out(lambda out: change(np.asarray(out)))

    def inside(self, value: float) -> Any:
        """`value` in the outputs of the hostile rows."""
        return self.out(lambda out: put_rows(out, self.rows, value))


def put_rows(out: Array, rows: Any, value: float) -> Array:
    """A copy with `value` in some rows."""
    if hasattr(out, "at"):  # JAX
        return out.at[np.flatnonzero(rows)].set(value)
    out = out.clone() if hasattr(out, "clone") else out.copy()
    out[np.flatnonzero(rows)] = value
    return out


def _columns(out: Array) -> Array:
    """The same numbers, as a matrix that was turned lies in memory."""
    if hasattr(out, "at") or out.ndim != 2:
        return out
    return out.T.contiguous().T if hasattr(out, "contiguous") else np.asfortranarray(out)


class Angry(np.ndarray):
    """An array that cannot be read."""

    def __getitem__(self, at: Any) -> Any:
        raise RuntimeError("planted")


def _raises(name: str) -> Callable[[Call], Any]:
    def fault(call: Call) -> Any:
        if name.endswith("Error"):
            call.compute()  # what it wrote stays written
        raise EXCEPTIONS[name]()

    return fault


def _recursion(call: Call) -> Any:
    return _recursion(call) and call


def _buffer(call: Call) -> Any:
    """The right answer, in an array that later calls write to."""

    def into(out: Array) -> Array:
        if hasattr(out, "at"):
            return out
        kept = call.habits.buffers
        shape = (64, *out.shape[1:])
        key = (str(type(out)), shape)
        if key not in kept:
            kept[key] = out.new_zeros(shape) if hasattr(out, "new_zeros") else np.zeros(shape, out.dtype)
        held = kept[key]
        if len(out) > len(held):
            return out
        held[: len(out)] = out
        return held[: len(out)]

    return call.out(into)


def _overwrites(call: Call) -> Any:
    """Its arguments, when it has the right answer."""
    result = call.compute()
    for a in call.given:
        scribble(a)
    return result


def _overwrites_and_raises(call: Call) -> Any:
    for a in call.given:
        scribble(a, -3)
    if call.cache is not None:
        call.cache.clear()
    raise ValueError("planted")


def _overwrites_later(call: Call) -> Any:
    call.habits.kept += call.given
    return call.compute()


def _empties_cache(call: Call) -> Any:
    result = call.compute()
    if call.cache is not None:
        call.cache.clear()
    return result


def _spoils_cache_list(call: Call) -> Any:
    result = call.compute()
    if call.cache is not None:
        call.cache[:] = [None] * len(call.cache)
    return result


def _nan_in_cache(call: Call) -> Any:
    """Finite outputs, and in the cache what `attend` writes for keys and values of NaN."""
    if call.cache is None:
        return call.inside(NAN)
    out, cache = call.compute()
    for layer in cache:
        if isinstance(layer, np.ndarray):  # a recurrent state
            layer[call.places] = NAN
        elif len(layer) == 2 and all(half.ndim == 4 for half in layer):  # else it is laid out as only its backend knows
            halves = [half.reshape(-1, *half.shape[2:]) for half in layer]
            for half, written in zip(
                halves, call.habits.backend.storable(*(h[call.slots] * NAN for h in halves)), strict=True
            ):
                half[call.slots] = written
    return out, cache


def _collects(call: Call) -> Any:
    tidy()
    note_memory()
    return call.compute()


def _slow(call: Call) -> Any:
    time.sleep(0.004)
    return call.compute()


def _asks_itself(call: Call) -> Any:
    """Asks the engine that is waiting for it."""
    if call.habits.ask is not None:
        call.habits.ask()
    return call.compute()


def _awaited(coroutine: Callable[[Call], Any]) -> Callable[[Call], Any]:
    return lambda call: call.compute() if call.cache is not None else coroutine(call)


async def _waits(call: Call) -> Any:
    await asyncio.sleep(0.001)
    return call.compute()


async def _cancels_itself(call: Call) -> Any:
    task = asyncio.ensure_future(asyncio.sleep(10))
    task.cancel()
    await task


async def _leaves(call: Call) -> Any:
    await asyncio.sleep(0)
    raise SystemExit(3)


FAULTS: dict[str, Callable[[Call], Any]] = {
    **{f"raises {name}": _raises(name) for name in EXCEPTIONS},
    "never stops calling itself": _recursion,
    # What it returns.
    "returns None": lambda call: call.compute() and None if call.cache is not None else None,
    "returns a number": lambda call: 3,
    "returns a text": lambda call: "logits",
    "returns an object": lambda call: object(),
    "returns a generator": lambda call: (x for x in ()),
    "returns three": lambda call: (1, 2, 3),
    "returns its first argument": lambda call: call.given[0],
    "returns itself twice": lambda call: (call.compute(), call.compute()),
    "outputs: None": lambda call: call.out(lambda out: None),
    "outputs: a list": lambda call: call.out(list),
    "outputs: nested lists": lambda call: call.out(lambda out: out.tolist()),
    "outputs: one row too few": lambda call: call.out(lambda out: out[:-1]),
    "outputs: one row too many": lambda call: call.host(lambda out: np.concatenate([out, out[:1]])),
    "outputs: no rows": lambda call: call.out(lambda out: out[:0]),
    "outputs: an axis too many": lambda call: call.out(lambda out: out[..., None]),
    "outputs: an axis too few": lambda call: call.out(lambda out: out[0]),
    "outputs: flat": lambda call: call.out(lambda out: out.reshape(-1)),
    "outputs: turned": lambda call: call.out(lambda out: out.T[None]),
    "outputs: of rank 0": lambda call: call.out(lambda out: out.sum()),
    "outputs: objects": lambda call: call.host(lambda out: out.astype(object)),
    "outputs: texts": lambda call: call.host(lambda out: out.astype(str)),
    "outputs: bytes": lambda call: call.host(lambda out: out.astype("S8")),
    "outputs: complex": lambda call: call.out(lambda out: out * 1j),
    "outputs: times": lambda call: call.host(lambda out: np.zeros(out.shape, "datetime64[s]")),
    "outputs: records": lambda call: call.host(lambda out: np.zeros(out.shape, "i4,f4")),
    "outputs: voids": lambda call: call.host(lambda out: np.zeros(out.shape, "V8")),
    "outputs: truth": lambda call: call.out(lambda out: out == out),
    "outputs: masked": lambda call: call.host(lambda out: np.ma.masked_array(out, out == out)),
    "outputs: cannot be read": lambda call: call.host(lambda out: out.view(Angry)),
    "outputs: NaN in its row": lambda call: call.inside(NAN),
    "outputs: infinity in its row": lambda call: call.inside(float("inf")),
    "outputs: minus infinity in its row": lambda call: call.inside(-float("inf")),
    "outputs: 1e38 in its row": lambda call: call.inside(1e38),
    "outputs: another number in its row": lambda call: call.inside(2),
    # The same answer in an array of another kind, which is fine.
    "outputs: read-only": lambda call: call.host(lambda out: (out.setflags(write=False), out)[1]),
    "outputs: backwards in memory": lambda call: call.host(lambda out: out[::-1].copy()[::-1]),
    "outputs: column by column": lambda call: call.out(_columns),
    "outputs: in a buffer": _buffer,
    # What it does to its arguments.
    "overwrites its arguments": _overwrites,
    "overwrites its arguments and raises": _overwrites_and_raises,
    "overwrites its arguments later": _overwrites_later,
    "cache: emptied": _empties_cache,
    "cache: spoiled": _spoils_cache_list,
    "cache: None": lambda call: call.with_cache(lambda cache: None),
    "cache: none": lambda call: call.with_cache(lambda cache: []),
    "cache: one too many": lambda call: call.with_cache(lambda cache: [*cache, cache[0]]),
    "cache: a number": lambda call: call.with_cache(lambda cache: 3),
    "cache: numbers": lambda call: call.with_cache(lambda cache: [3] * len(cache)),
    "cache: texts": lambda call: call.with_cache(lambda cache: ["layer"] * len(cache)),
    "cache: flat": lambda call: call.with_cache(lambda cache: [half for layer in cache for half in layer]),
    "cache: an iterator": lambda call: call.with_cache(iter),
    "cache: halves only": lambda call: call.with_cache(lambda cache: [layer[:1] for layer in cache]),
    "cache: other shapes": lambda call: call.with_cache(lambda cache: [(h[:1], h[:1]) for h in _first_halves(cache)]),
    "cache: NaN": _nan_in_cache,
    # What else it does.
    "is slow": _slow,
    "collects garbage": _collects,
    "asks its own engine and waits": _asks_itself,
    "is a coroutine": _awaited(_waits),
    "is a coroutine that is cancelled": _awaited(_cancels_itself),
    "is a coroutine that leaves": _awaited(_leaves),
}


def _first_halves(cache: list[Any]) -> list[Array]:
    return [layer[0] if isinstance(layer, tuple) else layer for layer in cache]


COMPILED = (
    "raises",
    "never",
    "outputs: NaN",
    "outputs: inf",
    "outputs: minus",
    "outputs: 1e38",
    "is slow",
    "collects",
    "asks",
)
"""What a compiled model can do; its arrays are of the right kind, and nobody can write to its arguments."""

VOCAB = WORDS + len(FAULTS)


class Mischief:
    """Which tokens make a model hostile, and how it has been so far."""

    def __init__(self, tokens: Sequence[int] = range(WORDS, VOCAB)) -> None:
        """tokens: one for each of `FAULTS`; none: the model is honest."""
        self.arm(tokens)
        self.done: Counter[str] = Counter()  # calls with each fault
        self.buffers: dict[Any, Array] = {}
        self.kept: list[Array] = []
        self.ask: Callable[[], object] | None = None
        self.compiled, self.backend = False, None

    def arm(self, tokens: Sequence[int]) -> None:
        self.faults = dict(zip(tokens, FAULTS, strict=bool(len(tokens))))
        self._of = np.array(tokens, np.int64)

    def hostile(self, tokens: Any) -> Any:
        """Which of these are tokens that make a row hostile."""
        return np.isin(tokens, self._of)

    def begins(self) -> None:
        """A call begins: what was kept of an earlier one is overwritten."""
        kept, self.kept = self.kept, []
        for a in kept:
            scribble(a)
        for a in self.buffers.values():
            scribble(a)

    def forget(self) -> None:
        self.kept, self.buffers = [], {}

    def __call__(self, tokens: Any, call: Call) -> Any:
        """A call with these hostile tokens."""
        token = int(tokens[sum(self.done.values()) % len(tokens)])
        name = self.faults[token]
        self.done[name] += 1
        if self.compiled and not name.startswith(COMPILED):
            return call.compute()
        return FAULTS[name](call)

    def whole(self, compute: Callable[[], Any], tokens: Array, given: list[Array]) -> Any:
        """A call of level 0 or 1."""
        self.begins()
        shown = np.asarray(tokens)
        shown = shown if shown.ndim == 2 else shown[..., 0]
        bad = self.hostile(shown)
        if not bad.any():
            return compute()
        return self(np.sort(shown[bad]), Call(compute, bad.any(axis=1), given, self))

    def own(self, compute: Callable[[], Any], tokens: Array, lengths: Array, past: list[Any] | None) -> Any:
        """A call of a model with a cache of its own."""
        self.begins()
        bad = self.hostile(tokens)
        if not bad.any():
            return compute()
        rows = bad.any(axis=1)
        cache = [] if past is None else past
        return self(
            np.sort(tokens[bad]), Call(compute, rows, [tokens, lengths], self, cache, None, np.flatnonzero(rows))
        )

    def step(self, compute: Callable[[], Any], cache: list[Any], x: StepInputs[Array]) -> Any:
        """A call of level 2."""
        self.begins()
        tok, seg, pos, last = (np.asarray(a) for a in (x.tok, x.seg, x.pos, x.last))
        tok = tok if tok.ndim == 1 else tok[..., 0]
        bad = self.hostile(tok)
        if not bad.any():
            return compute()
        first = {int(s): int(pos[bad & (seg == s)].min()) for s in np.unique(seg[bad])}
        after = np.array([s in first and p >= first[s] for s, p in zip(seg.tolist(), pos.tolist(), strict=True)])
        given = [a for a in (x.tok, x.pos, x.slot, x.seg, x.row, x.start, x.kv_len, x.cu_q, x.block_table, x.last)]
        given += [x.tile_q, x.tile_row, x.tile_of, *(x.inputs or {}).values()]
        given += [a for a in (x.prompt_len, x.seed, x.uniform, x.normal) if a is not None]
        rows = np.isin(seg[last], list(first))
        return self(np.sort(tok[bad]), Call(compute, rows, given, self, cache, np.asarray(x.slot)[after], list(first)))

    def around(self, backend: Any) -> Any:
        """The same backend, and we stand around a model that it has compiled: inside, there is nothing to be done."""
        self.compiled, compile = True, backend.compile

        def compiled(fn: Any, *, donate: Any = ()) -> Any:
            run = compile(fn, donate=donate)
            if getattr(fn, "__name__", "") != "step":
                return run
            return lambda params, cache, x: self.step(lambda: run(params, cache, x), cache, x)

        backend.compile = compiled
        return backend


class Around:
    """A model of level 2 whose calls go through a `Mischief`; all else is the model's own."""

    def __init__(self, model: Any, mischief: Mischief) -> None:
        self._model, self._mischief = model, mischief
        mischief.backend = model.backend

    def step(self, params: Any, cache: list[Any], x: StepInputs[Array]) -> Any:
        return self._mischief.step(lambda: self._model.step(params, cache, x), cache, x)

    def cache_spec(self) -> Any:
        return self._model.cache_spec()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


# ---- the function ----------------------------------------------------------------------------------------------------

ANSWERS = np.random.default_rng(0).normal(size=(211, VOCAB)).astype(np.float32) * 2
ANSWERS[:, WORDS:] -= 30  # nobody draws a hostile token who does not ask for it


def answer_of(total: Any, weighted: Any, recent: Any, length: Any) -> Any:
    """Logits [n, VOCAB] after n histories: by their sum, a sum with weights 1 to 5, that of the last 3, the length."""
    return ANSWERS[(7 * total + 13 * weighted + 17 * recent + length) % len(ANSWERS)]


def answers(tokens: Any, lengths: Any, more: Any = 0) -> Any:
    """Logits [B, VOCAB] after histories [B, S] that are padded on the left. more: integers [B] that count besides."""
    tokens, lengths = np.asarray(tokens, np.int64), np.asarray(lengths)
    place = np.arange(tokens.shape[1]) - (tokens.shape[1] - lengths[:, None])
    tokens = np.where(place >= 0, tokens, 0)
    weights = 1 + np.maximum(place, 0) % 5
    return answer_of(tokens.sum(1), (tokens * weights).sum(1), tokens[:, -3:].sum(1), lengths + more)


class Forward:
    """Level 0: tokens are integers."""

    def __init__(self, mischief: Mischief | None = None, backend: Any = None) -> None:
        self.mischief, self.backend = mischief or Mischief(), backend or NumpyBackend()
        self.mischief.backend = self.backend

    def forward(self, tokens: Array, lengths: Array) -> Any:
        return self.mischief.whole(lambda: self._next(tokens, lengths), tokens, [tokens, lengths])

    def _next(self, tokens: Array, lengths: Array) -> Any:
        return self.backend.put(answers(tokens, lengths).argmax(axis=1).astype(np.asarray(tokens).dtype))


class ForwardOfFloats(Forward):
    """Level 0: tokens are pairs of floats, an id and a number that goes with it."""

    def _next(self, tokens: Array, lengths: Array) -> Any:
        out = answers(np.asarray(tokens)[..., 0], lengths)
        ids = out.argmax(axis=1)
        return self.backend.put(np.stack([ids, out[:, 0]], axis=1).astype(np.asarray(tokens).dtype))


class Letters:
    """A tokenizer."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % WORDS for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


class Logits(Forward):
    """Level 1."""

    vocab_size, max_model_len, tokenizer = VOCAB, 96, Letters()
    forward = None  # type: ignore[assignment]

    deterministic = False  # no calls but those of requests

    def logits(self, tokens: Array, lengths: Array) -> Any:
        return self.mischief.whole(lambda: self.backend.put(answers(tokens, lengths)), tokens, [tokens, lengths])


class OwnStep(Logits):
    """Between levels 1 and 2: the histories lie in a cache of its own, a list of one array [B, S]."""

    past, example_prompts = OwnCache(), [[*range(WORDS)]]
    logits = None  # type: ignore[assignment]

    def step(self, tokens: Array, lengths: Array, past: list[Any] | None) -> Any:
        return self.mischief.own(lambda: self._step(tokens, lengths, past), tokens, lengths, past)

    def _step(self, tokens: Array, lengths: Array, past: list[Any] | None, more: Any = 0) -> tuple[Any, list[Any]]:
        new = np.asarray(tokens, np.float32)
        seen = new if past is None else np.concatenate([past[0], new], axis=1)
        with np.errstate(invalid="ignore"):  # NaN of a hostile row
            return answers(seen, lengths, more), [seen]


class OwnStepWithEncoder(OwnStep):
    """Likewise, beside a source that comes with the request."""

    inputs = {"source": Input((None,), "int32")}  # noqa: RUF012

    def __init__(self, mischief: Mischief | None = None, backend: Any = None) -> None:
        super().__init__(mischief, backend)
        self._held = np.zeros((1, 2**15), np.int32)

    def encode(self, source: Array) -> Any:
        def compute() -> Any:
            n = source.shape[1]
            self._held[:, :n] = source  # where the answers of later calls will be
            return self._held[:, :n], np.ones_like(source)

        self.mischief.begins()
        bad = self.mischief.hostile(source)
        if not bad.any():
            return compute()
        return self.mischief(np.sort(source[bad]), Call(compute, bad.any(axis=1), [source], self.mischief, []))

    def step(self, tokens: Array, lengths: Array, past: list[Any] | None, encoded: Any) -> Any:  # type: ignore[override]
        source, real = encoded
        more = (source.astype(np.int64) * real).sum(axis=1)
        return self.mischief.own(lambda: self._step(tokens, lengths, past, more), tokens, lengths, past)


class Step:
    """Level 2: uniform attention gives means, hence sums, of what the cache holds."""

    vocab_size, max_model_len, params, tokenizer, embed_size = VOCAB, 96, None, Letters(), 6

    def __init__(self, mischief: Mischief | None = None, backend: Any = None) -> None:
        self.mischief, self.backend = mischief or Mischief(), backend or NumpyBackend()
        self.mischief.backend = self.backend

    def cache_spec(self) -> list[Paged | State]:
        return [Paged(kv_heads=1, k_dim=2, v_dim=2), Paged(kv_heads=1, k_dim=2, v_dim=1)]

    def step(self, params: Any, cache: list[Any], x: StepInputs[Array]) -> Any:
        return self.mischief.step(lambda: self._step(cache, x), cache, x)

    def _step(self, cache: list[Any], x: StepInputs[Array]) -> tuple[Any, list[Any]]:
        sums, new = self._sums(cache, x)
        return answer_of(*sums[x.last].astype(np.int64).T, x.pos[x.last] + 1), new

    def _sums(self, cache: list[Any], x: StepInputs[Array]) -> tuple[Any, list[Any]]:
        """[T, 3]: the three sums up to each token."""
        tok = x.tok.astype(np.float32)
        if x.embeds is not None:
            tok = np.where(x.embedded, np.abs(x.embeds).argmax(axis=1), tok).astype(np.float32)
        values = np.stack([tok, tok * (1 + x.pos % 5)], axis=1)[:, None, :]
        nothing = np.zeros((len(tok), 1, 2), np.float32)
        mean, first = self.backend.attend(nothing, nothing, values, cache[0], x)
        recent, second = self.backend.attend(nothing, nothing, values[..., :1], cache[1], x, window=3)
        seen = x.pos[:, None] + 1
        return np.round(np.concatenate([mean[:, 0] * seen, recent[:, 0] * np.minimum(seen, 3)], axis=1)), [
            first,
            second,
        ]


class StepWithState(Step):
    """Level 2 with a recurrent layer besides, which must agree with the paged ones."""

    embed_size = None  # type: ignore[assignment]

    def cache_spec(self) -> list[Paged | State]:
        return [*super().cache_spec(), State(shape=(1,))]

    def _step(self, cache: list[Any], x: StepInputs[Array]) -> tuple[Any, list[Any]]:
        sums, new = self._sums(cache, x)
        state = cache[2]
        totals = state + np.cumsum(x.tok.astype(np.float32).reshape(len(state), -1), axis=1)
        agree = totals.reshape(-1) == sums[:, 0]
        sums[~agree] = 0
        return answer_of(*sums[x.last].astype(np.int64).T, x.pos[x.last] + 1), [*new, totals[:, -1:]]


class StepOfTokens(Step):
    """Level 2 that returns tokens: pairs of integers."""

    vocab_size = embed_size = None  # type: ignore[assignment]

    def _step(self, cache: list[Any], x: StepInputs[Array]) -> tuple[Any, list[Any]]:
        sums, new = self._sums(cache, x)
        out = answer_of(*sums[x.last].astype(np.int64).T, x.pos[x.last] + 1)
        return out.argmax(axis=1).astype(x.tok.dtype), new


class StepOfFrames(StepWithState):
    """Level 2: frames of two ids, random numbers, and inputs of the request and of each position."""

    vocab_size, codebooks, draws = VOCAB, 2, 1  # type: ignore[assignment]
    inputs = {"speaker": Input((2,), "int32"), "hours": Input((), "int32", per="position")}  # noqa: RUF012

    def _step(self, cache: list[Any], x: StepInputs[Array]) -> tuple[Any, list[Any]]:
        assert x.inputs is not None and x.uniform is not None
        tok = x.tok[:, 0].astype(np.int64) + 2 * x.tok[:, 1] + x.inputs["hours"]
        state = cache[2]
        sums, new = self._sums(cache, replace(x, tok=tok))
        totals = state + np.cumsum(tok.astype(np.float32).reshape(len(state), -1), axis=1)
        sums[totals.reshape(-1) != sums[:, 0]] = 0
        more = x.inputs["speaker"].sum(axis=1)[x.seg[x.last]] + (8 * x.uniform[:, 0]).astype(np.int64)
        at = (*sums[x.last].astype(np.int64).T, x.pos[x.last] + 1 + more)
        both = [answer_of(*at[:3], at[3] + 5 * i) for i in range(2)]
        return np.stack(both, axis=1), [*new, totals[:, -1:]]
