"""Where the fuzzer runs: engines with a model of hostile.py or the shipped one; and the innocent requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import hibachi
from hibachi import AutoregressiveBatchInference, SamplingParams, Terms, load_model
from hibachi.engine.scheduler.policy import Priority
from hibachi.llm.model.files import TINY, locate, open_files
from hibachi.llm.remote.llm import RemoteLLM
from hibachi.llm.texts import Texts
from hibachi.llm.tokenizers.own import OwnTokenizer

from . import hostile
from .drawn import STOP, WORDS, Predicate, Processor
from .hostile import (
    VOCAB,
    Forward,
    ForwardOfFloats,
    Logits,
    Mischief,
    OwnStep,
    OwnStepWithEncoder,
    Step,
    StepOfFrames,
    StepOfTokens,
    StepWithState,
)
from .watch import MALLOC, NOTES, OWN_NOTES

ROOT = Path(__file__).parents[2]
LENGTH = 96  # longest request
PROGRAMS = 200 * 2**20  # bytes: JAX compiles for new shapes all the time


@dataclass
class Place:
    """An engine under test, and how to ask it."""

    texts: Any  # a `Texts`, or None: only arrays go in and come out
    engine: Any
    level: int
    mischief: Mischief | None = None  # in this process
    triggers: list[int] = field(default_factory=lambda: list(range(WORDS, VOCAB)))  # the token of each fault
    remote: bool = False
    pairs: bool = False  # tokens are pairs of floats
    frames: bool = False  # tokens are pairs of ids
    declares: bool = False  # inputs come with each request
    embed_size: int | None = None

    @property
    def sampled(self) -> bool:
        return self.texts is not None or self.declares

    def prompt(self, ids: list[int]) -> Any:
        """Token ids as this engine takes them: an array of the caller's own."""
        if self.pairs:
            return np.stack([np.array(ids, float), np.ones(len(ids))], axis=1)
        if self.frames:
            return np.stack([np.array(ids, np.int64), 3 * np.array(ids, np.int64) % WORDS], axis=1)
        return np.array(ids, np.int64)

    def inputs(self, ids: list[int]) -> dict[str, Any]:
        """What comes with such a prompt, of the caller's own; {} where the model declares nothing."""
        if not self.declares:
            return {}
        if self.frames:
            return {"speaker": np.array([ids[-1] % 5, 1]), "hours": np.arange(LENGTH) * (1 + ids[-1] % 3) % 7}
        return {"source": np.array(ids[-1 - ids[-1] % 9 :])}

    def close(self) -> None:
        (self.texts or self.engine).close()


Make = Callable[[dict[str, Any], random.Random, bool], Place]
"""(options as they were drawn, luck, for solo runs?) -> a place."""


@dataclass
class Case:
    """A library and a level."""

    make: Make
    level: int
    soak: bool = False  # not in `make test`
    bound: float = 60.0  # seconds in which a request ends, a thread comes back, an engine comes to rest
    memory: int = 20 * 2**20  # bytes that may be missing in the end


def options_of(rng: random.Random, level: int) -> dict[str, Any]:
    """How the engine of a round is set up."""
    options: dict[str, Any] = {
        "max_num_seqs": rng.choice((3, 5, 8)),
        "max_num_queued_reqs": 80,
        "pause_after": rng.choice((1, 4, 16)),
        "scheduling_policy": rng.choice(("priority", "fcfs", "fair", "shares", "waiting-served", "aging")),
    }
    if level == 2:
        options |= {
            "block_size": rng.choice((1, 3, 4, 8)),
            "max_num_batched_tokens": rng.choice((8, 24, 64)),
            "max_prefill_tokens": rng.choice((None, 5)),
        }
    return options


def _policy(options: dict[str, Any]) -> dict[str, Any]:
    name = options["scheduling_policy"]
    return options | {"scheduling_policy": Priority(age=1.0) if name == "aging" else name}


def _alone(options: dict[str, Any]) -> dict[str, Any]:
    """The engine of the solo runs."""
    alone = {"max_num_seqs": 1}
    return alone | (
        {"enable_prefix_caching": False, "block_size": options["block_size"]} if "block_size" in options else {}
    )


