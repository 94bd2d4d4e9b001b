"""Chooses what computes the rows of a run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from hibachi.common.installed import need
from hibachi.common.named import object_named
from hibachi.engine.build import returns_ids
from hibachi.errors import ConfigError
from hibachi.llm.own import is_own, no_text
from hibachi.llm.remote.identity import name_of
from hibachi.llm.remote.opening import open_settled
from hibachi.llm.texts import Texts
from hibachi.llm.tokens import Tokens
from hibachi.offline.batch import Batch
from hibachi.offline.files.rows import BATCH
from hibachi.offline.settings import BatchSettings
from hibachi.offline.tasks.array_task import ArrayTask
from hibachi.offline.tasks.column_task import ColumnTask
from hibachi.offline.tasks.lines import are_lines
from hibachi.offline.tasks.task import RowTask
from hibachi.offline.tasks.text_task import Opens

Opened: TypeAlias = "tuple[Texts | Tokens, str | None]"


def resolve_lines(batch: Batch, columns: Sequence[str] | None) -> Batch:
    """A run that says whether its rows are OpenAI's lines; None of `openai` meant that their columns say so."""
    return replace(batch, openai=are_lines(columns)) if batch.openai is None else batch


def task_of(batch: Batch, created: int = 0, *, reading: bool = False) -> RowTask:
    """What computes the rows of a run, of which it is known whether they are lines. created: Unix time in seconds of
    its start. reading: it is only to judge rows, so no model is made to learn what it returns. Raises ConfigError,
    MissingExtra.
    """
    settings, model = batch.settings, batch.settings.model
    if batch.url is not None:
        return _at_url(batch, created)
    if batch.openai:
        return text_task(batch, partial(_texts, settings, []), created)
    if batch.task == "forward":
        if not is_own(model):
            raise ConfigError(f"The task forward is for a model of your own, named as pkg:Class; got {model}.")
        object_named(model)  # is it there?
        return ArrayTask(batch, partial(_tokens, settings, [], feedforward=True))
    opened: list[Opened] = []
    tokens = is_own(model) and _returns_tokens(model, reading)
    if tokens is None:
        opened.append(_opened(settings))
        tokens = isinstance(opened[0][0], Tokens)
    if not tokens:
        return text_task(batch, partial(_texts, settings, opened), created)
    if batch.task == "embed":
        for found, _ in opened:
            found.close()
        raise ConfigError(f"{model} has no hidden states of which vectors could be made.")
    return ArrayTask(batch, partial(_tokens, settings, opened))


def text_task(batch: Batch, open_: Opens, created: int = 0) -> RowTask:
    """What computes the rows by a language model here. Raises MissingExtra."""
    if not batch.openai:
        return ColumnTask(batch, open_, created)
    need("msgspec", "A batch line of OpenAI's", BATCH)
    from hibachi.offline.tasks.line_task import LineTask

    return LineTask(batch, open_, batch.served_names or names_of(batch.settings.model), created)


def _at_url(batch: Batch, created: int) -> RowTask:
    need("aiohttp", "run-batch --url", BATCH)
    from hibachi.offline.tasks.sender import Patience

    patience = Patience(timeout=batch.request_timeout)
    if batch.openai:
        need("msgspec", "A batch line of OpenAI's", BATCH)
        from hibachi.offline.tasks.url_lines import UrlLines

        return UrlLines(batch, created, patience)
    if batch.task == "forward":
        raise ConfigError("The task forward is for a model of your own: name it by --model, and leave --url out.")
    from hibachi.offline.tasks.url_columns import UrlColumns

    return UrlColumns(batch, created, patience)


def names_of(model: str) -> tuple[str, ...]:
    """The default model names that lines of OpenAI's batches may use: as the model was given, or its name."""
    return tuple(dict.fromkeys((model, name_of(model))))


def _returns_tokens(model: str, reading: bool) -> bool | None:
    """Are the tokens of a model of one's own arrays, not ids? With reading, a guess; None means it must be opened to
    know.
    """
    found = object_named(model)
    if inspect.isclass(found):
        if getattr(found, "codebooks", None) is not None:
            return True
        if callable(getattr(found, "logits", None)):
            return False
        if not callable(getattr(found, "step", None)):
            return True
        return False if reading or getattr(found, "vocab_size", None) is not None else None
    if inspect.isroutine(found) or isinstance(found, partial):
        return False if reading else None
    return not returns_ids(found)


def _opened(settings: BatchSettings) -> Opened:
    """What cannot be told from its name alone, opened to learn whether it makes text."""
    found = open_settled(_typeless(settings))
    if settings.dtype is None or isinstance(found[0], Tokens):
        return found
    found[0].close()  # to compute in another dtype
    return open_settled(settings)


def _typeless(settings: BatchSettings) -> BatchSettings:
    """Where dtype is that of the columns, as for models that make no text."""
    return replace(settings, dtype=None)


def _texts(settings: BatchSettings, opened: list[Opened]) -> tuple[Texts, str | None]:
    """opened: what was opened already, which is taken first."""
    found, template = opened.pop() if opened else open_settled(settings)
    if isinstance(found, Texts):
        return found, template
    found.close()
    how = "Name the column of its tokens by --tokens-column, or use --task forward"
    raise ConfigError(no_text(settings.model, f"makes no text. {how}"))


def _tokens(settings: BatchSettings, opened: list[Opened], **more: Any) -> Tokens:
    found, _ = opened.pop() if opened else open_settled(_typeless(settings), **more)
    if isinstance(found, Tokens):
        return found
    found.close()
    raise ConfigError(f"{settings.model} returns logits: its rows are texts, or token ids.")
