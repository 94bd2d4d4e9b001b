"""How a chat template writes reasoning, from what it makes of probes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hibachi.tools.format import THINK, ReasoningFormat
from hibachi.tools.probes import LATER, SAID, THOUGHT, Called, Template, same_beginning, user, whole_tags

_TAG_AT_END = re.compile(r"(<[^<>\s]*>|\[[A-Z][A-Z_ ]*\])\s*\Z")
_TAG_AT_BEGINNING = re.compile(r"\s*(</?[^<>\s]*>|\[/?[A-Z][A-Z_ ]*\])")
_SWITCHES = "enable_thinking", "thinking"


def reasoning(template: Template, call: Called | None) -> ReasoningFormat | None:
    """The texts around reasoning. call: one that the template writes, as some show reasoning only before calls."""
    return _shown(template, call) or _prompted(template) or _taken_away(template)


def _shown(template: Template, call: Called | None) -> ReasoningFormat | None:
    """From a message whose reasoning it shows."""
    more = {name: THOUGHT for name in ("reasoning_content", "reasoning", "thinking")}
    texts = [template.said(**more)]
    if call is not None:
        texts += [template.called(call, **more)]
    for text in texts:
        if text is None or THOUGHT not in text:
            continue
        before, _, behind = text.partition(THOUGHT)
        end = _TAG_AT_BEGINNING.match(behind)
        begin = _beginning(template, before)
        if end is not None and begin:
            return ReasoningFormat(begin, end[1])
    return None


def _beginning(template: Template, before: str) -> str:
    """What of the text before the reasoning belongs to it: a tag, or all that stands before no other answer."""
    tag = _TAG_AT_END.search(before)
    if tag is not None:
        return tag[1]
    answers = [_before_said(template.said()), template.prompt(), _before_said(_earlier(template, SAID))]
    shared = [whole_tags(before, same_beginning(before, a)) for a in answers if a is not None]
    rest = [before[n:].strip() for n in sorted(shared, reverse=True)]
    return next((r for r in rest if r), "")


def _before_said(text: str | None) -> str | None:
    return text.partition(SAID)[0] if text is not None and SAID in text else None


def _earlier(template: Template, said: str) -> str | None:
    """What it writes for an answer that is not the last."""
    text = template.after([user(), {"role": "assistant", "content": said}, user(LATER)])
    return None if text is None else text.partition(LATER)[0]


def _prompted(template: Template) -> ReasoningFormat | None:
    """From a prompt that opens it: by the name of its tag, or by the tag that ends it where thinking is off."""
    for prompt in _prompts(template):
        text = prompt.rstrip()
        closed = re.search(r"(<([^<>\s/]+)>)\s*(</\2>)\Z", text)
        if closed is not None:
            return ReasoningFormat(closed[1], closed[3])
        opened = re.search(r"<([^<>\s/]*think[^<>\s]*)>\Z|\[(THINK)\]\Z", text)
        if opened is not None:
            end = f"</{opened[1]}>" if opened[1] else f"[/{opened[2]}]"
            return ReasoningFormat(opened[0], end)
    return None


def _prompts(template: Template) -> Iterator[str]:
    for variables in ({}, *({name: on} for name in _SWITCHES for on in (False, True))):
        prompt = template.prompt(**variables)
        if prompt is not None:
            yield prompt


def _taken_away(template: Template) -> ReasoningFormat | None:
    """From an earlier answer whose reasoning it leaves out."""
    for form in (THINK, ReasoningFormat("[THINK]", "[/THINK]")):
        text = _earlier(template, f"{form.begin}\n{THOUGHT}\n{form.end}\n\n{SAID}")
        if text is not None and SAID in text and THOUGHT not in text:
            return form
    return None


def switch(template: Template) -> str | None:
    """The variable that turns thinking on and off."""
    for name in _SWITCHES:
        on, off = (template.text([user()], add_generation_prompt=True, **{name: x}) for x in (True, False))
        if on is not None and off is not None and on != off:
            return name
    return None


def reads_effort(template: Template) -> bool:
    """Whether the text depends on reasoning_effort."""
    low, high = (
        template.text([user()], add_generation_prompt=True, reasoning_effort=effort) for effort in ("low", "high")
    )
    return low is not None and high is not None and low != high
