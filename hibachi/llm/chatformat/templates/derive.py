"""How a chat template writes calls, from what it makes of probes: where names and arguments stand, and what is around.

`derive` renders conversations of made-up words and compares the texts. With one call and with two, the text before the
first name and the text before the second end alike: that is the beginning of a call. What stands behind the first
call's arguments and behind the second's begins alike: that is its end. The rest is around all calls, or between two.
Arguments are JSON where an object with the probe's arguments stands there, or else are taken apart in the same way.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hibachi.llm.chatformat.format import Call, ChatFormat, ReasoningFormat, Slot, ToolFormat
from hibachi.llm.chatformat.reading.slots import merged
from hibachi.llm.chatformat.templates.arguments import taken_apart
from hibachi.llm.chatformat.templates.probes import (
    IDS,
    KEYS,
    NAMES,
    SAID,
    VALUES,
    Called,
    Render,
    Template,
    Unclear,
    same_beginning,
    same_end,
    user,
    whole_tags,
)
from hibachi.llm.chatformat.templates.reasoning import (
    around_said,
    reads_effort,
    reasoning,
    switch,
    without_end,
    written_from,
)
from hibachi.llm.chatformat.templates.trial import THREE, fits, reads

ONE = Called(NAMES[0], {KEYS[0]: VALUES[0]}, IDS[0])
OTHER = Called(NAMES[1], {KEYS[1]: VALUES[1]}, IDS[1])
_NEAR = 60  # characters behind a value, in which its name may stand again
_OPENS = re.compile(r"[\s<\[{(\"]")


def derive(render: Render, record: tuple[str, ChatFormat] | None = None) -> ChatFormat:
    """The format of a chat template. Never raises; what is not found is None.

    render(messages, **variables) gives the text of a conversation, and raises InvalidRequest for what the template
    does not take. It is called at most 60 times, with add_generation_prompt, tools and such as variables.
    record: a format, and its name, that is taken if the template writes so, or writes no calls; one without tools is
    taken where no reasoning is found.
    """
    template = Template(render)
    writes = template.settle()
    found = _recorded(template, record, writes) if record else None
    if found is None:
        found = _derived(template, writes)
        if record and record[1].tools is None and found.reasoning is None:
            found = replace(found, reasoning=record[1].reasoning, silent=record[1].silent)
    return replace(
        found,
        shows=_shows(template),
        switch=switch(template),
        effort=reads_effort(template),
        history=template.history,
    )


def _recorded(template: Template, record: tuple[str, ChatFormat], writes: bool) -> ChatFormat | None:
    name, format = record
    if format.tools is None or not reads(template, format) or (writes and not fits(template, format)):
        return None
    return replace(format, source=name)


def _derived(template: Template, writes: bool) -> ChatFormat:
    thought = reasoning(template, ONE if writes else None)
    found = around_said(template, thought)
    if not reads(template, found):
        found, thought = ChatFormat(), None
    try:
        tools = _tools(template, thought) if writes else None
    except Unclear:
        tools = None
    if tools is None:
        return found
    tools = _marked(_without_blanks(_prompted(tools, found.prompted)), template, found.prompted)
    tools = replace(tools, spellings=_without_id(tools.call))
    whole = replace(found, tools=tools)
    if not fits(template, whole):
        return found
    if tools.most is None and not fits(template, whole, THREE):  # it closes the list behind the second
        return replace(whole, tools=replace(tools, most=2))
    return whole


def _without_id(call: Call) -> tuple[Call, ...]:
    """Further spellings: an id that is the last of a JSON object, `, "id": "..."}`, or stands behind a mark of its own,
    `[CALL_ID]...[ARGS]`, is left out by some models.
    """
    at = call.index(Slot.ID) if Slot.ID in call else 0
    if at > call.index(Slot.ARGUMENTS) and call[-1] == '"}':
        return ((*call[: at - 1], "}"),)
    if at > 1 and isinstance(mark := call[at - 1], str) and isinstance(behind := call[at + 1], str):
        return ((*call[: at - 1], *call[at + 1 :]),) if mark[:1] == behind[:1] and mark[:1] in "[<" else ()
    return ()


def _prompted(tools: ToolFormat, text: str) -> ToolFormat:
    """The format behind reasoning, where a header that is otherwise the prompt's comes again."""
    if not text:
        return tools
    if tools.begin:
        return replace(tools, begin=text + tools.begin)
    first, *more = tools.call
    call = (text + first, *more) if isinstance(first, str) else (text, first, *more)
    between = tools.between[: -len(text)] if tools.between.endswith(text) else tools.between
    return replace(tools, call=call, between=between)


