"""Who computes the rows: which kind of work a task and a model need."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.build import level_of
from hibachi.engine.feedforward import FeedforwardBatchInference
from hibachi.errors import ConfigError
from hibachi.lm.named import model_named
from hibachi.lm.own import is_own
from hibachi.model.extras import need
from hibachi.named import object_named
from hibachi.offline.files.rows import BATCH
from hibachi.offline.works.columns import Columns
from hibachi.offline.works.ownwork import ForwardWork, TokenWork
from hibachi.offline.works.textwork import EmbeddingWork, TextWork
from hibachi.offline.works.told import library_of
from hibachi.offline.works.work import Work
from hibachi.remote.opening import open_settled

Task = Literal["generate", "embed", "forward"]
TASKS: tuple[Task, ...] = ("generate", "embed", "forward")


def work_of(
    settings: SimpleNamespace,
    task: Task,
    columns: Columns,
    *,
    lines: bool,
    names: Sequence[str] = (),
    seed: int = 0,
    created: int = 0,
    token_ids: bool = False,
    reading: bool = False,
) -> Work:
    """lines: OpenAI's. names: that such lines may call the model by. created: Unix time in seconds of the run's start.
    reading: it is only to judge rows, so no model is made to learn what it returns. Raises ConfigError, MissingExtra.
    """
    model = settings.model
    if lines:
        need("msgspec", "A batch line of OpenAI's", BATCH)
        from hibachi.offline.works.openai import OpenAIWork

        called = names or names_of(model)
        return OpenAIWork(partial(open_settled, settings), called, seed=seed, created=created)
    if task == "forward":
        if not is_own(model):
            raise ConfigError(f"The task forward is for a model of your own, named as pkg:Class; got {model}.")
        object_named(model)  # is it there?
        return ForwardWork(columns, partial(_feedforward, settings), settings.dtype)
    if is_own(model) and (made := _without_logits(settings, reading)) is not None:
        if task == "embed":
            raise ConfigError(f"{model} has no hidden states of which vectors could be made.")
        return TokenWork(columns, partial(_tokens, settings, made), settings.dtype)
    open_ = partial(open_settled, settings)
    return (
        EmbeddingWork(columns, open_, seed=seed, created=created)
        if task == "embed"
        else TextWork(columns, open_, seed=seed, created=created, token_ids=token_ids)
    )


def names_of(model: str) -> tuple[str, ...]:
    """What a line of OpenAI's may call the model, where nobody says so: its name, or the last part of its path."""
    return (model, Path(model).name) if Path(model).exists() else (model,)


def _feedforward(settings: SimpleNamespace) -> tuple[FeedforwardBatchInference[Any], str]:
    model, backend = model_named(settings.model, settings.backend), settings.backend
    engine = FeedforwardBatchInference(
        model, max_batch_size=settings.max_num_seqs, backend=backend, stall_after=settings.stall_after or None
    )
    return engine, library_of(backend, model)


def _without_logits(settings: SimpleNamespace, reading: bool) -> list[Any] | None:
    """Of a model that returns tokens: [it, if it had to be made to know that]; None: it returns logits, or, with
    reading, may do so."""
    found = object_named(settings.model)
    if inspect.isclass(found):
        if callable(getattr(found, "logits", None)):
            return None
        if not callable(getattr(found, "step", None)):
            return []
        if reading or getattr(found, "vocab_size", None) is not None:
            return None
    if reading and (inspect.isroutine(found) or isinstance(found, partial)):
        return None
    made = model_named(settings.model, settings.backend)
    return None if level_of(made) > 0 and getattr(made, "vocab_size", None) is not None else [made]


def _tokens(settings: SimpleNamespace, made: list[Any]) -> tuple[AutoregressiveBatchInference[Any, Any], str]:
    model = made.pop() if made else model_named(settings.model, settings.backend)
    limit = settings.max_model_len
    if limit is None and not hasattr(model, "max_model_len"):
        limit = 1 << 20
    engine = AutoregressiveBatchInference(
        model,
        backend=settings.backend,
        max_model_len=limit,
        max_batch_size=settings.max_num_seqs,
        max_batch_tokens=settings.max_num_batched_tokens,
        deterministic=settings.deterministic,
        stall_after=settings.stall_after or None,
    )
    return engine, library_of(settings.backend, model)
