"""Options of an engine for texts, whatever the model, in this process or another; see `hibachi.engine.config`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hibachi.backend.array_backend import ArrayBackend
from hibachi.engine.config import EngineConfig, EngineOptions


@dataclass(frozen=True, kw_only=True)
class TextConfig(EngineConfig):
    """All options of `LLM`. Of those below, a user's own model takes `backend`, `dtype` and `deterministic` only."""

    backend: str | ArrayBackend | None = None
    dtype: str | None = None
    quantization: str | None = None
    gguf_unpack: bool = False
    autotune: str | float | None = None
    kernels: str | Path | None = None
    device: Any = None
    deterministic: bool | None = None
    numerics: str | None = None
    tensor_parallel_size: int | str = 1
    tp_leaves: int | None = None
    pipeline_parallel_size: int = 1

    def engine_options(self) -> EngineOptions:
        """Those of the engine."""
        options: Any = {one.name: getattr(self, one.name) for one in fields(EngineConfig)}
        found: EngineOptions = options
        return found


class TextOptions(EngineOptions, total=False):
    """`TextConfig` as keyword arguments."""

    backend: str | ArrayBackend | None
    dtype: str | None
    quantization: str | None
    gguf_unpack: bool
    autotune: str | float | None
    kernels: str | Path | None
    device: Any
    deterministic: bool | None
    numerics: str | None
    tensor_parallel_size: int | str
    tp_leaves: int | None
    pipeline_parallel_size: int


OPTIONS = [one.name for one in fields(TextConfig)]
