"""The fuzzer: hostile requests to a hostile model, beside innocent ones that must notice nothing.

16 innocent requests run over and over. Every bit of their tokens and log-probabilities must equal what the same request
gets alone. Beside them, hostile clients send what drawn.py lists, to a model that does what hostile.py lists. What a
call refuses, it refuses with a HibachiError; what it accepts ends, with a finish reason or a HibachiError, before
`BOUND`. In the end blocks, rows, threads, descriptors and memory are back where they were.

    python tests/adversary/fuzz.py --case "numpy, level 2" --seed 7 --seconds 20

One seed gives the same requests in the same order for each client; how they interleave is up to the threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import io
import itertools
import logging
import os
import random
import re
import reprlib
import resource
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
if not __package__:  # run as a script
    sys.path.insert(0, str(ROOT))
    __package__ = "tests.adversary"

import hibachi
from hibachi import AutoregressiveBatchInference, HibachiError, QueueFull, SamplingParams, StopRule, Terms, load_model
from hibachi.engine.remote import RemoteLLM
from hibachi.engine.texts import Texts
from hibachi.model.files import TINY, locate, open_files
from hibachi.model.text.own import OwnTokenizer
from hibachi.plan.policy import Priority

from . import drawn, hostile
from .drawn import EXCEPTIONS, FIELDS, ODD, PREDICATES, PROCESSORS, PROMPTS, RUN, STOP, WORDS, Predicate, Processor
from .hostile import FAULTS, VOCAB, Forward, ForwardOfFloats, Logits, Mischief, Step, StepOfTokens, StepWithState

BOUND = 60.0  # seconds in which a request ends, a thread comes back, an engine comes to rest
INNOCENTS, CLIENTS = 16, 5
MEMORY = 20 * 2**20  # bytes that may be missing in the end
MOST_MEMORY = 4 * 2**30  # bytes beyond what is there already: then memory runs out here, not in the whole machine
LENGTH = 96  # longest request
_repr = reprlib.Repr()
_repr.maxstring, _repr.maxother, _repr.maxlong = 60, 80, 40
short = _repr.repr


# ---- where it runs ---------------------------------------------------------------------------------------------------


@dataclass
class Place:
    """An engine under test, and how to ask it."""

    texts: Any  # a `Texts`, or None: the model returns tokens
    engine: Any
    level: int
    mischief: Mischief | None = None  # in this process
    triggers: list[int] = field(default_factory=lambda: list(range(WORDS, VOCAB)))  # the token of each fault
    remote: bool = False
    pairs: bool = False  # tokens are pairs of floats
    embed_size: int | None = None

    @property
    def sampled(self) -> bool:
        return self.texts is not None

    def prompt(self, ids: list[int]) -> Any:
        """Token ids as this engine takes them: an array of the caller's own."""
        if self.pairs:
            return np.stack([np.array(ids, float), np.ones(len(ids))], axis=1)
        return np.array(ids, np.int64)

    def close(self) -> None:
        (self.texts or self.engine).close()


@dataclass
class Case:
    """A library and a level. make(options, honest) -> a place; `options` of the engine, as they were drawn."""

    make: Callable[[dict[str, Any], random.Random, bool], Place]
    level: int
    soak: bool = False  # not in `make test`


def options_of(rng: random.Random, case: Case) -> dict[str, Any]:
    """How the engine is set up in this round."""
    options: dict[str, Any] = {
        "max_batch_size": rng.choice((3, 5, 8)),
        "max_waiting": 80,
        "pause_after": rng.choice((1, 4, 16)),
        "policy": rng.choice(("priority", "fcfs", "fair", "waiting-served", "aging")),
    }
    if case.level == 2:
        options |= {
            "block_size": rng.choice((1, 3, 4, 8)),
            "max_batch_tokens": rng.choice((8, 24, 64)),
            "max_prefill_tokens": rng.choice((None, 5)),
        }
    return options


def _policy(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"policy": Priority(age=1.0) if options["policy"] == "aging" else options["policy"]}


def _alone(options: dict[str, Any]) -> dict[str, Any]:
    """The engine of the solo runs."""
    alone = {"max_batch_size": 1}
    return alone | ({"prefix_cache": False, "block_size": options["block_size"]} if "block_size" in options else {})


