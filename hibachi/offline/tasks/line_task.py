"""OpenAI's batch lines, each answered by a model as a server would answer its body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from hibachi.backend.array_backend import HostArray
from hibachi.engine.sampling.uniforms import fork
from hibachi.errors import shown
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.forms import said_by
from hibachi.llm.dialects.messages.handler import MESSAGES as OF_MESSAGES
from hibachi.llm.dialects.openai import answers
from hibachi.llm.dialects.openai import handler as handlers
from hibachi.llm.dialects.openai import parse as asking
from hibachi.llm.dialects.openai.answers import TokenTexts
from hibachi.llm.dialects.openai.bodies import Bounds, EmbeddingBody, taken
from hibachi.llm.dialects.openai.writing import AnswerWriter, Signature
from hibachi.llm.dialects.reading import Reading
from hibachi.llm.dialects.responses.handler import RESPONSES as OF_RESPONSES
from hibachi.llm.dialects.responses.handler import chat_alone
from hibachi.llm.dialects.steps import run
from hibachi.llm.dialects.textmodel import TextModel
from hibachi.llm.dialects.vectors import shortened
from hibachi.llm.remote.identity import system_fingerprint
from hibachi.llm.textstream import TextStream
from hibachi.offline.batch import Batch
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.lines import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RESPONSES, LineRows, Seen
from hibachi.offline.tasks.task import Prepared
from hibachi.offline.tasks.text_task import Opens, TextRequest, TextTask
from hibachi.request import SamplingParams

_ROWS = 1 << 14  # continuations of one line
BOUNDS = Bounds(n=_ROWS, prompts=_ROWS, logprobs=1 << 20, stop=1024, rows=_ROWS, token_ids=1 << 20)
DIALECTS = {
    COMPLETIONS: handlers.COMPLETIONS,
    CHAT: handlers.CHATS,
    RESPONSES: replace(OF_RESPONSES, as_chat=partial(chat_alone, bounds=BOUNDS)),
    MESSAGES: OF_MESSAGES,
}
"""By url, of what is answered by a text."""


@dataclass(slots=True)
class _LineRequest(TextRequest):
    """url: of the line. body: its record, with the name of the model. writer: of its answer; None means vectors."""

    url: str = ""
    body: Any = None
    writer: AnswerWriter | None = None


class LineTask(LineRows, TextTask[_LineRequest]):
    """names: that a body may call the model by."""

    def __init__(self, batch: Batch, open_: Opens, names: Sequence[str], created: int = 0) -> None:
        super().__init__(batch, open_, created)
        self._names, self._seen = names, Seen()

    def _opened(self, template: str | None) -> None:
        texts, tokenizer = self.serving, self.serving.tokenizer
        self._fingerprint = system_fingerprint(texts.engine.facts, self._batch.settings.model)
        vocabulary = TokenTexts(tokenizer.token_bytes, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
        reading = Reading(texts.prompts, texts.vocab_size, template, parsers=self._parsers)
        self._model = TextModel(texts, reading, vocabulary, BOUNDS, {"strftime_now": self._created})

    # ---- what goes in --------------------------------------------------------------------------------------------

    def _judge(self, row: Row) -> None:
        url, body = self._body(row)
        if url == EMBEDDINGS:
            asking.embedding(body, BOUNDS)
        elif url == COMPLETIONS:
            asking.completion(body, SamplingParams(), BOUNDS)
        else:
            as_chat = DIALECTS[url].as_chat
            assert as_chat is not None
            chat = as_chat(body)
            with words(url, body):
                asking.chat(chat, SamplingParams(), BOUNDS)

    def _body(self, row: Row) -> tuple[str, Any]:
        """The url of a line, and the record of its body, with the model's name. Raises Refused."""
        url, given = self._line(row)
        if url == MESSAGES and given.get("model") is None:
            given = {**given, "model": self._names[0]}
        if url == EMBEDDINGS:
            body: Any = taken(EmbeddingBody, given)
        else:
            body = taken(DIALECTS[url].body, given, DIALECTS[url].page)
        if body.model is not None and body.model not in self._names:
            raise Refused(
                f"The model {shown(body.model)} is not the one that runs, which is called {' or '.join(self._names)}. "
                f"Name it so, or give it this name by --served-model-name.",
                status=404,
                param="model",
                code="model_not_found",
            )
        body.model = body.model or self._names[0]
        return url, body

    def _read(self, row: Row) -> Prepared:
        url, body = self._body(row)
        if url == EMBEDDINGS:
            ids, limit = run(self._model.reading.encode(asking.embedding(body, BOUNDS), "input")), None
            request = _LineRequest(ids, None, False, url, body)
        else:
            by = _Signer(self._model, self._fingerprint, self._created, partial(self._id_of, row.number))
            writer, ids = run(DIALECTS[url].handle(by, body))
            asked = writer.asked
            if asked.params.seed is None:
                asked.params = asked.params.with_(seed=fork(self._seed, row.number + 1))
            request = _LineRequest(ids, asked.params, writer.each, url, body, writer)
            limit = asked.max_tokens
        with words(url, body):
            for own in ids:
                self._model.reading.check_length(own, limit)
        return self._prepared(row, request, custom_id=row.values["custom_id"], url=url)

    def _submit(self, request: _LineRequest, params: SamplingParams) -> list[TextStream]:
        writer = request.writer
        assert writer is not None
        asked = writer.asked
        terms = replace(asked.terms, timeout=None, queue_timeout=None)  # or an answer would depend on the time
        with words(request.url, request.body), said_by(asked.form):
            writer.ids, writer.streams = (
                request.ids,
                self.serving.submit(request.ids, params, terms=terms, prediction=asked.prediction, reader=asked.reader),
            )
        return writer.streams

    # ---- what comes out ------------------------------------------------------------------------------------------

    def _vectors(self, request: _LineRequest, vectors: list[HostArray]) -> Any:
        body: EmbeddingBody = request.body
        n, packed = sum(map(len, request.ids)), body.encoding_format == "base64"
        return answers.embeddings(shortened(vectors, body.dimensions), body.model or "", n, packed=packed)

    def _texts(self, number: int, request: _LineRequest) -> Any:
        writer, feeding = request.writer, request.feeding
        assert writer is not None and feeding is not None
        writer.came(feeding.pieces)
        return msgspec.to_builtins(writer.whole())


@dataclass(frozen=True, slots=True)
class _Signer:
    """Answers one line. id_of: makes an id of one kind."""

    model: TextModel
    fingerprint: str
    created: int
    id_of: Callable[[str], str]

    def sign(self, name: str | None, use: str) -> Signature:
        assert name is not None
        return Signature(name, self.model.vocabulary, self.fingerprint, self.id_of(use), self.created, cached=False)


def words(url: str, body: Any) -> AbstractContextManager[None]:
    return DIALECTS[url].words(body) if url in DIALECTS else nullcontext()
