"""Conversations of made-up words, rendered through a chat template to see how it writes them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hibachi.errors import InvalidModelFiles, InvalidRequest
from hibachi.llm.chatformat.format import History

Render = Callable[..., str]
"""render(messages, **variables) -> text; raises InvalidRequest."""

MOST = 60  # renderings of one template
LONGEST = 1 << 16  # characters of a text that are compared
SECONDS = 20.0  # of all of them; each is bounded by the sandbox, too

# Words that no template has, and of which none begins or ends like another.
USER, SAID, THOUGHT, LATER = "Brillowex", "Quandorpi", "Hemstivly", "Ozgrafund"
THINKING = {"reasoning_content": THOUGHT, "reasoning": THOUGHT, "thinking": THOUGHT}  # in any name
NAMES = "wuplandic", "jexomarth"
KEYS = "kolquist", "yttervo"  # in the order of letters, as some templates sort them
VALUES = "Fnordaxil", "Muzbenhoc"
NUMBER = 48151623
IDS = "call_Lvaggwen0", "call_Rbixtopp8"


class Unclear(Exception):
    """Texts of a template do not fit together."""


@dataclass(frozen=True, slots=True)
class Called:
    """A call of a probe."""

    name: str
    arguments: Mapping[str, Any]
    id: str = IDS[0]


PARAMETERS = {
    "type": "object",
    "properties": {
        KEYS[0]: {"type": "string", "description": "a"},
        KEYS[1]: {"type": "string", "description": "b"},
    },
    "required": [],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "does it", "parameters": PARAMETERS}}
    for name in NAMES
]

_CALL = Called(NAMES[0], {KEYS[0]: VALUES[0]})
_CONTENTS: tuple[Literal["missing", "null", "empty"], ...] = ("missing", "null", "empty")
_ARGUMENTS: tuple[Literal["object", "text"], ...] = ("object", "text")
USUAL = {"tools": TOOLS, "add_generation_prompt": False, "strftime_now": 1.7e9}  # the present must not differ


class Template:
    """Renders conversations through a template, `most` of them and for `seconds` at most. What it refuses, and what is
    asked too late, is None.
    """

    def __init__(self, render: Render, most: int = MOST, seconds: float = SECONDS) -> None:
        self._render = render
        self._left = most
        self._until = time.monotonic() + seconds
        self._known: dict[str, str | None] = {}
        self.history = History()
        self.nine = False
        """Ids of calls must have nine letters."""

    def text(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str | None:
        """The whole text."""
        key = json.dumps([messages, variables])
        if key not in self._known:
            self._known[key] = self._ask(messages, variables)
        return self._known[key]

    def _ask(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str | None:
        if self._left <= 0 or time.monotonic() > self._until:
            return None
        self._left -= 1
        nulls = {"nulls": True} if self.history.content == "null" else {}
        try:
            text = self._render(messages, **(USUAL | nulls | dict(variables)))
        except (InvalidRequest, InvalidModelFiles):  # what is broken in it may be where only a probe comes
            return None
        return text if len(text) <= LONGEST else None

    def after(self, messages: Sequence[Mapping[str, Any]], word: str = USER, **variables: Any) -> str | None:
        """What comes behind the last time that `word` stands in the text."""
        text = self.text(messages, **variables)
        if text is None or word not in text:
            return None
        return text.rpartition(word)[2]

    def prompt(self, **variables: Any) -> str | None:
        """What the template writes behind the user's words where an answer is to begin."""
        return self.after([user()], add_generation_prompt=True, **variables)

    def said(self, **more: Any) -> str | None:
        """What it writes behind the user's words for an answer of text."""
        return self.after([user(), {"role": "assistant", "content": SAID} | more])

    def called(self, *calls: Called, said: str = "", **more: Any) -> str | None:
        """What it writes behind the user's words for an answer of calls."""
        return self.after([user(), self.answer(*calls, said=said, **more)])

    def answer(self, *calls: Called, said: str = "", **more: Any) -> dict[str, Any]:
        """A message with calls, in the form that the template takes."""
        content: dict[str, Any] = {}
        if said or self.history.content != "missing":
            content["content"] = said or ("" if self.history.content == "empty" else None)
        return {"role": "assistant", **content, "tool_calls": [self._call(c) for c in calls], **more}

    def _call(self, called: Called) -> dict[str, Any]:
        given: Any = dict(called.arguments)
        if self.history.arguments == "text":
            given = json.dumps(given, ensure_ascii=False)
        id_ = called.id[-9:] if self.nine else called.id
        return {"id": id_, "type": "function", "function": {"name": called.name, "arguments": given}}

    def settle(self) -> bool:
        """Find the form of messages whose calls the template writes. False means there is none."""
        forms = [
            (nine, History(arguments, content))
            for nine in (False, True)
            for content in _CONTENTS
            for arguments in _ARGUMENTS
        ]
        last: tuple[bool, History] | None = None  # the first form that will do at the end of a conversation
        for self.nine, self.history in forms:
            if self._shown(self.called(_CALL)):
                last = last or (self.nine, self.history)
                if self._shown(self.after([user(), self.answer(_CALL), self._result()], add_generation_prompt=True)):
                    break
        else:
            self.nine, self.history = last or (False, History())
        if last is not None:
            self._settle_python()
            self._settle_beside()
        return last is not None

    def _shown(self, text: str | None) -> bool:
        return text is not None and _CALL.name in text and VALUES[0] in text

    def _result(self) -> dict[str, Any]:
        id_ = _CALL.id[-9:] if self.nine else _CALL.id
        return {"role": "tool", "tool_call_id": id_, "name": _CALL.name, "content": LATER}

    def _settle_python(self) -> None:
        """Arguments that come out as Python's are better given as text."""
        if f"{{'{KEYS[0]}': '{VALUES[0]}'" in (self.called(_CALL) or ""):
            before, self.history = self.history, replace(self.history, arguments="text")
            if f'{{"{KEYS[0]}"' not in (self.called(_CALL) or ""):
                self.history = before

    def _settle_beside(self) -> None:
        text = self.called(_CALL, said=SAID)
        if text is not None and not (self._shown(text) and SAID in text):
            self.history = replace(self.history, beside="calls" if self._shown(text) else "content")


def user(words: str = USER) -> dict[str, Any]:
    """The user's message."""
    return {"role": "user", "content": words}


# ---- comparing texts ---------------------------------------------------------------------------------------------


def same_beginning(a: str, b: str) -> int:
    """Characters at the beginning that both have."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def same_end(a: str, b: str) -> int:
    """Characters at the end that both have."""
    return same_beginning(a[::-1], b[::-1])


def whole_tags(text: str, end: int) -> int:
    """`end`, or the beginning of the tag that it lies in: no text is cut within <...> or [...]."""
    for opens, closes in ("<>", "[]"):
        at = text.rfind(opens, 0, end)
        if at >= 0 and closes not in text[at:end] and closes in text[at:]:
            end = at
    return end
