"""How a chat template writes reasoning, from what it makes of probes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hibachi.llm.chatformat.format import THINK, ChatFormat, ReasoningFormat
from hibachi.llm.chatformat.templates.probes import (
    LATER,
    SAID,
    THINKING,
    THOUGHT,
    Called,
    Template,
    same_beginning,
    user,
    whole_tags,
)

_TAG_AT_END = re.compile(r"(<[^<>\s]*>|\[[A-Z][A-Z_ ]*\])\s*\Z")
_TAG_AT_BEGINNING = re.compile(r"\s*(</?[^<>\s]*>|\[/?[A-Z][A-Z_ ]*\])")
_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_ANY_TAG = re.compile(r"<[^<>\s]+>")
_SWITCHES = "enable_thinking", "thinking"


def reasoning(template: Template, call: Called | None) -> ReasoningFormat | None:
    """The texts around reasoning. call: one that the template writes, as some show reasoning only before calls."""
    return _shown(template, call) or _prompted(template) or _taken_away(template)


def _shown(template: Template, call: Called | None) -> ReasoningFormat | None:
    """From a message whose reasoning it shows."""
    blocks = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": SAID}]
    texts = [template.said(**THINKING)]
    if call is not None:
        texts += [template.called(call, **THINKING)]
    texts += [template.said(content=blocks)]
    for text in texts:
        if text is None or THOUGHT not in text:
            continue
        before, _, behind = text.partition(THOUGHT)
        end = _TAG_AT_BEGINNING.match(behind)
        begin = _beginning(template, before, end[1]) if end else ""
        if end is not None and begin:
            return ReasoningFormat(begin, end[1])
    return None


def _beginning(template: Template, before: str, end: str) -> str:
    """What of the text before the reasoning belongs to it: what prompts do not end with, or a tag."""
    prompt, said = template.prompt() or "", _before_said(template.said())
    rest = before[whole_tags(before, same_beginning(before, prompt)) :]
    tag = _TAG_AT_END.search(before)
    if tag is None or _TAG_AT_END.search(rest):
        shared = [same_beginning(before, a) for a in (prompt, said, _before_said(earlier(template, SAID))) if a]
        rests = [before[whole_tags(before, n) :].rstrip() for n in sorted(shared, reverse=True)]
        return rest.rstrip() if tag else next((r.lstrip() for r in rests if r.strip()), "")
    if tag[1] in (said or "") and end not in (said or ""):  # it belongs to any answer
        return prompt[same_beginning(before, prompt) :].strip()
    return tag[1]


def _before_said(text: str | None) -> str | None:
    return text.partition(SAID)[0] if text is not None and SAID in text else None


def earlier(template: Template, said: str) -> str | None:
    """What it writes for an answer that is not the last, up to the words of the next user."""
    text = template.after(
        [user(), {"role": "assistant", "content": said}, user(LATER), {"role": "assistant", "content": "Well."}]
    )
    return None if text is None else text.partition(LATER)[0]


def written_from(template: Template, text: str, thought: ReasoningFormat | None) -> int:
    """Where the model begins to write: behind what prompts end with, and behind reasoning that is empty."""
    start = whole_tags(text, same_beginning(template.prompt() or "", text))
    if thought is not None:
        begin, end = re.escape(thought.begin.strip()), re.escape(thought.end)
        found = re.compile(rf"\s*(?:{begin})?\s*{end}\s*").match(text, start) or re.search(rf"{begin}\s*{end}\s*", text)
        if found is not None:
            return found.end()
    return start


def without_end(template: Template, tail: str) -> str:
    """What stands behind a call, without the end of the turn: what stands behind an answer of text, or the last tags
    of it, or the first of it where the conversation goes on.
    """
    ends = [text.rpartition(SAID)[2] for text in (template.said(), earlier(template, SAID)) if text and SAID in text]
    tail = tail.rstrip()
    for end, forwards in zip(ends, (False, True), strict=False):
        cuts = [m.end() if forwards else m.start() for m in _TAG.finditer(end)]
        parts = [end, *([end[:at] for at in reversed(cuts)] if forwards else [end[at:] for at in cuts])]
        for part in (p.rstrip() for p in parts):
            if part and tail.endswith(part):
                return tail[: len(tail) - len(part)]
    return tail


def around_said(template: Template, thought: ReasoningFormat | None) -> ChatFormat:
    """What is around an answer of text, with or without reasoning before it."""
    said = template.said()
    if said is None or SAID not in said:
        return ChatFormat(reasoning=thought)
    front, _, end = said.partition(SAID)
    before = front[written_from(template, front, thought) :]
    prompted = _prompted_again(template, thought, before)
    if thought is not None:
        thought = ReasoningFormat(prompted + (thought.begin if prompted else thought.begin.strip()), thought.end)
    if not _ANY_TAG.search(before) or (template.prompt() or "").endswith(before):
        return ChatFormat(reasoning=thought)
    silent = list(dict.fromkeys(_ANY_TAG.findall(end)))
    if thought is not None and thought.begin in silent:  # the template goes on with another prompt
        silent = silent[: silent.index(thought.begin)]
    return ChatFormat(
        reasoning=thought,
        before_said=prompted + before if prompted else before.strip(),
        silent=tuple(silent),
        prompted=prompted,
    )


def _prompted_again(template: Template, thought: ReasoningFormat | None, before: str) -> str:
    """The end of a prompt, if the model writes it again behind its reasoning, before what comes `before` a text."""
    behind = _behind_reasoning(template, thought)
    header = behind[: len(behind) - len(before)].lstrip() if behind.endswith(before) else ""
    return header if header and (template.prompt() or "").endswith(header) else ""


def _behind_reasoning(template: Template, thought: ReasoningFormat | None) -> str:
    """What stands between the end of reasoning and what is said."""
    text = template.said(**THINKING)
    if thought is None or text is None or SAID not in text.partition(THOUGHT)[2]:
        return ""
    return text.partition(THOUGHT)[2].partition(SAID)[0].partition(thought.end)[2]


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
        text = earlier(template, f"{form.begin}\n{THOUGHT}\n{form.end}\n\n{SAID}")
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
