"""OpenAI's batch lines, each answered by a model as a server would answer its body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from hibachi.backend.array_backend import HostArray
from hibachi.engine.sampling.uniforms import fork
from hibachi.errors import FieldPath, shown
from hibachi.llm.dialects.errors import Refused, refusing
from hibachi.llm.dialects.forms import said_by
from hibachi.llm.dialects.messages import parse as of_messages
from hibachi.llm.dialects.messages.bodies import MessagesBody
from hibachi.llm.dialects.messages.writing import MessagesWriter
from hibachi.llm.dialects.openai import answers
from hibachi.llm.dialects.openai import parse as asking
from hibachi.llm.dialects.openai.answers import TokenTexts
from hibachi.llm.dialects.openai.bodies import PAGE as CHATS_PAGE
from hibachi.llm.dialects.openai.bodies import Bounds, ChatBody, CompletionBody, EmbeddingBody, taken
from hibachi.llm.dialects.openai.chatwriting import ChatWriter
from hibachi.llm.dialects.openai.parse import ParsedRequest
from hibachi.llm.dialects.openai.writing import AnswerWriter, CompletionWriter
from hibachi.llm.dialects.reading import Reading
from hibachi.llm.dialects.responses import parse as of_responses
from hibachi.llm.dialects.responses.bodies import ResponsesBody
from hibachi.llm.dialects.responses.items import PAGE, Item, ItemReference
from hibachi.llm.dialects.responses.writing import ResponsesWriter
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
BODIES: dict[str, Any] = {
    COMPLETIONS: CompletionBody,
    CHAT: ChatBody,
    EMBEDDINGS: EmbeddingBody,
    RESPONSES: ResponsesBody,
    MESSAGES: MessagesBody,
}
"""By url."""
IN_BODY: dict[str, Callable[[Any, FieldPath], FieldPath]] = {
    RESPONSES: lambda body, path: of_responses.in_body(body.tools, path),
    MESSAGES: of_messages.in_body,
}
"""By url: where a field of the chat that is made of a body stands in it."""


@dataclass(slots=True)
class _Request(TextRequest):
    """url: of the line. body: its record. name: of the model. writer: of its answer; None means vectors are wanted."""

    url: str = ""
    body: Any = None
    name: str = ""
    writer: AnswerWriter | None = None


class LineTask(LineRows, TextTask[_Request]):
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
        url, body, _ = self._body(row)
        if url == EMBEDDINGS:
            asking.embedding(body, BOUNDS)
        elif url == COMPLETIONS:
            asking.completion(body, SamplingParams(), BOUNDS)
        else:
            chat = chat_for(body)
            with words(url, body):
                asking.chat(chat, SamplingParams(), BOUNDS)

    def _body(self, row: Row) -> tuple[str, Any, str]:
        """The url of a line, the record of its body, and the model's name. Raises Refused."""
        url, given = self._line(row)
        if url == MESSAGES and given.get("model") is None:
            given = {**given, "model": self._names[0]}
        body = taken(BODIES[url], given, PAGE if url in IN_BODY else CHATS_PAGE)
        if body.model is not None and body.model not in self._names:
            raise Refused(
                f"The model {shown(body.model)} is not the one that runs, which is called {' or '.join(self._names)}. "
                f"Name it so, or give it this name by --served-model-name.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return url, body, body.model or self._names[0]

    def _read(self, row: Row) -> Prepared:
        url, body, name = self._body(row)
        if url == EMBEDDINGS:
            ids = run(self._model.reading.encode(asking.embedding(body, BOUNDS), "input"))
            request = _Request(ids, None, url=url, body=body, name=name)
            limit = None
        else:
            writer, ids = self._writer(url, body, name, partial(self._id_of, row.number))
            asked = writer.asked
            if asked.params.seed is None:
                asked.params = asked.params.with_(seed=fork(self._seed, row.number + 1))
            request = _Request(ids, asked.params, writer.each, url=url, body=body, name=name, writer=writer)
            limit = asked.limit
        with words(url, body):
            for own in ids:
                self._model.reading.check_length(own, limit)
        return self._prepared(row, request, custom_id=row.values["custom_id"], url=url)

    def _writer(
        self, url: str, body: Any, name: str, id_of: Callable[[str], str]
    ) -> tuple[AnswerWriter, list[list[int]]]:
        """What writes the answer to a body, and the token ids of its prompts. name: of the model. id_of: makes an id
        of one kind. Raises Refused, InvalidRequest or PromptTooLong.
        """
        model, made = self._model, self._created
        if url == COMPLETIONS:
            asked, several = run(model.completion(body))
            return self._usual(CompletionWriter, asked, name, id_of("text")), several
        if url == CHAT:
            asked, ids = run(model.chat(body))
            return self._usual(ChatWriter, asked, name, id_of("chat")), [ids]
        if url == MESSAGES:
            asked, ids = run(of_messages.request(model, body))
            full = of_messages.fit(asked, len(ids), model.reading.prompts.context)
            return MessagesWriter(asked, name, model.vocabulary, id=id_of("message"), cached=False, full=full), [ids]
        asked, ids = run(of_responses.request(model, body, partial(_items, body)))
        id = id_of("response")
        return ResponsesWriter(asked, name, model.vocabulary, body, server=None, id=id, created=made, cached=False), [
            ids
        ]

    def _usual(self, kind: type[AnswerWriter], asked: ParsedRequest, name: str, id: str) -> AnswerWriter:
        vocabulary = self._model.vocabulary
        return kind(asked, name, vocabulary, self._fingerprint, id=id, created=self._created, cached=False)

    def _submit(self, request: _Request, params: SamplingParams) -> list[TextStream]:
        writer = request.writer
        assert writer is not None
        asked = writer.asked
        terms = replace(asked.terms, timeout=None, queue_timeout=None)  # or an answer would depend on the time
        with words(request.url, request.body), said_by(asked.form):
            writer.ids, writer.streams = (
                request.ids,
                self.serving.submit(request.ids, params, terms=terms, prediction=asked.prediction, shown=asked.shown),
            )
        return writer.streams

    # ---- what comes out ------------------------------------------------------------------------------------------

    def _vectors(self, request: _Request, vectors: list[HostArray]) -> Any:
        body: EmbeddingBody = request.body
        n, packed = sum(map(len, request.ids)), body.encoding_format == "base64"
        return answers.embeddings(shortened(vectors, body.dimensions), request.name, n, packed=packed)

    def _texts(self, number: int, request: _Request) -> Any:
        writer, feeding = request.writer, request.feeding
        assert writer is not None and feeding is not None
        writer.came(feeding.pieces)
        return msgspec.to_builtins(writer.whole())


def words(url: str, body: Any) -> AbstractContextManager[None]:
    """Within it, what is refused of a chat is told of the body that the chat was made of."""
    return refusing(partial(IN_BODY[url], body) if url in IN_BODY else None)


def chat_for(body: Any) -> ChatBody:
    """The chat that a body asks for. Raises Refused."""
    if isinstance(body, ResponsesBody):
        return of_responses.as_chat(body, _items(body))
    if isinstance(body, MessagesBody):
        return of_messages.chat_of(body)
    assert isinstance(body, ChatBody)
    return body


def _items(body: ResponsesBody) -> list[Item]:
    """Those of the input; references were refused with the line."""
    return [item for item in of_responses.own_items(body, BOUNDS) if not isinstance(item, ItemReference)]
