"""The grammar of an answer with tools: which calls, text and reasoning may come, and in which order."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hibachi.engine.guide.worker import Refused, ascii_classes, read_schema
from hibachi.errors import InvalidRequest, MissingExtra, UnsupportedOperation, message_of
from hibachi.llm.chatformat.errors import BadField
from hibachi.llm.chatformat.format import ChatFormat, Json, ReasoningFormat, Slot, Thinking, ToolFormat
from hibachi.llm.chatformat.grammar.arguments import arguments, as_object, closed
from hibachi.llm.chatformat.grammar.lark import BLANKS, EMPTY, Rules, Special, joined, quoted, trie
from hibachi.llm.chatformat.grammar.schemas import moved
from hibachi.llm.chatformat.grammar.strings import slashed
from hibachi.llm.chatformat.marks import marks
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.chatformat.tools import Tool, Toolbox
from hibachi.structured import StructuredOutputs

SECONDS = 10.0  # that it may take to find out whose schema is refused
ANYTHING = {"type": "object", "additionalProperties": True}
BARE = {
    Slot.NUMBER: "/0|[1-9][0-9]{0,3}/",
    Slot.ID: "/[A-Za-z0-9_-]{1,40}/",
    Slot.TAG: "/[A-Za-z_-]{1,32}/",
}
FIRST = re.compile(r"\W*\w+")
NINE = "/[A-Za-z0-9]{9}/"


def unchecked_form(
    reader: AnswerReader,
    answer: StructuredOutputs | None,
    special: Special,
    *,
    ids: Iterable[int] = (),
    ends: Collection[int] = (),
    loose: Collection[str] = (),
) -> StructuredOutputs | None:
    """The form of an answer that `reader` reads; None where it may be anything. Whether the library can do it shows
    when it is checked.

    Where the model must call, calls come and nothing else. Where it may, any text comes, and from the text that begins
    calls on, calls that keep to their schemas. answer: the form of what is said: then either that comes or calls.
    Reasoning, where there may be some, comes first, and is free. Where the model may call, more comes behind it and
    behind calls, as the parser reads it.

    special: cuts a fixed text into texts and ids of special tokens. ids: special tokens, which free text may hold.
    ends: tokens that end an answer. loose: names of tools whose arguments may be any object.

    Raises InvalidRequest for a schema that cannot be read or that the format cannot say, as
    `tools[2].function.parameters: ...`.
    """
    format, toolbox = reader.format, reader.toolbox
    tools = toolbox.callable if format.tools is not None else ()
    if not tools and toolbox.mode == "required":
        raise BadField.at(
            ("tools",),
            ": a call was required, and there is no tool that may be called, or it is not known how the model "
            "writes calls. Send a tool that may be called, or tool_choice auto.",
        )
    if not tools and (answer is None or (reader.thinking is Thinking.NONE and not format.before_said)):
        return answer
    rules = Rules(special, ids, ends, marks(format, special))
    found = AnswerRules(rules, reader, answer, loose)
    return StructuredOutputs(grammar=found.source())


def checked_form(
    reader: AnswerReader,
    answer: StructuredOutputs | None,
    special: Special,
    check: Callable[[StructuredOutputs], object],
    *,
    ids: Iterable[int] = (),
    ends: Collection[int] = (),
) -> StructuredOutputs | None:
    """`unchecked_form`, checked. A tool whose schema the library cannot do may take any object where the model may
    choose and the tool is not strict; else it is refused by its name, and so is a form of what is said.

    check: checks a form and raises InvalidRequest, such as `hibachi.engine.forms.Forms.check`.
    """
    loose, until = set[str](), time.monotonic() + SECONDS
    while True:
        try:
            found = unchecked_form(reader, answer, special, ids=ids, ends=ends, loose=loose)
            if found is not None:
                check(found)
            return found
        except ToolRefused as e:
            guilty, error = {e.tool}, e
        except InvalidRequest as e:
            check_any(check)
            if answer is not None:
                check(answer)
            errors = {each.tool: each for each in faults(reader, special, check, until, ends) if each.tool not in loose}
            if not errors:
                raise BadField.at(("tools",), f": {words_of(e)}.") from None
            guilty, error = set(errors), next(iter(errors.values()))
        toolbox = reader.toolbox
        strict = {tool.name for tool in toolbox.callable if tool.strict or toolbox.mode == "required"}
        if guilty & (strict | loose):
            raise error
        loose |= guilty


def served_form(
    reader: AnswerReader,
    answer: StructuredOutputs | None,
    special: Special,
    check: Callable[[StructuredOutputs], object],
    *,
    ids: Iterable[int] = (),
    ends: Collection[int] = (),
) -> StructuredOutputs | None:
    """`checked_form`, or None where nothing must come and no grammar can be had: the library is missing, the model's
    tokens are no text, there are too many tools. Then calls are written as the model was trained to.
    """
    toolbox = reader.toolbox
    must = toolbox.mode == "required" or answer is not None or any(tool.strict for tool in toolbox.callable)
    try:
        return checked_form(reader, answer, special, check, ids=ids, ends=ends)
    except (MissingExtra, UnsupportedOperation):
        if must:
            raise
    except InvalidRequest as e:
        if must or e.path != ("tools",):
            raise
    return None


def check_any(check: Callable[[StructuredOutputs], object]) -> None:
    """Raises InvalidRequest about the tools if there cannot be any form."""
    try:
        check(StructuredOutputs(json_object=True))
    except InvalidRequest as e:
        raise BadField.at(("tools",), f": {words_of(e)}.") from None


class ToolRefused(BadField):
    """The schema of a tool cannot be served. tool: its name."""

    tool: str

    @classmethod
    def of(cls, place: int, tool: str, why: str) -> ToolRefused:
        error = cls.at(("tools", place, "function", "parameters"), f": {why}.")
        error.tool = tool
        return error


def faults(
    reader: AnswerReader,
    special: Special,
    check: Callable[[StructuredOutputs], object],
    until: float,
    ends: Collection[int],
) -> list[ToolRefused]:
    """The tools whose schemas, or calls, are refused even by themselves. Raises InvalidRequest if that is not known by
    `until`, of time.monotonic().
    """
    found = []
    for place, tool in enumerate(reader.toolbox.tools):
        if time.monotonic() > until:
            raise BadField.at(
                ("tools",),
                f": their schemas are too complex: checking them took more than {SECONDS:g} s. Make them simpler, "
                f"or send fewer tools.",
            )
        form: StructuredOutputs | None = None
        try:
            check(StructuredOutputs(json=tool.parameters or {"type": "object"}, one_of_as_any_of=True))
            form = unchecked_form(replace(reader, toolbox=Toolbox((tool,), "required")), None, special, ends=ends)
            if form is not None:
                check(form)
        except InvalidRequest as e:
            if form is None or "too complex" not in words_of(e):  # which is no fault of a schema
                found.append(ToolRefused.of(place, tool.name, words_of(e)))
    return found


def words_of(error: InvalidRequest) -> str:
    """What a form's check says, without the name of the form and the end of its sentence."""
    path = error.path or ()
    words = error.words[1:] if len(path) > 1 and path[0] == "structured_outputs" else error.words
    return message_of(words).removeprefix(":").strip().removesuffix(".")


