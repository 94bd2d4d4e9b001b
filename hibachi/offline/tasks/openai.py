"""OpenAI's batch lines, each answered by a model as a server would answer its body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hibachi.backend.array_backend import HostArray
from hibachi.engine.sampling.uniforms import fork
from hibachi.engine.scheduler.compose import blocks_of
from hibachi.engine.streams.stream import Item, ItemStream
from hibachi.errors import shown
from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.dialects.errors import SERVER, Refused
from hibachi.llm.dialects.forms import said_by
from hibachi.llm.dialects.openai import answers
from hibachi.llm.dialects.openai import parse as asking
from hibachi.llm.dialects.openai.answers import TokenTexts
from hibachi.llm.dialects.openai.bodies import Bounds, EmbeddingBody, taken
from hibachi.llm.dialects.openai.writing import AnswerWriter
from hibachi.llm.dialects.reading import Reading
from hibachi.llm.dialects.steps import run
from hibachi.llm.dialects.textmodel import TextModel
from hibachi.llm.dialects.vectors import shortened
from hibachi.llm.remote.identity import system_fingerprint
from hibachi.llm.texts import Texts
from hibachi.llm.textstream import TextStream
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.engine_task import EngineTask, judged, why_not
from hibachi.offline.tasks.fingerprint import told_of
from hibachi.offline.tasks.handler import Answering, body_of, check, words
from hibachi.offline.tasks.lines import EMBEDDINGS, URLS, BatchLines, LineRows
from hibachi.offline.tasks.task import Prepared, Result, RowError, Told
from hibachi.offline.tasks.textwork import Feeding, Opens

_ROWS = 1 << 14  # continuations of one line


@dataclass(slots=True)
class _ReadyLine:
    values: Mapping[str, Any]
    ids: list[list[int]]
    writer: AnswerWriter | None  # None means vectors are wanted
    name: str
    given: Any = None  # the body
    packed: bool = False
    dimensions: int | None = None
    items: Sequence[Item[HostArray]] = ()
    feeding: Feeding | None = None

    @property
    def streams(self) -> list[TextStream]:
        return self.writer.streams if self.writer is not None else []


class OpenAIWork(LineRows, EngineTask[Texts]):
    """Answers lines by a model. names: that a body may call the model by. model: whose fingerprint answers bear; None:
    none. parsers: how the format of tool calls and reasoning is chosen."""

    def __init__(
        self,
        open_: Opens,
        names: Sequence[str],
        *,
        seed: int = 0,
        created: int = 0,
        model: str | None = None,
        parsers: Parsers | None = None,
    ) -> None:
        super().__init__()
        self._parsers = parsers
        self._open, self._names, self._model = open_, names, model
        self._fingerprint: str | None = None
        self._lines = BatchLines(seed, created)
        self._bounds = Bounds(n=_ROWS, prompts=_ROWS, logprobs=1 << 20, stop=1024, rows=_ROWS, token_ids=1 << 20)

    def open(self) -> Told:
        self._serving, template = self._open()
        texts, facts = self.texts, self.texts.engine.facts
        self._fingerprint = None if self._model is None else system_fingerprint(facts, self._model)
        self.places = 2 * facts.limits.rows
        self._block = facts.limits.block_size if facts.cached else 0
        self._reading = Reading(texts.prompts, texts.vocab_size, template, parsers=self._parsers)
        tokenizer = texts.tokenizer
        vocabulary = TokenTexts(tokenizer.token_bytes, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
        created = self._lines.created
        model = TextModel(texts, self._reading, vocabulary, self._bounds, {"strftime_now": created})
        self._answering = Answering(model, created, self._fingerprint)
        return told_of(texts)

    @property
    def texts(self) -> Texts:
        return self.serving

    # ---- rows --------------------------------------------------------------------------------------------------

    def wrong(self, row: Row) -> str | None:
        def read() -> None:
            url, given = self._lines.read(row, URLS)
            body = taken(EmbeddingBody, given) if url == EMBEDDINGS else body_of(url, given, self._names[0])
            self._check_name(body.model)
            if url == EMBEDDINGS:
                asking.embedding(body, self._bounds)
            else:
                check(url, body, self._bounds)

        return why_not(row, read)

    def prepare(self, row: Row) -> Prepared:
        with judged(partial(self._failed, row.number, row.values)):
            url, body = self._lines.read(row, URLS)
            return self._prepared(row, url, body)

    def _prepared(self, row: Row, url: str, body: Mapping[str, Any]) -> Prepared:
        number, values = row.number, {"custom_id": row.values["custom_id"], "url": url}
        if url == EMBEDDINGS:
            embedding = taken(EmbeddingBody, body)
            name = self._check_name(embedding.model)
            ids = run(self._reading.encode(asking.embedding(embedding, self._bounds), "input"))
            for own in ids:
                self._reading.check_length(own, None)
            packed = embedding.encoding_format == "base64"
            ready = _ReadyLine(values, ids, None, name, packed=packed, dimensions=embedding.dimensions)
            return self._placed(row, ready, 0, 0)
        given = body_of(url, body, self._names[0])
        name = self._check_name(given.model)
        writer, ids = self._answering.writer(url, given, name, partial(self._lines.id_of, number))
        asked = writer.asked
        if asked.params.seed is None:
            asked.params = asked.params.with_(seed=fork(self._lines.seed, number + 1))
        return self._placed(
            row, _ReadyLine(values, ids, writer, name, given), asked.params.max_tokens, asked.params.runs
        )

    def _check_name(self, name: str | None) -> str:
        if name is not None and name not in self._names:
            raise Refused(
                f"The model {shown(name)} is not the one that runs, which is called {' or '.join(self._names)}. Name "
                f"it so, or give it this name by --served-model-name.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name or self._names[0]

    def _placed(self, row: Row, ready: _ReadyLine, limit: int | None, runs: int) -> Prepared:
        """limit: of new tokens of an answer. runs: answers that are computed for each prompt."""
        lengths, most = [len(own) for own in ready.ids], self.texts.prompts.context
        new = [most - n if limit is None else min(limit, most - n) for n in lengths]
        key = blocks_of(ready.ids[0], self._block) if self._block else ()
        size = row.size + 40 * sum(lengths) + 1000
        total = max(n + more for n, more in zip(lengths, new, strict=True))
        return Prepared(key, total, size, ready, sum(lengths), runs * sum(new), max(new))

    def lost(self, number: int, prepared: Prepared, message: str) -> RowError:
        why = Refused(message, status=500, kind=SERVER, code="engine_failed")
        return RowError(message, self._lines.refused(number, prepared.what.values, why))

    def start(self, number: int, prepared: Prepared) -> None:
        ready: _ReadyLine = prepared.what
        streams: list[ItemStream[Any]]
        feed = None
        with judged(partial(self._failed, number, ready.values)):
            if ready.writer is None:
                ready.items = self.texts.submit_vectors(ready.ids)
                streams = [item.stream for item in ready.items]
            else:
                asked = ready.writer.asked
                terms = replace(asked.terms, timeout=None, queue_timeout=None)  # or an answer would depend on the time
                with words(ready.values["url"], ready.given), said_by(asked.form):
                    ready.writer.streams = self.texts.submit(
                        ready.ids, asked.params, terms=terms, prediction=asked.prediction, shown=asked.shown
                    )
                ready.writer.ids = ready.ids
                streams = [c.tokens for s in ready.streams for c in s.choices]
                ready.feeding = Feeding(ready.streams, each=ready.writer.each)
                feed = ready.feeding if asked.params.stop else None
        self._started[number] = ready
        self._watched.add(number, streams, feed)

    def take(self, number: int) -> Result:
        ready: _ReadyLine = self._started.pop(number)
        self._watched.drop(number)
        n = sum(map(len, ready.ids))
        with judged(partial(self._failed, number, ready.values)):
            if ready.writer is None:
                vectors = shortened([item.result() for item in ready.items], ready.dimensions)
                body: Any = answers.embeddings(vectors, ready.name, n, packed=ready.packed)
                return Result(self._lines.answered(number, ready.values, body), n)
            assert ready.feeding is not None
            with ready.feeding.ended():
                ready.writer.came(ready.feeding.pieces)
                body = builtins_of(ready.writer.whole())
        new = sum(len(c.token_ids) for s in ready.streams for c in s.choices)
        cached = sum(s.tokens.reused for s in ready.streams)
        return Result(self._lines.answered(number, ready.values, body), n, cached, new)


def builtins_of(answer: Any) -> Any:
    """An answer as JSON has it."""
    import msgspec

    return msgspec.to_builtins(answer)
