"""The text of one request, as its tokens come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from hibachi.engine.closing import Closing
from hibachi.engine.stream import ItemStream, closed
from hibachi.model.text import Detokenizer
from hibachi.request import Finish

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one prompt."""

    prompt: Prompt
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: Finish
    logprobs: list[dict[int, float]] | None  # of each token, if asked for: {token id: log-probability}


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of a text. All pieces together are the whole text, and the whole list of token ids."""

    text: str
    token_ids: list[int]


class TextStream(Closing):
    """The text of one request, as it comes: `for piece in stream` or `async for`. Leaving the loop cancels it."""

    def __init__(
        self,
        prompt: Prompt,
        prompt_ids: list[int],
        tokens: ItemStream[int],
        text: Detokenizer,
        logprobs: bool,
    ) -> None:
        self.prompt, self.prompt_token_ids, self.tokens = prompt, prompt_ids, tokens
        self._text, self._logprobs = text, logprobs
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._held = 0  # tokens whose text has not come out yet
        self._flushed = False

    @property
    def finish_reason(self) -> Finish | None:
        """Why the text ended, or None while it runs."""
        return Finish.STOP if self._text.stopped else self.tokens.finish_reason

    def feed(self, ids: Sequence[int]) -> str:
        """Take new tokens; returns the text that they complete. Ends the request at a stop string."""
        out = ""
        for i in ids:
            if self._text.stopped:
                break
            self._ids.append(i)
            out += self._text.push(i)
        if self._text.stopped:
            self.tokens.close()
        if out:
            self._pieces.append(out)
        return out

    def completion(self) -> Completion:
        """The whole, after the end. Raises EngineClosed or RequestError if it was cut off."""
        if self.finish_reason in (None, Finish.CLOSED, Finish.CANCELLED):
            raise closed(self.tokens)
        self._flush()
        reason = self.finish_reason
        assert reason is not None
        logprobs = self.tokens.logprobs[: len(self._ids)] if self._logprobs else None
        return Completion(self.prompt, self.prompt_token_ids, "".join(self._pieces), self._ids, reason, logprobs)

    def _piece(self, ids: Sequence[int]) -> Piece | None:
        """The piece that new tokens complete, if they do."""
        before = len(self._ids) - self._held
        text = self.feed(ids)
        self._held = len(self._ids) - before
        if not text:
            return None
        self._held = 0
        return Piece(text, self._ids[before:])

    def _rest(self) -> Piece | None:
        """What was held back, at the end."""
        before = len(self._ids) - self._held
        self._held = 0
        text = self._flush()
        return Piece(text, self._ids[before:]) if text or before < len(self._ids) else None

    def _flush(self) -> str:
        text = "" if self._flushed else self._text.flush()
        self._flushed = True
        if text:
            self._pieces.append(text)
        return text

    def __iter__(self) -> Iterator[Piece]:
        for token in self.tokens:
            if (piece := self._piece([token])) is not None:
                yield piece
            if self._text.stopped:
                break
        if (piece := self._rest()) is not None:
            yield piece

    def __aiter__(self) -> AsyncIterator[Piece]:
        return _Pieces(self)

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        self.tokens.close()


class _Pieces:
    """What `async for` holds; dropped with the loop, so that `break` cancels at once."""

    def __init__(self, stream: TextStream) -> None:
        self._stream, self._tokens = stream, aiter(stream.tokens)
        self._over = False

    def __aiter__(self) -> _Pieces:
        return self

    async def __anext__(self) -> Piece:
        stream = self._stream
        while not self._over:
            try:
                piece = stream._piece([await anext(self._tokens)])
            except StopAsyncIteration:
                break
            self._over = stream._text.stopped
            if piece is not None:
                return piece
        self._over = True
        if (piece := stream._rest()) is not None:
            return piece
        raise StopAsyncIteration
