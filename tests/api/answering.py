"""Bodies answered without a socket: read, handed to an engine here, and written, whole and as a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.messages.handler import MESSAGES
from hibachi.llm.dialects.openai.answers import TokenTexts, encode
from hibachi.llm.dialects.openai.bodies import Bounds, read
from hibachi.llm.dialects.openai.handler import CHATS, COMPLETIONS
from hibachi.llm.dialects.openai.writing import Signature
from hibachi.llm.dialects.reading import Reading
from hibachi.llm.dialects.responses.handler import RESPONSES, respond
from hibachi.llm.dialects.responses.store import Store
from hibachi.llm.dialects.steps import run
from hibachi.llm.dialects.textmodel import TextModel
from hibachi.llm.own import open_texts
from hibachi.llm.texts import Texts

from ..serve.saying import SAYS, THINKS

DIALECTS = {"completion": COMPLETIONS, "chat": CHATS, "message": MESSAGES}


class Host:
    """Answers as a server does. store: of responses."""

    def __init__(self, texts: Texts, template: str | None, parsers: Parsers | None = None) -> None:
        words = TokenTexts(texts.tokenizer.token_bytes, lambda ids: texts.tokenizer.decode(ids, False))
        reading = Reading(texts.prompts, texts.vocab_size, template, None, parsers)
        self.texts, self.model = texts, TextModel(texts, reading, words, Bounds())
        self.store = Store("abcdefgh")

    def sign(self, name: str | None, use: str) -> Signature:
        return Signature(name or "m", self.model.vocabulary)

    def _handled(self, kind: str, body: dict[str, Any]) -> Any:
        responses = replace(RESPONSES, handle=partial(respond, store=self.store))
        dialect = DIALECTS.get(kind, responses)
        given = read(dialect.body, json.dumps(body).encode(), dialect.page)
        writer, writer.ids = run(dialect.handle(self, given))
        with dialect.words(given):
            for ids in writer.ids:
                self.model.reading.check_length(ids, writer.asked.max_tokens)
        writer.streams = self.texts.submit(writer.ids, writer.asked.params, reader=writer.asked.reader)
        return writer

    def whole(self, kind: str, **body: Any) -> dict[str, Any]:
        writer = self._handled(kind, body)

        async def come() -> None:
            for stream in writer.streams:
                while pieces := await stream.come(each=writer.each):
                    writer.came(pieces)

        asyncio.run(come())
        return json.loads(encode(writer.whole()))

    def events(self, kind: str, **body: Any) -> list[dict[str, Any]]:
        """The data of a stream of one prompt."""
        writer = self._handled(kind, {**body, "stream": True})
        [stream] = writer.streams

        async def come() -> list[Any]:
            chunks, open_ = writer.opening(), {c.index: c for c in stream.choices}
            while pieces := await stream.come(each=writer.each):
                chunks += [writer.piece(p) for p in pieces]
                chunks += [writer.end(open_.pop(i)) for i in [i for i, c in open_.items() if c.over]]
            chunks += [writer.end(c) for c in open_.values()]
            return [*chunks, writer.last()] if writer.asked.usage else chunks

        chunks = [c for chunk in asyncio.run(come()) for c in (chunk if isinstance(chunk, list) else [chunk])]
        frames = [writer.frame(c).decode() for c in chunks if c is not None]
        return [json.loads(frame.partition("data: ")[2]) for frame in frames]

    def refused(self, kind: str, **body: Any) -> Refused:
        try:
            self._handled(kind, body)
        except Refused as e:
            return e
        raise AssertionError("it was served")


@contextmanager
def saying(folder: Any, template: str = THINKS, parsers: Parsers | None = None) -> Iterator[Host]:
    """A host whose model says what it is told to, see `SAYS`."""
    file = folder / "says.py"
    file.write_text(SAYS)
    with open_texts(f"{file}:Says", max_num_seqs=8, max_num_batched_tokens=8192) as texts:
        yield Host(texts, template, parsers)
