"""The form of an answer of which the prompt has already written the beginning, as its last message goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.errors import BadField
from hibachi.llm.chatformat.format import thinking_of
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.request import SamplingParams
from hibachi.structured import StructuredOutputs

_BETWEEN: Final = re.compile(r'("(?:[^"\\]|\\.)*"?)|\s+', re.DOTALL)


def end_of(prompt: str, content: str) -> str:
    """What of a message's content stands at the end of a prompt: a template may leave out blanks around it."""
    ways = (content, content.rstrip(), content.lstrip(), content.strip())
    return next((way for way in ways if prompt.endswith(way)), "")


def reader_of_all(reader: AnswerReader, prompt: str, begun: str) -> AnswerReader:
    """What would read the answer with its beginning, with which a prompt ends."""
    if not begun.strip():
        return reader
    return replace(reader, thinking=thinking_of(reader.format.reasoning, prompt.removesuffix(begun)))


def compact(begun: str, form: StructuredOutputs, reader: AnswerReader | None) -> str:
    """The beginning of an answer, in JSON without the blanks between its tokens, which are as the caller likes."""
    if form.kind not in ("json", "json_object") or form.whitespace_pattern is not None:
        return begun
    thinks = reader.format.reasoning if reader is not None else None
    thought, end, said = begun.rpartition(thinks.end.strip()) if thinks is not None else ("", "", begun)
    return thought + end + _BETWEEN.sub(r"\1", said)


def behind(begun: str, params: SamplingParams, check: Callable[[SamplingParams], object]) -> SamplingParams:
    """Parameters whose form goes on behind its beginning. check: raises InvalidRequest where no form can be had. Raises
    BadField for a text with which no such answer begins.
    """
    form = params.structured_outputs
    assert isinstance(form, StructuredOutputs)
    check(params)
    found = params.with_(structured_outputs=replace(form, begun=begun))
    try:
        check(found)
    except InvalidRequest:
        raise BadField.about(
            ("messages",),
            "The last message cannot be continued in the form that is asked for: no such answer begins so, or it is "
            "whole already. Send a beginning of such an answer, or leave out the form.",
        ) from None
    return found