def _cache_bytes(model: Any, options: dict[str, Any]) -> int:
    """Memory for some two and a half of the longest requests, so that some are preempted."""
    position = sum(s.kv_heads * (s.k_dim + s.v_dim) * 4 for s in model.cache_spec() if hasattr(s, "k_dim"))
    return position * options["block_size"] * (int(2.5 * LENGTH) // options["block_size"] + 2)


def own(level: int, *models: type, library: str = "numpy") -> Callable[[dict[str, Any], random.Random, bool], Place]:
    """A model of hostile.py in this process."""

    def make(options: dict[str, Any], rng: random.Random, honest: bool) -> Place:
        made = rng.choice(models)
        backend = hibachi.load(library)
        mischief = Mischief(()) if honest else Mischief()
        model = made(mischief, backend)
        asked = _alone(options) if honest else _policy(options)
        if level < 2:
            asked["padding_token"] = np.zeros((1, 2)) if made is ForwardOfFloats else np.zeros(1, np.int64)
        elif not honest:
            asked["cache_bytes"] = _cache_bytes(model, options)
        if not honest and os.path.exists("/dev/full"):
            asked["record"] = rng.choice((None, None, "/dev/full"))
        engine = AutoregressiveBatchInference(model, max_model_len=LENGTH, backend=backend, **asked)
        texts = None
        if getattr(model, "vocab_size", None):
            texts = Texts(
                engine, OwnTokenizer(model.tokenizer), vocab_size=VOCAB, eos_ids=(), default_params=SamplingParams()
            )
        place = Place(texts, engine, level, mischief, pairs=made is ForwardOfFloats)
        place.embed_size = getattr(model, "embed_size", None)
        return place

    return make


def shipped(backend: Callable[[], Any]) -> Callable[[dict[str, Any], random.Random, bool], Place]:
    """The shipped model, on kernels that do not depend on the batch."""

    def make(options: dict[str, Any], rng: random.Random, honest: bool) -> Place:
        mischief = Mischief(())
        model = load_model(TINY, mischief.around(backend().invariant()), dtype="float32", max_model_len=LENGTH)
        asked = _alone(options) if honest else _policy(options) | {"cache_bytes": _cache_bytes(model, options)}
        engine = AutoregressiveBatchInference(
            model, max_model_len=LENGTH, deterministic=True, dtype=model.dtype, **asked
        )
        tokenizer = open_files(locate("tiny")).tokenizer(vocab_size=model.vocab_size)
        texts = Texts(
            engine, tokenizer, vocab_size=model.vocab_size, eos_ids=model.eos_ids, default_params=SamplingParams()
        )
        return Place(texts, engine, 2, mischief, embed_size=256)

    return make


def remote(level: int, model: str) -> Callable[[dict[str, Any], random.Random, bool], Place]:
    """A model of hostile.py in another process."""

    def make(options: dict[str, Any], rng: random.Random, honest: bool) -> Place:
        asked = _alone(options) if honest else options | {"policy": options["policy"].replace("aging", "fair")}
        if level == 2 and not honest:
            asked["cache_bytes"] = _cache_bytes(getattr(hostile, model), options)
        texts = RemoteLLM(f"{hostile.__name__}:{model}", max_model_len=LENGTH, **asked)
        return Place(texts, texts.engine, level, remote=True, embed_size=getattr(getattr(hostile, model), "embed_size", None))

    return make


def _torch(**options: Any) -> Any:
    import torch

    from hibachi_torch import TorchBackend

    torch.set_num_threads(1)
    return TorchBackend("cpu", **options)


CASES: dict[str, Case] = {
    "numpy, level 0": Case(own(0, Forward, ForwardOfFloats), 0),
    "numpy, level 1": Case(own(1, Logits), 1),
    "numpy, level 2": Case(own(2, Step, StepWithState, StepOfTokens), 2),
    "torch, level 2": Case(shipped(_torch), 2),
    "another process, level 1": Case(remote(1, "Logits"), 1),
    "torch, native, level 2": Case(shipped(lambda: _torch(native=True)), 2, soak=True),
    "another process, level 2": Case(remote(2, "Step"), 2, soak=True),
    "jax, level 1": Case(own(1, Logits, library="jax"), 1, soak=True),
    "jax, level 2": Case(shipped(lambda: hibachi.load("jax")), 2, soak=True),
}


# ---- innocent requests -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Innocent:
    ids: list[int]
    params: SamplingParams | None
    more: dict[str, Any]  # for `run`
    terms: Terms


def innocents(place: Place) -> list[Innocent]:
    """16 requests of all kinds, which begin alike."""
    rng = np.random.default_rng(1)
    common = rng.integers(0, WORDS, 40).tolist()
    plain, fine = SamplingParams(temperature=0), Processor("shifts")
    kinds = [
        plain.with_(logprobs=5),
        SamplingParams(temperature=0.8, seed=1, logprobs=3),
        SamplingParams(top_k=5, seed=2),
        SamplingParams(top_p=0.9, seed=3, logprobs=1),
        SamplingParams(min_p=0.05, seed=4),
        SamplingParams(typical_p=0.8, seed=5, logprobs=2),
        plain.with_(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3, logprobs=2),
        SamplingParams(logit_bias={3: 5, 4: -100}, seed=6),
        SamplingParams(allowed_token_ids=range(10, 30), seed=7, logprobs=1),
        plain.with_(stop_token_ids=[STOP], min_tokens=3, logprobs=0),
        SamplingParams(seed=8, prompt_logprobs=3, logprobs=1),
        SamplingParams(seed=9, logits_processors=[fine], logprobs=2),
        SamplingParams(temperature=50, seed=2**63, top_k=64, logprobs=4),
        plain.with_(logprobs=200),
        SamplingParams(seed=2**64 + 5, stop_token_ids=[STOP]),
        SamplingParams(seed=10, top_k=50, top_p=0.9, min_p=0.01, prompt_logprobs=2, frequency_penalty=0.7),
    ]
    out = []
    for n, params in enumerate(kinds):
        ids = common[: (0, 12, 24, 40)[n % 4]] + rng.integers(0, WORDS, 1 + n % 7).tolist()
        limit = (6, 24, 12)[n % 3]
        if place.level < 2:
            params = params.with_(prompt_logprobs=None)
        more: dict[str, Any] = {"stop": Predicate("fine")} if n in (3, 8) else {}
        if n == 5 and not place.pairs:
            more = {"stop": STOP}
        terms = Terms(priority=n % 3, tenant=f"innocent {n % 4}", cache_salt="salt" if n == 7 else None)
        if not place.sampled:
            out.append(Innocent(ids, None, more | {"max_new_tokens": limit}, terms))
        else:
            out.append(Innocent(ids, params.with_(max_tokens=limit), {} if place.remote else more, terms))
    return out


Answer = tuple[Any, ...]


def ask(place: Place, innocent: Innocent, how: str) -> Answer:
    """What an innocent request gets: tokens, log-probabilities, those of its prompt, why it ended."""
    if place.remote:
        stream = place.texts.stream(innocent.ids, innocent.params, terms=innocent.terms)
        tokens = _read(stream.tokens, how)
        return tuple(tokens), stream.tokens.logprobs, stream.tokens.prompt_logprobs, stream.tokens.finish_reason
    prompt = place.prompt(innocent.ids)
    stream = place.engine.run(prompt, innocent.params, terms=innocent.terms, **innocent.more)
    prompt[...] = 1  # what the caller does with its array after the call is its own business
    tokens = [np.asarray(token).tolist() for token in _read(stream, how)]
    return tuple(map(str, tokens)), stream.logprobs, stream.prompt_logprobs, stream.finish_reason


def _read(stream: Any, how: str) -> list[Any]:
    if how == "asyncio":
        return asyncio.run(stream.acollect())
    if how == "slowly":
        out = []
        for token in stream:
            out.append(token)
            time.sleep(0.001)
        return out
    return stream.collect()


# ---- hostile requests ------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """A call of `run`, `stream` or `generate`, and how its stream is read."""

    how: str
    values: dict[str, Any]  # of the call; "params" and "terms" are what they are made of, or what stands for them
    read: str
    said: str  # in words
    fault: str | None = None  # what the model does, by a token of its prompt

    def send(self, place: Place) -> Any:
        """Raises what the call raises, or what making its parameters raises."""
        values = dict(self.values)
        for name, kind in (("params", SamplingParams), ("terms", Terms), ("stop", StopRule)):
            if isinstance(values.get(name), _Fields):
                values[name] = kind(**values[name])
        if self.how == "run":
            return place.engine.run(**values)
        prompt = values.pop("prompt")
        if (embeds := values.pop("prompt_embeds", None)) is not None:
            prompt = {"prompt_embeds": embeds}
        values = {name: values[name] for name in ("params", "terms") if name in values}
        if self.how == "stream":
            return place.texts.stream(prompt, **values)
        if self.how == "generate":
            return place.texts.generate([prompt, [1, 2]] if isinstance(prompt, list) else prompt, **values)
        return asyncio.run(place.texts.agenerate(prompt, **values))


class _Fields(dict[str, Any]):
    """The fields of SamplingParams, Terms or StopRule, before one is made."""


class Draw:
    """Draws the requests of one client. only: draw nothing whose description lacks this pattern (for bisecting)."""

    def __init__(self, place: Place, rng: random.Random, own: list[Innocent], only: str | None = None) -> None:
        self.place, self.rng, self.innocents = place, rng, own
        self.only = re.compile(only) if only else None
        self.embeds = drawn.embeds(place.embed_size) if place.embed_size else {}

    def __call__(self) -> Request:
        while True:
            request = self._draw()
            if self.only is None or self.only.search(request.said):
                return request

    def _draw(self) -> Request:
        rng, place = self.rng, self.place
        ways = ["run"] if not place.sampled else ["stream", "generate", "agenerate"] if place.remote else None
        how = rng.choice(ways or ["run", "run", "stream", "generate", "agenerate"])
        words, values = [how], {}
        values["prompt"], said, fault = self._prompt()
        words.append(said)
        if place.sampled:
            params = _Fields(max_tokens=rng.choice((1, 3, 8, 20)), temperature=rng.choice((0, 1.0)))
            if fault is not None and rng.random() < 0.4:  # so that it is hostile in later steps as well
                params["allowed_token_ids"] = [place.triggers[list(FAULTS).index(fault)]]
            self._change(params, SamplingParams, rng.choice((0, 0, 1, 1, 2, 3)))
            values["params"] = params
        elif rng.random() < 0.9:
            values["max_new_tokens"] = rng.choice((1, 3, 8, 20))
        if rng.random() < 0.05:
            values["params"] = rng.choice(ODD)
        read = rng.choice(list(READS))
        terms = _Fields(tenant=rng.choice("abc"))
        if read == "never":
            terms["timeout"] = rng.choice((0.01, 0.1, 0.5))
        self._change(terms, Terms, rng.choice((0, 0, 1, 2)))
        values["terms"] = terms if rng.random() < 0.97 else rng.choice(ODD)
        if how == "run":
            self._arguments(values)
        if self.embeds and rng.random() < 0.06:
            name = rng.choice(list(self.embeds))
            values |= {"prompt": None, "prompt_embeds": self.embeds[name]}
            words[1], fault = name, None
        words += [f"{name}={_named(value)}" for name, value in values.items() if name not in ("prompt", "prompt_embeds")]
        if how in ("run", "stream"):
            words.append(f"read: {read}")
        return Request(how, values, read, "; ".join(words), fault)

    def _prompt(self) -> tuple[Any, str, str | None]:
        rng, place = self.rng, self.place
        luck = rng.random()
        if luck < 0.25:
            name = rng.choice(list(PROMPTS))
            return PROMPTS[name], f"prompt: {name}", None
        ids = rng.choice(self.innocents).ids
        ids = ids[: rng.randrange(len(ids) + 1)] + [rng.randrange(WORDS) for _ in range(rng.randrange(4))]
        fault = None
        if luck < 0.85 or not ids:
            fault = rng.choice(list(FAULTS))
            ids.insert(rng.randrange(len(ids) + 1), place.triggers[list(FAULTS).index(fault)])
        return ids if place.sampled else place.prompt(ids), f"{len(ids)} tokens, model {fault or 'honest'}", fault

    def _change(self, fields: _Fields, kind: type, n: int) -> None:
        """Put something unusual, or odd, into n fields."""
        for name in self.rng.sample(list(FIELDS[kind]), min(n, len(FIELDS[kind]))):
            fields[name] = self.rng.choice(ODD if self.rng.random() < 0.3 else FIELDS[kind][name])
        if self.rng.random() < 0.01:
            fields["unknown"] = 1

    def _arguments(self, values: dict[str, Any]) -> None:
        rng = self.rng
        for name in ("max_new_tokens", "stop", "include_stop"):
            if rng.random() < 0.15:
                values[name] = rng.choice(ODD if rng.random() < 0.3 else RUN[name])
        if rng.random() < 0.15:
            rule = _Fields()
            self._change(rule, StopRule, rng.choice((1, 2, 3)))
            values["stop"] = rule
        if rng.random() < 0.03:
            values["prompt_embeds"] = rng.choice(ODD)
        if rng.random() < 0.03:  # equal, by its own account, to the rule of an innocent request
            values["stop"] = StopRule((STOP,), drawn.Impostor("says yes"))


def _named(value: Any) -> str:
    if isinstance(value, _Fields):
        return "{" + ", ".join(f"{k}={_named(v)}" for k, v in value.items()) + "}"
    try:
        return short(value)
    except Exception as e:
        return f"a {type(value).__name__} whose repr raises {type(e).__name__}"


# ---- ways to read ----------------------------------------------------------------------------------------------------


def _all(stream: Any, rng: random.Random) -> None:
    for _ in stream:
        pass


def _collect(stream: Any, rng: random.Random) -> None:
    getattr(stream, "tokens", stream).collect()


def _leave(stream: Any, rng: random.Random) -> None:
    end = rng.randrange(5)
    for n, _ in enumerate(stream):
        if n == end:
            break


def _closed_by_another(stream: Any, rng: random.Random) -> None:
    timer = threading.Timer(rng.random() * 0.03, stream.close)
    timer.start()
    try:
        _all(stream, rng)
    finally:
        timer.join(BOUND)


def _slowly(stream: Any, rng: random.Random) -> None:
    for _ in stream:
        time.sleep(rng.random() * 0.01)


def _two(stream: Any, rng: random.Random) -> None:
    stream = getattr(stream, "tokens", stream)
    errors: list[BaseException] = []

    def other() -> None:
        try:
            stream.collect()
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    try:
        stream.collect()
    finally:
        thread.join(BOUND)
    for e in errors:
        raise e


async def _async_all(stream: Any, rng: random.Random) -> None:
    async for _ in stream:
        pass


async def _async_leave(stream: Any, rng: random.Random) -> None:
    end = rng.randrange(5)
    n = 0
    async for _ in stream:
        if n == end:
            break
        n += 1


async def _async_late(stream: Any, rng: random.Random) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_async_all(stream, rng), rng.random() * 0.03)


