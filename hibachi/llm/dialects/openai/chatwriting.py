"""Writes the answers to chats: what is said, thought and called, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET

from hibachi.llm.chatformat.format import CallArguments, CallBegun, CallEnded, Event, Reasoned, Said
from hibachi.llm.chatformat.reading.parser import Parser
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.chatformat.reading.whole import Answer
from hibachi.llm.dialects.openai import answers
from hibachi.llm.dialects.openai.answers import (
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatPiece,
    Delta,
    Function,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from hibachi.llm.dialects.openai.writing import AnswerWriter, reason_of
from hibachi.llm.textstream import Choice, Piece, TextChoice, cut_off


class ChatWriter(AnswerWriter):
    prefix, object = "chatcmpl", "chat.completion"
    _telling: dict[int, _Telling]  # by choice; {} means all is text

    def opening(self) -> list[Any]:
        firsts = [Delta("assistant", "")] + [Delta(None, front) for front in [self.asked.front] if front]
        choices = [c.index for s in self.streams for c in s.choices]
        reader = self.asked.reader
        self._telling = {} if reader is None else {i: self._teller(reader, i) for i in choices}
        return [self._chunk([ChatPiece(index, delta, None, None)]) for delta in firsts for index in choices]

    def _teller(self, reader: AnswerReader, index: int) -> _Telling:
        return _Telling(reader.parser(), self.asked.reasoning_fields, partial(self.call_id, choice=index))

    def piece(self, p: Piece) -> Any:
        found, most = None, self.asked.logprobs
        if most is not None and p.logprobs is not None:
            found = self._scores(p.token_ids, p.logprobs, most)
        ids = self._told(p.token_ids)
        if not self._telling:
            return self._chunk([ChatPiece(p.index, Delta(None, p.text), found, None, ids)])
        deltas = self._telling[p.index].feed(p.text)
        if not deltas and (found is not None or ids is not None):
            deltas = [Delta()]  # they come with their token, whatever it says
        chunks = []
        for delta in deltas:
            chunks.append(self._chunk([ChatPiece(p.index, delta, found, None, ids)]))
            found = ids = None
        return chunks or None

    def end(self, choice: TextChoice) -> Any:
        why, by, deltas = reason_of(choice.finish_reason), choice.stopped_by, [Delta()]
        if self._telling:
            telling = self._telling[choice.index]
            deltas = [*telling.end(cut_off(choice)), telling.last]
            why = _finish(why, telling.complete)
        *more, last = deltas
        chunks = [self._chunk([ChatPiece(choice.index, delta, None, None)]) for delta in more]
        stop = by.reason if by else None
        return [*chunks, self._chunk([ChatPiece(choice.index, last, None, why, stop_reason=stop)])]

    def last(self) -> Any:
        return self._chunk([], self.usage())

    def whole(self) -> Any:
        (done,) = self._done()
        choices = [self._choice(c) for c in done.choices]
        answer = ChatAnswer(self.id, self.object, self.created, self.name, choices, self.usage(), self.fingerprint)
        if done.prompt_logprobs is not None:
            answer.prompt_logprobs = answers.prompt_scores(done.prompt_logprobs, self.vocabulary)
        answer.prompt_token_ids = self._told(done.prompt_token_ids)
        return answer

    def _choice(self, c: Choice) -> ChatChoice:
        most, reader = self.asked.logprobs, self.asked.reader
        scores = None if most is None or c.logprobs is None else self._scores(c.token_ids, c.logprobs, most)
        reason, ids = reason_of(c.finish_reason), self._told(c.token_ids)
        if reader is None:
            message = ChatMessage("assistant", self.asked.front + c.text)
        else:
            answer = reader.read(c.text, cut_off(c))
            message, reason = self._message(answer, c.index), _finish(reason, answer.called)
        return ChatChoice(c.index, message, scores, reason, ids, c.stop_reason)

    def _message(self, answer: Answer, index: int) -> ChatMessage:
        said, fields = self.asked.front + answer.content, self.asked.reasoning_fields
        message = ChatMessage("assistant", said if said or not answer.calls else None)
        if answer.calls:
            message.tool_calls = [
                ToolCall(
                    self.call_id(call.id, i, index),
                    "function",
                    Function(call.name, call.arguments),
                    not call.complete,
                )
                for i, call in enumerate(answer.calls)
            ]
        if answer.reasoning:
            message.reasoning_content = answer.reasoning if "reasoning_content" in fields else UNSET
            message.reasoning = answer.reasoning if "reasoning" in fields else UNSET
        return message

    def _scores(self, ids: list[int], scores: Any, most: int) -> ChatLogprobs:
        return answers.chat_logprobs(ids, scores, most, self.vocabulary, named_ids=self.asked.named_ids)

    def _chunk(self, choices: Sequence[ChatPiece], used: Usage | None = None) -> ChatAnswer[ChatPiece]:
        shown = used or self._always()
        return ChatAnswer(
            self.id, f"{self.object}.chunk", self.created, self.name, list(choices), shown, self.fingerprint
        )


def _finish(why: str, complete: bool) -> str:
    """complete: there are calls, and all of them are whole."""
    return "tool_calls" if complete and why == "stop" else why


def _more(number: int, text: str, *, incomplete: bool = False) -> ToolCallDelta:
    return ToolCallDelta(number, UNSET, UNSET, FunctionDelta(UNSET, text), incomplete)


class _Telling:
    """Tells one continuation in deltas. fields: names of its reasoning; () leaves it out. id_of: see
    `AnswerWriter.call_id`. last: the delta of its last chunk.
    """

    def __init__(self, parser: Parser, fields: Sequence[str], id_of: Callable[[str | None, int], str]) -> None:
        self._parser, self._fields, self._id_of = parser, fields, id_of
        self._calls = 0
        self.last = Delta()

    @property
    def complete(self) -> bool:
        return self._calls > 0 and self.last.tool_calls is None

    def feed(self, text: str) -> list[Delta]:
        return self._deltas(self._parser.feed(text)) if text else []

    def end(self, cut: bool) -> list[Delta]:
        return self._deltas(self._parser.end(cut))

    def _deltas(self, events: Iterable[Event]) -> list[Delta]:
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def _delta(self, event: Event) -> Delta | None:
        match event:
            case Said(text):
                return Delta(None, text)
            case CallArguments(number, text):
                return Delta(tool_calls=[_more(number, text)])
            case CallBegun(number, name, id):
                self._calls += 1
                begun = ToolCallDelta(number, self._id_of(id, number), "function", FunctionDelta(name, ""))
                return Delta(tool_calls=[begun])
            case CallEnded(number, complete):
                if not complete:
                    self.last = Delta(tool_calls=[_more(number, "", incomplete=True)])
                return None
            case Reasoned(text):
                return self._thought(text) if self._fields else None

    def _thought(self, text: str) -> Delta:
        fields = self._fields
        return Delta(
            reasoning_content=text if "reasoning_content" in fields else None,
            reasoning=text if "reasoning" in fields else None,
        )
