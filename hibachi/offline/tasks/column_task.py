"""Rows that are texts, conversations or token ids by their columns, for a language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.engine.sampling.uniforms import fork
from hibachi.errors import ConfigError
from hibachi.llm.chats import ChatRequest, Chats, Ready
from hibachi.llm.dialects.openai.conversation import conversation
from hibachi.llm.textstream import Logprobs, TextStream
from hibachi.llm.tokenizers.own import NoTokenizer
from hibachi.llm.tokenizers.prompts import check_fits
from hibachi.offline.batch import Batch
from hibachi.offline.files.format import Field
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.answers import VECTOR, Answers, continuation_of
from hibachi.offline.tasks.columns import ColumnRows, RowReader, RowRequest
from hibachi.offline.tasks.task import Prepared
from hibachi.offline.tasks.text_task import Opens, TextRequest, TextTask
from hibachi.request import SamplingParams

MOST_MESSAGES = 16384  # of a conversation


@dataclass(slots=True)
class _ColumnRequest(TextRequest):
    chat: Ready | None = None  # how its answer is read


class ColumnTask(ColumnRows, TextTask[_ColumnRequest]):
    """Continuations of prompts, whose results have the columns of `Answers`; or, for the task embed, a vector of each
    prompt: embedding, prompt_tokens, error.
    """

    def __init__(self, batch: Batch, open_: Opens, created: int = 0) -> None:
        super().__init__(batch, open_, created)
        self._columns, self._embeds = batch.columns, batch.task == "embed"
        self._answers = Answers(batch.columns, self._parsers, token_ids=batch.token_ids)
        self._reader = RowReader(batch.columns, SamplingParams())
        self.fields: Sequence[Field] = VECTOR if self._embeds else self._answers.fields

    def check(self, columns: Sequence[str] | None) -> None:
        if self._embeds:
            self._columns.only((), "a vector is not sampled")
        super().check(columns)

    def _opened(self, template: str | None) -> None:
        texts = self.serving
        self._template, self._reader = template, RowReader(self._columns, texts.default_params)
        self._chats = Chats(texts.prompts, texts.check_form, texts.eos_ids)
        if self._columns.talks and template is None and not texts.tokenizer.chat_templates:
            raise ConfigError(
                "Chats need a chat template, and this model has none: give it one with --chat-template, or send plain "
                "prompts."
            )
        if isinstance(texts.tokenizer, NoTokenizer) and not self._embeds:
            self._answers.token_ids = True  # or there would be nothing to see
            self.fields = self._answers.fields
        if self._embeds and not texts.engine.facts.has_hidden:
            raise ConfigError(f"{texts.engine.facts.model} has no hidden states of which vectors could be made.")

    def _read(self, row: Row) -> Prepared:
        asked, prompts = self._reader.read(row), self.serving.prompts
        chat = self._chat(asked) if self._columns.talks else None
        ids, params = (prompts.encode(asked.prompt), asked.params) if chat is None else (chat.ids[0], chat.params[0])
        check_fits(len(ids), None, prompts.context)
        if not asked.seeded:
            params = params.with_(seed=fork(self._seed, row.number + 1))
        return self._prepared(row, _ColumnRequest([ids], None if self._embeds else params, chat=chat))

    def _chat(self, asked: RowRequest) -> Ready:
        """Raises InvalidRequest or PromptTooLong."""
        messages, options = conversation(asked.prompt, MOST_MESSAGES), asked.options
        variables = {"strftime_now": self._created, **options.variables, "add_generation_prompt": True}
        if self._template is not None:
            variables["chat_template"] = self._template
        talking = ChatRequest(
            options.tools, options.tool_choice, options.parallel_tool_calls, self._parsers, options.reasoning_effort
        )
        return self._chats.ready([messages], [asked.params], talking, variables)

    def _submit(self, request: _ColumnRequest, params: SamplingParams) -> list[TextStream]:
        [reader] = [None] if request.chat is None else request.chat.readers
        return self.serving.submit(request.ids, params, reader=reader)

    def _vectors(self, request: _ColumnRequest, vectors: list[HostArray]) -> dict[str, Any]:
        return {"embedding": np.asarray(vectors[0], np.float64).tolist(), "prompt_tokens": len(request.ids[0])}

    def _texts(self, number: int, request: _ColumnRequest) -> dict[str, Any]:
        done = request.streams[0].completion()
        if request.chat is not None:
            [done] = request.chat.told([done], [f"chatcmpl-{self._id_of(number, 'chat')}"])
        new = sum(len(c.token_ids) for c in done.choices)
        values = self._answers.values([continuation_of(c) for c in done.choices], len(request.ids[0]), new)
        if "logprobs" in self._answers.scores:
            values["logprobs"] = self._answers.told([_scores(c.logprobs) for c in done.choices])
        if "prompt_logprobs" in self._answers.scores:
            values["prompt_logprobs"] = _scores(done.prompt_logprobs)
        return values


def _scores(found: Logprobs | None) -> list[dict[str, float] | None] | None:
    """Of each token: {token id: log-probability}, the likeliest first; None for a prompt's first."""
    if found is None:
        return None
    return [
        None if by_id is None else {str(i): p for i, p in sorted(by_id.items(), key=lambda item: (-item[1], item[0]))}
        for by_id in found
    ]
