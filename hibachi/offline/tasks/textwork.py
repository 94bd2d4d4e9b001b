"""Rows that are texts, conversations or token ids, for a language model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hibachi.engine.sampling.uniforms import fork
from hibachi.engine.scheduler.compose import blocks_of
from hibachi.errors import ConfigError, HibachiError, ModelError, text_of
from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.chats import ChatRequest as Talking
from hibachi.llm.chats import Chats
from hibachi.llm.chats import Ready as Chat
from hibachi.llm.dialects.openai.conversation import conversation
from hibachi.llm.texts import Texts
from hibachi.llm.textstream import Logprobs, Piece, TextChoice, TextStream
from hibachi.llm.tokenizers.own import NoTokenizer
from hibachi.llm.tokenizers.prompts import check_fits
from hibachi.offline.files.format import Field
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.chat_rows import Answers, continuation_of
from hibachi.offline.tasks.columns import Columns, RowReader, RowRequest
from hibachi.offline.tasks.engine_task import EngineTask, judged, why_not
from hibachi.offline.tasks.fingerprint import told_of
from hibachi.offline.tasks.lines import id_of
from hibachi.offline.tasks.task import ColumnRows, Prepared, Result, Told
from hibachi.request import SamplingParams

MOST_MESSAGES = 4096  # of a conversation
Opens = Callable[[], tuple[Texts, str | None]]
"""Loads a model; returns it and its chat template, if that is not its own."""


@dataclass(slots=True)
class _ReadyText:
    ids: list[int]
    params: SamplingParams
    chat: Chat | None  # how its answer is read


class TextWork(ColumnRows, EngineTask[Texts]):
    """Continuations of prompts.

    The columns of a result: output, finish_reason, prompt_tokens, completion_tokens, error; of chats also reasoning, by
    the names of its fields, and tool_calls, if they may have tools; output_token_ids, logprobs and prompt_logprobs, if
    they are wanted. Where rows may have several continuations (n), columns of continuations are lists with an entry
    for each.

    open_: loads the model; called again when its engine was lost. seed: of the run. created: Unix time in seconds of
    the run's start, which chat templates take for the present. parsers: how the format of tool calls and reasoning is
    chosen.
    """

    def __init__(
        self,
        columns: Columns,
        open_: Opens,
        *,
        seed: int = 0,
        created: int = 0,
        token_ids: bool = False,
        parsers: Parsers | None = None,
    ) -> None:
        super().__init__()
        self._parsers = parsers or Parsers()
        self._columns, self._open, self._seed, self._token_ids = columns, open_, seed, token_ids
        self._created = created
        self._many = columns.params.get("n", 1) != 1 or "n" in columns.param_columns
        self._answers = Answers(self._parsers, talks=columns.talks, tools=columns.brings_tools, many=self._many)
        self._scores = [n for n in ("logprobs", "prompt_logprobs") if n in (*columns.params, *columns.param_columns)]
        self.fields: Sequence[Field] = self._fields()
        self._asking = RowReader(columns, SamplingParams())

    def _fields(self) -> list[Field]:
        found = self._answers.fields
        if self._token_ids:
            found.append(Field("output_token_ids", "json" if self._many else "ints"))
        found += [Field(name, "json") for name in self._scores]
        return [*found, Field("prompt_tokens", "int"), Field("completion_tokens", "int"), Field("error", "text")]

    # ---- the model ---------------------------------------------------------------------------------------------

    def check(self, columns: Sequence[str] | None) -> None:
        self._columns.check(columns)

    def open(self) -> Told:
        self._serving, self._template = self._open()
        facts, tokenizer = self.texts.engine.facts, self.texts.tokenizer
        self.places = 2 * facts.limits.rows
        self._block = facts.limits.block_size if facts.cached else 0
        self._asking = RowReader(self._columns, self.texts.default_params)
        self._chats = Chats(self.texts.prompts, self.texts.check_form, self.texts.eos_ids)
        if self._columns.talks and self._template is None and not tokenizer.chat_templates:
            self.close()
            raise ConfigError(
                "Chats need a chat template, and this model has none: give it one with --chat-template, or send plain "
                "prompts."
            )
        if isinstance(tokenizer, NoTokenizer) and not self._token_ids:
            self._token_ids = True  # or there would be nothing to see
            self.fields = self._fields()
        return told_of(self.texts)

    @property
    def texts(self) -> Texts:
        return self.serving

    # ---- rows --------------------------------------------------------------------------------------------------

    def wrong(self, row: Row) -> str | None:
        return why_not(row, lambda: self._asking.read(row))

    def prepare(self, row: Row) -> Prepared:
        with judged():
            asked = self._asking.read(row)
            chat = self._chat(asked) if self._columns.talks else None
            ids = self.texts.prompts.encode(asked.prompt) if chat is None else chat.ids[0]
            check_fits(len(ids), None, self.texts.prompts.context)
        params = asked.params if chat is None else chat.params[0]
        if not asked.seeded:
            params = params.with_(seed=fork(self._seed, row.number + 1))
        limit = params.max_tokens
        most = self.texts.prompts.context
        longest = most if limit is None else min(len(ids) + limit, most)
        key = blocks_of(ids, self._block) if self._block else ()
        new = longest - len(ids)
        size = row.size + 40 * len(ids) + 500
        return Prepared(key, longest, size, _ReadyText(ids, params, chat), len(ids), new * params.runs, new)

    def _chat(self, asked: RowRequest) -> Chat:
        """Raises InvalidRequest or PromptTooLong."""
        messages, options = conversation(asked.prompt, MOST_MESSAGES), asked.options
        variables = {"strftime_now": self._created, **options.variables, "add_generation_prompt": True}
        if self._template is not None:
            variables["chat_template"] = self._template
        talking = Talking(
            options.tools, options.tool_choice, options.parallel_tool_calls, self._parsers, options.reasoning_effort
        )
        return self._chats.ready([messages], [asked.params], talking, variables)

    def start(self, number: int, prepared: Prepared) -> None:
        ready: _ReadyText = prepared.what
        with judged():
            shown = frozenset[int]() if ready.chat is None else ready.chat.shown
            [stream] = self.texts.submit([ready.ids], ready.params, shown=shown)
        feeding = Feeding([stream])
        self._started[number] = stream, feeding, ready.chat
        self._watched.add(number, [c.tokens for c in stream.choices], feeding if ready.params.stop else None)

    def take(self, number: int) -> Result:
        started: tuple[TextStream, Feeding, Chat | None] = self._started.pop(number)
        stream, feeding, chat = started
        self._watched.drop(number)
        with judged(), feeding.ended():
            done = stream.completion()
            if chat is not None:
                [done] = chat.told([done], [f"chatcmpl-{id_of(self._seed, number, 'chat')}"])
        new = sum(len(c.token_ids) for c in done.choices)
        values: dict[str, Any] = {
            **self._answers.values([continuation_of(c) for c in done.choices]),
            "prompt_tokens": len(done.prompt_token_ids),
            "completion_tokens": new,
        }
        if self._token_ids:
            values["output_token_ids"] = self._answers.told([c.token_ids for c in done.choices])
        if "logprobs" in self._scores:
            values["logprobs"] = self._answers.told([_scores(c.logprobs) for c in done.choices])
        if "prompt_logprobs" in self._scores:
            values["prompt_logprobs"] = _scores(done.prompt_logprobs)
        return Result(values, len(done.prompt_token_ids), stream.tokens.reused, new)


class EmbeddingWork(TextWork):
    """A vector of each row. The columns of a result: embedding, prompt_tokens, error."""

    def _fields(self) -> list[Field]:
        return [Field("embedding", "floats"), Field("prompt_tokens", "int"), Field("error", "text")]

    def check(self, columns: Sequence[str] | None) -> None:
        self._columns.only((), "a vector is not sampled")
        super().check(columns)

    def prepare(self, row: Row) -> Prepared:
        prepared = super().prepare(row)
        prepared.longest, prepared.new_tokens, prepared.longest_answer = prepared.prompt_tokens, 0, 0
        return prepared

    def start(self, number: int, prepared: Prepared) -> None:
        ready: _ReadyText = prepared.what
        with judged():
            [item] = self.texts.submit_vectors([ready.ids])
        self._started[number] = item, len(ready.ids)
        self._watched.add(number, [item.stream])

    def open(self) -> Told:
        opened = super().open()
        if not self.texts.engine.facts.has_hidden:
            self.close()
            raise ConfigError(f"{self.texts.engine.facts.model} has no hidden states of which vectors could be made.")
        return opened

    def take(self, number: int) -> Result:
        item, n = self._started.pop(number)
        self._watched.drop(number)
        with judged():
            vector = item.result()
        return Result({"embedding": np.asarray(vector, np.float64).tolist(), "prompt_tokens": n}, n, item.stream.reused)


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


def _scores(found: Logprobs | None) -> list[dict[str, float] | None] | None:
    """Of each token: {token id: log-probability}, the likeliest first; None for a prompt's first."""
    if found is None:
        return None
    return [
        None if by_id is None else {str(i): p for i, p in sorted(by_id.items(), key=lambda item: (-item[1], item[0]))}
        for by_id in found
    ]
