"""What the routes of several APIs share between a body and what is submitted: beside an event loop, or at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from hibachi.llm.dialects.openai.bodies import ChatBody
from hibachi.llm.dialects.openai.parse import Asked

T = TypeVar("T")
Prepare: TypeAlias = Callable[[ChatBody], Awaitable[tuple[Asked, list[int]]]]
"""From a chat to what it asks for, and the token ids of its prompt. Raises Refused, InvalidRequest or PromptTooLong."""


def at_once(what: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing, where there is no event loop. Raises what it raises."""
    try:
        what.send(None)
    except StopIteration as e:
        found: T = e.value
        return found
    what.close()
    raise RuntimeError("expected a coroutine that waits for nothing; this one waits")
