"""What a request in TGI's dialect may say; read strictly, as those of OpenAI's API are."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct

from hibachi.llm.dialects.forms import Grammar
from hibachi.llm.dialects.openai.bodies import Anything


class Parameters(Struct, kw_only=True, forbid_unknown_fields=True):
    """How to write. null is as good as nothing."""

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: Grammar | None = None
    # Known, and refused by name.
    watermark: Anything = UNSET
    adapter_id: Anything = UNSET


class GenerateBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /generate, /generate_stream, / and /tokenize. parameters: without them tokens are drawn; with {} the
    likeliest are taken. stream: what a route does anyhow; on POST / and /invocations it decides.
    """

    inputs: str
    parameters: Parameters | None = None
    stream: bool | None = None


class ChatTokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /chat_tokenize: a request for a chat, of which only what the model is shown counts."""

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    tool_prompt: str | None = None
    response_format: Any = None
    # How the answer would be written, which is not asked for.
    frequency_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    max_tokens: Any = None
    n: Any = None
    presence_penalty: Any = None
    seed: Any = None
    stop: Any = None
    stream: Any = None
    stream_options: Any = None
    temperature: Any = None
    top_logprobs: Any = None
    top_p: Any = None


_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def fields_of(body: bytes) -> frozenset[str]:
    """Which fields a JSON object has; none if it is no such thing, which whoever reads it will say."""
    try:
        return frozenset(_FIELDS.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return frozenset()
