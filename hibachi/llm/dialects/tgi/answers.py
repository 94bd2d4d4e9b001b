"""What TGI's answers look like. Fields that may be left out are UNSET; the others are null where there is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from msgspec import UNSET, Struct, UnsetType


class Token(Struct, gc=False):
    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(Struct, gc=False):
    id: int
    text: str
    logprob: float | None


class StreamDetails(Struct):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(Struct):
    """An event. generated_text, details: of the last one only."""

    index: int
    token: Token
    generated_text: str | None = None
    details: StreamDetails | None = None
    top_tokens: list[Token] | UnsetType = UNSET


class BestOfSequence(Struct):
    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(Struct):
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET


class GenerateResponse(Struct):
    generated_text: str
    details: Details | UnsetType = UNSET


class SimpleToken(Struct, gc=False):
    """start, stop: bytes of the text in UTF-8 that it stands for."""

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(Struct):
    tokenize_response: list[SimpleToken]
    templated_text: str


class Info(Struct):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None = None
    docker_label: str | None = None


def simple_tokens(text: str, spans: Sequence[tuple[int, int, int]]) -> list[SimpleToken]:
    """spans: ids with the characters of `text` that each stands for; see `Tokenizer.spans`."""
    if text.isascii():
        return [SimpleToken(i, text[begin:end], begin, end) for i, begin, end in spans]
    at = [0, *accumulate(len(c.encode(errors="replace")) for c in text)]
    return [SimpleToken(i, text[begin:end], at[begin], at[end]) for i, begin, end in spans]
