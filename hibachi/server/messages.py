"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from functools import partial

from hibachi.llm.dialects.dialects import ANTHROPIC
from hibachi.llm.dialects.errors import refusing
from hibachi.llm.dialects.messages.answers import EVENTS, MessageAnswer, TokenCount
from hibachi.llm.dialects.messages.bodies import PAGE, CountBody, MessagesBody
from hibachi.llm.dialects.messages.parse import fit, in_body, request
from hibachi.llm.dialects.messages.writing import MessagesWriter
from hibachi.llm.dialects.openai.bodies import read
from hibachi.server.openai import MESSAGES
from hibachi.server.routes import About, Route, for_chat
from hibachi.server.served import Served
from hibachi.server.streaming import answer_text
from hibachi.server.web.exchange import Exchange


async def messages(served: Served, x: Exchange) -> None:
    """Answer a conversation, as Anthropic's API does."""
    body = read(MessagesBody, await served.body(x), PAGE)
    name = served.check_name(body.model)
    asked, ids = await served.read(x, request(served.model, body))
    full = fit(asked, len(ids), served.reading.prompts.context)
    writer = MessagesWriter(asked, name, served.vocabulary, served.fingerprint, full=full)
    with refusing(partial(in_body, body)):
        await answer_text(served, x, writer, [ids])


async def count_tokens(served: Served, x: Exchange) -> None:
    """Number of tokens of a conversation that would be sent to /v1/messages."""
    body = read(CountBody, await served.body(x), PAGE)
    served.check_name(body.model)
    _, ids = await served.read(x, request(served.model, body))
    await x.json(TokenCount(len(ids)))


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
