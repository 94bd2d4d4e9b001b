"""Prepares the chats of responses. Where the context does not hold a conversation, its beginning may be left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hibachi.errors import PromptTooLong
from hibachi.llm.dialects.openai.bodies import ChatBody
from hibachi.llm.dialects.openai.parse import Asked
from hibachi.llm.dialects.preparing import Prepare
from hibachi.llm.dialects.responses.parse import shortened, starts

Check = Callable[[Sequence[int], "int | None"], None]


async def prepared(prepare: Prepare, check: Check, chat: ChatBody, *, shortens: bool) -> tuple[Asked, list[int]]:
    """As `prepare`. check: of a prompt and the limit of new tokens, see `Reading.check_length`. shortens: the oldest
    turns are left out where the context does not hold them all; what system and developer say stays. Raises
    PromptTooLong.
    """

    async def fitting(chat: ChatBody) -> tuple[Asked, list[int]]:
        asked, ids = await prepare(chat)
        check(ids, asked.limit)
        return asked, ids

    try:
        return await fitting(chat)
    except PromptTooLong:
        turns = starts(chat)
        if not shortens or not turns:
            raise
    best = await fitting(shortened(chat, turns[-1]))
    low, high = 0, len(turns) - 1  # from turns[high] on it fits, and from none before turns[low]
    while low < high:
        middle = (low + high) // 2
        try:
            best = await fitting(shortened(chat, turns[middle]))
            high = middle
        except PromptTooLong:
            low = middle + 1
    return best
