"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from hibachi.api.asking import Asked
from hibachi.api.bodies import ChatBody, read
from hibachi.api.dialects import ANTHROPIC
from hibachi.api.errors import Refused, as_refused
from hibachi.api.messages.answers import EVENTS, MessageAnswer, TokenCount
from hibachi.api.messages.asking import chat_of, in_its_words
from hibachi.api.messages.bodies import PAGE, CountBody, MessagesBody
from hibachi.api.messages.writing import MessagesWriter
from hibachi.errors import InvalidRequest
from hibachi.serve.conversing import prepare
from hibachi.serve.openai import MESSAGES
from hibachi.serve.routes import About, Route, for_chat
from hibachi.serve.served import Served
from hibachi.serve.streaming import answer_text
from hibachi.web.exchange import Exchange


async def messages(served: Served, x: Exchange) -> None:
    """Answer a conversation, as Anthropic's API does."""
    body = read(MessagesBody, await served.body(x), PAGE)
    name = served.check_name(body.model)
    with _in_its_words():
        asked, ids = await _prepared(served, x, await served.beside(x, partial(chat_of, body)))
        full = _fit(served, asked, len(ids))
        writer = MessagesWriter(asked, name, served.vocabulary, served.fingerprint, full=full)
        await answer_text(served, x, writer, [ids])


async def count_tokens(served: Served, x: Exchange) -> None:
    """Number of tokens of a conversation that would be sent to /v1/messages."""
    body = read(CountBody, await served.body(x), PAGE)
    served.check_name(body.model)
    with _in_its_words():
        _, ids = await _prepared(served, x, await served.beside(x, partial(chat_of, body)))
    await x.json(TokenCount(len(ids)))


async def _prepared(served: Served, x: Exchange, chat: ChatBody) -> tuple[Asked, list[int]]:
    """`prepare`. An effort is a wish, which agents send to any model: many chat templates have no such setting."""
    try:
        return await prepare(served, x, chat)
    except Refused as e:
        if chat.reasoning_effort is None or e.param != "reasoning_effort":
            raise
    chat.reasoning_effort = None
    return await prepare(served, x, chat)


def _fit(served: Served, asked: Asked, prompt: int) -> bool:
    """max_tokens is what an answer has at most, and must be sent: where the context holds less, that is the limit.

    Returns whether it is.
    """
    wanted, room = asked.params.max_tokens, served.reading.prompts.context - prompt
    if wanted is None or not 1 <= room < wanted:
        return False
    asked.params, asked.limit = asked.params.with_(max_tokens=room), room
    return True


@contextmanager
def _in_its_words() -> Iterator[None]:
    """What is refused of the chat that is made of a body, is told of the body."""
    try:
        yield
    except (Refused, InvalidRequest) as e:
        raise in_its_words(as_refused(e)) from e


_HELLO = {"model": "", "messages": MESSAGES}
MESSAGE = About(
    MessagesBody,
    MessageAnswer,
    EVENTS,
    named=True,
    example=lambda served: {**_HELLO, "model": served.names[0], "max_tokens": 8},
    useful=for_chat,
)
COUNT = About(
    CountBody,
    TokenCount,
    named=True,
    asks=True,
    example=lambda served: {**_HELLO, "model": served.names[0]},
    useful=for_chat,
)
ROUTES = (
    Route("POST", "/v1/messages", messages, ANTHROPIC, about=MESSAGE),
    Route("POST", "/v1/messages/count_tokens", count_tokens, ANTHROPIC, about=COUNT),
)
