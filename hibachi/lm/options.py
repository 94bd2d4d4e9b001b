"""The options that reach an engine for texts, whatever the model, here or in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from hibachi.engine.options import EngineOptions
from hibachi.tensor.array_backend import ArrayBackend


class ModelOptions(TypedDict, total=False):
    """See `LLM`. A model of one's own takes `backend`, `dtype` and `deterministic` only."""

    backend: str | ArrayBackend | None
    dtype: str | None
    quantization: str | None
    autotune: str | float | None
    kernels: str | Path | None
    device: Any
    deterministic: bool | None


class TextOptions(EngineOptions, ModelOptions, total=False):
    """All of them."""


OPTIONS = [*ModelOptions.__annotations__, *EngineOptions.__annotations__]
