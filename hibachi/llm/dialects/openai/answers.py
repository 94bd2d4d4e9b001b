"""Bodies of answers: OpenAI's completions, chats, embeddings and models, whole and in chunks."""

from __future__ import annotations

import base64
import codecs
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypedDict, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

StopReason = str | int | None | UnsetType
"""vLLM's field beside finish_reason: the stop string or the id of stop_token_ids that ended the text, null for anything
else; not in chunks before the end.
"""
Logprobs = Sequence[dict[int, float] | None]
NEAR = 8  # characters behind its place in which a token's text is looked for
C = TypeVar("C")
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def encode(answer: Any) -> bytes:
    return _encode(answer)


def encode_line(answer: Any) -> bytes:
    """`encode` for a line of a stream. Characters at which Python's splitlines, and so some clients, would break it are
    escaped: U+2028, U+2029 and U+0085.
    """
    found = _encode(answer)
    if b"\xe2\x80" in found or b"\xc2\x85" in found:
        for raw, escaped in _BREAKS:
            found = found.replace(raw, escaped)
    return found


_BREAKS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def event(answer: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + encode_line(answer) + b"\n\n"


class Usage(Struct, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None
    completion_tokens_details: dict[str, int] | None = None

    @property
    def cached(self) -> int:
        """Of the prompt, tokens that were found in the cache, if that is reported."""
        return (self.prompt_tokens_details or {}).get("cached_tokens", 0)

    @property
    def reasoning(self) -> int | None:
        """Of the new tokens, those of the reasoning; None means it is not told from the text."""
        return (self.completion_tokens_details or {}).get("reasoning_tokens")


def usage(
    prompt: int,
    new: int,
    cached: int | None = None,
    predicted: tuple[int, int] | None = None,
    reasoning: int | None = None,
) -> Usage:
    """predicted: tokens of a prediction that were proposed, and were drawn or were not; None means there was none.
    reasoning: tokens of it; None means the model's reasoning is not told from its text.
    """
    used = Usage(prompt, new, prompt + new, None if cached is None else {"cached_tokens": cached})
    details = {} if reasoning is None else {"reasoning_tokens": reasoning}
    if predicted is not None:
        names = "accepted_prediction_tokens", "rejected_prediction_tokens"
        details |= dict(zip(names, predicted, strict=True))
    used.completion_tokens_details = details or None
    return used


class TokenTexts:
    """The text of tokens. raw: the bytes of an id. text: of ids, special tokens included."""

    text: Callable[[Sequence[int]], str]

    def __init__(self, raw: Callable[[int], bytes], text: Callable[[Sequence[int]], str]) -> None:
        self._raw, self.text = raw, text
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token: int) -> tuple[str, list[int]]:
        """Text and bytes of a token. Bytes that are no text alone are shown as OpenAI does: "bytes:\\xe2"."""
        found = self._known.get(token)
        if found is None:
            raw = self._raw(token)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{b:02x}" for b in raw)
            found = self._known[token] = text, list(raw)
        return found


# ---- completions -------------------------------------------------------------------------------------------------


class TextOffsets:
    """Where in a text its tokens begin, in characters, as both come. at: the beginning of the text.

    A token without a text of its own there (a special one, a part of a letter, one behind a stop string) begins where
    the text before it ends.
    """

    def __init__(self, vocabulary: TokenTexts, at: int = 0) -> None:
        self._vocabulary, self._at = vocabulary, at
        self._letters = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, ids: Sequence[int], text: str) -> list[int]:
        """Of the next tokens, with the text that they complete."""
        found, at = list[int](), 0
        for token in ids:
            found.append(self._at + at)
            own = self._letters.decode(bytes(self._vocabulary(token)[1]))
            bare = own.lstrip(" ")  # at a beginning some tokenizers drop a space
            if own and text.startswith(own, at):
                at += len(own)
            elif bare and (begin := text.find(bare, at, at + len(own) + NEAR)) >= 0:
                at = begin + len(bare)
        self._at += len(text)
        return found


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, omit_defaults=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: list[Any] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    stop_reason: StopReason = UNSET