def _without_blanks(tools: ToolFormat) -> ToolFormat:
    """Blanks before the first call belong to what was said, and blanks before another between two calls."""
    first, *more = tools.call
    if tools.begin or not isinstance(first, str):
        return replace(tools, begin=tools.begin.lstrip())
    blanks = first[: len(first) - len(first.lstrip())]
    return replace(tools, call=(first.lstrip(), *more), between=tools.between + blanks)


def _shows(template: Template) -> bool:
    conversation = [user()]
    with_tools = template.text(conversation, add_generation_prompt=True)
    return with_tools is not None and with_tools != template.text(conversation, add_generation_prompt=True, tools=None)


# ---- where names and arguments are -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spot:
    """A slot in a text."""

    start: int
    end: int
    slot: Slot


def _spots(template: Template, text: str, call: Called, start: int = 0) -> list[Spot]:
    """The slots of a call, in order, from `start` on."""
    given = call.id[-9:] if template.nine else call.id
    spots = [
        Spot(m.start(), m.end(), slot)
        for word, slot in ((call.name, Slot.NAME), (given, Slot.ID))
        for m in re.compile(re.escape(word)).finditer(text, start)
    ]
    where = _json(text, call, start) or _tagged(text, call, start)
    if not spots or where is None:
        raise Unclear("no arguments")
    return sorted([*spots, Spot(*where, Slot.ARGUMENTS)], key=lambda s: s.start)


def _json(text: str, call: Called, start: int) -> tuple[int, int] | None:
    """Where the arguments stand as JSON."""
    decoder = json.JSONDecoder()
    for found in re.compile(r"\{").finditer(text, start):
        try:
            value, end = decoder.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            continue
        if value == dict(call.arguments):
            return found.start(), end
    return None


def _tagged(text: str, call: Called, start: int) -> tuple[int, int] | None:
    """From the name of the one argument to the end of its value, or of its name where that stands behind again."""
    ((key, value),) = call.arguments.items()
    begin, end = text.find(key, start), text.find(value, start)
    if begin < 0 or end < begin:
        return None
    again = text.find(key, end, end + len(value) + _NEAR)
    return begin, (end + len(value) if again < 0 else again + len(key))


# ---- what is around them ---------------------------------------------------------------------------------------------


def _tools(template: Template, thought: ReasoningFormat | None) -> ToolFormat:
    one = template.called(ONE)
    if one is None:
        raise Unclear("no call")
    start = _start(template, one, thought)
    first = _spots(template, one, ONE)
    lead = one[start : first[0].start]
    inner = [one[a.end : b.start] for a, b in pairwise(first)]
    two = template.called(ONE, OTHER)
    if two is None or OTHER.name not in two:
        found = _single(template, one[first[-1].end :], lead, inner, first)
    elif not two.startswith(one[: first[-1].end]):
        raise Unclear("the first of two calls is another")
    else:
        found = _several(template, two, first, start)
    if _json(one, ONE, 0) is None:
        found = taken_apart(template, found, ONE)
    _check_apart(found.call)
    return replace(found, id="nine letters" if template.nine else None)


def _check_apart(call: Call) -> None:
    """A name and an id can be told apart only by a text between them."""
    parts = merged(call)
    if any(isinstance(a, Slot) and isinstance(b, Slot) and Slot.ARGUMENTS not in (a, b) for a, b in pairwise(parts)):
        raise Unclear("nothing between two slots")


def _single(template: Template, tail: str, lead: str, inner: list[str], spots: list[Spot]) -> ToolFormat:
    """Only one call is written."""
    call = _joined([lead], spots, [[t] for t in inner], [without_end(template, tail)])
    return ToolFormat(call=call, marker="", most=1)


