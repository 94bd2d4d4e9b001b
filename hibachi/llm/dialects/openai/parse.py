"""Converts bodies to what the engine takes, within bounds: prompts, parameters, terms."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UNSET

from hibachi.errors import InvalidRequest, shown
from hibachi.llm.chatformat.asked import as_shown, toolbox_of
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.dialects.chat import Conversation
from hibachi.llm.dialects.errors import Refused, refusing, unsupported
from hibachi.llm.dialects.forms import check_served, form_of
from hibachi.llm.dialects.openai.bodies import (
    Bounds,
    ChatBody,
    CompletionBody,
    CompletionFields,
    EmbeddingBody,
    same_fields,
)
from hibachi.llm.dialects.openai.conversation import check_values, conversation
from hibachi.llm.dialects.truncation import Truncation
from hibachi.request import SamplingParams, Terms
from hibachi.structured import StructuredOutputs

_DIGITS = re.compile(r"-?[0-9]{1,18}")
_ID = re.compile(r"[\x21-\x7e]{1,128}")
REFUSED = {
    "suffix": "Insertion is not served",
    "chat_template": "It is given at the start (--chat-template)",
    "audio": "Only text is served",
    "functions": "Use tools in its place",
    "function_call": "Use tools in its place",
    "web_search_options": "Nothing is searched",
    "moderation": "Nothing is judged",
    "prompt_embeds": "Embeddings are taken in Python only, by hibachi.LLM",
    "logprob_token_ids": "logprobs tells of the likeliest tokens",
    "repetition_detection": "Texts end at stop, at stop_token_ids and at max_tokens",
}
"""Fields that may only be null, and why."""
DEFAULTS: dict[str, tuple[Any, str]] = {
    "thinking_token_budget": (-1, "max_tokens limits reasoning and text together"),
    "stream_interval": (1, "A chunk has what came since the one before it"),
    "watermarking": (False, "Texts are not marked"),
    "routed_experts_prompt_start": (0, "The experts of a token are not told"),
    "return_token_offsets": (False, "POST /chat_tokenize tells them"),
    "return_prompt_text": (False, "POST /chat_tokenize tells it"),
    "return_mm_kwargs": (True, "Only text is served"),
    "media_io_kwargs": ({}, "Only text is served"),
    "mm_processor_kwargs": ({}, "Only text is served"),
    "vllm_xargs": ({}, "Nothing here takes them"),
    "kv_transfer_params": ({}, "Nothing is moved between servers"),
    "ec_transfer_params": ({}, "Nothing is moved between servers"),
}
"""Fields of vLLM's that may only have this value or null, and why."""
_SAME = same_fields(CompletionFields, "max_tokens", "logit_bias", "structured_outputs")


@dataclass(slots=True)
class ParsedRequest:
    """A request for text. prompts: texts or token ids; a chat has `chat` instead."""

    params: SamplingParams
    terms: Terms
    stream: bool
    usage: bool  # at the end of a stream
    usage_always: bool  # with each of its chunks
    token_ids: bool  # tell them
    logprobs: int | None = None  # how many beside the token itself
    max_tokens: int | None = None  # limit of new tokens, if one was asked for: there must be room for them
    id: str | None = None  # of its answer; None means one of ours
    prompts: list[Any] = field(default_factory=list)
    special: bool = True  # add special tokens to texts
    truncation: Truncation | None = None
    named_ids: bool = False  # log-probabilities are told of "token_id:7" in the place of texts
    echo: bool = False  # the text begins with the prompt
    front: str = ""  # of an answer to a chat: what its text begins with
    prompt_scores: bool = False  # tell the log-probabilities of the prompt apart
    unwritten: bool = False  # no new token is wanted: the one that is generated anyway is left out
    prediction: str | None = None  # what the answer may be
    predicted: list[int] | None = None  # in tokens, where the engine makes use of it
    form: str | None = None  # the field of the request that says what form the answer must have
    chat: Conversation | None = None
    include_reasoning: bool = True
    reasoning_fields: tuple[str, ...] = ()  # names under which reasoning is told in OpenAI's chats; () means it is not
    reader: AnswerReader | None = None  # of the answer to a chat; None means it is all text


def completion(body: CompletionBody, defaults: SamplingParams, bounds: Bounds) -> ParsedRequest:
    """Read the body of a completion. Raises Refused or InvalidRequest."""
    prompts = listed(body.prompt, "prompt", bounds.prompts)
    echo, none = bool(body.echo), body.max_tokens == 0
    if none:
        if not echo:
            raise Refused.at("max_tokens", " must be at least 1; 0 is for echo.")
        body.max_tokens = 1
    asked = _asked(body, defaults, bounds, body.max_tokens, body.logprobs, otherwise=16)
    asked.prompt_scores = body.prompt_logprobs is not None
    if body.prompt_logprobs is None and echo and body.logprobs is not None:
        asked.params = asked.params.with_(prompt_logprobs=body.logprobs)
    asked.prompts, asked.echo, asked.unwritten, asked.special = prompts, echo, none, body.add_special_tokens
    _check_rows(asked.params, len(prompts), bounds)
    asked.truncation = truncation(body, asked.max_tokens)
    return asked


