"""A format tried on what the template writes: what is read again must be what was called."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from hibachi.tools.format import (
    CallArguments,
    CallBegun,
    CallEnded,
    ChatFormat,
    Event,
    Python,
    Reasoned,
    Said,
    Thinking,
    thinking_of,
)
from hibachi.tools.parser import Parser
from hibachi.tools.probes import IDS, NAMES, SAID, THINKING, THOUGHT, Called, Template, same_beginning, user
from hibachi.tools.reasoning import without_end, written_from
from hibachi.tools.tools import Tool, Toolbox

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


def fits(template: Template, form: ChatFormat, trials: Sequence[Sequence[Called]] = TRIALS) -> bool:
    """Whether what the template writes for some lists of calls is read again as these."""
    tools = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in TOOLS
    ]
    if form.tools is None:
        return False
    plain = isinstance(form.tools.arguments, Python)  # whose templates escape nothing
    for calls in trials:
        if (form.tools.most or len(calls)) < len(calls) or (plain and "\\" in str(calls[0].arguments.get("city"))):
            continue
        text = template.after([user(), template.answer(*calls)], tools=tools)
        if text is None:
            return False
        found, said, _ = read(form, written(template, form, without_end(template, text)), TOOLS)
        if found != [(c.name, c.arguments) for c in calls] or not _TAGS_ONLY.fullmatch(said):
            return False
    return True


def reads(template: Template, form: ChatFormat) -> bool:
    """Whether an answer of text, with reasoning where the template shows it, is read as such."""
    for more in ({}, THINKING) if form.reasoning else ({},):
        text = template.said(**more)
        if text is None or SAID not in text:
            continue
        answer = written(template, form, text)
        opened = answer.lstrip().startswith(THOUGHT)
        thinking = Thinking.OPEN if opened else thinking_of(form.reasoning, text[: len(text) - len(answer)])
        _, said, thought = read(form, answer, (), thinking)
        front, _, rest = said.partition(SAID)
        if front.strip() or not _TAGS_ONLY.fullmatch(without_end(template, rest)):
            return False
        if THOUGHT in text and thought.strip() != THOUGHT:
            return False
    return True


def written(template: Template, form: ChatFormat, text: str) -> str:
    """What of the text behind the user's words the model would have written."""
    start = same_beginning(template.prompt() or "", text)
    if start < len(template.prompt() or ""):
        start = written_from(template, text, form.reasoning)
    return text[start:]


def read(
    form: ChatFormat, text: str, tools: Sequence[Tool], thinking: Thinking = Thinking.MAY
) -> tuple[list[tuple[str, Any]], str, str]:
    """The calls, what was said and the reasoning of an answer. Arguments that are no JSON come as their text."""
    parser = Parser(form, Toolbox(tuple(tools)), thinking)
    return gathered([*parser.feed(text), *parser.end()])


def gathered(events: Iterable[Event]) -> tuple[list[tuple[str, Any]], str, str]:
    """The same of events."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    said, reasoned = [], []
    for event in events:
        if isinstance(event, CallBegun):
            names[event.number] = event.name
        elif isinstance(event, CallArguments):
            arguments[event.number] = arguments.get(event.number, "") + event.text
        elif isinstance(event, CallEnded) and not event.complete:
            arguments[event.number] = "incomplete: " + arguments.get(event.number, "")
        elif isinstance(event, Said):
            said.append(event.text)
        elif isinstance(event, Reasoned):
            reasoned.append(event.text)
    return [(name, _value(arguments.get(n, ""))) for n, name in names.items()], "".join(said), "".join(reasoned)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
