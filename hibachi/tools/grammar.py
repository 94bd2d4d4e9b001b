"""The grammar of an answer with tools: which calls, text and reasoning may come, and in which order."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from hibachi.errors import InvalidRequest
from hibachi.guide.worker import Refused, read_schema
from hibachi.structured import StructuredOutputs
from hibachi.tools.arguments import arguments
from hibachi.tools.format import ChatFormat, ReasoningFormat, Slot, Thinking, ToolFormat
from hibachi.tools.lark import BLANKS, Rules, Special, joined, trie
from hibachi.tools.schemas import slashed
from hibachi.tools.tools import Tool, Toolbox

ANYTHING = {"type": "object", "additionalProperties": True}
BARE = {
    Slot.NUMBER: "/0|[1-9][0-9]{0,3}/",
    Slot.ID: "/[A-Za-z0-9_-]{1,40}/",
    Slot.TAG: "/[A-Za-z_-]{1,32}/",
}
NINE = "/[A-Za-z0-9]{9}/"


def form(
    format: ChatFormat,
    toolbox: Toolbox,
    thinking: Thinking,
    answer: StructuredOutputs | None,
    special: Special,
    *,
    ids: Iterable[int] = (),
    ends: Collection[int] = (),
    loose: Collection[str] = (),
) -> StructuredOutputs | None:
    """The form of an answer; None where it may be anything.

    Where the model must call, calls come and nothing else. Where it may, any text comes, and from the text that begins
    calls on, calls that keep to their schemas. answer: the form of what is said: then either that comes or calls.
    Reasoning, where there may be some, comes first, and is free.

    special: cuts a fixed text into texts and ids of special tokens. ids: special tokens, which free text may hold.
    ends: tokens that end an answer. loose: names of tools whose arguments may be any object.

    Raises InvalidRequest for a schema that cannot be read or that the format cannot say, as
    `tools[2].function.parameters: ...`; what the library cannot do shows when the form is checked, see `guided`.
    """
    tools = toolbox.callable if format.tools is not None else ()
    if not tools and toolbox.mode == "required":
        raise InvalidRequest(
            "tools: a call was required, and there is no tool that may be called, or it is not known how the model "
            "writes calls. Send a tool that may be called, or tool_choice auto."
        )
    if not tools and (answer is None or (thinking is Thinking.NONE and not format.before_said)):
        return answer
    rules = Rules(special, ids, ends)
    calls = Calls(rules, format, toolbox, loose) if tools else None
    said = None if answer is None else header(rules, format) + said_as(rules, answer)
    free = calls is not None and said is None and toolbox.mode != "required"
    barred = rules.barred(begin_of(format)) if thinking is Thinking.MAY and format.reasoning else set[int]()
    if calls is None:
        body = said or ""
    elif toolbox.mode == "required":
        body = calls.only()
    elif said is None:
        body = calls.perhaps(barred)
    else:
        body = f"{calls.only()} | {said}"
    start = behind(rules, format, thinking, rules.rule(body, "body"), free=free)
    return StructuredOutputs(grammar=rules.source(start))


def guided(
    format: ChatFormat,
    toolbox: Toolbox,
    thinking: Thinking,
    answer: StructuredOutputs | None,
    special: Special,
    check: Callable[[StructuredOutputs], object],
    *,
    ids: Iterable[int] = (),
    ends: Collection[int] = (),
) -> StructuredOutputs | None:
    """`form`, checked. A tool whose schema the library cannot do may take any object where the model may choose and the
    tool is not strict; else it is refused by its name, and so is a form of what is said.

    check: checks a form and raises InvalidRequest, such as `hibachi.engine.forms.Forms.check`.
    """
    loose = set[str]()
    while True:
        try:
            found = form(format, toolbox, thinking, answer, special, ids=ids, ends=ends, loose=loose)
            if found is not None:
                check(found)
            return found
        except ToolRefused as e:
            guilty, error = {e.tool}, e
        except InvalidRequest as e:
            if answer is not None:
                check(answer)
            errors = {each.tool: each for each in faults(toolbox, check) if each.tool not in loose}
            if not errors:
                raise InvalidRequest(f"tools: {words_of(e)}") from None
            guilty, error = set(errors), next(iter(errors.values()))
        strict = {tool.name for tool in toolbox.callable if tool.strict or toolbox.mode == "required"}
        if guilty & (strict | loose):
            raise error
        loose |= guilty


class ToolRefused(InvalidRequest):
    """The schema of a tool cannot be served. tool: its name."""

    def __init__(self, place: int, tool: str, why: str) -> None:
        super().__init__(f"tools[{place}].function.parameters: {why}.")
        self.tool = tool


def faults(toolbox: Toolbox, check: Callable[[StructuredOutputs], object]) -> list[ToolRefused]:
    """The tools whose schemas are refused even by themselves."""
    found = []
    for place, tool in enumerate(toolbox.tools):
        try:
            check(StructuredOutputs(json=tool.parameters or {"type": "object"}, one_of_as_any_of=True))
        except InvalidRequest as e:
            found.append(ToolRefused(place, tool.name, words_of(e)))
    return found


def words_of(error: InvalidRequest) -> str:
    """What a form's check says, without the name of the form and the end of its sentence."""
    return re.sub(r"^structured_outputs\.\w+:? ", "", str(error)).removesuffix(".")