def _cache_bytes(model: Any, options: dict[str, Any]) -> int:
    """Memory for some two and a half of the longest requests, so that some are preempted."""
    position = sum(s.kv_heads * (s.k_dim + s.v_dim) * 4 for s in model.cache_spec() if hasattr(s, "k_dim"))
    return position * options["block_size"] * (int(2.5 * LENGTH) // options["block_size"] + 2)


def own(level: int, *models: type, library: str = "numpy") -> Make:
    """A model of hostile.py in this process."""

    def make(options: dict[str, Any], rng: random.Random, solo: bool) -> Place:
        made = rng.choice(models)
        backend = hibachi.load_backend(library)
        mischief = Mischief(()) if solo else Mischief()
        model = made(mischief, backend)
        asked = _alone(options) if solo else _policy(options)
        if level < 2:
            asked["padding_token"] = np.zeros((1, 2)) if made is ForwardOfFloats else np.zeros(1, np.int64)
            if issubclass(made, OwnStep) and solo:
                asked["enable_prefix_caching"] = False
            elif issubclass(made, OwnStep):
                asked["max_num_batched_tokens"], asked["cache_tokens"] = rng.choice((8, 24, 64)), int(2.5 * LENGTH)
                asked["block_size"] = rng.choice((1, 3, 4, 8))
        elif not solo:
            asked["kv_cache_memory_bytes"] = _cache_bytes(model, options)
        if not solo:
            asked["record"] = rng.choice((None, os.devnull))
        engine = AutoregressiveBatchInference(model, max_model_len=LENGTH, backend=backend, **asked)
        texts, declares = None, bool(getattr(model, "inputs", None))
        if getattr(model, "vocab_size", None) and not declares:
            texts = Texts(
                engine, OwnTokenizer(model.tokenizer), vocab_size=VOCAB, eos_ids=(), default_params=SamplingParams()
            )
        place = Place(texts, engine, level, mischief, pairs=made is ForwardOfFloats, declares=declares)
        place.frames = made is StepOfFrames
        place.embed_size = getattr(model, "embed_size", None)
        return place

    return make


def shipped(backend: Callable[[], Any]) -> Make:
    """The shipped model, on kernels that do not depend on the batch."""

    def make(options: dict[str, Any], rng: random.Random, solo: bool) -> Place:
        mischief, kernels = Mischief(()), backend().invariant()
        if kernels.shapes.compiled:  # it is traced
            mischief.around(kernels)
        model: Any = load_model(TINY, kernels, dtype="float32", max_model_len=LENGTH)
        if not mischief.compiled:
            model = hostile.Around(model, mischief)
        asked = _alone(options) if solo else _policy(options) | {"kv_cache_memory_bytes": _cache_bytes(model, options)}
        engine = AutoregressiveBatchInference(
            model, max_model_len=LENGTH, deterministic=True, dtype=model.dtype, **asked
        )
        tokenizer = open_files(locate("tiny")).tokenizer(vocab_size=model.vocab_size)
        texts = Texts(
            engine, tokenizer, vocab_size=model.vocab_size, eos_ids=model.eos_ids, default_params=SamplingParams()
        )
        return Place(texts, engine, 2, mischief, embed_size=256)

    return make


def remote(level: int, model: type) -> Make:
    """A model of hostile.py in another process."""

    def make(options: dict[str, Any], rng: random.Random, solo: bool) -> Place:
        policy = options["scheduling_policy"].replace("aging", "fair")
        asked = _alone(options) if solo else options | {"scheduling_policy": policy}
        if level == 2 and not solo:
            asked["kv_cache_memory_bytes"] = _cache_bytes(model(), options)
        with _surroundings():
            texts = RemoteLLM(f"{hostile.__name__}:{model.__name__}", max_model_len=LENGTH, **asked)
        return Place(texts, texts.engine, level, remote=True, embed_size=getattr(model, "embed_size", None))

    return make


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    """Another process finds these modules, and gives memory back as this one does."""
    changed = {name: str(value) for name, (_, value) in MALLOC.items()}
    changed[NOTES] = str(OWN_NOTES)
    changed["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _torch(native: bool) -> Any:
    import torch

    from hibachi_torch import TorchBackend

    torch.set_num_threads(1)
    return TorchBackend("cpu", native=native)


CASES: dict[str, Case] = {
    "numpy, level 0": Case(own(0, Forward, ForwardOfFloats), 0),
    "numpy, level 1": Case(own(1, Logits), 1),
    "numpy, own cache": Case(own(1, OwnStep), 1),
    "numpy, own cache, encoder": Case(own(1, OwnStepWithEncoder), 1),
    "numpy, level 2, frames": Case(own(2, StepOfFrames), 2),
    "numpy, level 2": Case(own(2, Step, StepWithState, StepOfTokens), 2),
    "torch, level 2": Case(shipped(lambda: _torch(False)), 2, soak=True),
    "another process, level 1": Case(remote(1, Logits), 1),
    "another process, level 2": Case(remote(2, Step), 2, soak=True),
    "torch, native, level 2": Case(shipped(lambda: _torch(True)), 2, soak=True),
    "jax, level 1": Case(own(1, Logits, library="jax"), 1, soak=True, bound=300.0, memory=PROGRAMS),
    "jax, level 2": Case(shipped(lambda: hibachi.load_backend("jax")), 2, soak=True, bound=300.0, memory=PROGRAMS),
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
        if place.frames:
            params = _of_frames(params, n)
        more: dict[str, Any] = {"stop_rule": Predicate("fine")} if n in (3, 8) else {}
        if n == 5 and not place.pairs and not place.frames:
            more = {"stop_rule": STOP}
        terms = Terms(priority=n % 3, tenant=f"innocent {n % 4}")
        if not place.sampled:
            out.append(Innocent(ids, None, more | {"max_tokens": limit}, terms))
        else:
            out.append(Innocent(ids, params.with_(max_tokens=limit), {} if place.remote else more, terms))
    return out


def _of_frames(params: SamplingParams, n: int) -> SamplingParams:
    """The same, without what is for single ids."""
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "logprobs")
    each = ({}, {"temperature": 0.5, "top_k": 3}) if n % 3 == 1 else ()
    kept = SamplingParams(**{name: getattr(params, name) for name in names}, codebooks=each)
    return kept if kept.seed is not None else kept.with_(seed=n)  # the model draws besides


Answer = tuple[Any, ...]


def ask(place: Place, innocent: Innocent, how: str, salt: str | None = None) -> Answer:
    """What an innocent request gets: tokens, log-probabilities, those of its prompt, why it ended."""
    terms = replace(innocent.terms, cache_salt=salt)
    if place.remote:
        stream = place.texts.stream(innocent.ids, innocent.params, terms=terms)
        tokens = _read(stream.tokens, how)
        return tuple(tokens), stream.tokens.logprobs, stream.tokens.prompt_logprobs, stream.tokens.finish_reason
    prompt = place.prompt(innocent.ids)
    inputs = place.inputs(innocent.ids)
    stream = place.engine.run(prompt, innocent.params, terms=terms, inputs=inputs or None, **innocent.more)
    for array in (prompt, *inputs.values()):
        array[...] = 1  # what the caller does with its array after the call is its own business
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
