"""Options of an engine for texts, whatever the model, in this process or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from hibachi.backend.array_backend import ArrayBackend
from hibachi.engine.options import EngineOptions


class ModelOptions(TypedDict, total=False):
    """Options of `LLM`. A user's own model takes `backend`, `dtype` and `deterministic` only."""

    backend: str | ArrayBackend | None
    dtype: str | None
    quantization: str | None
    gguf_unpack: bool
    autotune: str | float | None
    kernels: str | Path | None
    device: Any
    deterministic: bool | None
    numerics: str | None


class TextOptions(EngineOptions, ModelOptions, total=False):
    """All options of `LLM` and its engine."""


OPTIONS = [*ModelOptions.__annotations__, *EngineOptions.__annotations__]