# ---- reasoning, and what is said -------------------------------------------------------------------------------------


def begin_of(format: ChatFormat) -> str:
    """What opens reasoning at the beginning of an answer."""
    assert format.reasoning is not None
    return format.reasoning.begin.strip().removeprefix(format.prompted).lstrip()


def behind(rules: Rules, format: ChatFormat, thinking: Thinking, body: str, *, free: bool) -> str:
    """A body behind the reasoning. free: the answer may end in its midst."""
    reasoning: ReasoningFormat | None = format.reasoning
    if reasoning is None or thinking is Thinking.NONE:
        return body
    end = reasoning.end.strip()
    thought = f"{rules.upto(end)} ({BLANKS})? {body}"
    if free:
        thought = f"{rules.upto(end)} {body} | {rules.free(rules.barred(end))}"
    if thinking is Thinking.OPEN:
        return thought
    begin = rules.cut(begin_of(format))
    blanks = "/[ \\t\\r\\n]*/"
    if all(isinstance(part, str) for part in begin):
        opened = rules.rule(f"{blanks} {joined(begin)}", "think", "[lazy]")
    else:
        opened = rules.rule(f"({BLANKS})? {joined(begin)}", "think")
    return f"{opened} {rules.rule(thought, 'thought')} | {body}"


def header(rules: Rules, format: ChatFormat) -> str:
    """What may come before what is said."""
    lead = format.before_said.removeprefix(format.prompted) if format.prompted else format.before_said
    return f"({rules.fixed(lead)})? " if lead else ""


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
            return rules.terminal(f"/{slashed(text)}/" if text else '""', "REGEX")
        if answer.kind == "choice":
            assert answer.choice is not None
            return rules.terminal(rules.either(list(answer.choice)), "CHOICE")
        return rules.embed(text)
    except Refused as e:
        raise InvalidRequest(f"structured_outputs.{answer.kind}: {e}.") from None


# ---- calls -----------------------------------------------------------------------------------------------------------


