"""The routes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NotRequired, TypedDict

from hibachi.backend.array_backend import HostArray
from hibachi.engine.streams.stream import Item
from hibachi.llm.dialects.dialects import ANTHROPIC
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.messages import answers as anthropic
from hibachi.llm.dialects.openai import answers
from hibachi.llm.dialects.openai import parse as asking
from hibachi.llm.dialects.openai.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
    read,
)
from hibachi.llm.dialects.openai.handler import CHATS, COMPLETIONS
from hibachi.llm.dialects.vectors import shortened
from hibachi.request import SamplingParams, Terms
from hibachi.server.openapi import Error
from hibachi.server.record import Record, Vectors
from hibachi.server.routes import About, Handler, Route, for_chat, for_ids, for_text, for_vectors
from hibachi.server.served import Served
from hibachi.server.streaming import answering
from hibachi.server.web.exchange import Exchange


class Tokenized(TypedDict):
    """tokens: ids. token_strs: their texts."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    prompt: str


MOST_SHOWN = 1 << 16  # tokens that are turned into text, where the context holds fewer


async def models(served: Served, x: Exchange) -> None:
    """The names that are served; in Anthropic's form for clients that send its version."""
    found: Any = [_about(served, x, name) for name in served.names]
    await x.json((anthropic if x.dialect is ANTHROPIC else answers).models(found))


async def model(served: Served, x: Exchange) -> None:
    """One of the names that are served, likewise."""
    await x.json(_about(served, x, served.named(x.params["model"])))


def _about(served: Served, x: Exchange, name: str) -> answers.Model | anthropic.AnthropicModel:
    if x.dialect is ANTHROPIC:
        return anthropic.model(name, served.created, served.max_model_len)
    keeps = served.responses.tag if served.responses.keeps else None
    return answers.model(name, served.created, served.max_model_len, served.settings.model, served.numerics, keeps)


async def embeddings(served: Served, x: Exchange) -> None:
    """A vector for each input."""
    body = read(EmbeddingBody, await served.body(x))
    name = served.check_name(body.model)
    ids = await served.read(x, served.reading.encode(asking.embedding(body, served.bounds), "input"))
    packed = body.encoding_format == "base64"

    def answer(vectors: Sequence[HostArray], tokens: int) -> Any:
        return answers.embeddings(shortened(vectors, body.dimensions), name, tokens, packed=packed)

    await answer_vectors(served, x, ids, Terms(), answer)


async def answer_vectors(
    served: Served,
    x: Exchange,
    ids: list[list[int]],
    terms: Terms,
    answer: Callable[[Sequence[HostArray], int], Any],
) -> None:
    """Answer with vectors. answer: makes the body from the vectors [hidden] of prompts and the number of their tokens.
    Raises as `answer_text`.
    """
    for own in ids:
        served.reading.check_length(own, None)
    with (
        served.record(x, SamplingParams(max_tokens=1), ids) as record,
        served.submit_vectors(ids, served.terms(terms, x.tenant, x.part)) as items,
    ):
        await answer_items(x, record, items, lambda vectors: answer(vectors, sum(map(len, ids))))


async def answer_items(
    x: Exchange, record: Record, items: list[Item[Any]], answer: Callable[[Sequence[Any]], Any]
) -> None:
    """Answer with items. answer: makes the body from the results of what was queued."""
    record.text = work = Vectors(items)

    async def whole() -> None:
        await x.json(answer([await item for item in items]))

    try:
        await x.while_here(whole(), work.close)
    finally:
        work.close()


async def cut(served: Served, x: Exchange, raw: bytes) -> None:
    """POST /tokenize: token ids of a text, or of a conversation."""
    body = read(TokenizeBody, raw)
    served.check_name(body.model)
    if body.messages is not None and body.prompt is None:
        ids = await served.read(x, served.reading.render(asking.prompt_of(body, served.bounds)))
    elif body.prompt is not None and body.messages is None:
        served.texts.prompts.check_size(body.prompt)
        [ids] = await served.read(x, served.reading.tokens([body.prompt], body.add_special_tokens))
    else:
        raise Refused("Send either prompt or messages.", param="prompt", code="missing_required_parameter")
    told: Tokenized = {"count": len(ids), "max_model_len": served.max_model_len, "tokens": ids}
    if body.return_token_strs:
        if len(ids) > (most := max(served.max_model_len, MOST_SHOWN)):
            raise Refused(f"There are {len(ids)} tokens; at most {most} are shown.", param="return_token_strs")
        told["token_strs"] = [served.vocabulary(i)[0] for i in ids]
    await x.json(told)


async def detokenize(served: Served, x: Exchange) -> None:
    """The text of token ids."""
    body = read(DetokenizeBody, await served.body(x))
    served.check_name(body.model)
    if len(body.tokens) > (most := max(served.max_model_len, MOST_SHOWN)):
        raise Refused(f"tokens has {len(body.tokens)} entries; at most {most} are served.", param="tokens")
    served.reading.check_ids(body.tokens, "tokens")
    told: Detokenized = {"prompt": served.vocabulary.text(body.tokens)}
    await x.json(told)


TEXT = "It is a truth universally acknowledged"
CONVERSATION = [{"role": "user", "content": "How do you do?"}]


def _prompt(served: Served) -> str | list[int]:
    return TEXT if for_text(served) else [1, 2, 3]


COMPLETION = About(
    CompletionBody,
    answers.CompletionAnswer,
    (answers.CompletionAnswer, Error),
    named=True,
    example=lambda served: {"prompt": _prompt(served), "max_tokens": 8},
    useful=for_ids,
)
CHAT = About(
    ChatBody,
    answers.ChatAnswer[answers.ChatChoice],
    (answers.ChatAnswer[answers.ChatPiece], Error),
    named=True,
    example=lambda served: {"messages": CONVERSATION, "max_tokens": 8},
    useful=for_chat,
)
EMBEDDINGS = About(
    EmbeddingBody,
    answers.Embeddings,
    named=True,
    example=lambda served: {"input": _prompt(served)},
    useful=for_vectors,
)


def at_engine(handler: Handler) -> Handler:
    """The handler for a path that names the model, as OpenAI's first one did and as text-inference-batcher's does. A
    model in the body comes before it.
    """

    @wraps(handler)
    async def answer(served: Served, x: Exchange) -> None:
        served.named(x.params["model"])
        await handler(served, x)

    return answer


MODELS = About(answer=(answers.Models, anthropic.AnthropicModels), dialects=(ANTHROPIC,))
MODEL = About(answer=(answers.Model, anthropic.AnthropicModel), dialects=(ANTHROPIC,), named=True)
ROUTES = (
    Route("GET", "/v1/models", models, about=MODELS),
    Route("GET", "/v1/models/{model:path}", model, about=MODEL),
    Route("POST", "/v1/completions", answering(COMPLETIONS), about=COMPLETION),
    Route("POST", "/v1/chat/completions", answering(CHATS), about=CHAT),
    Route("POST", "/v1/embeddings", embeddings, about=EMBEDDINGS),
    Route("POST", "/v1/engines/{model:path}/completions", at_engine(answering(COMPLETIONS)), about=COMPLETION),
    Route("POST", "/v1/engines/{model:path}/embeddings", at_engine(embeddings), about=EMBEDDINGS),
    Route(
        "POST",
        "/detokenize",
        detokenize,
        about=About(
            DetokenizeBody, Detokenized, named=True, example=lambda served: {"tokens": [1, 2, 3]}, useful=for_text
        ),
    ),
)
