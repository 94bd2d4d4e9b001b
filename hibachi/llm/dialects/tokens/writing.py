"""Answers of tokens of any kind, whole or as events, in one of several forms."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from hibachi.backend.array_backend import HostArray
from hibachi.backend.infer import mapped
from hibachi.errors import ModelError
from hibachi.llm.dialects.dialects import Dialect
from hibachi.llm.dialects.errors import body_of
from hibachi.llm.dialects.openai import answers
from hibachi.llm.dialects.openai.answers import Usage
from hibachi.llm.dialects.tokens.accept import refused
from hibachi.llm.dialects.tokens.arrays import DTYPES, as_lists, as_npy, plain
from hibachi.llm.dialects.tokens.bodies import JSON, MSGPACK, NPY

TOKENS = Dialect("tokens", body_of)
SSE, NDJSON = "text/event-stream", "application/x-ndjson"
Score = dict[int, float] | list[dict[int, float]] | None  # of a token: of several codebooks, one for each
Scores = Sequence[Score]
_packed = msgspec.msgpack.Encoder().encode


class TokenFormat(NamedTuple):
    """Of a stream. comment: what says that it goes on, and is no event. raw: tokens are bytes, not lists or base64."""

    kind: bytes
    comment: bytes
    event: Callable[[Any], bytes]
    raw: bool


def _line(event: Any) -> bytes:
    return answers.encode(event) + b"\n"


STREAMS = {
    SSE: TokenFormat(b"text/event-stream; charset=utf-8", b": waiting\n\n", answers.event, False),
    NDJSON: TokenFormat(NDJSON.encode(), b"\n", _line, False),
    MSGPACK: TokenFormat(MSGPACK.encode(), b"\xc0", _packed, True),  # nil
}
WHOLE = (JSON, NPY, MSGPACK)


class Opening(Struct, omit_defaults=True):
    """The first event. dtype, shape: of a token. encoding: "base64", where tokens are so; else lists, or bytes."""

    id: str
    object: str
    created: int
    model: str
    dtype: str | list[Any] | dict[str, Any]
    shape: list[Any] | dict[str, Any]
    encoding: str | None = None


class Came(Struct, omit_defaults=True):
    """Tokens that came together: [n, *token]."""

    tokens: Any
    logprobs: list[Score] | None = None


class End(Struct):
    """The last event. finish_reason: "stop" or "length". stop_reason: the id of those in `stop` that ended it."""

    finish_reason: str
    stop_reason: int | None
    usage: Usage


class Whole(Opening, omit_defaults=True, kw_only=True):
    """All tokens of a request, [n, *token]."""

    tokens: Any
    logprobs: list[Score] | None = None
    finish_reason: str
    stop_reason: int | None
    usage: Usage


class TokenSample(Struct, omit_defaults=True):
    """One of several for a prompt. score: of a beam."""

    tokens: Any
    finish_reason: str
    stop_reason: int | None
    logprobs: list[Score] | None = None
    score: float | None = None


class TokenSamples(Opening, omit_defaults=True, kw_only=True):
    """All samples of a request, or its beams, best first."""

    samples: list[TokenSample]
    usage: Usage


class TokensOutput(Opening, omit_defaults=True, kw_only=True):
    """Of a feed-forward model. dtype, shape: of the output, a list or an object as it is, where that is several."""

    output: Any


class TokenWriter:
    """kind: shape and dtype of a token; None means that of the first. base64: lists are not wanted.

    id: of the answer, behind a prefix.

    All tokens of an answer go out in one dtype, as its beginning says: that in which they go back into the model.
    """

    def __init__(self, name: str, kind: tuple[tuple[int, ...], str] | None, *, base64: bool, id: str) -> None:
        shape, dtype = kind or ((), "float32")
        self._name = name
        self._shape: Any = shape  # and dtype: of a token, or of an output, which may be several arrays
        self._dtype: Any = dtype if dtype in DTYPES else "float32"
        self._to = None if kind is None else DTYPES[self._dtype]
        self._base64 = base64
        self._id, self._created = f"gen-{id}", int(time.time())
        self._known: Any = None  # the dtype of tokens that need no change

    def made(self, tokens: HostArray) -> HostArray:
        """Tokens [n, *token] as they go out. Raises ModelError."""
        # To NumPy None is float64, where dtypes are compared.
        if self._known is None or tokens.dtype != self._known or not tokens.flags.c_contiguous:
            tokens = plain(tokens) if self._to is None else _cast(plain(tokens), self._to)
            self._known = self._to = tokens.dtype
            self._shape, self._dtype = tokens.shape[1:], tokens.dtype.name
        return tokens

    def opening(self, form: TokenFormat) -> Opening:
        """After the first `made`, if there is one."""
        return Opening(*self._about("generation.chunk", form.raw))

    def came(self, tokens: HostArray, form: TokenFormat, scores: Scores | None = None) -> Came:
        """tokens: made."""
        return Came(self._data(tokens, form.raw), told(scores))

    def lists(self, form: TokenFormat) -> bool:
        """Is each number of a token written as text?"""
        return not (form.raw or self._base64)

    def whole(self, tokens: HostArray, kind: str, end: End, scores: Scores | None = None) -> bytes:
        """kind: one of WHOLE. tokens: [n, *token]."""
        tokens = self.made(tokens)
        if kind == NPY:
            return as_npy(tokens)
        raw = kind == MSGPACK
        found = Whole(
            *self._about("generation", raw),
            tokens=self._data(tokens, raw),
            logprobs=told(scores),
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            usage=end.usage,
        )
        return _packed(found) if raw else answers.encode(found)

    def samples(self, each: Sequence[tuple[HostArray, End, Scores | None, float | None]], kind: str) -> bytes:
        """kind: JSON or MSGPACK. each: tokens [n, *token], made; how they ended; their scores, and that of the beam."""
        raw, usages = kind == MSGPACK, [end.usage for _, end, _, _ in each]
        found = [
            TokenSample(
                self._data(tokens, raw),
                end.finish_reason,
                end.stop_reason,
                told(scores),
                None if score is None else answers.finite(score),
            )
            for tokens, end, scores, score in each
        ]
        new = sum(usage.completion_tokens for usage in usages)
        first = usages[0]
        usage = msgspec.structs.replace(first, completion_tokens=new, total_tokens=first.prompt_tokens + new)
        made = TokenSamples(*self._about("generation.samples", raw), samples=found, usage=usage)
        return _packed(made) if raw else answers.encode(made)

    def output(self, output: Any, kind: str) -> bytes:
        """output: an array, or a list, tuple or dict of them. Raises Refused."""
        output = mapped(lambda _, array: plain(array), output)
        if kind == NPY:
            if isinstance(output, (list, tuple, dict)):
                raise refused((JSON, MSGPACK), " of several arrays")
            return as_npy(output)
        raw = kind == MSGPACK
        self._dtype = mapped(lambda _, array: array.dtype.name, output)
        self._shape = mapped(lambda _, array: array.shape, output)
        data = mapped(lambda _, array: self._data(array, raw), output)
        found = TokensOutput(*self._about("output", raw), output=data)
        return _packed(found) if raw else answers.encode(found)

    def none(self) -> HostArray:
        """No tokens, of the kind that they would have."""
        return np.empty((0, *self._shape), self._dtype)

    def _about(self, object: str, raw: bool) -> tuple[Any, ...]:
        encoding = "base64" if self._base64 and not raw else None
        return self._id, object, self._created, self._name, self._dtype, self._shape, encoding

    def _data(self, tokens: HostArray, raw: bool) -> Any:
        return tokens.tobytes() if raw or self._base64 else as_lists(tokens)


def _cast(tokens: HostArray, dtype: Any) -> HostArray:
    """What the dtype cannot hold has ended its request before (`token_part`); floats are rounded."""
    if tokens.dtype.kind not in "iub" and not np.can_cast(tokens.dtype, dtype, "same_kind"):
        raise ModelError(f"The model must return tokens of {dtype.name}, as its prompts are; got {tokens.dtype.name}.")
    return tokens.astype(dtype, copy=False)


def told(scores: Scores | None) -> list[Score] | None:
    return None if scores is None else [_finite(one) for one in scores]


def _finite(one: Score) -> Score:
    if isinstance(one, list):
        return [{i: answers.finite(p) for i, p in each.items()} for each in one]
    return None if one is None else {i: answers.finite(p) for i, p in one.items()}


def about(end: End) -> dict[str, str]:
    """Headers of an answer that is an array or the model's own bytes."""
    found = {"x-finish-reason": end.finish_reason, "x-prompt-tokens": str(end.usage.prompt_tokens)}
    found["x-completion-tokens"] = str(end.usage.completion_tokens)
    if end.stop_reason is not None:
        found["x-stop-reason"] = str(end.stop_reason)
    return found
