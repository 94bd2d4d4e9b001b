"""OpenAI's route for responses, and those for responses that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hibachi.llm.dialects.errors import Refused, refusing, unsupported
from hibachi.llm.dialects.openai.answers import encode
from hibachi.llm.dialects.openai.bodies import read
from hibachi.llm.dialects.openai.parse import check_count
from hibachi.llm.dialects.responses.answers import EVENTS, Deleted, ItemList, Response, listed
from hibachi.llm.dialects.responses.bodies import ResponsesBody
from hibachi.llm.dialects.responses.items import PAGE, Item
from hibachi.llm.dialects.responses.parse import in_body, own_items, request
from hibachi.llm.dialects.responses.store import (
    KeptResponse,
    KnownItems,
    Store,
    Stored,
    as_items,
    no_item,
    no_response,
    resolved,
)
from hibachi.llm.dialects.responses.writing import RESPONSES, ResponsesWriter
from hibachi.server.routes import About, Route, for_chat
from hibachi.server.served import Served
from hibachi.server.streaming import answer_text
from hibachi.server.web.exchange import Exchange

LISTED, MOST_LISTED = 20, 100  # items of one answer


async def create(served: Served, x: Exchange) -> None:
    """Answer a conversation, in the model's chat template; the next request may go on from there."""
    body = read(ResponsesBody, await served.body(x), PAGE)
    name = served.check_name(body.model)
    before, own = await _conversation(served, x, body)
    keeps = served.responses.keeps and body.store is not False

    def keep(done: Response) -> None:
        served.responses.of(x.tenant, x.part).keep(done.id, encode(done), before, own, done.output)

    items = [*before.each, *own]
    size = sum(len(item[1]) for item in items if isinstance(item, tuple))
    steps = request(served.model, body, partial(as_items, items), len(before.each), size)
    asked, ids = await served.read(x, steps)
    writer = ResponsesWriter(
        asked, name, served.vocabulary, body, server=served.responses.tag, keeps=keeps, keep=keep if keeps else None
    )
    with refusing(partial(in_body, body.tools)):
        await answer_text(served, x, writer, [ids])


async def retrieve(served: Served, x: Exchange) -> None:
    """A response that is kept."""
    for name, value in x.query:
        if name == "stream" and value != "false":
            raise unsupported("stream", "A response that is kept is whole already")
    await x.answer(_found(served, x).answer, b"application/json")


async def delete(served: Served, x: Exchange) -> None:
    """Forget a response."""
    id = _found(served, x).id
    served.responses.of(x.tenant, x.part).forget(id)
    await x.json(Deleted(id))


async def input_items(served: Served, x: Exchange) -> None:
    """The input of a response that is kept, with the conversation before it, the latest item first.

    `order`: desc or asc. `after`: the id of the item before the first one. `limit`: at most so many.
    """
    found = _found(served, x)
    query = dict(x.query)
    ids, limit = _listed(found, query), _limit(query.get("limit"))
    data = served.responses.of(x.tenant, x.part).data(ids[:limit])
    await x.json(listed(ids[:limit], data, more=len(ids) > limit))


# ---- what came before ----------------------------------------------------------------------------------------------


async def _conversation(served: Served, x: Exchange, body: ResponsesBody) -> tuple[KnownItems, list[Item | Stored]]:
    """What is kept of it, and the input. Raises Refused."""
    given = await served.beside(x, partial(own_items, body, served.bounds))
    store = served.responses.of(x.tenant, x.part)
    before = _before(store, body.previous_response_id)
    own = resolved(given, before, store)
    check_count("input", [*before.each, *own], served.bounds.messages, "items, with those before it")
    return before, own


def _before(store: Store, previous: str | None) -> KnownItems:
    if previous is None:
        return KnownItems()
    found = store.find(previous)
    if found is None:
        raise no_response(previous, "previous_response_id")
    return store.conversation(found)


def _found(served: Served, x: Exchange) -> KeptResponse:
    """Raises Refused."""
    id = x.params["response"]
    found = served.responses.of(x.tenant, x.part).find(id)
    if found is None:
        raise no_response(id)
    return found


def _listed(found: KeptResponse, query: dict[str, str]) -> Sequence[str]:
    """Ids of its input in the order that is asked for, behind the one that is named."""
    ids = found.items[: found.inputs]
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise Refused.at("order", f" must be asc or desc; got {order[:40]!r}.")
    if order == "desc":
        ids = ids[::-1]
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise no_item(after, "after")
        ids = ids[ids.index(after) + 1 :]
    return ids


def _limit(given: str | None) -> int:
    if given is None:
        return LISTED
    if not (given.isascii() and given.isdigit() and len(given) < 9 and 1 <= int(given) <= MOST_LISTED):
        raise Refused.at("limit", f" must be from 1 to {MOST_LISTED}; got {given[:40]!r}.")
    return int(given)


CREATE = About(
    ResponsesBody,
    Response,
    EVENTS,
    named=True,
    example=lambda served: {"input": "How do you do?", "max_output_tokens": 8},
    useful=for_chat,
)
_ID = "/v1/responses/{response}"
ROUTES = (
    Route("POST", "/v1/responses", create, RESPONSES, about=CREATE),
    Route("GET", _ID, retrieve, RESPONSES, about=About(answer=Response, named=True, statuses=(400,), useful=for_chat)),
    Route("DELETE", _ID, delete, RESPONSES, about=About(answer=Deleted, named=True, useful=for_chat)),
    Route(
        "GET",
        f"{_ID}/input_items",
        input_items,
        RESPONSES,
        about=About(answer=ItemList, named=True, statuses=(400,), useful=for_chat),
    ),
)
