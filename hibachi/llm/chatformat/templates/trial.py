"""A format tried on what the template writes: what is read again must be what was called."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from hibachi.llm.chatformat.format import ChatFormat, Python, Thinking, thinking_of
from hibachi.llm.chatformat.reading.whole import Answer, read
from hibachi.llm.chatformat.templates.probes import (
    IDS,
    NAMES,
    SAID,
    THINKING,
    THOUGHT,
    Called,
    Template,
    same_beginning,
    user,
)
from hibachi.llm.chatformat.templates.reasoning import without_end, written_from
from hibachi.llm.chatformat.tools import Tool, Toolbox

_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a"},
        "days": {"type": "integer", "description": "b"},
        "exact": {"type": "boolean", "description": "c"},
        "where": {
            "type": "object",
            "description": "d",
            "properties": {},
            "additionalProperties": {"description": "any"},
        },
        "tags": {"type": "array", "description": "e", "items": {"type": "string"}},
    },
    "required": [],
}
TOOLS = tuple(Tool(name, _SCHEMA, "does it") for name in NAMES)
TRIALS: list[list[Called]] = [
    [Called(NAMES[0], {"city": "Paris", "days": 3})],
    [Called(NAMES[1], {"city": '"Rue" d\'Or,\n  línea {2}: 東京 <b> & co.\\', "exact": True})],
    [Called(NAMES[0], {"where": {"at": [1, 2.5], "names": {"a": "x y"}}, "tags": ["a", "b c"]})],
    [Called(NAMES[0], {})],
    [Called(NAMES[0], {"city": "C:\\new\\"})],
    [Called(NAMES[0], {"city": "Lyon"}, IDS[0]), Called(NAMES[1], {"days": -17, "exact": False}, IDS[1])],
]
THREE = [[*TRIALS[-1], Called(NAMES[0], {"days": 3}, IDS[0][:-1] + "3")]]
_TAGS_ONLY = re.compile(r"(\s*<[^<>]+>)*\s*")


def fits(template: Template, format: ChatFormat, trials: Sequence[Sequence[Called]] = TRIALS) -> bool:
    """Whether what the template writes for some lists of calls is read again as these."""
    tools = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in TOOLS
    ]
    if format.tools is None:
        return False
    plain = isinstance(format.tools.arguments, Python)  # whose templates escape nothing
    for calls in trials:
        if (format.tools.most or len(calls)) < len(calls) or (plain and "\\" in str(calls[0].arguments.get("city"))):
            continue
        text = template.after([user(), template.answer(*calls)], tools=tools)
        if text is None:
            return False
        answer = heard(format, by_the_model(template, format, without_end(template, text)), TOOLS)
        if called(answer) != [(c.name, c.arguments) for c in calls] or not _TAGS_ONLY.fullmatch(answer.content):
            return False
    return True


def reads(template: Template, format: ChatFormat) -> bool:
    """Whether an answer of text, with reasoning where the template shows it, is read as such."""
    for more in ({}, THINKING) if format.reasoning else ({},):
        text = template.said(**more)
        if text is None or SAID not in text:
            continue
        answer = by_the_model(template, format, text)
        opened = answer.lstrip().startswith(THOUGHT)
        thinking = Thinking.OPEN if opened else thinking_of(format.reasoning, text[: len(text) - len(answer)])
        found = heard(format, answer, (), thinking)
        front, _, rest = found.content.partition(SAID)
        if front.strip() or not _TAGS_ONLY.fullmatch(without_end(template, rest)):
            return False
        if THOUGHT in text and (found.reasoning or "").strip() != THOUGHT:
            return False
    return True


def by_the_model(template: Template, format: ChatFormat, text: str) -> str:
    """What of the text behind the user's words the model would have written."""
    start = same_beginning(template.prompt() or "", text)
    if start < len(template.prompt() or ""):
        start = written_from(template, text, format.reasoning)
    return text[start:]


def heard(format: ChatFormat, text: str, tools: Sequence[Tool], thinking: Thinking = Thinking.MAY) -> Answer:
    """What an answer holds."""
    return read(format, Toolbox(tuple(tools)), thinking, text)


def called(answer: Answer) -> list[tuple[str, Any]]:
    """Names and arguments of the calls of an answer; arguments that are no JSON as their text."""
    return [(call.name, _value(call.arguments)) for call in answer.calls if call.complete]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
