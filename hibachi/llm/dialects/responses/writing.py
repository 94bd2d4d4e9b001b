"""Writes responses: items that grow from what the model says, the events that tell of it, and the whole answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as copied
from typing import Any

import msgspec
from msgspec import UNSET

from hibachi.llm.chatformat.format import CallArguments, CallBegun, CallEnded, Event, Reasoned, Said
from hibachi.llm.dialects.dialects import OPENAI
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai import answers as shared
from hibachi.llm.dialects.openai.answers import TokenLogprob
from hibachi.llm.dialects.openai.parse import ParsedRequest
from hibachi.llm.dialects.openai.writing import AnswerWriter, Signature, reason_of
from hibachi.llm.dialects.responses import answers
from hibachi.llm.dialects.responses.answers import Failure, Incomplete, Output, Response
from hibachi.llm.dialects.responses.bodies import FunctionTool, Namespace, ResponsesBody
from hibachi.llm.dialects.responses.items import (
    FunctionCall,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    SummaryText,
)
from hibachi.llm.dialects.responses.tools import functions, split
from hibachi.llm.textstream import Choice, Piece, TextChoice, cut_off

RESPONSES = copied(OPENAI, end=b"")  # the last event says that it is the last
Keep = Callable[[Response], None]


@dataclass(slots=True)
class _Open:
    """The item that grows. pieces: of its text or its arguments."""

    item: Output
    index: int
    pieces: list[str]
    logprobs: list[TokenLogprob]


class ResponsesWriter(AnswerWriter):
    """Writes the response to one request.

    body: as it came. server: the tag of this server; None means that no server makes it. keeps: it is stored. keep:
    called with a response that has ended, before the client is told of the end.
    """

    dialect = RESPONSES
    beside = False  # it reads as the text comes, and what is kept is not for several threads
    repeats = True

    def __init__(
        self,
        asked: ParsedRequest,
        by: Signature,
        body: ResponsesBody,
        *,
        server: str | None,
        keeps: bool = False,
        keep: Keep | None = None,
    ) -> None:
        super().__init__(asked, by)
        own = by.id or secrets.token_hex(12)
        self._suffix = own if server is None else f"{server}_{own}"
        self.id, self._ended = f"resp_{self._suffix}", by.created
        self._sums = body.reasoning is not None and body.reasoning.summed
        self._body, self._keeps, self._keep = body, keeps, keep
        self._parser = None if asked.reader is None else asked.reader.parser()
        self.each = asked.logprobs is not None  # so that each has its own
        self._spaces, self._echoed = split(functions(body.tools)), _echo(body, asked)
        self._output: list[Output] = []
        self._open: _Open | None = None
        self._scores: list[TokenLogprob] = []  # of tokens whose text has not come out of the parser
        self._began = False
        self._number = -1

    # ---- what a stream sends -----------------------------------------------------------------------------------

    def opening(self) -> list[Any]:
        self._began = True
        begun = self._response("in_progress")
        return [
            answers.ResponseCreated(self._next(), begun),
            answers.ResponseInProgress(self._next(), begun),
        ]

    def piece(self, p: Piece) -> Any:
        parser, told = self._parser, list[Any]()
        if self.asked.logprobs is not None and p.logprobs is not None:
            found = shared.chat_logprobs(p.token_ids, p.logprobs, self.asked.logprobs, self.vocabulary)
            self._scores += found.content
        if parser is None:
            if p.text:
                self._said(p.text, told)
            return told
        before = parser.reasoning
        for event in parser.feed(p.text):
            self._take(event, told)
        if before or parser.reasoning:
            self._scores.clear()
        return told

    def end(self, choice: TextChoice) -> Any:
        return self._end(choice)

    def failed(self, refused: Refused, request: str) -> Any:
        """The last events of a response that cannot go on."""
        if not self._began:
            return answers.ResponseError(self._next(), refused.code, str(refused), refused.param)
        told = list[Any]()
        self._close(told, "incomplete")
        failed = self._response("failed")
        failed.store = False
        code = {429: "rate_limit_exceeded"}.get(refused.status, "server_error")
        failed.error = Failure(code, str(refused))
        return [*told, answers.ResponseFailed(self._next(), failed)]

    def frame(self, chunk: Any) -> bytes:
        return answers.frame(chunk)

    # ---- a whole answer ----------------------------------------------------------------------------------------

    def came(self, pieces: Sequence[Piece]) -> None:
        if self.each:
            for p in pieces:
                self.piece(p)

    def whole(self) -> Any:
        [choice] = self._done()[0].choices
        if not self.each:
            self.piece(_as_piece(choice))
        return self._end(choice)[-1].response

    # ---- items -------------------------------------------------------------------------------------------------

    def _take(self, event: Event, told: list[Any]) -> None:
        if not isinstance(event, Said):
            self._scores.clear()
        match event:
            case Said(text) if text:
                self._said(text, told)
            case Reasoned(text) if text:
                self._think(text, told)
            case CallBegun():
                self._begin_call(event, told)
            case CallArguments(_, text):
                self._argue(text, told)
            case CallEnded(_, complete):
                self._close(told, "completed" if complete else "incomplete")

    def _said(self, text: str, told: list[Any]) -> None:
        now = self._open
        if now is None or type(now.item) is not Message:
            now = self._begin_message(told)
        now.pieces.append(text)
        scores, self._scores = _of_text(self._scores, text), []
        now.logprobs += scores
        told.append(answers.TextDelta(self._next(), str(now.item.id), now.index, 0, text, scores))

    def _begin_message(self, told: list[Any]) -> _Open:
        now = self._begin(Message(id=self._id("msg"), role="assistant", content=[], status="in_progress"), told)
        told.append(answers.PartAdded(self._next(), str(now.item.id), now.index, 0, OutputText("")))
        return now

    def _think(self, text: str, told: list[Any]) -> None:
        now = self._open
        if now is None or type(now.item) is not Reasoning:
            content = UNSET if self._sums else list[ReasoningText]()
            now = self._begin(Reasoning(id=self._id("rs"), content=content, status="in_progress"), told)
            at = str(now.item.id), now.index, 0
            told.append(
                answers.SummaryAdded(self._next(), *at, SummaryText(""))
                if self._sums
                else answers.PartAdded(self._next(), *at, ReasoningText(""))
            )
        now.pieces.append(text)
        delta = answers.SummaryDelta if self._sums else answers.ReasoningDelta
        told.append(delta(self._next(), str(now.item.id), now.index, 0, text))

    def _end_thought(self, now: _Open, item: Reasoning, text: str, told: list[Any]) -> None:
        at = str(item.id), now.index, 0
        if self._sums:
            item.summary = [SummaryText(text)]
            told.append(answers.SummaryDone(self._next(), *at, text))
            cut = "incomplete" if item.status == "incomplete" else UNSET
            told.append(answers.SummaryPartDone(self._next(), *at, item.summary[0], cut))
        else:
            item.content = [ReasoningText(text)]
            told.append(answers.ReasoningDone(self._next(), *at, text))
            told.append(answers.PartDone(self._next(), *at, item.content[0]))

    def _begin_call(self, event: CallBegun, told: list[Any]) -> None:
        space, name = self._spaces.get(event.name, (UNSET, event.name))
        call = FunctionCall(
            id=self._id("fc"),
            call_id=self.call_id(event.id, event.number),
            name=name,
            arguments="",
            status="in_progress",
            namespace=space,
        )
        self._begin(call, told)

    def _argue(self, text: str, told: list[Any]) -> None:
        now = self._open
        if now is not None and text:
            now.pieces.append(text)
            told.append(answers.ArgumentsDelta(self._next(), str(now.item.id), now.index, text))

    def _begin(self, item: Output, told: list[Any]) -> _Open:
        if self._open is not None:
            self._close(told, "completed")
        now = self._open = _Open(item, len(self._output), [], [])
        told.append(answers.ItemAdded(self._next(), now.index, msgspec.structs.replace(item)))
        return now

    def _close(self, told: list[Any], status: Any) -> None:
        """The item that grows is whole, or never will be. status: of it."""
        now, self._open = self._open, None
        if now is None:
            return
        item, text, id = now.item, "".join(now.pieces), str(now.item.id)
        item.status = status
        if isinstance(item, FunctionCall):
            item.arguments = text
            told.append(answers.ArgumentsDone(self._next(), id, now.index, item.name, text))
        elif isinstance(item, Message):
            part = OutputText(text, [], now.logprobs)
            item.content = [part]
            told.append(answers.TextDone(self._next(), id, now.index, 0, text, now.logprobs))
            told.append(answers.PartDone(self._next(), id, now.index, 0, part))
        else:
            self._end_thought(now, item, text, told)
        self._output.append(item)
        told.append(answers.ItemDone(self._next(), now.index, item))

    def _end(self, choice: Choice | TextChoice) -> list[Any]:
        """Raises EngineClosed for one that was cut off by the server."""
        told, cut = list[Any](), reason_of(choice.finish_reason) == "length"
        for event in () if self._parser is None else self._parser.end(cut_off(choice)):
            self._take(event, told)
        if self._open is None and not self._output:  # so that there is a text, which is empty
            self._begin_message(told)
        self._close(told, "incomplete" if cut else "completed")
        done = self._response("incomplete" if cut else "completed")
        done.usage = self._used()
        if cut:
            done.incomplete_details = Incomplete()
            told.append(answers.ResponseIncomplete(self._next(), done))
        else:
            done.completed_at = int(time.time()) if self._ended is None else self._ended
            told.append(answers.ResponseCompleted(self._next(), done))
        if self._keep is not None:
            self._keep(done)
        return told

    # ---- small things ------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _id(self, prefix: str) -> str:
        number = len(self._output) + (self._open is not None)
        return f"{prefix}_{self._suffix}_{number}"

    def _response(self, status: str) -> Response:
        return Response(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.name,
            output=list(self._output),
            previous_response_id=self._body.previous_response_id,
            store=self._keeps,
            **self._echoed,
        )

    def _used(self) -> answers.ResponseUsage:
        used = self.usage()
        return answers.ResponseUsage(
            used.prompt_tokens,
            answers.InputDetails(used.cached),
            used.completion_tokens,
            answers.OutputDetails(used.reasoning or 0),
            used.total_tokens,
        )


def _of_text(scores: list[TokenLogprob], text: str) -> list[TokenLogprob]:
    """Those of the tokens that a text is made of, without those before them, which have ended a call or are blanks that
    were left out. All, where the tokens do not end as the text does.
    """
    made, data = b"".join([bytes(score.bytes) for score in scores]), text.encode()
    if not made.endswith(data):
        return scores
    at = 0
    more = len(made) - len(data)
    while at < len(scores) and len(scores[at].bytes) <= more:
        more -= len(scores[at].bytes)
        at += 1
    return scores[at:]


def _as_piece(choice: Choice) -> Piece:
    return Piece(choice.text, choice.token_ids, 0, choice.logprobs)


def _echo(body: ResponsesBody, asked: ParsedRequest) -> dict[str, Any]:
    """The fields of a response that repeat what was asked for, or tell of defaults."""
    reasoning, form = body.reasoning, None if body.text is None else body.text.format
    told = {"type": "text"} if form is None else msgspec.to_builtins(form)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": answers.ResponseReasoning(
            None if reasoning is None else reasoning.effort, None if reasoning is None else reasoning.summary
        ),
        "temperature": asked.params.temperature,
        "text": answers.ResponseText({name: value for name, value in told.items() if value is not None}),
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": list(map(_told, body.tools or ())),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": asked.params.top_p,
        "truncation": body.truncation or "disabled",
        "user": UNSET if body.user is None else body.user,
        "metadata": body.metadata or {},
    }


def _told(raw: dict[str, Any]) -> Any:
    """A tool as a response repeats it."""
    if raw["type"] == "namespace":
        space = msgspec.convert(raw, Namespace)
        return answers.ResponseNamespace(space.name, space.description or "", list(map(_told, space.tools)))
    f = msgspec.convert(raw, FunctionTool)
    return answers.ResponseTool(name=f.name, description=f.description, parameters=f.parameters, strict=f.strict)