def chat(body: ChatBody, defaults: SamplingParams, bounds: Bounds) -> ParsedRequest:
    """Read the body of a chat. Raises Refused or InvalidRequest."""
    limit = _limit(body)
    if body.modalities not in (UNSET, None, ["text"]):
        raise unsupported("modalities", "Only text is served")
    if body.verbosity not in (UNSET, None, "medium"):  # OpenAI's default
        raise unsupported("verbosity", 'The models served have no such setting, so only "medium" is')
    if body.top_logprobs and not body.logprobs:  # 0 is what many clients send with no wish at all
        raise Refused.at("top_logprobs", " needs logprobs to be true.")
    size = check_values(body.tools)
    with refusing():
        toolbox = toolbox_of(body.tools, body.tool_choice, body.parallel_tool_calls, bounds.tools)
    _check_most("top_logprobs", body.top_logprobs, bounds.logprobs)
    asked = _asked(body, defaults, bounds, limit, (body.top_logprobs or 0) if body.logprobs else None)
    _check_rows(asked.params, 1, bounds)
    form = asked.params.structured_outputs
    size = 0 if toolbox is None else size
    asked.chat = Conversation(
        conversation(body.messages, bounds.messages),
        variables_of(body, toolbox is not None),
        toolbox,
        body.reasoning_effort,
        goes_on(body.continue_final_message, body.add_generation_prompt),
        body.add_special_tokens,
        truncation(body, asked.max_tokens),
        size + (len(form.text) if isinstance(form, StructuredOutputs) else 0),
    )
    asked.include_reasoning = body.include_reasoning is not False
    last = asked.chat.messages[-1]
    if body.echo and last["role"] == "assistant":
        asked.front = last.get("content") or ""
    return asked


def variables_of(body: Any, tools: bool) -> dict[str, Any]:
    """The variables of the template that a body says. tools: they are shown."""
    found = dict(getattr(body, "chat_template_kwargs", None) or {})
    found["add_generation_prompt"] = getattr(body, "add_generation_prompt", True)
    if tools:
        found["tools"] = as_shown(body.tools or ())
    if documents := getattr(body, "documents", None):
        found["documents"] = documents
    return found


def _limit(body: ChatBody) -> int | None:
    """The most new tokens of a chat. Raises Refused."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new not in (None, old):
        raise Refused.at(
            "max_tokens", " is the old name of max_completion_tokens; they say different things. Send one of them."
        )
    named, limit = ("max_tokens", old) if new is None else ("max_completion_tokens", new)
    if limit is not None and limit < 1:
        raise Refused.at(named, f" must be an integer >= 1 (or None: no limit); got {shown(limit)}.")
    return limit


def prompt_of(body: Any, bounds: Bounds) -> Conversation:
    """The conversation of a body of which only the prompt is wanted. Raises Refused."""
    check_values(body.tools)
    with refusing():
        tools = toolbox_of(body.tools, getattr(body, "tool_choice", None)) is not None
    open_end = goes_on(getattr(body, "continue_final_message", None), getattr(body, "add_generation_prompt", True))
    return Conversation(conversation(body.messages, bounds.messages), variables_of(body, tools), open_end=open_end)


def goes_on(continue_final_message: bool | None, add_generation_prompt: bool) -> bool:
    """Whether the last message of a conversation is to be continued. Raises Refused."""
    if continue_final_message and add_generation_prompt:
        raise Refused.at(
            "continue_final_message",
            " and add_generation_prompt exclude each other: the last message goes on, or an "
            "answer begins. Send add_generation_prompt false, as true is its default.",
        )
    return bool(continue_final_message)


def truncation(body: Any, new: int | None = None) -> Truncation | None:
    """How prompts are truncated; None means not at all. new: tokens of the answer that were asked for. Raises
    Refused.
    """
    most, side = body.truncate_prompt_tokens, body.truncation_side
    if most is None:
        if side is not None:
            raise Refused.at("truncation_side", " needs truncate_prompt_tokens.")
        return None
    if most < 1 and most != -1:
        raise Refused.at(
            "truncate_prompt_tokens", f" must be at least 1, or -1 for what the context holds; got {shown(most)}."
        )
    return Truncation(None if most == -1 else most, first=side == "right", new=1 if new is None else new)


def embedding(body: EmbeddingBody, bounds: Bounds) -> list[Any]:
    """The prompts of a request for vectors. Raises Refused."""
    if body.dimensions is not None and body.dimensions < 1:
        raise Refused.at("dimensions", f" must be at least 1; got {shown(body.dimensions)}.")
    return listed(body.input, "input", bounds.prompts)


def listed(given: Any, name: str, most: int) -> list[Any]:
    """One prompt or several, each a text or token ids. Raises Refused."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise Refused.at(name, " is empty: send a text, token ids, or a list of these.", code="empty_array")
    if isinstance(given[0], int):
        if not all(isinstance(i, int) for i in given):
            raise Refused.at(name, " mixes token ids with other things.", code="invalid_type")
        return [given]
    if any(isinstance(p, int) for p in given):
        raise Refused.at(name, " mixes token ids with other things.", code="invalid_type")
    check_count(name, given, most)
    if any(not p for p in given if not isinstance(p, str)):
        raise Refused.at(name, " holds an empty list.", code="empty_array")
    return list(given)


