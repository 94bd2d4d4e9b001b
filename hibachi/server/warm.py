"""Puts the beginning of prompts into the cache before requests come with it."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from hibachi.engine.batchengine import BatchEngine
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai.answers import Warmed
from hibachi.llm.dialects.openai.bodies import WarmBody, read
from hibachi.llm.dialects.openai.parse import ParsedRequest, prompt_of, terms_of
from hibachi.llm.dialects.openai.writing import AnswerWriter, Signature
from hibachi.prefix import warmed
from hibachi.request import Request, SamplingParams
from hibachi.server.routes import About, Route, for_text
from hibachi.server.served import Served
from hibachi.server.streaming import answer_text
from hibachi.server.web.exchange import Exchange


class WarmWriter(AnswerWriter):
    """chars: of the text. block: tokens of one of the cache."""

    prefix = "warm"
    chars: int
    block: int
    pinned: int | None = None

    def whole(self) -> Any:
        self._done()  # raises the error of one that failed
        (ids,), used = self.ids, self.usage()
        found = asdict(warmed(len(ids), used.cached, self.block))
        return Warmed(chars=self.chars, id=self.id, model=self.name, usage=used, pinned_tokens=self.pinned, **found)


async def warm(served: Served, x: Exchange) -> None:
    """Put a text, or a conversation, into the cache; "pin" and "importance" say how long it is kept."""
    body = read(WarmBody, await served.body(x))
    name = served.check_name(body.model)
    if not body.text and body.messages is None:
        raise Refused("Send text (or messages): it is missing.", param="text", code="missing_required_parameter")
    if body.text and body.messages is not None:
        raise Refused("Send either text or messages.", param="messages", code="invalid_value")
    facts, reading = served.texts.engine.facts, served.reading
    if not facts.cached:
        raise Refused("This model keeps no cache, so there is nothing to warm.", code="unsupported")
    special, text = body.add_special_tokens, body.text or ""
    if body.messages is not None:
        text = await served.read(x, reading.prompt_text(prompt_of(body, served.bounds)))
        special = bool(special)
    ids = await served.read(x, reading.encode([text], "text", special=special is not False))
    params = SamplingParams(temperature=0, max_tokens=1)
    asked = ParsedRequest(params, terms_of(body), False, False, False, False, unwritten=True)
    writer = WarmWriter(asked, Signature(name, served.vocabulary))
    writer.chars, writer.block = len(text), facts.limits.block_size
    if body.pin is not None or body.importance is not None:
        request = Request(np.array(ids[0]), params, terms=served.terms(asked.terms, x.tenant, x.part))
        found = await served.ask(partial(_keep, served.texts.engine, request, body.pin, body.importance))
        writer.pinned = None if body.pin is None else found * body.pin
    await answer_text(served, x, writer, ids)


def _keep(engine: BatchEngine[Any], request: Request, pin: bool | None, importance: float | None) -> int:
    return engine.keep(engine.check(request), pin=pin, importance=importance)


def _useful(served: Served) -> bool:
    return for_text(served) and served.what.engine.facts.cached


def _text(served: Served) -> Any:
    return {"text": "You are a helpful assistant."}


_ABOUT = About(WarmBody, Warmed, named=True, asks=True, example=_text, useful=_useful)
ROUTES = (Route("POST", "/v1/warm", warm, about=_ABOUT),)
