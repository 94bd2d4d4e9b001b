"""How the answer to a chat is read: which text is reasoning, which is said, which are calls of tools."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hibachi.tools.format import ChatFormat, Thinking
from hibachi.tools.tools import Toolbox

if TYPE_CHECKING:
    from hibachi.tools.parser import Parser

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@dataclass(frozen=True, slots=True)
class Turns:
    """format: of the model's template. thinking: where the answer begins. include_reasoning: False means it is read and
    left out.
    """

    format: ChatFormat
    toolbox: Toolbox = field(default_factory=Toolbox)
    thinking: Thinking = Thinking.NONE
    include_reasoning: bool = True

    def parser(self) -> Parser:
        """One for each continuation."""
        from hibachi.tools.parser import Parser

        return Parser(self.format, self.toolbox, self.thinking)

    def call_id(self, answer: str, choice: int, number: int) -> str:
        """The id of a call, in the form that the template wants. See `call_id`."""
        tools = self.format.tools
        return call_id(answer, choice, number, nine=tools is not None and tools.id == "nine letters")


def call_id(answer: str, choice: int, number: int, *, nine: bool = False) -> str:
    """The id of call `number` of a continuation: "call_" and 24 letters, or nine letters. The same for the same answer,
    so that a run that is done again writes the same bytes.

    answer: the id of the answer.
    """
    left = int.from_bytes(hashlib.sha256(f"{answer} {choice} {number}".encode(errors="replace")).digest())
    letters = []
    for _ in range(9 if nine else 24):
        left, one = divmod(left, len(_LETTERS))
        letters.append(_LETTERS[one])
    return ("" if nine else "call_") + "".join(letters)
