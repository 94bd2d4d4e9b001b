"""OpenAI's route for responses, and those for responses that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hibachi.llm.dialects.errors import Refused, unsupported
from hibachi.llm.dialects.responses.answers import EVENTS, Deleted, ItemList, Response, listed
from hibachi.llm.dialects.responses.bodies import ResponsesBody
from hibachi.llm.dialects.responses.handler import RESPONSES, respond
from hibachi.llm.dialects.responses.store import (
    KeptResponse,
    no_item,
    no_response,
)
from hibachi.llm.dialects.responses.writing import RESPONSES as DIALECT
from hibachi.server.routes import About, Route, for_chat
from hibachi.server.served import Served
from hibachi.server.streaming import answer_body
from hibachi.server.web.exchange import Exchange

LISTED, MOST_LISTED = 20, 100  # items of one answer


async def create(served: Served, x: Exchange) -> None:
    """Answer a conversation, in the model's chat template; the next request may go on from there."""
    raw, store = await served.body(x), served.responses.of(x.tenant, x.part)
    await answer_body(served, x, replace(RESPONSES, handle=partial(respond, store=store)), raw)


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
    Route("POST", "/v1/responses", create, DIALECT, about=CREATE),
    Route("GET", _ID, retrieve, DIALECT, about=About(answer=Response, named=True, statuses=(400,), useful=for_chat)),
    Route("DELETE", _ID, delete, DIALECT, about=About(answer=Deleted, named=True, useful=for_chat)),
    Route(
        "GET",
        f"{_ID}/input_items",
        input_items,
        DIALECT,
        about=About(answer=ItemList, named=True, statuses=(400,), useful=for_chat),
    ),
)
