"""What a dialect makes of a body that is answered by a text: who writes the answer, and for which prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from hibachi.errors import FieldPath
from hibachi.llm.dialects.openai.writing import AnswerWriter
from hibachi.llm.dialects.steps import Steps
from hibachi.llm.dialects.textmodel import TextModel


class Answerer(Protocol):
    """Who answers, such as a server. fingerprint: equal where the same bits are computed."""

    @property
    def model(self) -> TextModel:
        """Raises Refused where no text is made."""
        ...

    fingerprint: str | None

    def check_name(self, name: str | None, /) -> str:
        """The name of the model in the answer. Raises Refused for one that is not served."""
        ...


@dataclass(frozen=True, slots=True)
class Handled:
    """ids: of each prompt. move: where fields of the chat that a body was made into stand in it; None means that the
    body is its own.
    """

    writer: AnswerWriter
    ids: list[list[int]]
    move: Callable[[FieldPath], FieldPath] | None = None


Handler: TypeAlias = Callable[[Answerer, bytes], Steps[Handled]]
"""Reads a body. Raises Refused, InvalidRequest or PromptTooLong."""
