"""Messages in Anthropic's API, and how many tokens they have."""

from __future__ import annotations

from functools import partial

from hibachi.llm.dialects.handler import Answerer, Handled
from hibachi.llm.dialects.messages.answers import TokenCount
from hibachi.llm.dialects.messages.bodies import PAGE, CountBody, MessagesBody
from hibachi.llm.dialects.messages.parse import fit, in_body, request
from hibachi.llm.dialects.messages.writing import MessagesWriter
from hibachi.llm.dialects.openai.bodies import read
from hibachi.llm.dialects.steps import Steps


def message(by: Answerer, raw: bytes) -> Steps[Handled]:
    """Answer a conversation, as Anthropic's API does."""
    body = read(MessagesBody, raw, PAGE)
    name = by.check_name(body.model)
    asked, ids = yield from request(by.model, body)
    full = fit(asked, len(ids), by.model.reading.prompts.context)
    writer = MessagesWriter(asked, name, by.model.vocabulary, by.fingerprint, full=full)
    return Handled(writer, [ids], partial(in_body, body))


def count(by: Answerer, raw: bytes) -> Steps[TokenCount]:
    body = read(CountBody, raw, PAGE)
    by.check_name(body.model)
    _, ids = yield from request(by.model, body)
    return TokenCount(len(ids))
