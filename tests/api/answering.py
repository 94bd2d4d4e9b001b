"""Bodies answered without a socket: read, handed to an engine here, and written, whole and as a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.dialects.errors import Refused, refusing
from hibachi.llm.dialects.messages.handler import message
from hibachi.llm.dialects.openai.answers import TokenTexts, encode
from hibachi.llm.dialects.openai.bodies import Bounds
from hibachi.llm.dialects.openai.handler import chat, completion
from hibachi.llm.dialects.reading import Reading
from hibachi.llm.dialects.responses.handler import respond
from hibachi.llm.dialects.responses.store import Store
from hibachi.llm.dialects.steps import run
from hibachi.llm.dialects.textmodel import TextModel
from hibachi.llm.own import open_texts
from hibachi.llm.texts import Texts

from ..serve.saying import SAYS, THINKS

HANDLERS = {"completion": completion, "chat": chat, "message": message}


class Host:
    """Answers as a server does. store: of responses."""

    def __init__(self, texts: Texts, template: str | None, parsers: Parsers | None = None) -> None:
        words = TokenTexts(texts.tokenizer.token_bytes, lambda ids: texts.tokenizer.decode(ids, False))
        reading = Reading(texts.prompts, texts.vocab_size, template, None, parsers)
        self.texts, self.model, self.fingerprint = texts, TextModel(texts, reading, words, Bounds()), None
        self.store = Store("abcdefgh")

    def check_name(self, name: str | None) -> str:
        return name or "m"

    def _handled(self, kind: str, body: dict[str, Any]) -> Any:
        raw = json.dumps(body).encode()
        steps = respond(self, raw, self.store) if kind == "response" else HANDLERS[kind](self, raw)
        found = run(steps)
        writer = found.writer
        with refusing(found.move):
            for ids in found.ids:
                self.model.reading.check_length(ids, writer.asked.limit)
        writer.ids = found.ids
        writer.streams = self.texts.submit(found.ids, writer.asked.params, shown=writer.asked.shown)
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
