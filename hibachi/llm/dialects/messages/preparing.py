"""Prepares messages: their chats and their limits."""

from __future__ import annotations

from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai.bodies import ChatBody
from hibachi.llm.dialects.openai.parse import Asked
from hibachi.llm.dialects.preparing import Prepare


async def prepared(prepare: Prepare, chat: ChatBody) -> tuple[Asked, list[int]]:
    """As `prepare`. An effort is a wish, which agents send to any model: many chat templates have no such setting."""
    try:
        return await prepare(chat)
    except Refused as e:
        if chat.reasoning_effort is None or e.param != "reasoning_effort":
            raise
    chat.reasoning_effort = None
    return await prepare(chat)


def fit(asked: Asked, prompt: int, context: int) -> bool:
    """max_tokens is what an answer has at most, and must be sent: where the context holds less, that is the limit.

    prompt: its tokens. context: tokens that it holds. Returns whether it is the limit.
    """
    wanted, room = asked.params.max_tokens, context - prompt
    if wanted is None or not 1 <= room < wanted:
        return False
    asked.params, asked.limit = asked.params.with_(max_tokens=room), room
    return True
