"""Builds the chunks and whole answers of a request from the continuations that the engine generates."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET, UnsetType

from hibachi.errors import EngineClosed
from hibachi.llm.dialects.dialects import OPENAI, Dialect
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai import answers
from hibachi.llm.dialects.openai.answers import (
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    TextOffsets,
    TokenTexts,
    Usage,
)
from hibachi.llm.dialects.openai.parse import ParsedRequest
from hibachi.llm.dialects.thought import Thought
from hibachi.llm.textstream import Choice, Completion, Piece, Stopped, TextChoice, TextStream
from hibachi.request import Finish


@dataclass(frozen=True, slots=True)
class Signature:
    """What an answer says of who made it, and when. name: of the model. vocabulary: its tokens. fingerprint: equal
    where the same bits are computed. id: behind the prefix, if the request names none; None means random. created: Unix
    time in seconds; None means now. cached: report how many tokens were found in the cache, or were predicted and
    proposed, which depends on other requests.
    """

    name: str
    vocabulary: TokenTexts
    fingerprint: str | None = None
    id: str | None = None
    created: int | None = None
    cached: bool = True


class AnswerWriter:
    """Writes the answer to one request. `streams` and `ids`, one for each prompt, are set when it has been queued.

    each: `piece` wants every token alone, also one without text. waiting: what is sent now and then while
    nothing comes. beside: `opening` and `whole` may be called in another thread than the other methods; `frame` always
    may. repeats: the first and the last events of a stream have the request in them, and the last all that was said.
    """

    dialect: Dialect = OPENAI
    waiting: bytes = b": waiting\n\n"  # readers of server-sent events pass over it (WHATWG HTML, 9.2.6)
    each: bool = False
    beside: bool = True
    repeats: bool = False

    prefix = object = ""

    def __init__(self, asked: ParsedRequest, by: Signature) -> None:
        self.asked, self.by = asked, by
        self.name, self.vocabulary, self.fingerprint = by.name, by.vocabulary, by.fingerprint
        self.id: str = f"{self.prefix}-{asked.id or by.id or secrets.token_hex(12)}"
        self.created: int = int(time.time()) if by.created is None else by.created
        self.streams: list[TextStream] = []
        self.ids: list[list[int]] = []
        self._given = asked.params.n
        self._thoughts: dict[int, Thought] = {}  # by choice

    def usage(self) -> Usage:
        """Token usage of what has been read so far."""
        new = sum(len(c.token_ids) for s in self.streams for c in s.choices)
        cached = sum(s.tokens.reused for s in self.streams) if self.by.cached else None
        predicted = None
        if self.asked.prediction is not None and self.by.cached:
            each = [c.tokens.predicted for s in self.streams for c in s.choices]
            predicted = sum(accepted for accepted, _ in each), sum(rejected for _, rejected in each)
        prompt = sum(map(len, self.ids))
        return answers.usage(prompt, 0 if self.asked.unwritten else new, cached, predicted, self._reasoned())

    def _reasoned(self) -> int | None:
        """Tokens of reasoning that have been read so far; None means reasoning is not told from text."""
        reader = self.asked.reader
        if reader is None or reader.format.reasoning is None:
            return None
        total = 0
        for choice in (c for s in self.streams for c in s.choices):
            found = self._thoughts.get(choice.index)
            if found is None:
                found = self._thoughts[choice.index] = Thought(reader, self._raw)
            total += found.upto(choice.token_ids)
        return total

    def call_id(self, given: str | None, number: int, choice: int = 0) -> str:
        """The id of call `number` of a choice: the one that the text has, or one that is made of the answer's."""
        if given:
            return given
        assert self.asked.reader is not None
        return self.asked.reader.call_id(self.id, choice, number)

    def _raw(self, token: int) -> bytes:
        return bytes(self.vocabulary(token)[1])

    def prompt_of(self, index: int) -> int:
        """The index of the prompt that a choice belongs to."""
        return index // self._given

    @property
    def begun(self) -> bool:
        """Whether what `opening` tells is there; asked when the first token is."""
        return True

    def opening(self) -> list[Any]:
        """Chunks before all text; called once it has `begun`."""
        return []

    def piece(self, p: Piece) -> Any:
        """A chunk, or a list of them; None means its contents come with the next chunk."""
        raise NotImplementedError

    def end(self, choice: TextChoice) -> Any:
        """As `piece`, when a continuation has ended."""
        raise NotImplementedError

    def frame(self, chunk: Any) -> bytes:
        """A chunk as it is sent."""
        return answers.event(chunk)

    def failed(self, refused: Refused, request: str) -> Any:
        """As `piece`, where a stream that has begun ends with an error. request: the id of the request."""
        return self.dialect.told(refused, request)

    def came(self, pieces: Sequence[Piece]) -> None:
        """These have come, of an answer that is to be whole."""

    def whole(self) -> Any:
        raise NotImplementedError

    def last(self) -> Any:
        """The last chunk, with the usage, or a list of chunks. Called if `asked.usage`."""
        raise NotImplementedError

    def _always(self) -> Usage | UnsetType | None:
        """Of a chunk: null where the last one will have it, as OpenAI's have it."""
        if self.asked.usage_always:
            return self.usage()
        return None if self.asked.usage else UNSET

    def _told(self, ids: list[int]) -> list[int] | None:
        return ids if self.asked.token_ids else None

    def _done(self) -> list[Completion]:
        return [s.completion() for s in self.streams]


