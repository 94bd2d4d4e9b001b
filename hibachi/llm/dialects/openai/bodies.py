"""Bodies of requests: JSON as typed records, read strictly.

An unknown field is refused by its name, but not within records that are Extensible. A known one that has no effect here
although its sender would expect one is refused, too.
Fields in IGNORED do not affect the answer.
"""

from __future__ import annotations

import difflib
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from hibachi.errors import MOST_SHOWN, FieldPath
from hibachi.llm.chatformat.errors import UNSUPPORTED
from hibachi.llm.chatformat.history import HALF, whole_letters
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.expected import choices, same
from hibachi.llm.dialects.extensible import Extensible, without_unknown
from hibachi.llm.dialects.forms import Backend, Format, Schema, Structured
from hibachi.llm.dialects.json_limits import at_once
from hibachi.request import SamplingParams

T = TypeVar("T")
Anything = Any | UnsetType


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest values that a request may ask for."""

    n: int = 128  # continuations of a prompt, best_of likewise
    prompts: int = 1024  # of one request
    logprobs: int = 20
    stop: int = 16  # strings
    stop_length: int = 1024  # characters of one
    bias: int = 1024  # entries of logit_bias
    token_ids: int = 4096  # of stop_token_ids or allowed_token_ids
    messages: int = 16384
    tools: int = 1024
    rows: int = 4096  # continuations of all prompts of a request
    new: int | None = None  # new tokens of a continuation: the most that it gets, whatever it asks for


class StreamOptions(Extensible):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | UnsetType = UNSET


class TextPart(Extensible):
    type: Literal["text"]
    text: str


class Prediction(Struct, forbid_unknown_fields=True):
    """What an answer may be: OpenAI's predicted outputs."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Sampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of every request for tokens: of `SamplingParams` and `Terms` by the same names, and three more."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    num_speculative_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    request_id: str | None = None


def same_fields(body: type[Struct], *but: str) -> tuple[str, ...]:
    """Fields of a body that `SamplingParams` has by the same name, without those that are converted first."""
    known = SamplingParams.__dataclass_fields__.keys() - {*but}
    return tuple(name for name in body.__struct_fields__ if name in known)


class _Ignored(Struct, kw_only=True):
    user: Anything = UNSET
    store: Anything = UNSET
    metadata: Anything = UNSET
    service_tier: Anything = UNSET
    safety_identifier: Anything = UNSET
    prompt_cache_key: Anything = UNSET
    prompt_cache_retention: Anything = UNSET
    prompt_cache_options: Anything = UNSET
    session_id: Anything = UNSET


IGNORED: tuple[str, ...] = _Ignored.__struct_fields__
"""Fields of OpenAI's and vLLM's APIs that may be sent and change nothing."""


class CompletionFields(Sampling, kw_only=True, forbid_unknown_fields=True):
    """Fields of both kinds of completion. Those that OpenAI does not have are vLLM's, by the same names."""

    # Those of IGNORED.
    user: Anything = UNSET
    store: Anything = UNSET
    metadata: Anything = UNSET
    service_tier: Anything = UNSET
    safety_identifier: Anything = UNSET
    prompt_cache_key: Anything = UNSET
    prompt_cache_retention: Anything = UNSET
    prompt_cache_options: Anything = UNSET
    session_id: Anything = UNSET
    # The others.
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    best_of: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    prediction: Prediction | None = None
    spaces_between_special_tokens: bool | None = None  # the tokenizers put no spaces there, whatever it says
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    # What form the answer must have: at most one of these; see `hibachi.llm.dialects.forms`.
    response_format: Format | None = None
    structured_outputs: Structured | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None  # llama.cpp's, as the next one
    json_schema: Schema | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Backend | None = None  # it has no effect
    use_beam_search: bool | None = None  # n beams
    length_penalty: float | None = None
    # As their default only: see `parse.DEFAULTS`.
    thinking_token_budget: int | None = None
    stream_interval: int | None = None
    watermarking: bool | None = None
    routed_experts_prompt_start: int | None = None
    return_token_offsets: bool | None = None
    return_mm_kwargs: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    # Known, and refused by name.
    logprob_token_ids: Anything = UNSET
    repetition_detection: Anything = UNSET


