"""Writes answers of Anthropic's Messages API: content blocks, from what the parser finds in a text."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from hibachi.llm.chatformat.format import CallArguments, CallBegun, CallEnded, Event, Reasoned, Said
from hibachi.llm.chatformat.reading.reader import ALL_SAID
from hibachi.llm.dialects.dialects import ANTHROPIC
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.json_limits import check_weight
from hibachi.llm.dialects.messages.answers import (
    SIGNATURE,
    AnswerBlock,
    BlockDelta,
    BlockStart,
    BlockStop,
    Direct,
    Ending,
    InputDelta,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SaidBlock,
    SignatureDelta,
    TextDelta,
    ThinkingDelta,
    ThinkingTokens,
    ThoughtBlock,
    ToolUseBlock,
)
from hibachi.llm.dialects.openai import answers as openai
from hibachi.llm.dialects.openai.parse import ParsedRequest
from hibachi.llm.dialects.openai.writing import AnswerWriter, Signature, reason_of
from hibachi.llm.textstream import Choice, Piece, Stopped, TextChoice, cut_off
from hibachi.request import Finish

Part: TypeAlias = BlockStart | BlockDelta | BlockStop
WITHIN = b"[" * 5  # lists and objects of a body in which the input of a call stands when it is sent back
FULL = "model_context_window_exceeded"


def named(chunk: Any) -> bytes:
    """An event with its name: that of its type. chunk: a record of `answers`, or the body of an error."""
    name = chunk["type"] if isinstance(chunk, dict) else chunk.__struct_config__.tag
    return b"event: " + str(name).encode() + b"\ndata: " + openai.encode_line(chunk) + b"\n\n"


class ContentBlocks:
    """Makes the parts of content blocks from the events of a parser, one block after the other.

    id_of: gives the id of a call, see `AnswerWriter.call_id`. Where only blanks are said there is no block of text,
    unless there is no other block.
    """

    def __init__(self, id_of: Callable[[str | None, int], str], *, reasoning: bool) -> None:
        self._id_of, self._reasoning = id_of, reasoning
        self._kind: type[Struct] | None = None  # of the open block
        self._index = -1
        self._blanks = ""
        self._calls: list[bool] = []  # is each complete?
        self._arguments: list[str] = []  # of the open call, in pieces

    @property
    def called(self) -> bool:
        """There are calls, and all of them are complete."""
        return bool(self._calls) and all(self._calls)

    def add(self, events: Iterable[Event]) -> list[Part]:
        return [part for event in events for part in self._add(event)]

    def end(self) -> list[Part]:
        """Nothing comes any more."""
        if self._index < 0 and (blanks := self._blanks):
            return [*self._begin(SaidBlock("")), self._delta(TextDelta(blanks)), *self._stop()]
        return self._stop()

    def _add(self, event: Event) -> list[Part]:
        match event:
            case Said(text):
                return self._said(text)
            case Reasoned(text):
                return self._thought(text) if text and self._reasoning else []
            case CallBegun(number, name, id):
                self._arguments = []
                return self._begin(ToolUseBlock(self._id_of(id, number), name, {}, Direct()))
            case CallArguments(_, text):
                self._arguments.append(text)
                return [self._delta(InputDelta(text))] if text else []
            case CallEnded(_, complete):
                complete = complete and _input("".join(self._arguments)) is not None
                self._calls.append(complete)
                return self._stop(incomplete=not complete)

    def _thought(self, text: str) -> list[Part]:
        begun = [] if self._kind is ThoughtBlock else self._begin(ThoughtBlock("", ""))
        return [*begun, self._delta(ThinkingDelta(text))]

    def _said(self, text: str) -> list[Part]:
        if self._kind is SaidBlock:
            return [self._delta(TextDelta(text))] if text else []
        self._blanks += text
        if not self._blanks.strip():
            return []
        said, self._blanks = self._blanks, ""
        return [*self._begin(SaidBlock("")), self._delta(TextDelta(said))]

    def _begin(self, block: AnswerBlock) -> list[Part]:
        before, self._blanks = self._stop(), ""
        self._kind = type(block)
        self._index += 1
        return [*before, BlockStart(self._index, block)]

    def _delta(self, delta: TextDelta | InputDelta | ThinkingDelta | SignatureDelta) -> Part:
        return BlockDelta(self._index, delta)

    def _stop(self, *, incomplete: bool = False) -> list[Part]:
        kind, self._kind = self._kind, None
        if kind is None:
            return []
        signed = [self._delta(SignatureDelta(SIGNATURE))] if kind is ThoughtBlock else []
        return [*signed, BlockStop(self._index, incomplete)]


def joined(parts: Iterable[Part]) -> list[AnswerBlock]:
    """The blocks that parts are of."""
    blocks: list[AnswerBlock] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, BlockStart):
            blocks.append(part.content_block)
            texts = []
        elif isinstance(part, BlockStop):
            _fill(blocks[-1], "".join(texts), incomplete=part.incomplete)
        elif isinstance(part.delta, SignatureDelta):
            pass  # it is the same for all
        elif isinstance(part.delta, InputDelta):
            texts.append(part.delta.partial_json)
        elif isinstance(part.delta, ThinkingDelta):
            texts.append(part.delta.thinking)
        else:
            texts.append(part.delta.text)
    return blocks


def _fill(block: AnswerBlock, text: str, *, incomplete: bool) -> None:
    if isinstance(block, SaidBlock):
        block.text = text
    elif isinstance(block, ThoughtBlock):
        block.thinking, block.signature = text, SIGNATURE
    elif incomplete:
        block.incomplete = True
    else:
        block.input = _input(text) or {}


def _input(arguments: str) -> dict[str, Any] | None:
    """The input of a call. None means it cannot be told: it holds a number beyond those of 64 bits, such as 1e999, or
    what is nested too deep to be sent back.
    """
    try:
        given = (arguments or "{}").encode()
        check_weight(WITHIN + given)
        return msgspec.json.decode(given, type=dict[str, Any])
    except (Refused, msgspec.DecodeError, UnicodeError):
        return None


class MessagesWriter(AnswerWriter):
    """A message, whole or as named events.

    full: the context of the model holds less than max_tokens, so that its end may be that of the context.
    """

    dialect = ANTHROPIC
    waiting = named(Ping())

    def __init__(self, asked: ParsedRequest, by: Signature, *, full: bool = False) -> None:
        super().__init__(asked, by)
        self.id = f"msg_{by.id or secrets.token_hex(12)}"
        self._full = full
        self._parser = (asked.reader or ALL_SAID).parser()
        self._blocks = ContentBlocks(self.call_id, reasoning=asked.include_reasoning)

    def frame(self, chunk: Any) -> bytes:
        return named(chunk)

    def opening(self) -> list[Any]:
        return [MessageStart(self._message([], None, None)), Ping()]

    def piece(self, p: Piece) -> Any:
        return self._read(p.text) or None

    def end(self, choice: TextChoice) -> Any:
        reason_of(choice.finish_reason)  # which raises for a text that was cut off
        parts = self._rest(choice)
        ending = Ending(*self._why(choice.finish_reason, choice.stopped_by))
        return [*parts, MessageDelta(ending, self._used()), MessageStop()]

    def whole(self) -> Any:
        (done,) = self._done()
        (choice,) = done.choices
        parts = [*self._read(choice.text), *self._rest(choice)]
        return self._message(joined(parts), *self._why(choice.finish_reason, choice.stopped_by))

    def _read(self, text: str) -> list[Part]:
        return self._blocks.add(self._parser.feed(text))

    def _rest(self, choice: Choice | TextChoice) -> list[Part]:
        return [*self._blocks.add(self._parser.end(cut_off(choice))), *self._blocks.end()]

    def _why(self, finish: Finish | None, by: Stopped | None) -> tuple[str, str | None]:
        """stop_reason and stop_sequence."""
        if reason_of(finish) == "length":
            return FULL if self._full else "max_tokens", None
        if self._blocks.called:
            return "tool_use", None
        if by is not None and isinstance(by.reason, str):
            return "stop_sequence", by.reason
        return "end_turn", None

    def _message(self, content: list[AnswerBlock], why: str | None, by: str | None) -> MessageAnswer:
        return MessageAnswer(self.id, "assistant", self.name, content, why, by, self._used())

    def _used(self) -> MessageUsage:
        used = self.usage()
        more = None if used.reasoning is None else ThinkingTokens(used.reasoning)
        return MessageUsage(used.prompt_tokens - used.cached, used.completion_tokens, used.cached, 0, more)

    def call_id(self, given: str | None, number: int, choice: int = 0) -> str:
        id = super().call_id(given, number, choice)
        return id if given or not id.startswith("call_") else f"toolu_{id.removeprefix('call_')}"