class CompletionWriter(AnswerWriter):
    """With log-probabilities the token that ended a text has an entry as well, and counts: who cuts the lists by the
    lengths of prompts finds one for each token that was drawn, as in vLLM.
    """

    prefix, object = "cmpl", "text_completion"

    def __init__(self, asked: ParsedRequest, by: Signature) -> None:
        super().__init__(asked, by)
        self._offsets: dict[int, TextOffsets] = {}  # of each choice

    def usage(self) -> Usage:
        used = super().usage()
        if self.asked.logprobs is not None and not self.asked.unwritten:
            ends = [c.stopped_by for s in self.streams for c in s.choices]
            told = sum(by is not None and by.logprobs is not None for by in ends)
            used.completion_tokens += told
            used.total_tokens += told
        return used

    @property
    def begun(self) -> bool:
        if not self.asked.echo or self.asked.logprobs is None:
            return True
        firsts = [s.choices[0] for s in self.streams]  # they have the scores of their prompts with their first tokens
        return all(c.token_ids or c.finish_reason is not None for c in firsts)

    def opening(self) -> list[Any]:
        if not self.asked.echo:
            return []
        return [self._answer([self._echo(c.index)]) for s in self.streams for c in s.choices]

    def piece(self, p: Piece) -> Any:
        if self.asked.unwritten:
            return self._answer([CompletionChoice(p.index, "", None, None)])
        scores = None if p.logprobs is None else self._scores(p.index, p.token_ids, p.logprobs, p.text)
        return self._answer([CompletionChoice(p.index, p.text, scores, None, None, self._told(p.token_ids))])

    def end(self, choice: TextChoice) -> Any:
        why, by = reason_of(choice.finish_reason), choice.stopped_by
        if self.asked.unwritten:
            why, by = "length", None
        stop, scores = by.reason if by else None, self._ended(choice.index, by)
        return self._answer([CompletionChoice(choice.index, "", scores, why, stop_reason=stop)])

    def last(self) -> Any:
        return CompletionAnswer(self.id, self.object, self.created, self.name, [], self.usage(), self.fingerprint)

    def whole(self) -> Any:
        choices = []
        for p, done in enumerate(self._done()):
            choices += [self._whole(p, done, c) for c in done.choices]
        answer = self._answer(choices)
        answer.usage = self.usage()
        return answer

    def _whole(self, p: int, done: Completion, c: Choice) -> CompletionChoice:
        index = p * self._given + c.index % self._given
        out = self._echo(index, done.prompt_logprobs) if self.asked.echo else CompletionChoice(index, "", None, None)
        if not self.asked.unwritten:
            if self.asked.logprobs is not None and c.logprobs is not None:
                new = [self._scores(index, c.token_ids, c.logprobs, c.text), self._ended(index, c.stopped_by)]
                out.logprobs = answers.joined([out.logprobs, *new])
            out.text += c.text
            out.token_ids = self._told(c.token_ids)
        out.finish_reason = "length" if self.asked.unwritten else reason_of(c.finish_reason)
        out.stop_reason = None if self.asked.unwritten else c.stop_reason
        if done.prompt_logprobs is not None and self.asked.prompt_scores:
            out.prompt_logprobs = answers.prompt_scores(done.prompt_logprobs, self.vocabulary)
        if self.asked.token_ids:
            out.prompt_token_ids = done.prompt_token_ids
        return out

    def _echo(self, index: int, scores: Any = None) -> CompletionChoice:
        """The prompt, as the beginning of the text."""
        p = self.prompt_of(index)
        prompt = self.asked.prompts[p] if self.asked.truncation is None else self.ids[p]
        text = prompt if isinstance(prompt, str) else self.vocabulary.text(prompt)
        scores = self.streams[p].tokens.prompt_logprobs if scores is None else scores
        found = None if scores is None else self._scores(index, self.ids[p], scores, text)
        return CompletionChoice(index, text, found, None)

    def _ended(self, index: int, by: Stopped | None) -> CompletionLogprobs | None:
        """The entry of an end that is not among the tokens."""
        if by is None or by.token is None or by.logprobs is None:
            return None
        return self._scores(index, [by.token], [by.logprobs], "")

    def _scores(self, index: int, ids: list[int], scores: Any, text: str) -> CompletionLogprobs | None:
        """Of the next tokens of a choice, with the text that they complete; None if they were not asked for."""
        if (most := self.asked.logprobs) is None:
            return None
        places = self._offsets.setdefault(index, TextOffsets(self.vocabulary))
        offsets, named = places.of(ids, text), self.asked.named_ids
        return answers.completion_logprobs(ids, scores, most, self.vocabulary, offsets, named_ids=named)

    def _answer(self, choices: Sequence[CompletionChoice]) -> CompletionAnswer:
        return CompletionAnswer(
            self.id, self.object, self.created, self.name, list(choices), self._always(), self.fingerprint
        )


def reason_of(finish: Finish | None) -> str:
    """The finish reason in OpenAI's words. Raises EngineClosed for a text that was cut off."""
    if finish is Finish.STOP:
        return "stop"
    if finish is Finish.LENGTH:
        return "length"
    raise EngineClosed("The server is shutting down, and this request was not done. Send it again.")