class CompletionBody(CompletionFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. At most one field says what form the answer must have: response_format,
    structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar, grammar or json_schema.
    """

    prompt: str | list[int | str | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True
    prompt_embeds: Anything = UNSET
    suffix: Anything = UNSET


class ChatBody(CompletionFields, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions. At most one field says what form the answer must have: response_format,
    structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar, grammar or json_schema.
    """

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    add_special_tokens: bool = False
    documents: list[dict[str, Any]] | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    return_prompt_text: bool | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Anything = UNSET
    audio: Anything = UNSET
    functions: Anything = UNSET
    function_call: Anything = UNSET
    verbosity: Anything = UNSET
    web_search_options: Anything = UNSET
    moderation: Anything = UNSET


class EmbeddingBody(_Ignored, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings"""

    input: str | list[int | str | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class _Ranking(_Ignored, kw_only=True):
    """Fields of routes that compare texts; vLLM's."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int | None = None
    request_id: str | None = None
    use_activation: bool | None = None


class ScoreBody(_Ranking, kw_only=True, forbid_unknown_fields=True):
    """POST /score: two texts, or lists of them, under one of four pairs of names."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class Document(Struct, forbid_unknown_fields=True):
    text: str


class RerankBody(_Ranking, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank"""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None


class ClassifyBody(_Ignored, kw_only=True, forbid_unknown_fields=True):
    """POST /classify. input: one or several, see `hibachi.llm.dialects.ranking.inputs`."""

    input: msgspec.Raw
    model: str | None = None
    use_activation: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    timeout: float | None = None
    queue_timeout: float | None = None


class WarmBody(_Ignored, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/warm: a text, or a conversation."""

    model: str | None = None
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    pin: bool | None = None
    importance: float | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    timeout: float | None = None
    queue_timeout: float | None = None


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]


PAGE = "docs/serving.md"
_STEPS = re.compile(r"\[(\d+)\]|\[(\.\.\.)\]|([^.\[\]]+)")
_AT = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_NO_CHOICE = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_NONE = re.compile(r"Invalid value ('.*')", re.DOTALL)  # of the field that tells types of objects apart


def read(kind: type[T], body: bytes, page: str = PAGE) -> T:
    """Read a body from JSON. page: the page that lists the fields. Raises Refused, which names the field."""
    try:
        with at_once(len(body)):
            try:
                return msgspec.json.decode(body, type=kind)
            except msgspec.ValidationError as e:
                value = msgspec.json.decode(body) if _UNKNOWN.search(str(e)) else None
                return taken(kind, _extended(e, kind, page, value), page)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        if (whole := _whole(body)) != body:
            return read(kind, whole, page)
        raise Refused(f"The body must be valid JSON in UTF-8: {e}.", code="invalid_json") from None
    except RecursionError:
        raise Refused("The body is nested too deep.", code="invalid_json") from None


def _whole(body: bytes) -> bytes:
    """A body whose texts have halves of surrogate pairs, without these; or the body."""
    with suppress(ValueError, RecursionError):
        if HALF.search(text := body.decode()):
            return whole_letters(json.loads(text)).encode()
    return body


def taken(kind: type[T], value: Any, page: str = PAGE, within: FieldPath = ()) -> T:
    """Read a body, or what stands at the place `within` of one, from parsed JSON: dictionaries, lists, texts, numbers.
    Raises Refused, as `read` does.

    Where a field may hold anything, the record holds what was given, not a copy.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        return taken(kind, _extended(e, kind, page, value, within), page, within)


def _extended(error: msgspec.ValidationError, kind: Any, page: str, value: Any, within: FieldPath = ()) -> Any:
    """The value without what clients may add, if that is what is wrong with it. Raises Refused if it is not."""
    kept = without_unknown(kind, value, within) if _UNKNOWN.search(str(error)) else value
    if kept == value:
        raise refused_by(error, kind, page, within) from None
    return kept


def refused_by(error: msgspec.ValidationError, kind: Any, page: str = PAGE, within: FieldPath = ()) -> Refused:
    """What names the field. kind: the type that was read; within: where in the body that stands."""
    text = str(error)
    at = _AT.search(text)
    inner = at[1] if at else ""
    path = (*within, *path_of(inner))
    what = text[: at.start()] if at else text
    if unknown := _UNKNOWN.search(what):
        own = unknown[1][:MOST_SHOWN]
        known = () if path else getattr(kind, "__struct_encode_fields__", ())
        may = f" (did you mean {near[0]}?)" if (near := difflib.get_close_matches(own, known, 1)) else ""
        may = f", and {found} says the same" if known and (found := same(kind, own)) else may
        return Refused(
            "Unknown field: ",
            (*path, own),
            f". There is none of that name here{may}; {page} lists them.",
            param=(*path, own),
            code="unknown_parameter",
        )
    if missing := re.search(r"missing required field `(.*)`", what):
        path = (*path, missing[1])
        return Refused("The field ", path, " is missing.", param=path, code="missing_required_parameter")
    if path and (none := _NONE.fullmatch(what)):
        value = none[1][:MOST_SHOWN]
        return Refused.at(path, f" is not supported as {value}; {page} lists what it may be.", code=UNSUPPORTED)
    if inner and (got := _NO_CHOICE.fullmatch(what)) and (values := choices(kind, inner)):
        what = f"expected {' or '.join(map(repr, values))}; got {got[1]}"
    return Refused(path or "The body", f": {what[:MOST_SHOWN]}.", param=path or None, code="invalid_type")


def path_of(place: str) -> FieldPath:
    """The path of a place such as "messages[0].content[...]", as msgspec tells it."""
    return tuple(int(index) if index else key or name for index, key, name in _STEPS.findall(place))
