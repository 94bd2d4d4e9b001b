"""What system and developer say, put where a chat template shows it; messages of one role in a row, and turns that are
missing or empty.

What a template does with them is tried with made-up words, once for each surrounding, and kept. So where a message goes
depends on its neighbours only: what comes later moves nothing, and a conversation is rendered once.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from hibachi.errors import InvalidModelFiles, InvalidRequest
from hibachi.llm.chatformat.errors import UNSUPPORTED, BadField
from hibachi.llm.chatformat.templates.probes import KEYS, NAMES, THINKING

Message: TypeAlias = Mapping[str, Any]
_SPEAKERS = ("system", "developer")
_WORDS = [f"Brillo{letter}wex" for letter in "abcdefghijklmnop"]


class Way(Enum):
    """How some messages of system and developer in a row are given to a template, the first choice first."""

    AS_SENT = 0
    SYSTEM = 1  # developers as system
    ONE = 2  # as one system message
    USER = 3  # as what the user says, marked
    RESULT = 4  # the same, joined to the result of a call beside it


class Surrounding(NamedTuple):
    """Where they stand. led: the conversation begins with others. before, after: what the neighbours are, see `_kind`;
    None means there is none. roles: theirs.
    """

    led: bool
    before: str | None
    roles: tuple[str, ...]
    after: str | None


Show: TypeAlias = Callable[[list[Message]], str]
Choice: TypeAlias = Callable[[Surrounding], Way]


class Instructions:
    """Of one template. show(messages, begin): the text of a conversation; with `begin` an answer begins behind it. It
    raises InvalidRequest. developer: the template knows this role.
    """

    def __init__(self, show: Callable[[Sequence[Message], bool], str], developer: bool) -> None:
        self._show, self._developer = show, developer
        self._ways: dict[Surrounding, Way] = {}
        self._rows: dict[str, bool] = {}
        self._blanks: dict[str | None, bool] = {}
        self._texts: bool | None = None

    def shown(self, messages: Sequence[Message], show: Show) -> str:
        """What `show` makes of the messages in a form in which the template shows all that system and developer say;
        those of one role in a row are one where the template does not take several. Raises BadField if there is none.
        """
        text = show(self._placed(messages, self._way))
        if self._hidden(messages, text, show, self._way) is None:
            return text
        text = show(self._placed(messages, _as_user))
        if (i := self._hidden(messages, text, show, _as_user)) is None:
            return text
        raise BadField.at(
            ("messages", i, "content"),
            f" is not supported: this model's chat template does not show what {messages[i]['role']} says here. Let "
            f"the user say it.",
            code=UNSUPPORTED,
        )

    def _placed(self, messages: Sequence[Message], way_of: Choice) -> list[Message]:
        groups = [list(group) for _, group in groupby(self._alternating(messages), _speaks)]
        found: list[Message] = []
        for i, group in enumerate(groups):
            if not _speaks(group[0]):
                found += group
                continue
            behind = groups[i + 1] if i + 1 < len(groups) else []
            before = _kind(groups[i - 1][-1]) if i else None
            led = i > 0 and _speaks(groups[0][0])
            where = Surrounding(led, before, _roles(group), _kind(behind[0]) if behind else None)
            _put(way_of(where), found, group, behind)
        return self._joined(found)

    def _alternating(self, messages: Sequence[Message]) -> list[Message]:
        """With a blank turn where the template wants one: in front of an answer that a conversation begins with, and
        between a result and what the user says behind it.
        """
        found: list[Message] = []
        at = 0  # behind the last that is not of system or developer
        for m in messages:
            if not _speaks(m):
                before = _kind(found[at - 1]) if at else None
                if (before, m.get("role")) in _UNANSWERED and self._wants_blank(before):
                    found.insert(at, _blank(before))
                at = len(found) + 1
            found.append(m)
        return found

    def _joined(self, messages: Sequence[Message]) -> list[Message]:
        rows = [list(row) for _, row in groupby(messages, lambda m: m.get("role"))]
        found: list[Message] = []
        for row in rows:
            role = row[0].get("role")
            one = len(row) > 1 and role in ("user", "assistant") and not self._takes(str(role))
            found += [_one(row)] if one else row
        last = len(found) - 1  # which may go on
        empty = [i for i, m in enumerate(found) if m.get("role") == "assistant" and not _says(m) and i < last]
        for i in empty if empty and self._wants_blank("assistant") else ():
            found[i] = {**found[i], **_blank("assistant")}
        return found

    def _hidden(self, messages: Sequence[Message], text: str, show: Show, way_of: Choice) -> int | None:
        """The first message of system or developer that `text`, which `show` made of all, does not hold."""
        at = 0
        for m in messages:
            said = m.get("content") if _speaks(m) else None
            if not isinstance(said, str) or not (said := said.strip()):
                continue
            if (found := text.find(said, at)) < 0:
                return self._unshown(messages, show, way_of)
            at = found + len(said)
        return None

    def _unshown(self, messages: Sequence[Message], show: Show, way_of: Choice) -> int | None:
        """`_hidden` by words around the texts, for a template that changes texts or their order."""
        word = f"Word{secrets.token_hex(8)}x"
        told = {i for i, m in enumerate(messages) if _speaks(m) and m.get("content")}
        worded = [
            {**m, "content": f"{word}{i}. {m['content']} {word}{i}."} if i in told else m
            for i, m in enumerate(messages)
        ]
        with suppress(InvalidRequest):
            found = Counter(map(int, re.findall(f"{word}([0-9]+)", show(self._placed(worded, way_of)))))
            return min((i for i in told if found[i] < 2), default=None)
        return None

    # ---- what the template does --------------------------------------------------------------------------------

    def _way(self, where: Surrounding) -> Way:
        """The first way in which all is shown and nothing in front changes; or else in which all is shown."""
        if where in self._ways:
            return self._ways[where]
        usual = Way.AS_SENT if self._developer or "developer" not in where.roles else Way.SYSTEM
        grades = dict[Way, int]()
        for way in Way:
            if way.value >= usual.value and grades.setdefault(way, self._grade(where, way)) == 2:
                break
        self._ways[where] = max(grades, key=lambda way: (grades[way], -way.value)) if any(grades.values()) else usual
        return self._ways[where]

    def _grade(self, where: Surrounding, way: Way) -> int:
        """2: all is shown in its order, and what stands in front is as without it. 1: all is shown. 0: it is not."""

        def way_of(other: Surrounding) -> Way:
            return way if other == where._replace(after=other.after) else self._way(other)

        front = ["system"] * where.led + _IN_FRONT[where.before].split()
        behind = _BEHIND[where.after].split()
        ends = [behind[:-2]] if where.before is None else [behind[:-2], behind]  # some count turns, and find out late
        trials = [_saying([*front, *where.roles, *end]) for end in ends]
        own = slice(where.led, None)  # where the first system message is shown is settled
        texts = [self._told(self._placed(trial, way_of), _WORDS[: len(trial)][own]) for trial in trials]
        if not all(texts):
            return 0
        if where.before is None:
            return 2
        for text, trial in zip(texts, trials, strict=True):
            places = [text.find(word) for word in _WORDS[: len(trial)][own]]
            if places != sorted(places):
                return 0
        last = _WORDS[len(front) - 1]
        alone = self._told(self._placed(_saying(front), way_of), [last])
        head = alone[: alone.find(last) + len(last)]
        return 2 if alone and texts[0].startswith(head) else 1

    def _takes(self, role: str) -> bool:
        """Whether messages of a role in a row are all shown."""
        if role not in self._rows:
            kinds = ["user", "user", "assistant", "user", "user"]
            trial = _saying(kinds if role == "user" else ["user", "assistant", "assistant", "user"])
            self._rows[role] = bool(self._told(trial, _WORDS[: len(trial)]))
        return self._rows[role]

    def _wants_blank(self, before: str | None) -> bool:
        """Whether the template takes what may follow a message of this kind with a blank turn between only; of
        "assistant", whether it takes an answer of a blank and none of no text.
        """
        if before not in self._blanks:
            front = _IN_FRONT[before].removesuffix(" assistant").split()
            trial = _saying([*front, *_BEHIND["user" if before else None].split()])
            without: list[Message] = [{**_blank(before), "content": ""}] if before == "assistant" else []
            at, words = len(front), _WORDS[: len(trial)]
            told = [self._told([*trial[:at], *turn, *trial[at:]], words) for turn in (without, [_blank(before)])]
            self._blanks[before] = not told[0] and bool(told[1])
        return self._blanks[before]

    def take_texts(self) -> bool:
        """Whether arguments of a call that are no object are shown as they are, maybe in quotes."""
        if self._texts is None:
            trial = _saying(["user", "calls"], _BROKEN)
            self._texts = any(self._told(trial, [form]) for form in (_BROKEN, json.dumps(_BROKEN)[1:-1]))
        return self._texts

    def _told(self, messages: Sequence[Message], words: Sequence[str]) -> str:
        """The text of a conversation of made-up words; "" if the template does not show these."""
        with suppress(InvalidRequest, InvalidModelFiles):  # what is broken may be where only a trial comes
            text = self._show(messages, messages[-1].get("role") != "assistant")
            return text if all(word in text for word in words) else ""
        return ""


def _as_user(where: Surrounding) -> Way:
    """Of all, for a template that hides elsewhere what it has shown in trials."""
    return Way.USER


# Kinds of messages in trials, by the neighbour. Behind none comes an answer, and then the user.
_IN_FRONT = {None: "", "user": "user", "assistant": "user assistant", "calls": "user calls", "tool": "user calls tool"}
_BEHIND = {
    None: "assistant user", "user": "user assistant user", "assistant": "assistant user",
    "calls": "calls tool assistant user", "tool": "tool assistant user",
}  # fmt: skip
_UNANSWERED = {("tool", "user"), (None, "assistant")}
_ID = "call_Lvag1"
_BROKEN = f'{{"{KEYS[0]}": "{_WORDS[0]}'  # arguments that were cut off


def _saying(kinds: Sequence[str], arguments: str | None = None) -> list[Message]:
    """Messages of these kinds, each with a word of its own. arguments: of calls, in the place of an object."""
    found: list[Message] = []
    for kind, word in zip(kinds, _WORDS, strict=False):
        function = {"name": NAMES[0], "arguments": arguments or {KEYS[0]: word}}
        if kind == "calls":
            calls = [{"id": _ID, "type": "function", "function": function}]
            found.append({"role": "assistant", "content": None, "tool_calls": calls, **THINKING})
        else:
            more = {"assistant": THINKING, "tool": {"tool_call_id": _ID}}
            found.append({"role": kind, "content": word, **more.get(kind, {})})
    return found


def _speaks(m: Message) -> bool:
    return m.get("role") in _SPEAKERS


def _kind(m: Message) -> str:
    role = m.get("role")
    if role == "assistant":
        return "calls" if m.get("tool_calls") else "assistant"
    return "tool" if role == "tool" else "user"


def _blank(before: str | None) -> Message:
    """A turn that says nothing, behind a message of this kind; some templates want more than an empty text for that."""
    return {"role": "assistant" if before else "user", "content": " "}


def _says(m: Message) -> bool:
    return bool(m.get("content") or m.get("tool_calls"))


def _roles(run: Sequence[Message]) -> tuple[str, ...]:
    """Of messages in a row, without what makes no difference."""
    roles = [str(m["role"]) for m in run]
    return (*roles[:2], *dict.fromkeys(roles[2:]))


def _put(way: Way, found: list[Message], run: Sequence[Message], behind: list[Message]) -> None:
    """Append messages of system and developer. behind: those that follow; the first may be changed."""
    if way is Way.AS_SENT:
        found += run
    elif way is Way.SYSTEM:
        found += without_developer(run)
    elif way is Way.ONE:
        found.append({"role": "system", "content": _text(run)})
    else:
        marked = [f"<system-message>\n{_text([m])}\n</system-message>" for m in run]
        said = {"role": "user", "content": "\n\n".join(marked)}
        if way is Way.RESULT and found and found[-1].get("role") == "tool":
            found[-1] = {**found[-1], "content": _text([found[-1], said])}
        elif way is Way.RESULT and behind and behind[0].get("role") == "tool":
            behind[0] = {**behind[0], "content": _text([said, behind[0]])}
        else:
            found.append(said)


def without_developer(messages: Sequence[Message]) -> list[Message]:
    """The role "developer" is "system", and is joined to a system message in front."""
    found: list[Message] = []
    for m in messages:
        if m.get("role") != "developer":
            found.append(m)
        elif found and found[-1].get("role") == "system":
            found[-1] = {**found[-1], "content": _text([found[-1], m])}
        else:
            found.append({**m, "role": "system"})
    return found


def _one(row: Sequence[Message]) -> Message:
    """Messages of one role as one, with all their calls and reasoning."""
    found = dict(row[0])
    found["content"] = _text(row) or found.get("content")
    for name in ("reasoning_content", "reasoning", "thinking"):
        if thought := _text(row, name):
            found[name] = thought
    if calls := [call for m in row for call in m.get("tool_calls") or ()]:
        found["tool_calls"] = calls
    return found


def _text(messages: Sequence[Message], name: str = "content") -> str:
    return "\n\n".join(text for m in messages if isinstance(text := m.get(name), str) and text.strip())
