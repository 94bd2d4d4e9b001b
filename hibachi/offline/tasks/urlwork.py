"""Rows that a running server computes, over OpenAI's API: one of ours, a router, vLLM, llama.cpp and others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

from hibachi.engine.sampling.uniforms import fork
from hibachi.errors import ConfigError, InvalidRequest, shown
from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.model.extras import need
from hibachi.llm.remote.settings import parsers_of
from hibachi.offline.files.format import Field
from hibachi.offline.files.rows import BATCH, Row
from hibachi.offline.settings import BatchSettings
from hibachi.offline.tasks.answer_ids import CallId, rename_chat, renaming
from hibachi.offline.tasks.chat_rows import Answers, Continuation, continuation_in
from hibachi.offline.tasks.columns import Columns, RowReader, RowRequest
from hibachi.offline.tasks.engine_task import judged, why_not
from hibachi.offline.tasks.lines import id_of
from hibachi.offline.tasks.sender import Patience
from hibachi.offline.tasks.task import ColumnRows, Prepared, Result, RowError, RowTask
from hibachi.offline.tasks.urlbase import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    Answer,
    Asks,
    ReadyRequest,
    RemoteServer,
    UrlWork,
    are_ids,
    bad,
    begins,
    choices_of,
    encoded,
    signed,
    text_of,
    used_of,
    vectors_of,
)
from hibachi.request import SamplingParams
from hibachi.structured import StructuredOutputs

PATIENT = Patience()
_NAMES = {"include_stop": "include_stop_str_in_output"}  # where the API's differ
_KNOWN = 4096  # distinct sets of parameters that are kept


class AsksRows(Asks, Protocol):
    """What of a `Batch` concerns rows that go to a server."""

    @property
    def columns(self) -> Columns: ...
    @property
    def settings(self) -> BatchSettings: ...
    @property
    def task(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def token_ids(self) -> bool: ...
    @property
    def served_names(self) -> Sequence[str]: ...


def url_work(batch: AsksRows, *, lines: bool, created: int, patience: Patience | None = None) -> RowTask:
    """lines: OpenAI's. created: Unix time in seconds of the run's start. Raises ConfigError, MissingExtra."""
    server = RemoteServer.of(batch, patience or replace(PATIENT, timeout=batch.request_timeout))
    if lines:
        need("msgspec", "A batch line of OpenAI's", BATCH)
        from hibachi.offline.tasks.urllines import UrlLines

        return UrlLines(server, batch.served_names, seed=batch.seed, created=created)
    if batch.task == "forward":
        raise ConfigError("The task forward is for a model of your own: name it by --model, and leave --url out.")
    if batch.task == "embed":
        return UrlVectors(server, batch.columns)
    parsers = parsers_of(batch.settings)
    return UrlText(server, batch.columns, seed=batch.seed, token_ids=batch.token_ids, parsers=parsers)


class UrlRows(ColumnRows, UrlWork):
    """Rows by their columns."""

    def __init__(self, server: RemoteServer, columns: Columns) -> None:
        super().__init__(server)
        self._columns = columns
        self._asking = RowReader(columns, UrlAnswer())

    def check(self, columns: Sequence[str] | None) -> None:
        self._columns.check(columns)

    def wrong(self, row: Row) -> str | None:
        return why_not(row, lambda: self._read(row))

    def _read(self, row: Row) -> RowRequest:
        """Raises InvalidRequest."""
        asked = self._asking.read(row)
        prompt = asked.prompt
        if not self._columns.talks and not isinstance(prompt, str) and not are_ids(prompt):
            raise InvalidRequest(f"A prompt must be a text or a list of token ids; got {shown(prompt)}.")
        return asked

    def _prepared(self, row: Row, ready: ReadyRequest, prompt: Any, limit: int) -> Prepared:
        key, tokens = begins(prompt)
        return Prepared(key, tokens + limit, row.size + len(ready.body) + 500, ready)


class UrlText(UrlRows):
    """Continuations. The columns of a result are those of `TextWork`, without logprobs. parsers: whether and by which
    names there are columns of reasoning; how it is read, the server knows."""

    def __init__(
        self,
        server: RemoteServer,
        columns: Columns,
        *,
        seed: int = 0,
        token_ids: bool = False,
        parsers: Parsers | None = None,
    ) -> None:
        super().__init__(server, columns)
        if columns.params.get("logprobs") is not None or "logprobs" in columns.param_columns:
            raise ConfigError(
                "logprobs of rows are told by token id, and servers tell them by the tokens' texts. Leave logprobs "
                "out, take a model by --model, or send lines of OpenAI's batches, whose answers are kept as they come."
            )
        if not columns.talks and columns.params.get("max_tokens", 16) is None:
            raise ConfigError(
                "max_tokens of None, no limit, cannot be said to a server's /v1/completions: expected a number."
            )
        self._seed, self._token_ids = seed, token_ids
        many = columns.params.get("n", 1) != 1 or "n" in columns.param_columns
        self._answers = Answers(parsers or Parsers(), talks=columns.talks, tools=columns.brings_tools, many=many)
        self._said: dict[UrlAnswer, dict[str, Any]] = {}
        self.fields = [
            *self._answers.fields,
            *([Field("output_token_ids", "json" if many else "ints")] if token_ids else ()),
            Field("prompt_tokens", "int"),
            Field("completion_tokens", "int"),
            Field("error", "text"),
        ]

    def prepare(self, row: Row) -> Prepared:
        with judged():
            asked = self._read(row)
            params = asked.params
            assert isinstance(params, UrlAnswer)
            seed = params.seed if params.seed is not None else fork(self._seed, row.number + 1)
            body = {"model": self._model, **self._fields(params), "seed": signed(seed)}
            body |= asked.options.as_body()
            body["messages" if self._columns.talks else "prompt"] = asked.prompt
            ready = ReadyRequest(CHAT if self._columns.talks else COMPLETIONS, encoded(body), params.n)
        return self._prepared(row, ready, asked.prompt, params.max_tokens or 0)

    def _fields(self, params: UrlAnswer) -> dict[str, Any]:
        found = self._said.get(params)
        if found is None:
            if len(self._said) >= _KNOWN:
                self._said.clear()
            found = self._said[params] = params.as_body()
            if self._token_ids:
                found["return_token_ids"] = True
        return found

    def result(self, number: int, ready: ReadyRequest, answer: Answer) -> Result:
        choices = choices_of(answer, ready.count)
        said = [continuation_in(c, text_of(c, ready.path)) for c in choices]
        used = used_of(answer)
        if ready.path == CHAT:
            rename_chat(answer, self._call_ids(number, str(answer.get("id"))))
            self._check_reasoning(said)
        values: dict[str, Any] = {
            **self._answers.values(said),
            "prompt_tokens": used.prompt,
            "completion_tokens": used.new,
        }
        if self._token_ids:
            values["output_token_ids"] = self._answers.told([self._ids(c) for c in choices])
        return Result(values, used.prompt or 0, used.cached, used.new or 0)

    def _call_ids(self, number: int, before: str) -> CallId:
        """Gives ids to the calls of an answer, whose own id was `before`: those that a model here would give."""
        drawn = partial(id_of, self._seed, number)
        return renaming(before, f"chatcmpl-{drawn('chat')}", drawn, ours=self._ours)

    def _check_reasoning(self, said: Sequence[Continuation]) -> None:
        """Raises ConfigError where reasoning came that was to be a part of the output."""
        if not self._answers.parted and any(s.reasoning for s in said):
            raise ConfigError(
                f"{self._server.url} tells reasoning apart from the text: expected it in the text, as "
                f"--reasoning-parser none says. Leave that out, or start the server with it too."
            )

    def failed(self, number: int, ready: ReadyRequest, why: Refused) -> RowError:
        if self._token_ids and "return_token_ids" in str(why):
            raise self._no_ids(f" It says: {why}") from why
        return super().failed(number, ready, why)

    def _ids(self, choice: Answer) -> list[int]:
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            raise self._no_ids("")
        return ids

    def _no_ids(self, said: str) -> ConfigError:
        return ConfigError(
            f"{self._server.url} tells no token ids: expected a server that knows return_token_ids, such as hibachi's "
            f"or vLLM's.{said} Leave --token-ids out."
        )


class UrlVectors(UrlRows):
    """A vector of each row. The columns of a result are those of `EmbeddingWork`."""

    fields: Sequence[Field] = (Field("embedding", "floats"), Field("prompt_tokens", "int"), Field("error", "text"))

    def __init__(self, server: RemoteServer, columns: Columns) -> None:
        super().__init__(server, columns)
        if columns.talks:
            raise ConfigError("A server makes vectors of texts and token ids: expected these; got conversations.")

    def prepare(self, row: Row) -> Prepared:
        with judged():
            prompt = self._read(row).prompt
            ready = ReadyRequest(EMBEDDINGS, encoded({"model": self._model, "input": prompt}))
        return self._prepared(row, ready, prompt, 0)

    def result(self, number: int, ready: ReadyRequest, answer: Answer) -> Result:
        data = vectors_of(answer)
        used = used_of(answer)
        if len(data) != 1:
            raise bad(f"expected one vector; got {len(data)}")
        return Result({"embedding": data[0], "prompt_tokens": used.prompt}, used.prompt or 0, used.cached)


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
    said = {f.name: value for f in fields(form) if (value := getattr(form, f.name)) not in (None, False)}
    if said.keys() == {"json_object"}:
        return {"response_format": {"type": "json_object"}}
    if said.keys() == {"json"} and isinstance(schema := json.loads(said["json"]), dict):
        named = {"name": "answer", "schema": schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    return {"structured_outputs": said}
