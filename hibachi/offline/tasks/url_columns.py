"""Rows by their columns that a running server computes, over OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from hibachi.engine.sampling.uniforms import fork
from hibachi.errors import ConfigError, HibachiError, InvalidRequest, shown
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.remote.settings import parsers_of
from hibachi.offline.batch import Batch
from hibachi.offline.files.format import Field
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.answers import VECTOR, Answers, continuation_in
from hibachi.offline.tasks.columns import ColumnRows, RowReader, RowRequest
from hibachi.offline.tasks.lines import CHAT, COMPLETIONS, EMBEDDINGS
from hibachi.offline.tasks.sender import Patience
from hibachi.offline.tasks.task import Prepared, RowError
from hibachi.offline.tasks.url_answers import (
    Answer,
    bad,
    choices_of,
    rename_chat,
    renaming,
    text_of,
    used_of,
    vectors_of,
)
from hibachi.offline.tasks.url_task import UrlRequest, UrlTask, are_ids, encoded, signed
from hibachi.request import SamplingParams
from hibachi.structured import StructuredOutputs

_NAMES = {"include_stop": "include_stop_str_in_output"}  # where the API's differ
_KNOWN = 4096  # distinct sets of parameters that are kept


class UrlColumns(ColumnRows, UrlTask):
    """The columns of results are those of `ColumnTask`, without logprobs. Parsers of the settings say whether and by
    which names there are columns of reasoning; how it is read, the server knows.
    """

    def __init__(self, batch: Batch, created: int, patience: Patience) -> None:
        super().__init__(batch, created, patience)
        self._columns, self._reader = batch.columns, RowReader(batch.columns, UrlAnswer())
        self._answers = Answers(batch.columns, parsers_of(batch.settings), token_ids=batch.token_ids)
        self._path = EMBEDDINGS if batch.task == "embed" else CHAT if batch.columns.talks else COMPLETIONS
        self._said: dict[UrlAnswer, dict[str, Any]] = {}
        self.fields: Sequence[Field] = VECTOR if self._path == EMBEDDINGS else self._answers.fields
        self._check_path()

    def _check_path(self) -> None:
        """Raises ConfigError for what this API does not say."""
        columns = self._columns
        if self._path == EMBEDDINGS:
            if columns.talks:
                raise ConfigError("A server makes vectors of texts and token ids: expected these; got conversations.")
        elif columns.params.get("logprobs") is not None or "logprobs" in columns.param_columns:
            raise ConfigError(
                "logprobs of rows are told by token id, and servers tell them by the tokens' texts. Leave logprobs "
                "out, take a model by --model, or send lines of OpenAI's batches, whose answers are kept as they come."
            )
        elif not columns.talks and columns.params.get("max_tokens", 16) is None:
            raise ConfigError(
                "max_tokens of None, no limit, cannot be said to a server's /v1/completions: expected a number."
            )

    # ---- what goes out -----------------------------------------------------------------------------------------------

    def _judge(self, row: Row) -> RowRequest:
        asked = self._reader.read(row)
        if not self._columns.talks and not isinstance(asked.prompt, str) and not are_ids(asked.prompt):
            raise InvalidRequest(f"A prompt must be a text or a list of token ids; got {shown(asked.prompt)}.")
        return asked

    def _read(self, row: Row) -> Prepared:
        asked = self._judge(row)
        params, prompt = asked.params, asked.prompt
        if self._path == EMBEDDINGS:
            request = UrlRequest(self._path, encoded({"model": self._model, "input": prompt}))
            return self._prepared(row, request, prompt, 0)
        assert isinstance(params, UrlAnswer)
        seed = params.seed if params.seed is not None else fork(self._seed, row.number + 1)
        body = {"model": self._model, **self._fields(params), "seed": signed(seed), **asked.options.as_body()}
        body["messages" if self._path == CHAT else "prompt"] = prompt
        request = UrlRequest(self._path, encoded(body), params.n)
        return self._prepared(row, request, prompt, params.max_tokens or 0)

    def _fields(self, params: UrlAnswer) -> dict[str, Any]:
        found = self._said.get(params)
        if found is None:
            if len(self._said) >= _KNOWN:
                self._said.clear()
            found = self._said[params] = params.as_body()
            if self._answers.token_ids:
                found["return_token_ids"] = True
        return found

    # ---- what comes in -----------------------------------------------------------------------------------------------

    def _answer(self, number: int, request: UrlRequest, answer: Answer) -> dict[str, Any]:
        used = used_of(answer)
        if request.path == EMBEDDINGS:
            vectors = vectors_of(answer)
            if len(vectors) != 1:
                raise bad(f"expected one vector; got {len(vectors)}")
            return {"embedding": vectors[0], "prompt_tokens": used.prompt}
        said = [continuation_in(c, text_of(c, request.path)) for c in choices_of(answer, request.count)]
        if request.path == CHAT:
            drawn = partial(self._id_of, number)
            rename_chat(answer, renaming(str(answer.get("id")), f"chatcmpl-{drawn('chat')}", drawn, ours=self._ours))
            if not self._answers.parted and any(s.reasoning for s in said):
                raise ConfigError(
                    f"{self._url} tells reasoning apart from the text: expected it in the text, as "
                    f"--reasoning-parser none says. Leave that out, or start the server with it too."
                )
        if self._answers.token_ids and not all(isinstance(s.ids, list) for s in said):
            raise self._no_ids("")
        return self._answers.values(said, used.prompt, used.new)

    def _failed(self, number: int, about: Mapping[str, Any], error: HibachiError) -> RowError:
        if self._answers.token_ids and isinstance(error, Refused) and "return_token_ids" in str(error):
            raise self._no_ids(f" It says: {error}") from error
        return super()._failed(number, about, error)

    def _no_ids(self, said: str) -> ConfigError:
        return ConfigError(
            f"{self._url} tells no token ids: expected a server that knows return_token_ids, such as hibachi's or "
            f"vLLM's.{said} Leave --token-ids out."
        )


@dataclass(frozen=True, slots=True)
class UrlAnswer(SamplingParams):
    """Parameters that remember which of them were given: a server has defaults of its own for the others."""

    named: frozenset[str] = frozenset()

    def with_(self, **changes: Any) -> UrlAnswer:
        """Raises InvalidRequest."""
        return replace(self, **changes, named=self.named.union(changes))

    def as_body(self) -> dict[str, Any]:
        """As fields of a request. max_tokens is always said, as a chat would have no limit otherwise."""
        found: dict[str, Any] = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        for name in sorted(self.named - {"seed", "max_tokens", "logprobs", "prompt_logprobs"}):
            value = getattr(self, name)
            if name == "logit_bias":
                value = {str(token): bias for token, bias in value}
            if name == "structured_outputs" and value is not None:
                found |= form_as_body(value)
            elif value is not None:
                found[_NAMES.get(name, name)] = value
        return found


def form_as_body(form: StructuredOutputs) -> dict[str, Any]:
    """As a field of a request: OpenAI's, which most servers know, where that can say it, else vLLM's."""
    names = [f.name for f in fields(form) if f.name != "begun"]  # no server reads that
    said = {name: value for name in names if (value := getattr(form, name)) not in (None, False)}
    if said.keys() == {"json_object"}:
        return {"response_format": {"type": "json_object"}}
    if said.keys() == {"json"} and isinstance(schema := json.loads(said["json"]), dict):
        named = {"name": "answer", "schema": schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    return {"structured_outputs": said}
