"""Chooses the kind of work that a task and a model need."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

from hibachi.common.named import object_named
from hibachi.engine.build import returns_ids
from hibachi.errors import ConfigError
from hibachi.llm.model.extras import need
from hibachi.llm.own import is_own, no_text
from hibachi.llm.remote.identity import name_of
from hibachi.llm.remote.opening import open_settled
from hibachi.llm.remote.settings import parsers_of
from hibachi.llm.texts import Texts
from hibachi.llm.tokens import Tokens
from hibachi.offline.files.rows import BATCH
from hibachi.offline.settings import BatchSettings
from hibachi.offline.tasks.columns import Columns
from hibachi.offline.tasks.ownwork import ForwardWork, TokenWork
from hibachi.offline.tasks.task import RowTask
from hibachi.offline.tasks.textwork import EmbeddingWork, TextWork

Task = Literal["generate", "embed", "forward"]
Opened: TypeAlias = "tuple[Texts | Tokens, str | None]"
TASKS: tuple[Task, ...] = ("generate", "embed", "forward")


def work_of(
    settings: BatchSettings,
    task: Task,
    columns: Columns,
    *,
    lines: bool,
    names: Sequence[str] = (),
    seed: int = 0,
    created: int = 0,
    token_ids: bool = False,
    reading: bool = False,
) -> RowTask:
    """lines: OpenAI's. names: that such lines may call the model by. created: Unix time in seconds of the run's start.
    reading: it is only to judge rows, so no model is made to learn what it returns. Raises ConfigError, MissingExtra.
    """
    model, parsers = settings.model, parsers_of(settings)
    if lines:
        need("msgspec", "A batch line of OpenAI's", BATCH)
        from hibachi.offline.tasks.openai import OpenAIWork

        called = names or names_of(model)
        open_ = partial(_texts, settings, [])
        return OpenAIWork(open_, called, seed=seed, created=created, model=model, parsers=parsers)
    if task == "forward":
        if not is_own(model):
            raise ConfigError(f"The task forward is for a model of your own, named as pkg:Class; got {model}.")
        object_named(model)  # is it there?
        return ForwardWork(columns, partial(_tokens, settings, [], feedforward=True), settings.dtype)
    opened: list[Opened] = []
    tokens = is_own(model) and _returns_tokens(model, reading)
    if tokens is None:
        opened.append(_opened(settings))
        tokens = isinstance(opened[0][0], Tokens)
    if tokens:
        if task == "embed":
            for found, _ in opened:
                found.close()
            raise ConfigError(f"{model} has no hidden states of which vectors could be made.")
        return TokenWork(columns, partial(_tokens, settings, opened), settings.dtype)
    open_ = partial(_texts, settings, opened)
    return (
        EmbeddingWork(columns, open_, seed=seed, created=created)
        if task == "embed"
        else TextWork(columns, open_, seed=seed, created=created, token_ids=token_ids, parsers=parsers)
    )


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
    raise ConfigError(no_text(settings.model, "returns tokens, or one output for each input"))


def _tokens(settings: BatchSettings, opened: list[Opened], **more: Any) -> Tokens:
    found, _ = opened.pop() if opened else open_settled(_typeless(settings), **more)
    if isinstance(found, Tokens):
        return found
    found.close()
    raise ConfigError(f"{settings.model} returns logits: its rows are texts, or token ids.")