# ---- reasoning, and what is said -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Rules for reasoning at the beginning, behind other and behind calls; "" where none is told from what is said.

    whole: one with its end. open: one that the answer ends in. barred: special tokens that nothing but it begins with.
    """

    whole: str = ""
    open: str = ""
    barred: frozenset[int] = frozenset()

    @property
    def lead(self) -> str:
        """Any number of whole ones, in front of something."""
        return f"({self.whole})* " if self.whole else ""


NO_THOUGHTS = Thoughts()


class AnswerRules:
    """The rules of one answer."""

    def __init__(
        self,
        rules: Rules,
        reader: AnswerReader,
        answer: StructuredOutputs | None,
        loose: Collection[str],
    ) -> None:
        format, toolbox = reader.format, reader.toolbox
        self._rules, self._format, self._required = rules, format, toolbox.mode == "required"
        self._reasoning = None if reader.thinking is Thinking.NONE else format.reasoning
        self._open = reader.thinking is Thinking.OPEN
        called = format.tools is not None and bool(toolbox.callable)
        self._calls = CallRules(rules, format, toolbox, loose) if called else None
        self._answer = answer
        self._said = None if answer is None else said_as(rules, answer)
        self._thoughts = self._further()

    def source(self) -> str:
        if self._reasoning is None:
            return self._rules.source(self._body(first=True))
        thought = self._thought(self._reasoning)
        if self._open:
            return self._rules.source(thought)
        begin = self._begin(self._reasoning)
        if begin is None or (self._thoughts.whole and not self._format.prompted.strip()):
            return self._rules.source(self._body(first=True))
        thought = f"{self._began(begin)} {self._rules.rule(thought, 'thought')}"
        return self._rules.source(f"{thought} | {self._body(first=True, barred=self._rules.barred(begin))}")

    def _begin(self, reasoning: ReasoningFormat) -> str | None:
        """What opens reasoning at the beginning of an answer; None if the prompt has begun with something else."""
        begin, prompted = reasoning.begin.strip(), self._format.prompted.lstrip()
        return begin.removeprefix(prompted) if begin.startswith(prompted) else None

    def _further(self) -> Thoughts:
        """Reasoning wherever it may come. Calls are looked for behind its end, as the parser does."""
        rules, calls = self._rules, self._calls
        if self._reasoning is None or calls is None or self._said is not None or self._required:
            return NO_THOUGHTS
        begin, end = self._reasoning.begin.strip(), self._reasoning.end.strip()
        if not told_apart(rules.cut(begin), rules.cut(calls.marker)):
            return NO_THOUGHTS
        began, whole = self._marked(begin), f"{self._marked(begin)} {rules.upto(end)}"
        ended = rules.cut(end)
        if is_text(ended) and all(told_apart(ended, rules.cut(other)) for other in (begin, calls.marker)):
            whole += f" | {self._marked(end)}"  # an end of nothing, which is left out
        return Thoughts(
            rules.rule(whole, "thought"), f"{began} {rules.free(rules.barred(end))}", frozenset(rules.barred(begin))
        )

    def _marked(self, mark: str) -> str:
        """A mark behind blanks, which nothing else can be where it has come."""
        parts = self._rules.cut(mark)
        if is_text(parts):  # any blanks may come, as they might be said
            return self._rules.rule(f"/[ \\t\\r\\n]*/ {joined(parts)}", "mark", "[lazy]")
        return self._rules.rule(f"({BLANKS})? {self._rules.lazily(parts)}", "mark")

    def _began(self, begin: str) -> str:
        """The beginning of the reasoning, behind blanks; but what goes on with the prompt's text comes at once."""
        parts = self._rules.cut(begin)
        if self._format.prompted.strip():
            return self._rules.lazily(parts)
        if is_text(parts):
            return self._rules.rule(f"/[ \\t\\r\\n]{{0,8}}/ {joined(parts)}", "think", "[lazy]")
        return self._rules.rule(f"({BLANKS})? {self._rules.lazily(parts)}", "think")

    def _thought(self, reasoning: ReasoningFormat) -> str:
        """From behind the beginning of the reasoning on. Where nothing is required it may also be all there is."""
        rules, end = self._rules, reasoning.end.strip()
        body = self._body(first=False)
        if self._calls is not None and self._said is None and not self._required:
            return f"{rules.upto(end)} {body} | {rules.free(rules.barred(end))}"
        return f"{rules.upto(end)} ({BLANKS})? {body}"

    def _body(self, *, first: bool, barred: Collection[int] = ()) -> str:
        """What is said and called. first: nothing comes before it. barred: special tokens that do not come there."""
        calls, said = self._calls, self._said
        if said is not None:
            lead = self._format.before_said
            lead = lead.removeprefix(self._format.prompted) if first else lead
            said = f"({self._rules.fixed(lead)})? {said}" if lead else said
        if calls is None:
            return self._rules.rule(said or EMPTY, "body")
        if self._required:
            body = calls.only(first=first)
        elif said is None or self._answer is None:
            body = calls.perhaps(barred, self._thoughts, first=first)
        else:
            body = calls.or_json(self._answer) or f"{calls.only(first=first)} | {said}"
        return self._rules.rule(body, "body")


