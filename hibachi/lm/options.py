"""The options that reach an engine for texts, whatever the model, here or in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from hibachi.plan.policy import Policy
from hibachi.tensor.array_backend import ArrayBackend


class EngineOptions(TypedDict, total=False):
    """See `AutoregressiveBatchInference`."""

    max_model_len: int | None
    max_batch_size: int
    max_batch_tokens: int
    block_size: int | None
    cache_bytes: int | None
    prefix_cache: bool
    policy: str | Policy | None
    reserve_all: bool
    max_prefill_tokens: int | None
    max_waiting: int | None
    pause_after: int | None
    restart: str | None
    stall_after: float | None
    record: str | Path | None
    overlap: bool | None


class ModelOptions(TypedDict, total=False):
    """See `LLM`. A model of one's own takes `backend` and `dtype` only."""

    backend: str | ArrayBackend | None
    dtype: str | None
    quantization: str | None
    autotune: str | float | None
    device: Any
    deterministic: bool | None


class TextOptions(EngineOptions, ModelOptions, total=False):
    """All of them."""


OPTIONS = [*ModelOptions.__annotations__, *EngineOptions.__annotations__]
