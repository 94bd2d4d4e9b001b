"""From bodies to what the engine is asked: prompts, parameters, terms; within bounds."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UNSET

from hibachi.api.bodies import Bounds, ChatBody, CompletionBody, EmbeddingBody
from hibachi.api.conversation import conversation
from hibachi.api.errors import Refused
from hibachi.errors import InvalidRequest, shown
from hibachi.request import SamplingParams, Terms

_DIGITS = re.compile(r"-?[0-9]{1,18}")
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LATER = "Guided decoding is not served yet"
REFUSED = {
    "suffix": "Insertion is not served",
    "guided_json": _LATER,
    "guided_regex": _LATER,
    "guided_choice": _LATER,
    "guided_grammar": _LATER,
    "structured_outputs": _LATER,
    "chat_template": "It is given at the start (--chat-template)",
    "audio": "Only text is served",
    "functions": "Use tools in its place",
    "function_call": "Use tools in its place",
    "reasoning_effort": "The models served have no such setting",
    "verbosity": "The models served have no such setting",
    "web_search_options": "Nothing is searched",
}
_SAME = (  # fields of SamplingParams by the same name
    "temperature",
    "top_p",
    "n",
    "best_of",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "stop",
)


@dataclass(slots=True)
class Asked:
    """A request for text. prompts: texts or token ids; a chat has none yet, but messages."""

    params: SamplingParams
    terms: Terms
    stream: bool
    usage: bool  # at the end of a stream
    usage_always: bool  # with each of its chunks
    token_ids: bool  # tell them
    logprobs: int | None = None  # how many beside the token itself
    limit: int | None = None  # of new tokens, if one was asked for: for these there must be room
    id: str | None = None  # of its answer; None: one of ours
    prompts: list[Any] = field(default_factory=list)
    special: bool = True  # add special tokens to texts
    echo: bool = False
    prompt_scores: bool = False  # tell the log-probabilities of the prompt apart
    unwritten: bool = False  # no new token is wanted: the one that is made anyhow is left out
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)  # variables for the chat template


def completion(body: CompletionBody, defaults: SamplingParams, bounds: Bounds) -> Asked:
    """Raises Refused or InvalidRequest."""
    prompts = listed(body.prompt, "prompt", bounds.prompts)
    echo, none = bool(body.echo), body.max_tokens == 0
    if none:
        if not echo:
            raise Refused("max_tokens must be at least 1; 0 is for echo.", param="max_tokens", code="invalid_value")
        body.max_tokens = 1
    asked = _asked(body, defaults, bounds, body.max_tokens or 16, body.logprobs)
    asked.prompt_scores = body.prompt_logprobs is not None
    if body.prompt_logprobs is None and echo and body.logprobs is not None:
        asked.params = asked.params.with_(prompt_logprobs=body.logprobs)
    asked.prompts, asked.echo, asked.unwritten, asked.special = prompts, echo, none, body.add_special_tokens
    _check_rows(asked.params, len(prompts), bounds)
    asked.limit = None if body.max_tokens is None else asked.params.max_tokens
    return asked


def chat(body: ChatBody, defaults: SamplingParams, bounds: Bounds) -> Asked:
    """Raises Refused or InvalidRequest."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise Refused(
            "max_tokens is the old name of max_completion_tokens; they say different things. Send one of them.",
            param="max_tokens",
            code="invalid_value",
        )
    if body.modalities not in (UNSET, None, ["text"]):
        raise _no("modalities", "Only text is served")
    if body.top_logprobs is not None and not body.logprobs:
        raise Refused("top_logprobs needs logprobs to be true.", param="top_logprobs", code="invalid_value")
    if body.tool_choice not in (None, "none", "auto"):
        raise _no("tool_choice", f"{_LATER}, so a tool cannot be demanded: 'auto' and 'none' are")
    named, limit = "max_tokens", body.max_tokens
    if body.max_completion_tokens is not None:
        named, limit = "max_completion_tokens", body.max_completion_tokens
    if limit is not None and limit < 1:
        raise Refused(
            f"{named} must be an integer >= 1 (or None: no limit); got {shown(limit)}.",
            param=named,
            code="invalid_value",
        )
    _check_most("top_logprobs", body.top_logprobs, bounds.logprobs)
    asked = _asked(body, defaults, bounds, limit, (body.top_logprobs or 0) if body.logprobs else None)
    _check_rows(asked.params, 1, bounds)
    asked.limit = None if limit is None else asked.params.max_tokens
    asked.messages = conversation(body.messages, bounds.messages)
    asked.template = dict(body.chat_template_kwargs or {})
    asked.template["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        raise _no("continue_final_message", "An answer always begins anew")
    if body.tools and body.tool_choice != "none":
        asked.template["tools"] = body.tools
    return asked


def embedding(body: EmbeddingBody, bounds: Bounds) -> list[Any]:
    """The prompts. Raises Refused."""
    if body.dimensions is not None:
        raise _no("dimensions", "A vector has as many numbers as the model's hidden states")
    return listed(body.input, "input", bounds.prompts)


def listed(given: Any, name: str, most: int) -> list[Any]:
    """One prompt or several, each a text or token ids. Raises Refused."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise Refused(f"{name} is empty: send a text, token ids, or a list of these.", param=name, code="empty_array")
    if isinstance(given[0], int):
        if not all(isinstance(i, int) for i in given):
            raise Refused(f"{name} mixes token ids with other things.", param=name, code="invalid_type")
        return [given]
    if any(isinstance(p, int) for p in given):
        raise Refused(f"{name} mixes token ids with other things.", param=name, code="invalid_type")
    _check_count(name, given, most)
    if any(not p for p in given if not isinstance(p, str)):
        raise Refused(f"{name} holds an empty list.", param=name, code="empty_array")
    return list(given)


def _asked(body: Any, defaults: SamplingParams, bounds: Bounds, limit: int | None, logprobs: int | None) -> Asked:
    for name, why in REFUSED.items():
        if getattr(body, name, UNSET) not in (UNSET, None):
            raise _no(name, why)
    form = body.response_format
    if form not in (UNSET, None) and not (isinstance(form, dict) and form.get("type") == "text"):
        raise _no("response_format", f"{_LATER}: only {{'type': 'text'}} is")
    _check_most("n", body.n, bounds.n)
    _check_most("best_of", body.best_of, bounds.n)
    for name, count in (("logprobs", logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        _check_most(name, count, bounds.logprobs)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    _check_count("stop", stops, bounds.stop)
    _check_count("bad_words", body.bad_words, bounds.stop)
    for name in ("stop", "bad_words"):
        for text in (stops if name == "stop" else body.bad_words) or ():
            _check_count(name, text, bounds.stop_length, "characters")
    for name in ("stop_token_ids", "allowed_token_ids"):
        _check_count(name, getattr(body, name), bounds.token_ids)
    _check_count("logit_bias", body.logit_bias, bounds.bias)
    if body.stream_options is not None and not body.stream:
        raise Refused("stream_options needs stream to be true.", param="stream_options", code="invalid_value")
    changes = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    most = [n for n in (limit, bounds.new) if n is not None]
    changes["max_tokens"] = min(most, default=None)
    if body.include_stop_str_in_output is not None:
        changes["include_stop"] = body.include_stop_str_in_output
    if body.seed is not None:
        changes["seed"] = body.seed % 2**64  # OpenAI's may be negative
    if body.logit_bias is not None:
        changes["logit_bias"] = _bias(body.logit_bias)
    if logprobs is not None:
        changes["logprobs"] = logprobs
    try:
        params = replace(defaults, **changes)
        terms = Terms(body.priority or 0, "", body.timeout, body.queue_timeout, body.cache_salt)
    except InvalidRequest as e:
        raise Refused(str(e), param=str(e).partition(" ")[0], code="invalid_value") from None
    if body.stream and params.runs > params.n:
        raise Refused(
            "best_of cannot be streamed: which are the best is known at the end.", param="best_of", code="invalid_value"
        )
    options = body.stream_options
    return Asked(
        params,
        terms,
        stream=bool(body.stream),
        usage=bool(options and options.include_usage),
        usage_always=bool(options and options.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
        logprobs=logprobs,
        id=_request_id(body.request_id),
    )


def _bias(given: dict[str, float]) -> dict[int, float]:
    if not all(_DIGITS.fullmatch(token) for token in given):
        raise Refused("logit_bias maps token ids to numbers.", param="logit_bias", code="invalid_value")
    return {int(token): value for token, value in given.items()}


def _check_rows(params: SamplingParams, prompts: int, bounds: Bounds) -> None:
    """Before anything is made of them."""
    if (rows := prompts * params.runs) > bounds.rows:
        raise Refused(
            f"This request asks for {rows} continuations (prompts times n or best_of); at most {bounds.rows} fit in at "
            f"once.",
            param="n" if params.runs > 1 else "prompt",
            code="invalid_value",
        )


def _request_id(given: str | None) -> str | None:
    if given is not None and not _ID.fullmatch(given):
        raise Refused(
            "request_id must have 1 to 128 visible ASCII characters.", param="request_id", code="invalid_value"
        )
    return given


def _check_most(name: str, given: int | None, most: int) -> None:
    if given is not None and given > most:
        raise Refused(f"{name} must be at most {most}; got {shown(given)}.", param=name, code="invalid_value")


def _check_count(name: str, given: Any, most: int, what: str = "entries") -> None:
    if given is not None and len(given) > most:
        raise Refused(f"{name} has {len(given)} {what}; at most {most} are served.", param=name, code="invalid_value")


def _no(name: str, why: str) -> Refused:
    return Refused(f"{name} is not supported: {why}.", param=name, code="unsupported_parameter")
