"""Responses in OpenAI's API: answers that are kept, and conversations that go on from them."""

from __future__ import annotations

from functools import partial

from hibachi.llm.dialects.handler import Answerer, Handled, TextDialect
from hibachi.llm.dialects.openai.answers import encode
from hibachi.llm.dialects.openai.bodies import Bounds, ChatBody
from hibachi.llm.dialects.openai.parse import check_count
from hibachi.llm.dialects.responses.answers import Response
from hibachi.llm.dialects.responses.bodies import ResponsesBody
from hibachi.llm.dialects.responses.items import PAGE, Item, ItemReference
from hibachi.llm.dialects.responses.parse import as_chat, in_body, own_items, request
from hibachi.llm.dialects.responses.store import KnownItems, Store, as_items, no_response, resolved
from hibachi.llm.dialects.responses.writing import ResponsesWriter
from hibachi.llm.dialects.steps import ReadingStep, Steps


def respond(by: Answerer, body: ResponsesBody, store: Store) -> Steps[Handled]:
    """Answer a conversation, in the model's chat template; the next request may go on from there."""
    signature, model = by.sign(body.model, "response"), by.model
    given = yield ReadingStep("body", partial(own_items, body, model.bounds))
    before = _before(store, body.previous_response_id)
    own = resolved(given, before, store)
    items = [*before.each, *own]
    check_count("input", items, model.bounds.messages, "items, with those before it")
    keeps = store.keeps and body.store is not False

    def keep(done: Response) -> None:
        store.keep(done.id, encode(done), before, own, done.output)

    size = sum(len(item[1]) for item in items if isinstance(item, tuple))
    asked, ids = yield from request(model, body, partial(as_items, items), len(before.each), size)
    writer = ResponsesWriter(asked, signature, body, server=store.tag, keeps=keeps, keep=keep if keeps else None)
    return writer, [ids]


def respond_alone(by: Answerer, body: ResponsesBody) -> Steps[Handled]:
    """`respond` where nothing is kept. References of its input are left out."""
    signature = by.sign(body.model, "response")
    asked, ids = yield from request(by.model, body, partial(_items, body, by.model.bounds))
    return ResponsesWriter(asked, signature, body, server=None), [ids]


def chat_alone(body: ResponsesBody, bounds: Bounds) -> ChatBody:
    """The chat that a body asks for by itself. Raises Refused."""
    return as_chat(body, _items(body, bounds))


def _items(body: ResponsesBody, bounds: Bounds) -> list[Item]:
    return [item for item in own_items(body, bounds) if not isinstance(item, ItemReference)]


def _before(store: Store, previous: str | None) -> KnownItems:
    if previous is None:
        return KnownItems()
    found = store.find(previous)
    if found is None:
        raise no_response(previous, "previous_response_id")
    return store.conversation(found)


RESPONSES = TextDialect(ResponsesBody, PAGE, respond_alone, move=lambda body, path: in_body(body.tools, path))
