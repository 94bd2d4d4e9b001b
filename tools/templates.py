"""How the chat templates of a folder, or of an sdist that has some, write calls and reasoning: a table.

    python tools/templates.py FOLDER_OR_TAR [NAME ...]

Each template that writes calls is tried with 25 random lists of calls, which must be read again exactly.
"""

from __future__ import annotations

import random
import re
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hibachi.llm.chatformat.format import ChatFormat, Python, Quoted, Tagged, Thinking
from hibachi.llm.chatformat.templates.choosing import Formats
from hibachi.llm.chatformat.templates.probes import SAID, THINKING, THOUGHT, Called, Template, user
from hibachi.llm.chatformat.templates.reasoning import without_end
from hibachi.llm.chatformat.templates.trial import by_the_model, called, heard
from hibachi.llm.chatformat.tools import Tool
from hibachi.llm.tokenizers.chat import render_chat

LISTS = 25
FOLDER = "models/templates/"
NAMES = ("get_weather", "searchWeb2", "note-it")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a"},
        "text": {"type": "string", "description": "b"},
        "days": {"type": "integer", "description": "c"},
        "share": {"type": "number", "description": "d"},
        "exact": {"type": "boolean", "description": "e"},
        "where": {"type": "object", "description": "f", "properties": {}, "additionalProperties": {"description": "x"}},
        "tags": {"type": "array", "description": "g", "items": {"type": "string"}},
    },
    "required": [],
}
TOOLS = tuple(Tool(name, SCHEMA, "does it") for name in NAMES)
SENT = [
    {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": SCHEMA}}
    for t in TOOLS
]
STRINGS = (
    "Paris",
    "",
    "\"quoted\" and 'single'",
    "two\nlines\n\nand a third",
    "東京の天気は？ 서울 🌦",
    "a < b && c > d </b> & co.",
    "{'not': [json}",
    '{"a": 1}',
    "17",
    "true",
    "null",
    "tab\there",
    "x=1, y=(2), z='3'",
    "C:\\new\\table\\",
    "line one\\nstill one",
    "a very " + "long " * 60 + "text",
    "  blanks before and behind  ",
    "\n a new line before, and one behind\n",
    "# Heading\n\n```python\nprint('hi')\n```\n- item",
)


@dataclass
class Row:
    """What came of one template."""

    name: str
    form: ChatFormat
    writes: bool
    reasoning: str = ""  # "yes", or "wrong: ..."; "" where nothing shows it
    wrong: list[str] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)  # what the template cannot write

    @property
    def verdict(self) -> str:
        if self.form.tools is None:
            return "refused" if self.writes else "writes no calls" + ("" if self.form.shows else ", ignores tools")
        by = "derived" if self.form.source == "derived" else f"by data ({self.form.source})"
        return f"{by}{', WRONG' if self.wrong else ''}{'' if self.writes else ', unseen'}"


def templates(place: Path) -> Iterator[tuple[str, str]]:
    """Names and texts."""
    if place.is_dir():
        for file in sorted(place.glob("*.jinja")):
            yield file.stem, file.read_text()
        return
    with tarfile.open(place) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            if FOLDER in member.name and member.name.endswith(".jinja"):
                file = tar.extractfile(member)
                assert file is not None
                yield Path(member.name).stem, file.read().decode()


def row(name: str, text: str, formats: Formats, lists: int = LISTS) -> Row:
    """One template tried."""

    def render(messages: Any, **variables: Any) -> str:
        return render_chat(text, messages, **{"bos_token": "<s>", "eos_token": "</s>", **variables})

    form = formats.of(text, render)
    template = Template(render, most=10_000, seconds=600)
    found = Row(name, form, template.settle())
    found.reasoning = _reasoning(template, form)
    if form.tools is None or not found.writes:
        return found
    chance = random.Random(name)
    for _ in range(lists):
        calls = _calls(chance, form, found.left_out)
        sent = template.after([user(), template.answer(*calls)], tools=SENT)
        wanted = [(c.name, c.arguments) for c in calls]
        if sent is None:
            found.wrong.append(f"refused: {calls}")
            continue
        answer = heard(form, by_the_model(template, form, without_end(template, sent)), TOOLS)
        got, said = called(answer), answer.content
        if got != wanted or [list(a) for _, a in got] != [list(_sorted(a, form)) for _, a in wanted]:
            found.wrong.append(f"{sent!r}\n     gave {got!r}\n   wanted {wanted!r}")
        elif said.strip() and not said.strip().startswith("<"):
            found.wrong.append(f"said {said!r}")
    return found


def _sorted(arguments: Any, form: ChatFormat) -> Any:
    return sorted(arguments) if form.tools and isinstance(form.tools.arguments, Quoted) else arguments


def _reasoning(template: Template, form: ChatFormat) -> str:
    if form.reasoning is None:
        return ""
    for text in (template.said(**THINKING), template.called(Called(NAMES[0], {"city": "Oslo"}), **THINKING)):
        if text is None or THOUGHT not in text:
            continue
        start = text.index(THOUGHT)
        answer = heard(form, text[start:], TOOLS, Thinking.OPEN)
        said, thought = without_end(template, answer.content), answer.reasoning or ""
        if thought.strip() != THOUGHT or not re.fullmatch(r"\s*(<[^<>]+>\s*)*", said.replace(SAID, "")):
            return f"wrong: {thought!r}, {said!r}"
        return "yes"
    return "not shown"


