"""Submits requests for text and sends their answers: whole, or as chunks with the steps that made them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Protocol

from hibachi.errors import HibachiError
from hibachi.llm.dialects.errors import Refused, as_refused
from hibachi.llm.dialects.forms import said_by
from hibachi.llm.dialects.handler import TextDialect
from hibachi.llm.dialects.openai.answers import encode
from hibachi.llm.dialects.openai.bodies import read
from hibachi.llm.dialects.openai.writing import AnswerWriter
from hibachi.llm.textstream import TextChoice, TextStream
from hibachi.server.record import Record
from hibachi.server.served import Served
from hibachi.server.web.comments import Comments
from hibachi.server.web.exchange import JSON, Exchange

Headers = Callable[[Record], dict[str, str]]
LONG = 1 << 12  # tokens and log-probabilities of an answer, of which others wait for a few milliseconds
BYTES = 8  # of a body that is repeated, which take as long as one of these


def answering(dialect: TextDialect) -> Callable[[Served, Exchange], Awaitable[None]]:
    """The handler of a route whose bodies are of this dialect."""

    async def answer(served: Served, x: Exchange) -> None:
        await answer_body(served, x, dialect, await served.body(x))

    handle = dialect.handle
    answer.__doc__, answer.__module__ = handle.__doc__, handle.__module__.rpartition(".")[0]  # its folder is the tag
    return answer


async def answer_body(served: Served, x: Exchange, dialect: TextDialect, raw: bytes) -> None:
    """Answer a body that came."""
    body = read(dialect.body, raw, dialect.page)
    writer, ids = await served.read(x, dialect.handle(served, body))
    with dialect.words(body):
        await answer_text(served, x, writer, ids)


async def answer_text(
    served: Served, x: Exchange, writer: AnswerWriter, ids: list[list[int]], headers: Headers | None = None
) -> None:
    """Submit a request for text and send its answer.

    ids: of each prompt. headers: further ones, of an answer that is whole, or of a stream that begins. Raises Refused,
    and what the engine raises, as long as nothing was sent.
    """
    asked = writer.asked
    for own in ids:
        served.reading.check_length(own, asked.max_tokens)
    if asked.prediction and served.texts.engine.facts.speculates:
        asked.predicted = await served.read(x, served.reading.predicted(asked.prediction))
    await served.check_form(asked.params, x.tenant, asked.form)
    with (
        said_by(asked.form),
        served.record(x, asked.params, ids) as record,
        served.submit(
            ids, asked.params, served.terms(asked.terms, x.tenant, x.part), asked.predicted, asked.reader
        ) as writer.streams,
    ):
        writer.ids = ids
        text = _one(writer.streams, asked.params.n)
        record.text, record.stream = text, asked.stream
        try:
            if asked.stream:
                comments = Comments(x, comment=writer.waiting, more=headers and headers(record))
                work = send_parts(x, record, comments, TextParts(served, x, writer, text, record))
            else:
                work = _whole(served, x, writer, text, record, headers)
            await x.while_here(work, text.close)
        finally:
            text.close()


async def _whole(
    served: Served, x: Exchange, writer: AnswerWriter, text: TextStream, record: Record, headers: Headers | None
) -> None:
    while pieces := await text.come(each=writer.each):
        record.came(pieces)
        writer.came(pieces)
    if writer.beside:
        data = await _made(served, _of_prompts(writer) + _new(writer), lambda: encode(writer.whole()))
    else:
        whole = writer.whole()
        data = await _made(served, _again(x, writer), lambda: encode(whole))
    await x.answer(data, JSON, 200, None if headers is None else headers(record))


async def _made(served: Served, size: int, make: Callable[[], bytes]) -> bytes:
    """What `make()` returns; beside the event loop, if it is long. size: as that of LONG."""
    return await served.apart(make) if size > LONG else make()


def _again(x: Exchange, writer: AnswerWriter) -> int:
    """How long what a writer repeats is, as that of LONG: the request, and all that was said."""
    return x.size // BYTES + _new(writer)


def _of_prompts(writer: AnswerWriter) -> int:
    """Tokens and log-probabilities of the prompts that an answer has."""
    asked = writer.asked
    if not asked.echo and asked.params.prompt_logprobs is None:
        return 0
    each = sum(map(len, writer.ids)) * (1 + (asked.params.prompt_logprobs or 0))
    return each * asked.params.n if asked.echo else each


def _new(writer: AnswerWriter) -> int:
    """Tokens and log-probabilities of the continuations."""
    new = sum(len(choice.token_ids) for stream in writer.streams for choice in stream.choices)
    return new * (1 + (writer.asked.params.logprobs or 0))


class Parts(Protocol):
    """The parts of a stream, as they come. over: `next` has given the last one."""

    over: bool

    async def next(self) -> bytes: ...

    async def failed(self, refused: Refused) -> bytes:
        """What had come and was not sent, and an error at its end."""
        ...


async def send_parts(
    x: Exchange,
    record: Record,
    comments: Comments,
    parts: Parts,
    refuse: Callable[[HibachiError], Refused] = as_refused,
) -> None:
    """Send a stream. An error before its first part is raised, as it has a status of its own."""
    try:
        while not parts.over:
            data = await parts.next()
            await comments.ready()
            await x.write(data, more=not parts.over)
    except HibachiError as e:
        await comments.settled()
        if not x.begun:
            raise
        record.failed(e)
        refused = refuse(e)
        x.blame(refused, e)
        await x.write(await parts.failed(refused), more=False)
    finally:
        comments.stop()


class TextParts:
    """Of a text. first: events before all of it, until they are sent; None means nothing has come."""

    def __init__(self, served: Served, x: Exchange, writer: AnswerWriter, text: TextStream, record: Record) -> None:
        self._served, self._x, self._writer, self._text, self._record = served, x, writer, text, record
        self._first: bytes | None = None
        self._chunks: list[Any] = []
        self._open = {c.index: c for c in text.choices}
        self.over = False

    async def next(self) -> bytes:
        writer, chunks = self._writer, self._chunks
        pieces = await self._text.come(each=writer.each)
        while pieces and self._first is None and not writer.begun:
            pieces += (more := await self._text.come(each=writer.each))
            if not more:
                break
        self._record.came(pieces)
        if self._first is None:
            self._first = await _opening(self._served, self._x, writer)
        chunks += [writer.piece(p) for p in pieces]
        ends = [writer.end(c) for c in _over(self._open)]
        chunks += ends
        if not pieces:
            chunks += [writer.end(c) for c in self._open.values()]
            if writer.asked.usage:
                chunks.append(writer.last())
            ends, self.over = chunks, True
        return await self._sent(bool(ends))

    async def failed(self, refused: Refused) -> bytes:
        self._chunks.append(self._writer.failed(refused, self._x.id))  # with what came before it
        self.over = True
        return await self._sent(True)

    async def _sent(self, ends: bool) -> bytes:
        """All that is to be sent. ends: some of it is the end of a text."""
        writer, chunks, first = self._writer, self._chunks, self._first or b""
        self._chunks, self._first = [], b""
        size = _again(self._x, writer) if ends and writer.repeats else 0
        events = await _made(self._served, size, partial(_events, writer, chunks))
        return first + events + (writer.dialect.end if self.over else b"")


async def _opening(served: Served, x: Exchange, writer: AnswerWriter) -> bytes:
    """The events before all text."""
    if writer.beside:
        return await _made(served, _of_prompts(writer), lambda: _events(writer, writer.opening()))
    return await _made(served, x.size // BYTES, partial(_events, writer, writer.opening()))


def _events(writer: AnswerWriter, chunks: Iterable[Any]) -> bytes:
    """The events, without those that a writer keeps for its next one, which are None. A chunk may be several."""
    each = (part for chunk in chunks for part in (chunk if isinstance(chunk, list) else [chunk]))
    return b"".join([writer.frame(chunk) for chunk in each if chunk is not None])


def _over(open_: dict[int, TextChoice]) -> list[TextChoice]:
    """The streams that have ended and were read to their end; they are no longer open."""
    over = [c for c in open_.values() if c.over]
    for choice in over:
        del open_[choice.index]
    return over


def _one(streams: list[TextStream], n: int) -> TextStream:
    """All continuations of all prompts as one stream, numbered as OpenAI does."""
    if len(streams) == 1:
        return streams[0]
    choices = []
    for p, stream in enumerate(streams):
        for choice in stream.choices:
            choice.index += p * n
            choices.append(choice)
    return TextStream("", [], choices, len(choices))
