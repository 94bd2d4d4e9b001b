"""The routes of text-generation-inference (TGI)."""

from __future__ import annotations

import time
from typing import Any

from hibachi.common.installed import version
from hibachi.errors import InvalidRequest, PromptTooLong
from hibachi.llm.dialects.dialects import OPENAI, TGI, TGI_STREAM
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai.bodies import TokenizeBody, read
from hibachi.llm.dialects.openai.handler import CHATS, COMPLETIONS
from hibachi.llm.dialects.openai.parse import prompt_of
from hibachi.llm.dialects.tgi import handler
from hibachi.llm.dialects.tgi.answers import (
    ChatTokenizeResponse,
    GenerateResponse,
    Info,
    SimpleToken,
    StreamResponse,
    simple_tokens,
)
from hibachi.llm.dialects.tgi.bodies import ChatTokenizeBody, GenerateBody, fields_of
from hibachi.llm.dialects.tgi.writing import GenerateWriter
from hibachi.request import MOST_INT
from hibachi.server import openai
from hibachi.server.openapi import TEXT, TgiError
from hibachi.server.record import Record
from hibachi.server.routes import About, Route, for_chat, for_ids, for_text
from hibachi.server.served import Served
from hibachi.server.streaming import answer_body, answer_text
from hibachi.server.web.exchange import Exchange

WORKERS = 2  # that read texts, as /info tells


async def generate(served: Served, x: Exchange) -> None:
    """Continue a text."""
    await _generate(served, x, read(GenerateBody, await served.body(x)), stream=False)


async def generate_stream(served: Served, x: Exchange) -> None:
    """Continue a text: an event for each token, and errors as events."""
    await _generate(served, x, read(GenerateBody, await served.body(x)), stream=True)


async def compatible(served: Served, x: Exchange) -> None:
    """Continue a text: one answer in a list, or a stream; with the prompt unless `return_full_text` is false."""
    await _compatible(served, x, await served.body(x))


async def invocations(served: Served, x: Exchange) -> None:
    """Amazon SageMaker's route: a request as for POST /, /v1/chat/completions or /v1/completions."""
    raw = await served.body(x)
    fields = fields_of(raw)
    if "inputs" in fields or not fields & {"messages", "prompt"}:
        await _compatible(served, x, raw)
        return
    x.dialect = OPENAI
    await answer_body(served, x, CHATS if "messages" in fields else COMPLETIONS, raw)


async def tokenize(served: Served, x: Exchange) -> None:
    """Token ids of a text, or of a conversation; with `inputs` in TGI's form, with places in the text."""
    raw = await served.body(x)
    if "inputs" not in fields_of(raw):
        await openai.cut(served, x, raw)
        return
    x.dialect = TGI
    await x.json(await _tokens(served, x, read(GenerateBody, raw).inputs, special=True))


async def chat_tokenize(served: Served, x: Exchange) -> None:
    """The text of a conversation in the model's chat template, and its tokens."""
    body = read(ChatTokenizeBody, await served.body(x))
    served.check_name(body.model)
    if body.tools and body.response_format is not None:
        raise Refused("Grammar and tools are mutually exclusive", param="tools", code="tool_error")
    if body.tool_prompt:
        raise Refused(
            "`tool_prompt` is not supported: the chat template shows the tools.",
            param="tool_prompt",
            code="unsupported_parameter",
        )
    shown = prompt_of(body, served.bounds)
    try:
        text = await served.read(x, served.reading.prompt_text(shown))
    except PromptTooLong:
        raise
    except InvalidRequest as e:
        raise Refused(str(e), param="messages", code="template_error") from None
    await x.json(ChatTokenizeResponse(await _tokens(served, x, text, special=False), _bare(served, text)))


async def info(served: Served, x: Exchange) -> None:
    """The model's name, and the most that a request may ask for."""
    limits, context = served.tgi, served.reading.prompts.context
    engine = served.what.engine.facts.limits
    room = MOST_INT if engine.max_num_queued_reqs is None else engine.rows + engine.max_num_queued_reqs
    most = limits.max_concurrent_requests
    told = Info(
        model_id=served.settings.model,
        model_sha=None,
        model_pipeline_tag="text-generation",
        max_concurrent_requests=room if most is None else most,
        max_best_of=limits.max_best_of,
        max_stop_sequences=limits.max_stop_sequences,
        max_input_tokens=limits.input(context),
        max_total_tokens=limits.total(context),
        validation_workers=WORKERS,
        max_client_batch_size=limits.max_client_batch_size,
        router="hibachi",
        version=version(),
    )
    await x.json(told)


async def health(served: Served, x: Exchange) -> None:
    """Does the engine step? An empty answer."""
    varies = {"Vary": "Accept"}  # what a browser is shown may differ
    if served.why_not_live(False) is None:
        await x.answer(b"", b"text/plain; charset=utf-8", 200, varies)
    else:
        await x.json({"error": "unhealthy", "error_type": "healthcheck"}, 503, {"Retry-After": "1", **varies})


