"""Messages in Anthropic's API, and how many tokens they have."""

from __future__ import annotations

from hibachi.llm.dialects.handler import Answerer, Handled, TextDialect
from hibachi.llm.dialects.messages.answers import TokenCount
from hibachi.llm.dialects.messages.bodies import PAGE, CountBody, MessagesBody
from hibachi.llm.dialects.messages.parse import chat_of, fit, in_body, request
from hibachi.llm.dialects.messages.writing import MessagesWriter
from hibachi.llm.dialects.steps import Steps


def message(by: Answerer, body: MessagesBody) -> Steps[Handled]:
    """Answer a conversation, as Anthropic's API does."""
    signature = by.sign(body.model, "message")
    asked, ids = yield from request(by.model, body)
    full = fit(asked, len(ids), by.model.reading.prompts.context)
    return MessagesWriter(asked, signature, full=full), [ids]


def count(by: Answerer, body: CountBody) -> Steps[TokenCount]:
    by.sign(body.model, "message")
    _, ids = yield from request(by.model, body)
    return TokenCount(len(ids))


MESSAGES = TextDialect(MessagesBody, PAGE, message, chat_of, in_body)
