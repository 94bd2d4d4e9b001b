"""What a language model computes for rows of any kind: continuations of prompts, or vectors of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hibachi.backend.array_backend import HostArray
from hibachi.engine.scheduler.compose import blocks_of
from hibachi.engine.streams.stream import Item, ItemStream
from hibachi.errors import HibachiError, ModelError, text_of
from hibachi.llm.remote.settings import parsers_of
from hibachi.llm.texts import Texts
from hibachi.llm.textstream import Piece, TextChoice, TextStream
from hibachi.offline.batch import Batch
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.engine_task import EngineTask
from hibachi.offline.tasks.fingerprint import told_of
from hibachi.offline.tasks.task import Prepared, Result, Told
from hibachi.request import SamplingParams

Opens = Callable[[], tuple[Texts, str | None]]
"""Loads a model; returns it and its chat template, if that is not its own."""


@dataclass(slots=True)
class TextRequest:
    """Prompts of a row. ids: of each. params: None means that vectors are wanted. each: of every token there is to be a
    piece. When it was queued: streams and what feeds them, or items with vectors.
    """

    ids: list[list[int]]
    params: SamplingParams | None
    each: bool = False
    streams: Sequence[TextStream] = field(default=(), init=False)
    feeding: Feeding | None = field(default=None, init=False)
    items: Sequence[Item[HostArray]] = field(default=(), init=False)


R = TypeVar("R", bound=TextRequest)


class TextTask(EngineTask[Texts], Generic[R]):
    """open_: loads the model; called again when its engine was lost. created: Unix time in seconds of the run's start,
    which chat templates take for the present.
    """

    def __init__(self, batch: Batch, open_: Opens, created: int) -> None:
        super().__init__()
        self._batch, self._open = batch, open_
        self._seed, self._created = batch.seed, created
        self._parsers = parsers_of(batch.settings)

    def _opened(self, template: str | None) -> None:
        """The model is there. template: in place of its own. Raises ConfigError."""
        raise NotImplementedError

    def _submit(self, request: R, params: SamplingParams) -> list[TextStream]:
        raise NotImplementedError

    def _vectors(self, request: R, vectors: list[HostArray]) -> Any:
        """The row's answer."""
        raise NotImplementedError

    def _texts(self, number: int, request: R) -> Any:
        """The row's answer, when all texts are whole."""
        raise NotImplementedError

    def open(self) -> Told:
        self._serving, template = self._open()
        facts = self._serving.engine.facts
        self.places = 2 * facts.limits.rows
        self._block = facts.limits.block_size if facts.cached else 0
        try:
            self._opened(template)
        except BaseException:
            self.close()
            raise
        return told_of(self._serving)

    def _prepared(self, row: Row, request: R, **about: Any) -> Prepared:
        """about: see `Prepared`."""
        lengths, most = [len(own) for own in request.ids], self.serving.prompts.context
        limit, runs = (0, 0) if request.params is None else (request.params.max_tokens, request.params.runs)
        new = [most - n if limit is None else min(limit, most - n) for n in lengths]
        key = blocks_of(request.ids[0], self._block) if self._block else ()
        size = row.size + 40 * sum(lengths) + 1000
        longest = max(n + more for n, more in zip(lengths, new, strict=True))
        return Prepared(key, longest, size, request, sum(lengths), runs * sum(new), max(new), about)

    def start(self, number: int, prepared: Prepared) -> None:
        request: R = prepared.what
        streams: list[ItemStream[Any]]
        feed = None
        with self._judging(number, prepared.about):
            if request.params is None:
                request.items = self.serving.submit_vectors(request.ids)
                streams = [item.stream for item in request.items]
            else:
                request.streams = self._submit(request, request.params)
                request.feeding = Feeding(request.streams, each=request.each)
                streams = [c.tokens for s in request.streams for c in s.choices]
                feed = request.feeding if request.params.stop else None
        self._watch(number, prepared, streams, feed)

    def take(self, number: int) -> Result:
        prepared, _ = self._started.pop(number)
        request: R = prepared.what
        with self._judging(number, prepared.about):
            if request.feeding is None:
                answer = self._vectors(request, [item.result() for item in request.items])
            else:
                with request.feeding.ended():
                    answer = self._texts(number, request)
        new = sum(len(c.token_ids) for s in request.streams for c in s.choices)
        cached = sum(s.tokens.reused for s in request.streams) + sum(item.stream.reused for item in request.items)
        return Result(self._values(number, prepared.about, answer), prepared.prompt_tokens, cached, new)


class Feeding:
    """Makes text of tokens as they come, so that a stop string ends it. What a tokenizer of one's own raises is the
    error of this row. each: a piece of each token is put into `pieces`."""

    def __init__(self, streams: Sequence[TextStream], *, each: bool = False) -> None:
        self._choices = [c for s in streams for c in s.choices]
        self._error: Exception | None = None
        self.pieces: list[Piece] = []
        for choice in self._choices if each else ():
            choice.each = True

    def __call__(self, i: int, ids: list[int]) -> None:
        try:
            self._feed(self._choices[i], ids)
        except Exception as e:
            self._error = e
            for choice in self._choices:
                choice.tokens.close()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Of streams that have ended: what has not been read becomes text, of which something is then made. Raises the
        error of the row."""
        try:
            if self._error is not None:
                raise self._error
            for choice in self._choices:
                self._feed(choice, choice.tokens.come(), ended=True)
                if not choice.stopped:
                    choice.tokens.check()
            yield
        except HibachiError:
            raise
        except Exception as e:
            raise ModelError(f"The tokenizer raised {text_of(e)}") from e

    def _feed(self, choice: TextChoice, ids: list[int], *, ended: bool = False) -> None:
        if choice.each:
            self.pieces += choice.pieces(ids, ended=ended)
        else:
            choice.feed(ids)