async def _async_cancelled(stream: Any, rng: random.Random) -> None:
    task = asyncio.ensure_future(_async_all(stream, rng))
    await asyncio.sleep(rng.random() * 0.02)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _in_asyncio(read: Callable[[Any, random.Random], Any]) -> Callable[[Any, random.Random], None]:
    return lambda stream, rng: asyncio.run(read(stream, rng))


READS: dict[str, Callable[[Any, random.Random], None] | None] = {
    "to the end": _all,
    "at once": _collect,
    "leaves": _leave,
    "closed by another thread": _closed_by_another,
    "slowly": _slowly,
    "two threads": _two,
    "asyncio": _in_asyncio(_async_all),
    "asyncio, leaves": _in_asyncio(_async_leave),
    "asyncio, with a limit": _in_asyncio(_async_late),
    "asyncio, cancelled": _in_asyncio(_async_cancelled),
    "dropped": None,
    "dropped in a cycle": None,
    "never": None,
}


# ---- a round ---------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What one round, or several, came to."""

    rounds: int = 0
    seconds: float = 0.0
    innocent: int = 0  # innocent requests that ended
    equal: int = 0  # of these, equal to their solo run in every bit
    slowest: float = 0.0  # seconds of an innocent request
    deaths: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    preemptions: int = 0
    memory: int = 0  # most bytes that a round kept
    wrong: list[str] = field(default_factory=list)

    def __add__(self, other: Report) -> Report:
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__dataclass_fields__
            if name not in ("slowest", "memory")
        }
        return Report(**sums, slowest=max(self.slowest, other.slowest), memory=max(self.memory, other.memory))

    @property
    def good(self) -> bool:
        return not self.wrong and not self.deaths and self.equal == self.innocent > 0

    def __str__(self) -> str:
        share = 100 * self.equal / self.innocent if self.innocent else 0.0
        rows = [
            ("rounds", self.rounds),
            ("seconds", f"{self.seconds:.0f}"),
            ("steps", self.steps),
            ("preemptions", self.preemptions),
            ("innocent requests", self.innocent),
            ("of these, equal to their solo run in every bit", f"{self.equal:,} ({share:.4g} %)"),
            ("the slowest of these", f"{self.slowest:.1f} s"),
            ("engine deaths", self.deaths),
            ("hostile requests", sum(self.requests.values())),
            *((f"hostile requests: {what}", n) for what, n in sorted(self.requests.items())),
            ("most memory kept by a round", f"{self.memory / 2**20:.1f} MiB"),
            ("ways to read a stream", len(self.reads)),
            ("faults of the model, kinds", len(self.faults)),
            ("faults of the model", sum(self.faults.values())),
            *((f"faults: {what}", n) for what, n in sorted(self.faults.items())),
            ("**wrong**", f"**{len(self.wrong)}**"),
        ]
        table = "\n".join(f"| {what} | {n:,} |" if isinstance(n, int) else f"| {what} | {n} |" for what, n in rows)
        return "\n".join(["| fuzz | |\n|---|---|", table, *(f"WRONG: {what}" for what in self.wrong[:20])])


