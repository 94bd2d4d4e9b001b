"""The text of one request, as its tokens come."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hibachi.engine.streams.channel import give_way
from hibachi.engine.streams.closeable import Closing
from hibachi.engine.streams.merge import await_any, wait_any
from hibachi.engine.streams.stream import LEAVABLE, ItemStream, checked_number, closed, left_early, move
from hibachi.errors import RequestError
from hibachi.llm.chatformat.tools import ToolCall
from hibachi.request import Finish, Prompt

Logprobs = list[dict[int, float] | None]


class Detokenizes(Protocol):
    """Makes text of tokens as they come, see `hibachi.llm.tokenizers.Detokenizer`. stopped: a stop string has come,
    which is `stop`."""

    @property
    def stopped(self) -> bool: ...

    @property
    def stop(self) -> str | None: ...

    def push(self, token: int, /) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Stopped:
    """The cause that ended a text before its limit.

    reason: the stop string, or the id of a stop token that the request named; None means the model's own end. token:
    the id that ended it, delivered or not; None means a stop string did. logprob: of that token, if log-probabilities
    were asked for. logprobs: as of a token in `Choice.logprobs`, if it is not among these.
    """

    reason: str | int | None
    token: int | None = None
    logprob: float = 0.0
    logprobs: dict[int, float] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One continuation of a prompt. tool_calls, reasoning: what an answer of `chat` has beside its text. score: of a
    beam.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: Finish
    logprobs: Logprobs | None = None  # of each token, if asked for: {token id: log-probability}
    stopped_by: Stopped | None = None  # None means its limit was reached
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    score: float | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of its conversation, in OpenAI's form: what is to be appended before the results of
        its calls. A call that was cut off is left out, as nothing can answer it.
        """
        said: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            said["reasoning_content"] = self.reasoning
        if calls := [c for c in self.tool_calls if c.complete]:
            said["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ]
        return said

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the id of a stop token that the request named, if one ended it."""
        return None if self.stopped_by is None else self.stopped_by.reason

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities, if those were asked for."""
        return None if self.logprobs is None else _sum(self.token_ids, self.logprobs)


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one prompt: `choices`, and for short the fields of the first."""

    prompt: Prompt
    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: Logprobs | None = None  # of each token of the prompt, None for the first; if asked for

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def finish_reason(self) -> Finish:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> Logprobs | None:
        return self.choices[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        return self.choices[0].cumulative_logprob


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of a text. All pieces of an index together are its whole text and all its token ids."""

    text: str
    token_ids: list[int]
    index: int = 0  # of the choice
    logprobs: Logprobs | None = None  # of these tokens, if asked for


class TextChoice:
    """One continuation while it is being generated.

    text: makes a new detokenizer for it. ends: ids that are the model's own ends. delivers: the token that ends it is
    delivered. each: every token has a piece of its own, also one without text.
    """

    index: int
    tokens: ItemStream[int]

    def __init__(
        self,
        index: int,
        tokens: ItemStream[int],
        text: Callable[[], Detokenizes],
        logprobs: bool,
        *,
        ends: Container[int] = (),
        delivers: bool = False,
        each: bool = False,
    ) -> None:
        self.index, self.tokens = index, tokens
        self._new_text, self._text, self._logprobs = text, text(), logprobs
        self._ends, self._delivers = ends, delivers
        self.each = each
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._held = 0  # tokens whose text has not come out yet
        self._flushed = False
        self._unread: deque[int] = deque()  # tokens that have come and are not in the text yet
        self.over = False  # it has ended, and `TextStream.come` has given all of it

    @property
    def token_ids(self) -> list[int]:
        """The token ids so far."""
        return self._ids

    @property
    def finish_reason(self) -> Finish | None:
        """Why the text ended, or None while it runs."""
        return Finish.STOP if self._text.stopped else self.tokens.finish_reason

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._text.stopped

    @property
    def stopped_by(self) -> Stopped | None:
        """The cause that ended the text, once it has ended; None means its limit, or an error."""
        if (string := self._text.stop) is not None:
            return Stopped(string)
        if self.tokens.finish_reason is not Finish.STOP:
            return None
        token, scores = self.tokens.stop_token, self.tokens.stop_logprobs
        if token is None:
            return Stopped(None)
        logprob = 0.0 if scores is None else scores[token]
        if self._logprobs and self._delivers and self._ids and self._ids[-1] == token:
            logprob = (self.tokens.logprobs_from(len(self._ids) - 1, len(self._ids))[0] or {})[token]
        return Stopped(None if token in self._ends else token, token, logprob, scores)

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

    def pieces(self, ids: Sequence[int], *, ended: bool = False) -> list[Piece]:
        """`feed`, with the pieces that the tokens complete. ended: with what was held back too."""
        found = [self._piece(token) for token in ids]
        if ended:
            found.append(self._rest())
        return [piece for piece in found if piece is not None]

    def pieces_into(self, ready: deque[Piece], *, ended: bool) -> None:
        """Append the pieces of the tokens that have come; with `ended`, what was held back too.

        If this is interrupted, or the tokenizer raises, it is as if it had not been called.
        """
        before, pieces = (len(self._ids), len(self._pieces), self._held, self._flushed), len(ready)
        self.tokens.come_into(self._unread)
        tokens = [*self._unread]
        try:
            found = [self._piece(token) for token in tokens]
            if ended or self._text.stopped:
                found.append(self._rest())
            ready.extend(piece for piece in found if piece is not None)
            self._unread.clear()
        except BaseException:
            self._unread = deque(tokens)
            while len(ready) > pieces:
                ready.pop()
            n, m, self._held, self._flushed = before
            del self._ids[n:], self._pieces[m:]
            self._text = self._new_text()
            for token in self._ids:
                self._text.push(token)
            raise

    def _piece(self, token: int) -> Piece | None:
        """The piece that a new token completes, if it does."""
        before = len(self._ids) - self._held
        text = self.feed([token])
        self._held = len(self._ids) - before
        if not text and not (self.each and self._held):
            return None
        self._held = 0
        return self._cut(text, before)

    def _rest(self) -> Piece | None:
        """The text that was held back, at the end."""
        before = len(self._ids) - self._held
        self._held = 0
        text = self._flush()
        return self._cut(text, before) if text or before < len(self._ids) else None

    def _cut(self, text: str, before: int) -> Piece:
        logprobs = self.tokens.logprobs_from(before, len(self._ids)) if self._logprobs else None
        return Piece(text, self._ids[before:], self.index, logprobs)

    def _flush(self) -> str:
        text = "" if self._flushed else self._text.flush()
        self._flushed = True
        if text:
            self._pieces.append(text)
        return text

    def choice(self) -> Choice:
        """The finished continuation. Raises EngineClosed or RequestError if it was cut off."""
        reason = self.finish_reason
        if reason is None:
            raise RequestError(
                "This request is not done yet. Read its stream to the end first, for example with `for`."
            )
        if reason in (Finish.CLOSED, Finish.CANCELLED):
            raise closed(self.tokens)
        self._flush()
        logprobs = self.tokens.logprobs_from(0, len(self._ids)) if self._logprobs else None
        return Choice(
            self.index, "".join(self._pieces), self._ids, reason, logprobs, self.stopped_by, score=self.tokens.score
        )

    def likelihood(self) -> float:
        """Log-probability of all drawn tokens, the token that ended it included."""
        end = [] if (by := self.stopped_by) is None or by.logprobs is None else [by.logprob]
        return sum(end, _sum(self._ids, self.tokens.logprobs_from(0, len(self._ids))))


def cut_off(choice: Choice | TextChoice) -> bool:
    """Whether something else than the model has ended a continuation: its limit or a stop string."""
    by = choice.stopped_by
    return choice.finish_reason is not Finish.STOP or (by is not None and isinstance(by.reason, str))


class TextStream(Closing):
    """The text of one request, as it comes: `for piece in stream` or `async for`. Leaving the loop cancels it.

    With n > 1 the pieces of all continuations come as they are generated; `piece.index` is the number of the
    continuation.
    """

    prompt: str | Sequence[int] | Mapping[str, Any]
    prompt_token_ids: list[int]
    choices: list[TextChoice]

    def __init__(self, prompt: Prompt, prompt_ids: list[int], choices: Sequence[TextChoice], n: int) -> None:
        self.prompt, self.prompt_token_ids, self.choices = prompt, prompt_ids, list(choices)
        self._n = n
        self._pieces = _Pieces(self.choices)
        self._left = self._read_out = False

    @property
    def tokens(self) -> ItemStream[int]:
        """The tokens of the first continuation."""
        return self.choices[0].tokens

    @property
    def started(self) -> float | None:
        """When it joined the batch, by time.monotonic(); None means it still waits."""
        return self.tokens.started

    def reused(self, runs: int) -> int:
        """Tokens of its prompts that were found in the cache. runs: continuations of each prompt."""
        return sum(c.tokens.reused for c in self.choices[::runs])

    @property
    def finish_reason(self) -> Finish | None:
        """Why the first text ended, or None while it runs; see `finish_reasons`."""
        return self.choices[0].finish_reason

    @property
    def finish_reasons(self) -> list[Finish | None]:
        return [c.finish_reason for c in self.choices]

    def feed(self, ids: Sequence[int]) -> str:
        """Take new tokens of the first continuation, for callers that read `tokens`; returns the text that they
        complete.
        """
        return self.choices[0].feed(ids)

    def completion(self) -> Completion:
        """The whole result, after the end, also if its last pieces were not read. Raises the request's error,
        EngineClosed or RequestError if it was cut off, and RequestError while it runs.

        With best_of, it holds the n continuations with the largest log-probability, best first.
        """
        self._check_left()
        self._pieces.look()
        choices = [c.choice() for c in self.choices]
        if len(choices) > self._n:
            order = sorted(range(len(choices)), key=lambda i: -self.choices[i].likelihood())
            choices = [replace(choices[i], index=rank) for rank, i in enumerate(order[: self._n])]
        return Completion(self.prompt, self.prompt_token_ids, choices, self.tokens.prompt_logprobs)

    def __next__(self) -> Piece:
        """The next piece, waiting for it. Does not cancel anything."""
        if not self._comes():
            raise StopIteration
        return self._pieces.pop()

    def _comes(self) -> bool:
        """Wait until there is a piece; False at the end."""
        self._check_left()
        pieces = self._pieces
        while not pieces.fill():
            if not pieces.active:
                self._read_out = True
                return False
            wait_any([c.tokens for c in pieces.active])
        return True

    def __iter__(self) -> Iterator[Piece]:
        return _TextLoop(self)

    async def __anext__(self) -> Piece:
        """The next piece. Does not cancel anything."""
        if not await self._acomes():
            raise StopAsyncIteration
        return self._pieces.pop()

    async def _acomes(self) -> bool:
        """`_comes` for a task."""
        self._check_left()
        await give_way()
        pieces = self._pieces
        while not pieces.fill():
            if not pieces.active:
                self._read_out = True
                return False
            await await_any([c.tokens for c in pieces.active])
        return True

    def __aiter__(self) -> AsyncIterator[Piece]:
        return _TextLoop(self)

    def take(self, n: int) -> list[Piece]:
        """The next n pieces, waiting for them; fewer at the end. The request runs on.

        Raises the request's error once all pieces before it were read, and InvalidRequest for a wrong n.
        """
        pieces, wanted = deque[Piece](), checked_number(n)
        try:
            while len(pieces) < wanted and self._comes():
                self._pieces.move_to(pieces, wanted - len(pieces))
        except BaseException as e:  # an error is raised again by the next read; Ctrl-C loses nothing
            if not (pieces and isinstance(e, Exception)):
                self._pieces.put_back(pieces)
                raise
        return [*pieces]

    async def atake(self, n: int) -> list[Piece]:
        """`take` for a task. Cancelling it does not cancel the request, and loses no piece."""
        pieces, wanted = deque[Piece](), checked_number(n)
        try:
            while len(pieces) < wanted and await self._acomes():
                self._pieces.move_to(pieces, wanted - len(pieces))
        except BaseException as e:
            if not (pieces and isinstance(e, Exception)):
                self._pieces.put_back(pieces)
                raise
        return [*pieces]

    async def come(self, *, each: bool = False) -> list[Piece]:
        """All pieces that have come since the last call, one for each continuation that has any; waits for some. [] at
        the end.

        each: one piece for each token instead, also for a token without text; must be passed from the first call on.
        Raises the error of a continuation after its pieces.
        """
        self._check_left()
        self._pieces.each(each)
        return await self._pieces.some()

    def close(self) -> None:
        """Cancel the request unless it has ended."""
        for choice in self.choices:
            choice.tokens.close()

    def leave(self) -> None:
        """`close`, by a loop that ends before a reader was told of the end. Reading the stream again raises
        RequestError, which says so.
        """
        if not self._read_out:
            self._left = self._left or any(c.finish_reason in LEAVABLE for c in self.choices)
        for choice in self.choices:
            choice.tokens.leave()

    def _check_left(self) -> None:
        if self._left:
            raise left_early()


class _TextLoop:
    """What `for` and `async for` hold: dropping it, as `break` does, cancels the request at once."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream

    def __iter__(self) -> _TextLoop:
        return self

    def __next__(self) -> Piece:
        try:
            return next(self._stream)
        except BaseException:  # Ctrl-C: its traceback would keep this object for a while
            self._stream.leave()
            raise

    def __aiter__(self) -> _TextLoop:
        return self

    async def __anext__(self) -> Piece:
        try:
            return await anext(self._stream)
        except BaseException:  # a cancelled task or a timeout: likewise
            self._stream.leave()
            raise

    def __del__(self) -> None:
        self._stream.leave()


class _Pieces:
    """The unread pieces of a stream."""

    def __init__(self, choices: Sequence[TextChoice]) -> None:
        self.active = list(choices)
        self._each = False
        self._ready: deque[Piece] = deque()

    def each(self, wanted: bool) -> None:
        """Whether there is a piece for each token."""
        if wanted is not self._each:
            self._each = wanted
            for choice in self.active:
                choice.each = wanted

    def put_back(self, pieces: deque[Piece]) -> None:
        """Return pieces that were moved out and not delivered."""
        self._ready.extendleft(reversed(pieces))

    def move_to(self, to: deque[Piece], n: int) -> None:
        """Move up to n pieces."""
        move(self._ready, to, n)

    def pop(self) -> Piece:
        return self._ready.popleft()

    def look(self) -> None:
        """Take what has come, for a reader that comes later. Raises the error of a continuation."""
        found = deque[Piece]()
        try:
            while self.fill():
                self.move_to(found, len(self._ready))
        finally:
            self.put_back(found)

    def fill(self) -> bool:
        """Whether there is a piece. Raises the error of a continuation after its pieces."""
        for choice in list(self.active) if not self._ready else ():
            over = choice.tokens.finish_reason is not None  # read first: nothing comes after the end
            choice.pieces_into(self._ready, ended=over and choice.tokens.error is None)
            if over and not self._ready:
                choice.tokens.check()
            if choice.stopped or (over and choice.tokens.error is None):
                self.active.remove(choice)
                choice.over = True
        return bool(self._ready)

    async def some(self) -> list[Piece]:
        """See `TextStream.come`."""
        await give_way()
        while not self.fill():
            if not self.active:
                return []
            await await_any([c.tokens for c in self.active])
        found = [*self._ready]
        self._ready.clear()
        return _joined(found) if len(found) > 1 and not self._each else found


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """One piece for each index."""
    by_index: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return [some[0] if len(some) == 1 else _whole(some) for some in by_index.values()]


def _whole(some: Sequence[Piece]) -> Piece:
    ids = [i for piece in some for i in piece.token_ids]
    scores = None if some[0].logprobs is None else [s for piece in some for s in piece.logprobs or ()]
    return Piece("".join(piece.text for piece in some), ids, some[0].index, scores)


def _sum(ids: Sequence[int], logprobs: Logprobs) -> float:
    return sum(found[i] for i, found in zip(ids, logprobs, strict=True) if found is not None)