class Calls:
    """Rules for the calls of one answer. Raises ToolRefused."""

    def __init__(self, rules: Rules, format: ChatFormat, toolbox: Toolbox, loose: Collection[str]) -> None:
        assert format.tools is not None
        tools = self._format = format.tools
        self._rules, self._prompted = rules, format.prompted
        call = list(tools.call)
        prefix = call.pop(0) if isinstance(call[0], str) else ""
        tail = call.pop() if call and isinstance(call[-1], str) else ""
        self._lead = (tools.begin + prefix).lstrip()
        self._later, ended = rules.ended(tail + tools.between + prefix)
        self._closing, _ = rules.ended((tail + tools.end).rstrip())
        self._one = ended or not toolbox.parallel or tools.most == 1
        self._most = tools.most
        place = {tool.name: i for i, tool in enumerate(toolbox.tools)}
        named = [self._named(call, tool, place[tool.name], tool.name in loose) for tool in toolbox.callable]
        self._call = rules.rule(trie(named), "call")

    def _named(self, parts: list[str | Slot], tool: Tool, place: int, loose: bool) -> tuple[str, str]:
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
                found.append(self._slot(part, tool, place, loose))
        return begin, " ".join(found)

    def _slot(self, slot: Slot, tool: Tool, place: int, loose: bool) -> str:
        if slot is not Slot.ARGUMENTS:
            nine = slot is Slot.ID and self._format.id == "nine letters"
            return self._rules.terminal(NINE if nine else BARE[slot], slot.name)
        try:
            return arguments(self._rules, self._format.arguments, ANYTHING if loose else tool.parameters)
        except Refused as e:
            raise ToolRefused(place, tool.name, str(e)) from None

    def only(self) -> str:
        """Calls and nothing else."""
        lead = self._lead.removeprefix(self._prompted).lstrip() if self._prompted else self._lead
        return f"{self._rules.spaced(lead)} {self._all()}"

    def perhaps(self, barred: Collection[int]) -> str:
        """Text, and calls from the first marker on."""
        rules = self._rules
        marker, rest = split(self._format, self._lead)
        free = rules.free({*barred, *rules.barred(marker)})
        begun = self._opening(marker, rest)
        if self._format.alone:
            return f"{begun or self._first(marker)} {rules.fixed(rest)} {self._all()} | {free}"
        head = f"{rules.upto(marker, barred)} {rules.fixed(rest)}"
        if self._one or not self._repeats:
            found = f"{head} {self._all()} | {free}"
        else:
            one = rules.rule(f"{head} {self._call} {joined(self._closing)}", "said_and_called")
            most = "*" if self._most is None else f"{{0,{self._most}}}"
            found = f"{one}{most} {free}"
        if not begun:
            return found
        first = f"{begun} {rules.fixed(rest)} {self._all()}"
        again = "" if self._one or not self._repeats else f" {rules.rule(found, 'further')}"
        return f"{first}{again} | {found}"

    @property
    def _repeats(self) -> bool:
        """Each call has a marker of its own, so text may stand between two."""
        return not self._format.begin.strip() and not self._format.end.strip()

    def _all(self) -> str:
        """From behind the first text of the first call to the end of the last."""
        further = ""
        if not self._one:
            most = "*" if self._most is None else f"{{0,{self._most - 1}}}"
            further = f" ({joined(self._later)} {self._call}){most}"
        return f"{self._call}{further} {joined(self._closing)}"

    def _opening(self, marker: str, rest: str) -> str:
        """The marker at the beginning of an answer whose prompt has written a part of it; "" if there is no such."""
        prompted = self._prompted.lstrip()
        if not prompted or not marker.startswith(prompted) or marker == prompted:
            return ""
        return self._first(marker.removeprefix(prompted))

    def _first(self, marker: str) -> str:
        """A marker at the beginning of an answer, behind blanks."""
        parts = self._rules.cut(marker.lstrip())
        if all(isinstance(part, str) for part in parts):
            return self._rules.rule(f"/[ \\t\\r\\n]*/ {joined(parts)}", "first", "[lazy]")
        return self._rules.rule(f"({BLANKS})? {joined(parts)}", "first")


def split(tools: ToolFormat, lead: str) -> tuple[str, str]:
    """The marker, and what follows it in the text that leads to the first call."""
    marker = tools.marker.strip() or lead.rstrip()
    at = lead.find(marker)
    if at < 0:
        return lead.rstrip(), lead[len(lead.rstrip()) :]
    return lead[: at + len(marker)], lead[at + len(marker) :]