# ---- random calls ----------------------------------------------------------------------------------------------------


def _calls(chance: random.Random, form: ChatFormat, left_out: set[str]) -> list[Called]:
    assert form.tools is not None
    count = min(form.tools.most or 3, chance.choice((1, 1, 2, 3)))
    return [
        Called(chance.choice(NAMES), _arguments(chance, form, left_out), f"call_{chance.getrandbits(45):09x}"[:14])
        for _ in range(count)
    ]


def _arguments(chance: random.Random, form: ChatFormat, left_out: set[str]) -> dict[str, Any]:
    makers: dict[str, Any] = {
        "city": lambda: _string(chance, form, left_out),
        "text": lambda: _string(chance, form, left_out),
        "days": lambda: chance.randrange(-5, 10**6),
        "share": lambda: chance.choice((0.5, -2.25, 3, 1e-3)),
        "exact": lambda: chance.random() < 0.5,
        "where": lambda: _object(chance, form, left_out, 2),
        "tags": lambda: [_string(chance, form, left_out) for _ in range(chance.randrange(4))],
    }
    keys = chance.sample(list(makers), chance.choice((0, 1, 1, 2, 3, 5)))
    return {key: makers[key]() for key in keys}


def _object(chance: random.Random, form: ChatFormat, left_out: set[str], depth: int) -> dict[str, Any]:
    def value(depth: int) -> Any:
        kind = chance.randrange(7 if depth else 5)
        if kind == 5:
            return [value(depth - 1) for _ in range(chance.randrange(1, 3))]
        if kind == 6:
            return {f"k{i}": value(depth - 1) for i in range(chance.randrange(1, 3))}
        if kind == 4 and _nested(form):
            left_out.add("null in objects, which it leaves out")
            return True
        return (_string(chance, form, left_out, nested=True), chance.randrange(99), 1.5, True, None)[kind]

    return {key: value(depth) for key in chance.sample(("name", "pos", "more"), chance.randrange(1, 4))}


def _nested(form: ChatFormat) -> bool:
    arguments = form.tools.arguments if form.tools else None
    return isinstance(arguments, Tagged) and arguments.item is not None


def _string(chance: random.Random, form: ChatFormat, left_out: set[str], nested: bool = False) -> str:
    while True:
        text = chance.choice(STRINGS)
        why = _impossible(text, form, nested)
        if why is None:
            return text
        left_out.add(why)


def _impossible(text: str, form: ChatFormat, nested: bool) -> str | None:
    """Why no reader can tell this text from another in what the template writes."""
    arguments = form.tools.arguments if form.tools else None
    if isinstance(arguments, Python) and "\\" in text:
        return "backslashes, which it does not escape"
    if isinstance(arguments, Python) and "'" in text:
        return "quotes, which it does not escape"
    if nested and _nested(form) and text in ("17", "true", "null", "", '{"a": 1}'):
        return "texts within objects that look like other values, which it writes alike"
    return None


def table(rows: list[Row]) -> str:
    """In Markdown."""
    lines = ["| template | calls | arguments | reasoning | switch |", "|---|---|---|---|---|"]
    for r in rows:
        kind = type(r.form.tools.arguments).__name__ if r.form.tools else ""
        begin = r.form.reasoning.begin.replace("|", "\\|") if r.form.reasoning else ""
        marks = f"`{begin}` {r.reasoning}" if begin else ""
        switch = ", ".join(filter(None, (r.form.switch, "reasoning_effort" if r.form.effort else None)))
        lines.append(f"| {r.name} | {r.verdict} | {kind} | {marks} | {switch} |")
    return "\n".join(lines)


def main(place: str, *wanted: str) -> int:
    """Print the table, what was wrong, and the sums."""
    formats = Formats()
    rows = [row(n, t, formats) for n, t in templates(Path(place)) if not wanted or any(w in n for w in wanted)]
    print(table(rows))
    for r in rows:
        for what in r.wrong[: 3 if wanted else 1]:
            print(f"\n{r.name}: {len(r.wrong)} of {LISTS} wrong, for example\n     {what}")
        if r.left_out:
            print(f"{r.name}: left out {', '.join(sorted(r.left_out))}")
    writers = [r for r in rows if r.writes]
    derived = sum(r.form.tools is not None and r.form.source == "derived" and not r.wrong for r in writers)
    data = sum(r.form.tools is not None and r.form.source != "derived" and not r.wrong for r in writers)
    wrong = sum(bool(r.wrong) for r in writers)
    thinks = sum(r.form.reasoning is not None for r in rows)
    print(
        f"\n{len(rows)} templates, {len(writers)} write calls: {derived} derived, {data} by data, {wrong} wrong, "
        f"{len(writers) - derived - data - wrong} refused; reasoning in {thinks}"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