# ---- what several of them do ---------------------------------------------------------------------------------------


async def _compatible(served: Served, x: Exchange, raw: bytes) -> None:
    body = read(GenerateBody, raw)
    x.dialect = TGI_STREAM if body.stream else TGI
    await _generate(served, x, body, stream=bool(body.stream), compatible=True)


async def _generate(served: Served, x: Exchange, body: GenerateBody, *, stream: bool, compatible: bool = False) -> None:
    """compatible: as POST / does it."""
    steps = handler.generate(
        served.model, served.check_name(None), served.words, served.tgi, body, stream=stream, root=compatible
    )
    writer, ids = await served.read(x, steps)

    def headers(record: Record) -> dict[str, str]:
        return _headers(served, writer, record)

    await answer_text(served, x, writer, ids, headers)


def _headers(served: Served, writer: GenerateWriter, record: Record) -> dict[str, str]:
    """Of a stream, which has only begun, less is known. Times are in ms, the compute time in seconds."""
    found = {
        "x-compute-type": served.numerics or "unknown",
        "x-compute-characters": str(len(writer.given.inputs)),
    }
    if record.stream:
        return found
    now, begun = time.monotonic(), record.started or record.queued
    spent = {
        "x-total-time": now - record.arrival,
        "x-validation-time": record.queued - record.arrival,
        "x-queue-time": begun - record.queued,
        "x-inference-time": now - begun,
        "x-time-per-token": (now - begun) / max(1, writer.generated),
    }
    return {
        **found,
        **{name: str(max(0, round(seconds * 1000))) for name, seconds in spent.items()},
        "x-compute-time": f"{now - record.arrival:.6f}",
        "x-prompt-tokens": str(record.prompt_tokens),
        "x-generated-tokens": str(writer.generated),
    }


async def _tokens(served: Served, x: Exchange, text: str, *, special: bool) -> list[SimpleToken]:
    served.reading.prompts.check_size(text)
    spans = await served.read(x, served.reading.spans(text, special))
    if len(spans) > (most := max(served.max_model_len, openai.MOST_SHOWN)):
        raise Refused(f"There are {len(spans)} tokens; at most {most} are shown.", param="inputs")
    return simple_tokens(_bare(served, text), spans)


def _bare(served: Served, text: str) -> str:
    return str(served.texts.tokenizer.bare(text))


def _example(served: Served) -> dict[str, Any]:
    return {"inputs": openai.TEXT, "parameters": {"max_new_tokens": 8}}


LISTED = list[GenerateResponse]
EVENTS = (StreamResponse, TgiError)
GENERATE = About(GenerateBody, GenerateResponse, example=_example, useful=for_text)
GENERATE_STREAM = About(GenerateBody, None, EVENTS, example=_example, useful=for_text)
COMPATIBLE = About(GenerateBody, LISTED, EVENTS, dialects=(TGI_STREAM,), example=_example, useful=for_text)
INVOCATIONS = About(
    (GenerateBody, openai.COMPLETION.body, openai.CHAT.body),
    (LISTED, openai.COMPLETION.answer, openai.CHAT.answer),
    (*EVENTS, *openai.COMPLETION.events, *openai.CHAT.events),
    dialects=(TGI_STREAM, OPENAI),
    named=True,
    example=_example,
    useful=for_text,
)
TOKENIZE = About(
    (GenerateBody, TokenizeBody),
    (list[SimpleToken], openai.Tokenized),
    dialects=(TGI,),
    named=True,
    asks=True,
    example=lambda served: {"prompt": openai.TEXT},
    useful=for_text,
)
CHAT_TOKENIZE = About(
    ChatTokenizeBody,
    ChatTokenizeResponse,
    named=True,
    asks=True,
    example=lambda served: {"messages": openai.CONVERSATION},
    useful=for_chat,
)
HEALTH = About(writes={"text/plain": TEXT}, unwell=TgiError)
ROUTES = (
    Route("POST", "/generate", generate, TGI, about=GENERATE),
    Route("POST", "/generate_stream", generate_stream, TGI_STREAM, about=GENERATE_STREAM),
    Route("POST", "/", compatible, TGI, about=COMPATIBLE),
    Route("POST", "/invocations", invocations, TGI, about=INVOCATIONS),
    Route("POST", "/tokenize", tokenize, about=TOKENIZE),
    Route("POST", "/chat_tokenize", chat_tokenize, TGI, about=CHAT_TOKENIZE),
    Route("GET", "/info", info, TGI, about=About(answer=Info, useful=for_ids)),
    Route("GET", "/", health, TGI, keyed=False, about=HEALTH),
    Route("GET", "/ping", health, TGI, keyed=False, about=HEALTH),
)