def said_as(rules: Rules, answer: StructuredOutputs) -> str:
    """The form of what is said, as a part of a rule. Raises InvalidRequest."""
    text = answer.text
    try:
        if answer.kind in ("json", "json_object"):
            schema = read_schema(text) if text else {"type": "object"}
            return rules.json(schema, answer.whitespace_pattern, any_of=answer.one_of_as_any_of)
        if answer.kind == "regex":
            if (len(text) - len(text.rstrip("\\"))) % 2:
                raise Refused("it ends with a backslash that escapes nothing")
            return rules.terminal(f"/{slashed(ascii_classes(text))}/" if text else '""', "REGEX")
        if answer.kind == "choice":
            assert answer.choice is not None
            return rules.terminal(rules.either(list(answer.choice)), "CHOICE")
        return rules.embed(text)
    except Refused as e:
        raise InvalidRequest.at(("structured_outputs", answer.kind), f": {e}.") from None


# ---- calls -----------------------------------------------------------------------------------------------------------


class CallRules:
    """Rules for the calls of one answer. Raises ToolRefused."""

    def __init__(self, rules: Rules, format: ChatFormat, toolbox: Toolbox, loose: Collection[str]) -> None:
        assert format.tools is not None
        tools = self._format = format.tools
        self._rules, self._prompted, self._before_said = rules, format.prompted, format.before_said
        prefix, call, tail = parts_of(tools)
        lead = tools.begin + prefix
        self._lead = lead.lstrip()
        self._blanks = quoted(lead[: len(lead) - len(self._lead)])
        self._later, last = rules.ended(tail + tools.between + prefix)
        self._closing, over = rules.ended((tail + tools.end).rstrip())
        # Each call has a marker of its own, so text may stand between two.
        self._apart = not tools.begin.strip() and not tools.end.strip()
        self._several = toolbox.parallel and tools.most != 1 and not last
        self._again = toolbox.parallel and not over and (self._several if self._apart else tools.most is None)
        self._tools, self._loose = toolbox.callable, loose
        place = {tool.name: i for i, tool in enumerate(toolbox.tools)}
        self._named = [self._one(call, tool, place[tool.name]) for tool in toolbox.callable]
        self._call = rules.rule(trie(self._named), "call")

    def _one(self, parts: list[str | Slot], tool: Tool, place: int) -> tuple[str, str]:
        """One call, from behind its first text to before its last: the text it begins with, and the rest."""
        begin, found, text = "", list[str](), ""
        for part in [*parts, None]:
            if isinstance(part, str) or part is Slot.NAME:
                text += part if isinstance(part, str) else tool.name
                continue
            cut = [*self._rules.cut(text)]
            if not found and cut and isinstance(cut[0], str):
                begin = str(cut.pop(0))
            found += [joined(cut)] if cut else []
            text = ""
            if part is not None:
                found.append(self._slot(part, tool, place))
        return begin, " ".join(found)

    def _parameters(self, tool: Tool) -> Mapping[str, Any]:
        return ANYTHING if tool.name in self._loose else tool.parameters

    def _slot(self, slot: Slot, tool: Tool, place: int) -> str:
        if slot is not Slot.ARGUMENTS:
            nine = slot is Slot.ID and self._format.id == "nine letters"
            return self._rules.terminal(NINE if nine else BARE[slot], slot.name)
        try:
            return arguments(self._rules, self._format.arguments, self._parameters(tool))
        except Refused as e:
            raise ToolRefused.of(place, tool.name, str(e)) from None
        except RecursionError:
            raise ToolRefused.of(place, tool.name, "it is nested too deep, or a reference leads to itself") from None

    def only(self, *, first: bool) -> str:
        """Calls and nothing else. first: at the beginning of the answer."""
        prompted = self._prompted.lstrip()
        if first and prompted and self._lead.startswith(prompted):
            return f"{self._rules.fixed(self._lead.removeprefix(prompted))} {self._all()}"
        return f"{self._rules.spaced(self._lead, self._blanks if first else BLANKS)} {self._all()}"

    @property
    def marker(self) -> str:
        """The text that says that calls come."""
        return split(self._format, self._lead)[0]

    def perhaps(self, barred: Collection[int], thoughts: Thoughts, *, first: bool) -> str:
        """Text, and calls from the first marker on. barred: special tokens that the text does not hold. thoughts: come
        behind calls, and in front unless the prompt has begun the answer.
        """
        rules = self._rules
        marker, rest = split(self._format, self._lead)
        barred = {*barred, *thoughts.barred}
        if alone := self._format.alone:
            until, may, said = "", "", rules.free({*barred, *rules.barred(marker)})
        else:
            until, may, free = rules.until(marker, barred)
            said = rules.rule(f"{free} | {may} {free}", "said")
        last = f"({said} | {thoughts.open})" if thoughts.open else said
        prompted = first and bool(self._prompted.strip())
        before, end = ("", said) if prompted else (thoughts.lead, last)
        begun = self._opening(marker) if first else ""
        if alone:
            return f"{before}({begun or self._first(marker)} {rules.fixed(rest)} {self._all()} | {end})"
        called = rules.rule(f"{until} {rules.fixed(rest)} {self._call} | {may} {self._perhaps(rest)}", "called")
        further = ""
        if self._again:
            most = "*" if self._format.most is None else f"{{0,{self._format.most - prompted}}}"
            called = f"{called} {joined(self._closing) if self._apart else self._behind()}"
            further = rules.rule(f"({thoughts.lead}{called}){most} {thoughts.lead}{last}", "further")
            found = f"{called} {further} | {said}" if prompted else further
        else:
            found = f"{before}({called} {self._behind()} | {end})"
        if first and marker == self._prompted.lstrip() and not rest and (told := self._told(marker, found, further)):
            return told
        return f"{begun} {rules.fixed(rest)} {self._all()} {further} | {found}" if begun else found

    def _perhaps(self, rest: str) -> str:
        """The first call behind a marker that may be said, and no more behind it: nothing but it begins so. rest: what
        is between the marker and the call.
        """
        rules, cut = self._rules, self._rules.cut(rest.lstrip())
        if cut and isinstance(cut[0], int):
            return f"({BLANKS})? {joined(cut)} {self._call}"
        begins: dict[str, list[tuple[str, str]]] = {}
        if word := FIRST.match(rest := rest.lstrip()):
            begins[word[0]] = [("", f"{rules.fixed(rest[word.end() :])} {self._call}")]
        for text, behind in [] if word else self._named:
            begins.setdefault(text[:1], []).append((text[1:], behind))
        options = []
        for first, texts in begins.items():
            begun = rules.rule(" ".join(f"/[ \\t\\r\\n]*/ {quoted(letter)}" for letter in first), "begun", "[lazy]")
            options.append(f"{begun} {trie(texts)}")
        return rules.rule(" | ".join(options), "perhaps")

    def _told(self, marker: str, found: str, further: str) -> str:
        """An answer whose prompt has written the whole marker of a call, which is also how what is said begins; "" if
        it is not. The two are told apart by what comes next. found: what is said and what comes behind it; further:
        what comes behind a call.
        """
        said = self._before_said.removeprefix(marker)
        if said == self._before_said or not said or any(text.startswith(said) or not text for text, _ in self._named):
            return ""
        behind = self._rules.rule(f"{self._behind()} {further}", "behind")
        return trie([*((text, f"{rest} {behind}") for text, rest in self._named), (said, f"({found})")])

    def _all(self) -> str:
        """From behind the first text of the first call to the end of the last."""
        return f"{self._call}{self._behind()}"

    def _behind(self) -> str:
        """From behind the first call to the end of the last."""
        further = ""
        if self._several:
            most = "*" if self._format.most is None else f"{{0,{self._format.most - 1}}}"
            further = f" ({joined(self._later)} {self._call}){most}"
        return f"{further} {joined(self._closing)}"

    def or_json(self, answer: StructuredOutputs) -> str:
        """One call or JSON, where both begin alike: as one schema, since the lexer never goes back. "" for others."""
        if not self._format.alone or answer.kind not in ("json", "json_object"):
            return ""
        options = [call_schema(self._format, tool.name, f"#/$defs/{i}") for i, tool in enumerate(self._tools)]
        if None in options or not isinstance(self._format.arguments, Json):
            return ""
        given = read_schema(answer.text) if answer.text else {"type": "object"}
        schemas = [*(closed(as_object(self._parameters(tool))) for tool in self._tools), given]
        options.append({"$ref": f"#/$defs/{len(self._tools)}"})
        whole = {"anyOf": options, "$defs": {str(i): moved(schema, str(i)) for i, schema in enumerate(schemas)}}
        return self._rules.json(whole, answer.whitespace_pattern, any_of=True)

    def _opening(self, marker: str) -> str:
        """The rest of a marker at the beginning of an answer whose prompt has written a part of it; "" if there is
        none.
        """
        prompted = self._prompted.lstrip()
        if not prompted or not marker.startswith(prompted) or marker == prompted:
            return ""
        return self._rules.lazily(self._rules.cut(marker.removeprefix(prompted)))

    def _first(self, marker: str) -> str:
        """A marker at the beginning of an answer, behind blanks."""
        parts = self._rules.cut(marker.lstrip())
        if is_text(parts):
            return self._rules.rule(f"/[ \\t\\r\\n]{{0,8}}/ {joined(parts)}", "first", "[lazy]")
        return self._rules.rule(f"({BLANKS})? {self._rules.lazily(parts)}", "first")