class CompletionAnswer(Struct, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


def _name(token: int, vocabulary: TokenTexts, named_ids: bool) -> str:
    return f"token_id:{token}" if named_ids else vocabulary(token)[0]


def completion_logprobs(
    ids: Sequence[int],
    scores: Logprobs,
    most: int,
    vocabulary: TokenTexts,
    offsets: list[int],
    *,
    named_ids: bool = False,
) -> CompletionLogprobs:
    """The log-probabilities of a completion. offsets: of `TextOffsets`. named_ids: tokens are named "token_id:7"
    instead of by text.
    """
    out = CompletionLogprobs([], [], [], offsets)
    for token, by_id in zip(ids, scores, strict=True):
        out.tokens.append(_name(token, vocabulary, named_ids))
        out.token_logprobs.append(None if by_id is None else finite(by_id[token]))
        if by_id is None:
            out.top_logprobs.append(None)
        else:
            top: dict[str, float] = {}
            for i, p in [*likeliest(by_id, most), (token, by_id[token])]:
                top.setdefault(_name(i, vocabulary, named_ids), finite(p))  # of those that look alike, the likeliest
            out.top_logprobs.append(top)
    return out


def joined(parts: Sequence[CompletionLogprobs | None]) -> CompletionLogprobs:
    """One behind the other."""
    some = [part for part in parts if part is not None]
    return CompletionLogprobs(
        [token for part in some for token in part.tokens],
        [score for part in some for score in part.token_logprobs],
        [top for part in some for top in part.top_logprobs],
        [at for part in some for at in part.text_offset],
    )


# ---- chats -------------------------------------------------------------------------------------------------------


class TokenLogprob(Struct, omit_defaults=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Any] | None = None


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class Function(Struct):
    """arguments: JSON in a text."""

    name: str
    arguments: str


class ToolCall(Struct, omit_defaults=True):
    """incomplete: the answer ended within this call, and `arguments` is only their beginning."""

    id: str
    type: Literal["function"] | UnsetType  # or the value would be left out
    function: Function
    incomplete: bool = False


class ChatMessage(Struct):
    """content: null where there are only calls. reasoning_content, reasoning: one of them, or both, by a setting."""

    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChoice(Struct, omit_defaults=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None
    stop_reason: StopReason = UNSET


class ChatAnswer(Struct, Generic[C], omit_defaults=True):
    """C: ChatChoice, or ChatPiece in a chunk."""

    id: str
    object: str
    created: int
    model: str
    choices: list[C]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(Struct, omit_defaults=True):
    name: str | UnsetType
    arguments: str


class ToolCallDelta(Struct, omit_defaults=True):
    """A piece of a call. id, type and the name come with its first. incomplete: see `ToolCall`."""

    index: int
    id: str | UnsetType
    type: Literal["function"] | UnsetType
    function: FunctionDelta
    incomplete: bool = False


class Delta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatPiece(Struct, omit_defaults=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None
    stop_reason: StopReason = UNSET


def chat_logprobs(
    ids: Sequence[int], scores: Logprobs, most: int, vocabulary: TokenTexts, *, named_ids: bool = False
) -> ChatLogprobs:
    """The log-probabilities of a chat. named_ids: tokens are named "token_id:7" instead of by text; their bytes are
    those of the texts.
    """

    def told(token: int, p: float, top: list[Any] | None = None) -> TokenLogprob:
        return TokenLogprob(_name(token, vocabulary, named_ids), finite(p), vocabulary(token)[1], top)

    content = []
    for token, by_id in zip(ids, scores, strict=True):
        assert by_id is not None
        top = [told(i, p) for i, p in likeliest(by_id, most)]
        content.append(told(token, by_id[token], top))
    return ChatLogprobs(content)


def prompt_scores(scores: Logprobs, vocabulary: TokenTexts) -> list[Any]:
    """vLLM's prompt_logprobs: {id: {"logprob", "rank", "decoded_token"}} for each token of the prompt, null for the
    first.
    """
    out: list[Any] = []
    for by_id in scores:
        ranked = sorted((by_id or {}).items(), key=lambda item: -item[1])
        told = {
            str(i): {"logprob": finite(p), "rank": rank, "decoded_token": vocabulary(i)[0]}
            for rank, (i, p) in enumerate(ranked, 1)
        }
        out.append(None if by_id is None else told)
    return out


def likeliest(by_id: dict[int, float], most: int) -> list[tuple[int, float]]:
    return sorted(by_id.items(), key=lambda item: -item[1])[:most]


def finite(p: float) -> float:
    """A finite number: JSON has no infinity, and OpenAI writes -9999 for impossible tokens."""
    return max(float(p), -9999.0)


# ---- others ------------------------------------------------------------------------------------------------------


class Model(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    numerics: str | None
    server: str | None


class Models(TypedDict):
    object: str
    data: list[Model]


class VectorsUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """embedding: numbers, or base64 of them as little-endian float32."""

    object: str
    index: int
    embedding: list[float] | str


class Embeddings(TypedDict):
    object: str
    data: list[Embedding]
    model: str
    usage: VectorsUsage


def models(found: Sequence[Model]) -> Models:
    return {"object": "list", "data": list(found)}


def model(
    name: str,
    created: int,
    max_model_len: int | None,
    root: str,
    numerics: str | None = None,
    server: str | None = None,
) -> Model:
    """The entry of a model. numerics: the name of the bits that it computes; replicas with one name give one answer.
    server: what the ids of responses have in them that are kept there, so that a router knows where they are.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "hibachi",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
        "numerics": numerics,
        "server": server,
    }


class Warmed(Struct, kw_only=True):
    """The answer to /v1/warm, in kvboost's words: its chunks are the blocks of the cache."""

    status: str = "warmed"
    chars: int
    token_count: int
    chunk_size: int
    chunks_stored: int  # that were not there
    chunk_boundary_aligned: bool
    partial_tail_tokens: int
    alignment_warning: str | None
    pinned_tokens: int | None = None
    id: str
    model: str
    usage: Usage


class Well(Struct):
    numerics: str | None
    status: str = "ok"


class Unwell(Struct):
    reason: str
    status: str = "unavailable"


class Version(Struct):
    version: str


class Load(Struct):
    """The answer to /load, as vLLM's."""

    server_load: int


class Forgotten(Struct):
    success: bool


class CacheEvent(Struct):
    """name: of a block, in hexadecimal digits."""

    number: int
    event: str
    tier: str
    name: str


class CacheEvents(Struct):
    """next: the number to ask from."""

    events: list[CacheEvent]
    next: int


def embeddings(vectors: Sequence[Any], name: str, tokens: int, *, packed: bool) -> Embeddings:
    """The answer with vectors. vectors: float32 arrays [hidden]. packed: as base64 of little-endian float32."""

    def told(v: Any) -> Any:
        return base64.b64encode(v.astype("<f4").tobytes()).decode() if packed else [float(x) for x in v]

    data: list[Embedding] = [{"object": "embedding", "index": i, "embedding": told(v)} for i, v in enumerate(vectors)]
    return {
        "object": "list",
        "data": data,
        "model": name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