def _asked(
    body: Any,
    defaults: SamplingParams,
    bounds: Bounds,
    limit: int | None,
    logprobs: int | None,
    *,
    otherwise: int | None = None,
) -> ParsedRequest:
    """What completions and chats say alike. limit: of new tokens, as it was asked for; else it is `otherwise`.
    logprobs: how many beside each token.
    """
    check_served(body, REFUSED, DEFAULTS)
    _check_bounds(body, bounds, logprobs)
    options = body.stream_options
    if options is not None and not body.stream:
        raise Refused.at("stream_options", " needs stream to be true.")
    if body.return_tokens_as_token_ids and logprobs is None:
        raise Refused.at("return_tokens_as_token_ids", " needs logprobs.")
    form, most = form_of(body), [n for n in (otherwise if limit is None else limit, bounds.new) if n is not None]
    more: dict[str, Any] = {"max_tokens": min(most, default=None)}
    if logprobs is not None:
        more["logprobs"] = logprobs
    if form is not None:
        more["structured_outputs"] = form[1]
    params = _params(body, defaults, more)
    return ParsedRequest(
        params,
        terms_of(body),
        stream=bool(body.stream),
        usage=bool(options and options.include_usage),
        usage_always=bool(options and options.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
        logprobs=logprobs,
        max_tokens=None if limit is None else params.max_tokens,
        id=request_id(body.request_id),
        named_ids=bool(body.return_tokens_as_token_ids),
        prediction=None if body.prediction is None else body.prediction.text,
        form=None if form is None else form[0],
    )


def _check_bounds(body: Any, bounds: Bounds, logprobs: int | None) -> None:
    """Raises Refused."""
    _check_most("n", body.n, bounds.n)
    _check_most("best_of", body.best_of, bounds.n)
    for name, count in (("logprobs", logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        _check_most(name, count, bounds.logprobs)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    check_count("stop", stops, bounds.stop)
    check_count("bad_words", body.bad_words, bounds.stop)
    for name in ("stop", "bad_words"):
        for text in (stops if name == "stop" else body.bad_words) or ():
            check_count(name, text, bounds.stop_length, "characters")
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_count(name, getattr(body, name), bounds.token_ids)
    check_count("logit_bias", body.logit_bias, bounds.bias)


def _params(body: Any, defaults: SamplingParams, more: dict[str, Any]) -> SamplingParams:
    """The defaults with what a body says. more: what it says by other names. Raises Refused."""
    changes = more | {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.include_stop_str_in_output is not None:
        changes["include_stop"] = body.include_stop_str_in_output
    if body.seed is not None:
        changes["seed"] = body.seed % 2**64  # OpenAI's may be negative
    if body.use_beam_search:
        changes["beams"] = {} if body.length_penalty is None else {"length_penalty": body.length_penalty}
    elif body.length_penalty not in (None, 1):
        raise Refused.at("length_penalty", " is of beam search: set use_beam_search, or leave it out.")
    if body.logit_bias is not None:
        changes["logit_bias"] = _bias(body.logit_bias)
    try:
        params = replace(defaults, **changes)
    except InvalidRequest as e:
        raise Refused.of(e) from None
    if body.stream and params.runs > params.n:
        raise Refused.at("best_of", " cannot be streamed: which are the best is known at the end.")
    return params


def _bias(given: dict[str, float]) -> dict[int, float]:
    if not all(_DIGITS.fullmatch(token) for token in given):
        raise Refused.at("logit_bias", " maps token ids to numbers.")
    return {int(token): value for token, value in given.items()}


def terms_of(body: Any) -> Terms:
    """The terms of a request. Raises Refused."""
    try:
        return Terms(
            body.priority or 0,
            "",
            getattr(body, "timeout", None),
            getattr(body, "queue_timeout", None),
            getattr(body, "cache_salt", None),
        )
    except InvalidRequest as e:
        raise Refused.of(e) from None


def _check_rows(params: SamplingParams, prompts: int, bounds: Bounds) -> None:
    """Before anything is made of them."""
    if (rows := prompts * params.runs) > bounds.rows:
        raise Refused(
            f"This request asks for {rows} continuations (prompts times n or best_of); at most {bounds.rows} fit in at "
            f"once.",
            param="n" if params.runs > 1 else "prompt",
            code="invalid_value",
        )


def request_id(given: str | None) -> str | None:
    if given is not None and not _ID.fullmatch(given):
        raise Refused.at("request_id", " must have 1 to 128 visible ASCII characters.")
    return given


def _check_most(name: str, given: int | None, most: int) -> None:
    if given is not None and given > most:
        raise Refused.at(name, f" must be at most {most}; got {shown(given)}.")


def check_count(name: str, given: Any, most: int, what: str = "entries") -> None:
    if given is not None and len(given) > most:
        raise Refused.at(name, f" has {len(given)} {what}; at most {most} are served.")