def is_text(parts: Sequence[str | int]) -> bool:
    """Whether there is no special token among them."""
    return all(isinstance(part, str) for part in parts)


def told_apart(a: Sequence[str | int], b: Sequence[str | int]) -> bool:
    """Whether no text can be the beginning of both: where one begins like the other, the shorter would be taken."""
    x, y = next(((x, y) for x, y in zip(a, b, strict=False) if x != y), (None, None))
    if isinstance(x, str) and isinstance(y, str):
        return not (x.startswith(y) or y.startswith(x))
    return x is not None


def parts_of(tools: ToolFormat) -> tuple[str, list[str | Slot], str]:
    """The text that a call begins with, what stands between, and the text that it ends with."""
    call = list(tools.call)
    first, last = call[0], call[-1]
    prefix = first if isinstance(first, str) else ""
    tail = last if isinstance(last, str) and len(call) > 1 else ""
    return prefix, call[bool(prefix) : len(call) - bool(tail)], tail


def call_schema(tools: ToolFormat, name: str, arguments: str) -> dict[str, Any] | None:
    """The schema of a call that is a JSON object by itself; None for others. arguments: a reference."""
    slots = {Slot.NAME: json.dumps(name)[1:-1], Slot.ARGUMENTS: json.dumps({"$ref": arguments})}
    texts = [part if isinstance(part, str) else slots.get(part, "") for part in tools.call]
    try:
        found = json.loads("".join([tools.begin, *texts, tools.end]))
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    properties = {key: value if isinstance(value, dict) else {"const": value} for key, value in found.items()}
    return {"type": "object", "properties": properties, "required": [*found], "additionalProperties": False}


def split(tools: ToolFormat, lead: str) -> tuple[str, str]:
    """The marker, and what follows it in the text that leads to the first call."""
    marker = tools.marker.strip() or lead.rstrip()
    at = lead.find(marker)
    if at < 0:
        return lead.rstrip(), lead[len(lead.rstrip()) :]
    return lead[: at + len(marker)], lead[at + len(marker) :]
