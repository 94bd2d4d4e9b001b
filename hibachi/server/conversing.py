"""Prepares chats, whichever route they came by: from a body to what is submitted."""

from __future__ import annotations

from functools import partial

from hibachi.llm.dialects.openai import parse as asking
from hibachi.llm.dialects.openai.bodies import ChatBody
from hibachi.llm.dialects.openai.parse import Asked
from hibachi.server.served import Served
from hibachi.server.web.exchange import Exchange


async def prepare(served: Served, x: Exchange, body: ChatBody) -> tuple[Asked, list[int]]:
    """What a chat asks for, with what reads its answer in `Asked.reader`, and the token ids of its prompt.

    Raises Refused, InvalidRequest or PromptTooLong.
    """
    defaults = served.texts.default_params
    asked = await served.beside(x, partial(asking.chat, body, defaults, served.bounds))
    ids = await served.reading.chat(asked, x.tenant)
    await served.form_chat(asked, x.tenant)
    return asked, ids