class Gone(Exception):
    """The round is over: the engine is dead, or something hangs."""


class Round:
    """One engine, one seed. `run` takes some seconds more than it is told: for solo runs and the end."""

    def __init__(self, case: str, seed: int, *, only: str | None = None) -> None:
        self.case, self.seed, self.only = case, seed, only
        self.options = options_of(random.Random(f"options {seed}"), CASES[case])
        self.report = Report(rounds=1)
        self.lock = threading.Lock()
        self.over = threading.Event()  # for all threads of the round
        self.doing: dict[str, tuple[float, str]] = {}  # thread -> since when, and what
        self.last: deque[str] = deque(maxlen=25)  # requests
        self.unread: deque[tuple[float, Any, str]] = deque()
        self.began = time.monotonic()
        self.numbers = itertools.count()
        self.log = io.StringIO()

    # What went wrong.

    def complain(self, what: str) -> None:
        with self.lock:
            if len(self.report.wrong) < 50:
                self.report.wrong.append(f"[{self.case}, seed {self.seed}] {what}")

    def command(self) -> str:
        return f'python tests/adversary/fuzz.py --case "{self.case}" --seed {self.seed} --seconds {self.seconds:.0f}'

    def explain(self) -> str:
        """For a failure: how to see it again, and what came before."""
        said = "\n".join(self.last)
        return f"{self.command()}\n{self.options}\nThe last requests:\n{said}\nThe log ends:\n{self.log.getvalue()[-3000:]}"

    # From beginning to end.

    def run(self, seconds: float) -> Report:
        self.seconds = seconds
        before = _belongings()
        with _watched(self.complain, self.log), _bounded_memory():
            alone = CASES[self.case].make(self.options, random.Random(self.seed), True)
            self.innocents = innocents(alone)
            self.solo = [ask(alone, innocent, "at once") for innocent in self.innocents]
            alone.close()
            self.place = place = CASES[self.case].make(self.options, random.Random(self.seed), False)
            self._arm()
            try:
                self._storm(seconds / 3)
                warm = self._quiet()
                self._storm(seconds - seconds / 3)
                self._compare(warm, self._quiet(), "after the first third, and after the rest")
                self._once_more()
                stats = place.engine.stats()
                self.report.steps, self.report.preemptions = stats.steps, stats.preemptions
                if place.mischief is not None:
                    self.report.faults = place.mischief.done
                self._bounded(place.close, "close")
                if place.mischief is not None:
                    place.mischief.ask = None
                del self.place, place
                self._compare(before, _belongings(), "before the round, and after", memory=False)
            except Gone:
                self.over.set()
                with contextlib.suppress(Exception):
                    threading.Thread(target=self.place.close, daemon=True).start()
        self.report.seconds = time.monotonic() - self.began
        return self.report

    def _arm(self) -> None:
        """From now on the model may be hostile."""
        place = self.place
        used = {int(float(str(t).strip("[").split(",")[0])) for tokens, *_ in self.solo for t in tokens}
        used.update(i for innocent in self.innocents for i in innocent.ids)
        if place.mischief is not None and not place.mischief.faults:  # the shipped model, which says what it likes
            free = (t for t in range(WORDS, place.texts.vocab_size) if t not in used)
            place.triggers = list(itertools.islice(free, len(FAULTS)))
            place.mischief.arm(place.triggers)
        assert used.isdisjoint(place.triggers)
        if place.mischief is not None:
            engine = place.engine
            more: dict[str, Any] = {"params": SamplingParams(max_tokens=1)} if place.sampled else {"max_new_tokens": 1}
            place.mischief.ask = lambda: engine.run(place.prompt([1, 2]), **more).collect()

    def _storm(self, seconds: float) -> None:
        """All clients at once. Raises Gone."""
        place, n = self.place, next(self.numbers)
        self.over.clear()
        threads = [threading.Thread(target=self._innocent, args=(i,), daemon=True) for i in range(INNOCENTS)]
        threads += [threading.Thread(target=self._hostile, args=(f"{n}.{i}",), daemon=True) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.05)
            self._look(place)
        self.over.set()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.01)
            self._look(place)
        end = time.monotonic() + BOUND
        while self.unread:
            _, stream, said = self.unread.popleft()
            if not _wait(lambda stream=stream: stream.finish_reason is not None, end):
                self.complain(f"a stream that nobody read never ended: {said}")
            del stream

    def _look(self, place: Place) -> None:
        """Is the engine alive, and does every thread come back in time? Raises Gone."""
        now = time.monotonic()
        for name, (since, what) in list(self.doing.items()):
            if now - since > BOUND:
                self.complain(f"{name} hangs for {now - since:.0f} s: {what}\n{_stacks()}")
                raise Gone
        try:
            health = place.engine.health()
        except BaseException as e:
            health = hibachi.Health("failed", f"health raised {_shown(e)}")
        if health.state in ("failed", "closed"):
            self.report.deaths += 1
            self.complain(f"the engine died: {health.message}\n{self.explain()}")
            raise Gone
        if health.state == "stalled":
            self.complain(f"the engine is stalled: {health.message}\n{_stacks()}")
            raise Gone

    def _quiet(self) -> dict[str, Any]:
        """Wait until the engine is idle, and look that nothing is left; returns what belongs to this process."""
        engine, remote = self.place.engine, self.place.remote
        end = time.monotonic() + BOUND

        def idle() -> bool:
            gc.collect()
            stats = engine.stats()
            if stats.running or stats.waiting or stats.free_blocks != stats.blocks:
                return False
            return engine.health().state == "idle" and not engine.health().paused

        if not _wait(idle, end):
            self.complain(f"the engine does not come to rest: {engine.health()}, {engine.stats()}\n{_stacks()}")
            raise Gone
        if remote:
            if engine._channels:
                self.complain(f"places are kept: {len(engine._channels)}")
        else:
            inner = engine._worker._engine
            try:
                inner.scheduler.check()
            except AssertionError as e:
                self.complain(f"scheduler.check: {e}")
            if inner._live:
                self.complain(f"requests are kept: {len(inner._live)}")
        if self.place.mischief is not None:
            self.place.mischief.begins()  # lets go of what it kept
        return _belongings(engine.pid if remote else None)

    def _once_more(self) -> None:
        """When all is over, nothing has remained of it."""
        for n in range(INNOCENTS):
            self._bounded(lambda n=n: self._check(n, "at once"), f"innocent {n} at the end")

    def _bounded(self, call: Callable[[], object], what: str) -> None:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(BOUND)
        if thread.is_alive():
            self.complain(f"{what} hangs\n{_stacks()}")
            raise Gone

    def _compare(self, before: dict[str, Any], after: dict[str, Any], when: str, *, memory: bool = True) -> None:
        for name, value in after.items():
            if name.startswith("memory"):
                kept = value - before.get(name, value)
                if memory:
                    self.report.memory = max(self.report.memory, kept)
                    if kept > MEMORY:
                        self.complain(f"{name}: {before[name] / 2**20:.1f} and {value / 2**20:.1f} MiB {when}")
            elif name in before and len(value) > len(before[name]):
                self.complain(f"{name} {when}: {before[name]} and {value}")

    # The clients.

    def _innocent(self, n: int) -> None:
        rng = random.Random(n)
        while not self.over.is_set():
            self._check(n, rng.choice(("at once", "at once", "asyncio", "slowly")))
        self.doing.pop(f"innocent {n}", None)

    def _check(self, n: int, how: str) -> None:
        began = time.monotonic()
        self.doing[f"innocent {n}"] = began, "its request"
        got: Any
        try:
            got = ask(self.place, self.innocents[n], how)
        except QueueFull:
            time.sleep(0.005)
            return
        except BaseException as e:
            got = e
        if self.over.is_set() and isinstance(got, hibachi.EngineError):
            return  # the round is over
        with self.lock:
            self.report.innocent += 1
            self.report.equal += (same := _same(got, self.solo[n]))
            self.report.slowest = max(self.report.slowest, time.monotonic() - began)
        if not same:
            cause = f" from {_shown(got.__cause__)}" if isinstance(got, BaseException) else ""
            said = "\n".join(list(self.last)[-8:])
            self.complain(
                f"innocent {n} got {_shown(got)}{cause}\ninstead of {_shown(self.solo[n])}\nbeside\n{said}"
            )

    def _hostile(self, name: str) -> None:
        rng = random.Random(f"{self.seed} {name}")
        draw = Draw(self.place, rng, self.innocents, self.only)
        who = f"client {name}"
        while not self.over.is_set():
            request = draw()
            self.last.append(request.said)
            self.doing[who] = time.monotonic(), request.said
            outcome = self._ask(request, rng)
            with self.lock:
                self.report.requests[outcome] += 1
                if outcome.startswith("accepted"):
                    self.report.reads[request.read] += 1
                    if self.place.remote and request.fault:
                        self.report.faults[request.fault] += 1
            time.sleep(rng.random() * 0.004)
        self.doing.pop(who, None)

    def _ask(self, request: Request, rng: random.Random) -> str:
        """Send a hostile request and read its stream; returns what became of it."""
        whole = request.how not in ("run", "stream")
        try:
            got = request.send(self.place)
        except BaseException as e:
            return self._raised(e, request, "ended" if whole else "refused")
        if whole:
            return "ended: a whole text"
        try:
            if request.read == "never":
                if len(self.unread) > 20:
                    self.unread.popleft()[1].close()
                self.unread.append((time.monotonic(), got, request.said))
                return "accepted: never read"
            if request.read.startswith("dropped"):
                if request.read.endswith("cycle"):
                    box = [got]
                    box.append(box)
                    del box
                del got
                if rng.random() < 0.1:
                    gc.collect()
                return "accepted: dropped"
            read = READS[request.read]
            assert read is not None
            read(got, rng)
        except BaseException as e:
            return self._raised(e, request, "accepted")
        if got.finish_reason is None:
            self.complain(f"a stream was read to its end, and has none: {request.said}")
        return f"accepted: {got.finish_reason}"

    def _raised(self, e: BaseException, request: Request, when: str) -> str:
        if isinstance(e, TypeError) and "unexpected keyword" in str(e):
            return "refused: TypeError for a field that there is not"
        if not isinstance(e, HibachiError) or isinstance(e, hibachi.EngineFailed):
            said = "".join(traceback.format_exception(type(e), e, e.__traceback__)[-4:])[-1500:] if when != "x" else ""
            if not (self.over.is_set() and isinstance(e, hibachi.EngineError)):
                self.complain(f"{when} with {_shown(e)}: {request.said}\n{said}")
        else:
            try:
                str(e), repr(e)
            except BaseException as other:
                self.complain(f"{type(e).__name__} has no text, but {_shown(other)}: {request.said}")
        return f"{when}: {type(e).__name__}"