def _several(template: Template, text: str, first: list[Spot], start: int) -> ToolFormat:
    second = _spots(template, text, OTHER, first[-1].end)
    if [s.slot for s in first] != [s.slot for s in second]:
        raise Unclear("two calls are not alike")
    lead, middle, tail = text[start : first[0].start], text[first[-1].end : second[0].start], text[second[-1].end :]
    numbers: set[int] = set()
    pre, of_lead, of_middle = _common_end(lead, middle, numbers)
    behind, ended = middle[: len(middle) - of_middle], without_end(template, tail)
    n = whole_tags(behind, same_beginning(behind, tail))
    inner = [
        _numbered(text[a.end : b.start], text[c.end : d.start], numbers)
        for (a, b), (c, d) in zip(pairwise(first), pairwise(second), strict=True)
    ]
    if len(numbers) > 1:
        raise Unclear("two numberings")
    begin, end = lead[: len(lead) - of_lead], ended[n:]
    between = behind[n:]
    if not begin.strip():  # nothing is around all calls, and nothing is to be closed
        begin = end = ""
    return ToolFormat(
        call=_joined(pre, first, inner, [behind[:n]]),
        marker="",
        begin=begin,
        between=between,
        end=end,
        first_number=next(iter(numbers), 0),
    )


def _common_end(lead: str, middle: str, numbers: set[int]) -> tuple[list[str | Slot], int, int]:
    """The parts with which both end, and the characters that are of each. A number may count the calls."""
    n = same_end(lead, middle)
    before, count = lead[: len(lead) - n], middle[: len(middle) - n]
    if n < len(lead) and before[-1:] in "01" and before[-1:] and count.endswith(str(int(before[-1]) + 1)):
        more = _cut_to_tag(before[:-1], same_end(before[:-1], count[:-1]))
        if more:
            numbers.add(int(before[-1]))
            total = n + 1 + more
            return [before[len(before) - 1 - more : -1], Slot.NUMBER, lead[len(lead) - n :]], total, total
    n = _cut_to_tag(lead, n)
    return [lead[len(lead) - n :]], n, n


def _cut_to_tag(text: str, n: int) -> int:
    """Fewer than the last n characters, so that they do not begin within a tag or a word."""
    if n in (0, len(text)):
        return n
    found = _OPENS.search(text, len(text) - n)
    return len(text) - found.start() if found else n


def _numbered(one: str, other: str, numbers: set[int]) -> list[str | Slot]:
    """The same text of two calls, whose only difference may be their numbers."""
    if one == other:
        return [one]
    n = same_beginning(one, other)
    a, b = one[n : n + 1], other[n : n + 1]
    if a in ("0", "1") and b == str(int(a) + 1) and one[n + 1 :] == other[n + 1 :]:
        numbers.add(int(a))
        return [one[:n], Slot.NUMBER, one[n + 1 :]]
    raise Unclear("two calls are not alike")


def _joined(pre: list[Any], spots: list[Spot], inner: list[Any], post: list[Any]) -> Call:
    """The parts of a call; empty texts are left out."""
    parts: list[str | Slot] = list(pre)
    for spot, behind in zip(spots, [*inner, post], strict=True):
        parts += [spot.slot, *behind]
    return tuple(p for p in parts if p != "")


def _start(template: Template, text: str, thought: ReasoningFormat | None) -> int:
    """Where the model begins to write calls: behind what comes before an answer of text, too, if all of it is there."""
    start = written_from(template, text, thought)
    said = (template.said() or "").partition(SAID)[0].rstrip()
    return max(start, len(said)) if said.strip() and text.startswith(said) else start


# ---- the marker ------------------------------------------------------------------------------------------------------


def _marked(found: ToolFormat, template: Template, prompted: str) -> ToolFormat:
    """The format with its marker: a tag, or what stands before a bracket or a new line."""
    first = found.call[0] if isinstance(found.call[0], str) else ""
    text = (found.begin + first).lstrip()
    said = template.said() or ""
    end = said.rpartition(SAID)[2].strip() if SAID in said else ""
    if re.match(r"[\[{]\s*[\[{\"]|[\[{]\s*\Z", text) or not text:
        return replace(found, marker=text.split(":")[0].rstrip(), alone=True)
    skip = len(prompted)
    tag = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]").match(text, skip)
    at = tag.end() if tag else skip + len(re.split(r"[\[{\n]", text[skip:], maxsplit=1)[0].rstrip())
    at = at if at > skip else len(text.rstrip())
    while end and end.startswith(text[:at].strip()) and at < len(text):  # this much ends a turn, too
        more = re.compile(r".*?<[^<>\s]+>|.+", re.DOTALL).match(text, at)
        assert more is not None
        at = more.end()
    return replace(found, marker=text[:at])
