"""The events and the whole answers of a request in TGI's dialect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from msgspec import UNSET

from hibachi.errors import EngineClosed
from hibachi.llm.dialects.dialects import TGI, TGI_STREAM
from hibachi.llm.dialects.errors import SERVER, Refused
from hibachi.llm.dialects.openai.answers import TokenTexts, finite, likeliest
from hibachi.llm.dialects.openai.writing import AnswerWriter, Signature
from hibachi.llm.dialects.tgi.answers import (
    BestOfSequence,
    Details,
    GenerateResponse,
    PrefillToken,
    StreamDetails,
    StreamResponse,
    Token,
)
from hibachi.llm.dialects.tgi.parse import TgiRequest
from hibachi.llm.textstream import Choice, Piece, Stopped, TextChoice
from hibachi.llm.tokenizers import Detokenizer
from hibachi.request import Finish

Scores = dict[int, float]
Fork = Callable[[int, int], int]


class TgiTokens:
    """What tokens are called, and which of them are special. ends: ids that end a text, which are. fork: (seed, number
    of a continuation) -> the seed that the engine draws it by.
    """

    def __init__(self, vocabulary: TokenTexts, tokenizer: Any, ends: Collection[int], fork: Fork) -> None:
        self.vocabulary, self.tokenizer, self.ends, self.fork = vocabulary, tokenizer, frozenset(ends), fork
        self._special: dict[int, bool] = {}

    def special(self, token: int) -> bool:
        """Is this a token without text, such as the end?"""
        found = self._special.get(token)
        if found is None:
            found = self._special[token] = token in self.ends or self.tokenizer.is_silent(token)
        return found

    def alone(self, token: int) -> str:
        """The text of a token by itself; a part of a character becomes U+FFFD."""
        return bytes(self.vocabulary(token)[1]).decode(errors="replace")

    def token(self, token: int, text: str, scores: Scores) -> Token:
        """Of those written. text: what it added to the text."""
        if special := self.special(token):
            text = self.alone(token)
        return Token(token, text, finite(scores[token]), special)

    def top(self, scores: Scores, most: int) -> list[Token]:
        """The likeliest tokens."""
        return [Token(i, self.alone(i), finite(p), self.special(i)) for i, p in likeliest(scores, most)]


class GenerateWriter(AnswerWriter):
    """Of one prompt. listed: a whole answer is a list of one. generated: tokens so far, or of the best continuation."""

    def __init__(self, given: TgiRequest, name: str, words: TgiTokens, *, listed: bool = False) -> None:
        super().__init__(given.asked, Signature(name, words.vocabulary))
        self.given, self.words, self.listed, self.generated = given, words, listed, 0
        self.each = given.asked.stream
        self.dialect = TGI_STREAM if self.each else TGI
        self._last: StreamResponse | None = None
        self._extra = ""  # of the text, that no token brought: of a character that was not completed

    # ---- events --------------------------------------------------------------------------------------------------

    def piece(self, p: Piece) -> Any:
        """None for the last token: its event says more, and `end` makes it."""
        if not p.token_ids:
            self._extra += p.text
            return None
        assert p.logprobs is not None
        (token,), (scores,) = p.token_ids, p.logprobs
        assert scores is not None
        self.generated = index = self.generated + 1
        event = StreamResponse(index, self.words.token(token, p.text, scores))
        if self.given.top:
            event.top_tokens = self.words.top(scores, self.given.top)
        (choice,) = self.streams[0].choices
        if index < len(choice.token_ids):
            return event
        if not (index == self.asked.params.max_tokens or choice.over or token in self.words.ends):
            return event
        self._last = event
        return None

    def end(self, choice: TextChoice) -> Any:
        event, done = self._last, choice.choice()
        reason = reason_of(done)
        if event is None:
            raise Refused(
                "The text ended behind a token that was not known to be the last.",
                status=500,
                kind=SERVER,
                code="incomplete_generation",
            )
        if not event.token.special:
            event.token.text += self._extra
        event.generated_text = self._text(done)
        if self.given.details:
            event.details = StreamDetails(reason, self.generated, self.given.seed, len(self.ids[0]))
        return event

    # ---- whole answers -------------------------------------------------------------------------------------------

    def whole(self) -> Any:
        """Of several continuations that with the largest mean log-probability of its tokens."""
        done = self.streams[0].completion()
        choices = done.choices
        best = choices[0] if len(choices) == 1 else max(choices, key=_mean)
        self.generated = len(best.token_ids)
        answer = GenerateResponse(self._text(best))
        if self.given.details:
            prefill = self._prefill(done.prompt_logprobs) if self.given.prefill else []
            answer.details = self._details(best, prefill)
            if len(choices) > 1:
                answer.details.best_of_sequences = [self._sequence(c, prefill) for c in choices if c is not best]
        return [answer] if self.listed else answer

    def _details(self, c: Choice, prefill: list[PrefillToken]) -> Details:
        seed, n = self._seed(c), len(c.token_ids)
        return Details(reason_of(c), n, seed, prefill, self._tokens(c), top_tokens=self._top(c))

    def _sequence(self, c: Choice, prefill: list[PrefillToken]) -> BestOfSequence:
        seed, n = self._seed(c), len(c.token_ids)
        return BestOfSequence(self._text(c), reason_of(c), n, seed, prefill, self._tokens(c), self._top(c))

    def _seed(self, c: Choice) -> int | None:
        return None if self.given.seed is None else self.words.fork(self.given.seed, c.index)

    def _tokens(self, c: Choice) -> list[Token]:
        texts = self._texts(c.token_ids)
        rows = zip(c.token_ids, texts, _scores(c), strict=True)
        return [self.words.token(token, text, scores) for token, text, scores in rows]

    def _texts(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text."""
        text = Detokenizer(self.words.tokenizer, self.asked.params.stop, after=self.ids[0], include_stop=True)
        texts = [text.push(i) for i in ids]
        if texts:
            texts[-1] += text.flush()
        return texts

    def _top(self, c: Choice) -> Any:
        most = self.given.top
        return [self.words.top(scores, most) for scores in _scores(c)] if most else UNSET

    def _prefill(self, scores: Sequence[Scores | None] | None) -> list[PrefillToken]:
        each = zip(self.ids[0], scores or (), strict=True)
        return [PrefillToken(i, self.words.alone(i), None if by_id is None else finite(by_id[i])) for i, by_id in each]

    def _text(self, c: Choice) -> str:
        """Without a token that ended it, also where the tokenizer has a text for that."""
        text, ids = c.text, c.token_ids
        if c.stopped_by is not None and c.stopped_by.token is not None and not self.words.tokenizer.is_silent(ids[-1]):
            text = text.removesuffix(self._texts(ids)[-1])
        return self.given.inputs + text if self.given.full_text else text


def reason_of(c: Choice) -> str:
    """As TGI says it. Raises EngineClosed for a text that was cut off."""
    if c.finish_reason is Finish.LENGTH:
        return "length"
    if c.finish_reason is not Finish.STOP:
        raise EngineClosed("The server is shutting down, and this request was not done. Send it again.")
    by = c.stopped_by or Stopped(None)
    return "stop_sequence" if isinstance(by.reason, str) else "eos_token"


def _scores(c: Choice) -> list[Scores]:
    return [scores for scores in c.logprobs or () if scores is not None]


def _mean(c: Choice) -> float:
    total = c.cumulative_logprob
    assert total is not None
    return total / len(c.token_ids)
