"""What a load generator sends, and when: works, made-up prompts and traces, as requests of OpenAI's API."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np

from hibachi.engine.simulator.trace import Trace
from hibachi.errors import ConfigError
from hibachi.testing.bench.work import TimedRequest

CHAT, COMPLETIONS = "chat", "completions"
PATHS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
ARRIVALS = ("poisson", "constant")
_FIRST_ID = 3  # smaller ones are often special
# A token each in most vocabularies, with the space in front.
_TEXT = """the of and to in is that for it as was with be by on not he his but at are this have an had they you were
their one all we can her has there been if more when will would who so no said out up into some them other time about
first new world over people only because through may must very even most such where after before"""
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. due: seconds after the start; None means as soon as it may. prompt: token ids. new: tokens
    wanted.
    """

    id: int
    due: float | None
    prompt: Sequence[int]
    new: int


# ---- sources -------------------------------------------------------------------------------------------------------


def arrivals(kind: str, rate: float | None, seed: int) -> Iterator[float | None]:
    """Times in seconds, the first at 0, `rate` a second on average; rate None means no times. Raises ConfigError."""
    if kind not in ARRIVALS:
        raise ConfigError(f"Arrivals must be one of {', '.join(ARRIVALS)}; got {kind!r}.")
    if rate is None:
        while True:
            yield None
    rng, at = np.random.default_rng([seed, 2]), 0.0
    for i in count():
        yield at if kind == "poisson" else i / rate
        at += rng.exponential(1 / rate)


@dataclass(frozen=True, slots=True)
class Random:
    """Prompts of random token ids. prompt, new: tokens. spread: lengths are uniform within this share of them. prefix:
    the first so many tokens of the prompt are the same in all."""

    prompt: int = 128
    new: int = 64
    spread: float = 0.0
    prefix: int = 0
    vocab_size: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.new < 1 or not 0 <= self.prefix <= self.prompt or not 0 <= self.spread < 1:
            raise ConfigError(
                f"Prompts and answers must have at least 1 token, a shared prefix from 0 to {self.prompt}, a spread "
                f"from 0 up to 1; got {self.prompt}, {self.new}, {self.prefix} and {self.spread}."
            )
        check_vocabulary(self.vocab_size)

    def asks(self, due: Iterator[float | None]) -> Iterator[Ask]:
        lengths, ids = np.random.default_rng([self.seed, 0]), np.random.default_rng([self.seed, 1])
        shared = ids.integers(_FIRST_ID, self.vocab_size, self.prefix).tolist()
        for i, at in enumerate(due):
            share = 1 + self.spread * lengths.uniform(-1, 1, 2)
            prompt, new = max(1, round(self.prompt * share[0])), max(1, round(self.new * share[1]))
            own = ids.integers(_FIRST_ID, self.vocab_size, max(prompt - self.prefix, 0)).tolist()
            yield Ask(i, at, (shared + own)[:prompt], new)


def of_work(requests: Sequence[TimedRequest], due: Iterator[float | None], rate: float | None) -> Iterator[Ask]:
    """A work of `hibachi bench work`, again and again: at its own times if it has any and there is a rate, at those of
    `due` otherwise."""
    timed = rate is not None and requests[-1].arrival > 0
    span = requests[-1].arrival * (1 + 1 / max(len(requests) - 1, 1))  # and a mean interval between two rounds
    for i in count():
        round_, r = i // len(requests), requests[i % len(requests)]
        at = next(due)
        yield Ask(i, (r.arrival + round_ * span) / rate if timed and rate else at, r.prompt, r.max_tokens)


def of_trace(
    trace: Trace, *, vocab_size: int, seed: int = 0, longest: int | None = None, new: int | None = None
) -> Iterator[Ask]:
    """A trace at its own times. Prompts that share keys share their tokens. longest, new: most tokens of prompts and of
    answers; longer ones are cut."""
    check_vocabulary(vocab_size)

    @lru_cache(4096)
    def piece(key: Any) -> list[int]:
        rng = np.random.default_rng([seed, 3, zlib.crc32(repr(key).encode())])
        found: list[int] = rng.integers(_FIRST_ID, vocab_size, trace.key_tokens).tolist()
        return found

    own = np.random.default_rng([seed, 1])
    for i in range(len(trace)):
        length = int(trace.prompt[i]) if longest is None else min(int(trace.prompt[i]), longest)
        prompt: list[int] = []
        for key in trace.keys[i] if trace.keys is not None else ():
            if len(prompt) >= length:
                break
            prompt += piece(key)
        prompt = prompt[:length]
        prompt += own.integers(_FIRST_ID, vocab_size, length - len(prompt)).tolist()
        out = int(trace.output[i])
        yield Ask(i, int(trace.arrival[i]) / 1e12, prompt, out if new is None else min(out, new))


def check_vocabulary(vocab_size: int) -> None:
    if vocab_size <= _FIRST_ID:
        raise ConfigError(f"Prompts need a vocabulary of more than {_FIRST_ID} tokens; got {vocab_size}.")


# ---- bodies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestForm:
    """How a request is said. words: prompts as English words, one for each token id, as chats have no token ids.
    ignore_eos: the field of vLLM, so that answers have exactly the length asked for. more: further fields."""

    endpoint: str
    model: str | None
    words: bool = False
    stream: bool = True
    ignore_eos: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint not in PATHS:
            raise ConfigError(f"The endpoint must be one of {', '.join(PATHS)}; got {self.endpoint!r}.")

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    def body(self, ask: Ask) -> bytes:
        said: dict[str, Any] = {} if self.model is None else {"model": self.model}
        if self.endpoint == CHAT:
            said["messages"] = [{"role": "user", "content": text(ask.prompt)}]
        else:
            said["prompt"] = text(ask.prompt) if self.words else list(ask.prompt)
        said |= {"max_tokens": ask.new, "temperature": 0, "stream": self.stream}
        if self.stream:
            said["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            said["ignore_eos"] = True
        return json.dumps(said | dict(self.more), separators=(",", ":")).encode()


def text(ids: Sequence[int]) -> str:
    """A word for each."""
    return " ".join(_WORDS[i % len(_WORDS)] for i in ids)
