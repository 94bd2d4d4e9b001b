"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from hibachi.llm.dialects.dialects import ANTHROPIC
from hibachi.llm.dialects.messages.answers import EVENTS, MessageAnswer, TokenCount
from hibachi.llm.dialects.messages.bodies import PAGE, CountBody, MessagesBody
from hibachi.llm.dialects.messages.handler import MESSAGES, count
from hibachi.llm.dialects.openai.bodies import read
from hibachi.server.openai import CONVERSATION
from hibachi.server.routes import About, Route, for_chat
from hibachi.server.served import Served
from hibachi.server.streaming import answering
from hibachi.server.web.exchange import Exchange


async def count_tokens(served: Served, x: Exchange) -> None:
    """Number of tokens of a conversation that would be sent to /v1/messages."""
    body = read(CountBody, await served.body(x), PAGE)
    await x.json(await served.read(x, count(served, body)))


_HELLO = {"model": "", "messages": CONVERSATION}
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
    Route("POST", "/v1/messages", answering(MESSAGES), ANTHROPIC, about=MESSAGE),
    Route("POST", "/v1/messages/count_tokens", count_tokens, ANTHROPIC, about=COUNT),
)
