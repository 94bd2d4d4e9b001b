"""What a dialect makes of a body that is answered by a text: who writes the answer, and for which prompts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from hibachi.errors import FieldPath
from hibachi.llm.dialects.errors import refusing
from hibachi.llm.dialects.openai.bodies import ChatBody
from hibachi.llm.dialects.openai.writing import AnswerWriter, Signature
from hibachi.llm.dialects.steps import Steps
from hibachi.llm.dialects.textmodel import TextModel

Use: TypeAlias = Literal["text", "chat", "message", "response"]
Handled: TypeAlias = tuple[AnswerWriter, list[list[int]]]
"""Who writes the answer, and the token ids of each prompt."""


class Answerer(Protocol):
    """Who answers, such as a server."""

    @property
    def model(self) -> TextModel:
        """Raises Refused where no text is made."""
        ...

    def sign(self, name: str | None, use: Use, /) -> Signature:
        """name: of the model, as the body has it. Raises Refused for one that is not served."""
        ...


@dataclass(frozen=True, slots=True)
class TextDialect:
    """body: the record of its bodies; page: that lists their fields. handle: reads a body; raises Refused,
    InvalidRequest or PromptTooLong. as_chat: the chat that a body asks for; move: where its fields stand in the body.
    """

    body: Any
    page: str
    handle: Callable[[Answerer, Any], Steps[Handled]]
    as_chat: Callable[[Any], ChatBody] | None = None
    move: Callable[[Any, FieldPath], FieldPath] | None = None

    def words(self, body: Any) -> AbstractContextManager[None]:
        """Within it, what is refused of a chat is told of the body that the chat was made of."""
        return refusing(None if self.move is None else partial(self.move, body))