def _same(got: Any, want: Any) -> bool:
    try:
        return bool(got == want)
    except Exception:
        return False


def _shown(value: Any) -> str:
    try:
        return repr(value)[:600]
    except BaseException as e:
        return f"a {type(value).__name__} whose repr raises {type(e).__name__}"


def _wait(true: Callable[[], bool], end: float) -> bool:
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# ---- this process ----------------------------------------------------------------------------------------------------


def _belongings(child: int | None = None) -> dict[str, Any]:
    """Threads, descriptors and memory of this process and of the engine's."""
    for _ in range(3):
        gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    own = {"threads": sorted(t.name for t in threading.enumerate()), **_process(os.getpid())}
    if child is not None:
        own |= {f"{name} of the engine's process": value for name, value in _process(child).items()}
        own["threads of the engine's process"] = os.listdir(f"/proc/{child}/task")
    return own


def _process(pid: int) -> dict[str, Any]:
    if not os.path.exists("/proc/self/statm"):  # not on Linux
        return {}
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    open_files = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            open_files.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return {"descriptors": sorted(open_files), "memory": pages * resource.getpagesize()}


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """What takes memory without a bound fails, and the machine lives."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with contextlib.suppress(OSError, ValueError):
        have = int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
        resource.setrlimit(resource.RLIMIT_DATA, (have + MOST_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextlib.contextmanager
def _watched(complain: Callable[[str], None], text: io.StringIO) -> Iterator[None]:
    """Threads that die and errors in destructors count; what is logged is kept, and formatted as by any handler."""
    log = logging.getLogger("hibachi")
    handler = _Kept(text, complain)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    propagates, log.propagate = log.propagate, False  # pytest would keep every record, and all that hangs on it
    log.addHandler(handler)
    hooks = threading.excepthook, sys.unraisablehook

    def died(args: Any) -> None:
        said = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))[-2000:]
        complain(f"a thread died: {args.thread.name if args.thread else '?'}\n{said}")

    def unraisable(args: Any) -> None:
        complain(f"unraisable in {short(args.object)}: {_shown(args.exc_value)} {args.err_msg or ''}")

    threading.excepthook, sys.unraisablehook = died, unraisable
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = hooks
        log.removeHandler(handler)
        log.propagate = propagates


class _Kept(logging.StreamHandler):  # type: ignore[type-arg]
    """Keeps the end of the log."""

    def __init__(self, text: io.StringIO, complain: Callable[[str], None]) -> None:
        super().__init__(text)
        self._text, self._complain = text, complain

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if self._text.tell() > 200_000:
            end = self._text.getvalue()[-20_000:]
            self._text.seek(0)
            self._text.truncate()
            self._text.write(end)

    def handleError(self, record: logging.LogRecord) -> None:
        self._complain(f"a log line cannot be made: {record.msg!r:.200}, {_shown(sys.exc_info()[1])}")


def _stacks() -> str:
    names = {t.ident: t.name for t in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            parts.append(f"--- {names.get(ident, ident)}\n" + "".join(traceback.format_stack(frame)[-7:]))
    return "\n".join(parts)[-12_000:]


# ---- as a command ----------------------------------------------------------------------------------------------------


def fuzz(case: str, seed: int, seconds: float, *, only: str | None = None, say: Callable[[str], object] = print) -> Report:
    """Rounds of a case, one after another, until the time is over; seeds count up from `seed`."""
    end, total = time.monotonic() + seconds, Report()
    while True:
        left = end - time.monotonic()
        one = Round(case, seed, only=only)
        total += one.run(min(left, 20.0))
        if one.report.wrong:
            say(f"{one.explain()}\n" + "\n".join(f"WRONG: {what}" for what in one.report.wrong[:10]))
        seed += 1
        if end - time.monotonic() < 3:
            return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="one of " + "; ".join(CASES) + " (default: all)")
    parser.add_argument("--seconds", type=float, default=60, help="for all cases together (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="PATTERN", help="send only requests whose description matches")
    args = parser.parse_args()
    cases = [args.case] if args.case else list(CASES)
    total = Report()
    for case in cases:
        report = fuzz(case, args.seed, args.seconds / len(cases), only=args.only)
        print(f"{case}: {report.rounds} rounds, {report.innocent} innocent, {report.equal} equal, {len(report.wrong)} wrong",
              flush=True)
        total += report
    print(total)
    return not total.good


if __name__ == "__main__":
    os.environ.setdefault("HIBACHI_AUTOTUNE", "off")
    sys.exit(main())
