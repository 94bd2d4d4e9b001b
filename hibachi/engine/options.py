"""The options of an engine as typed dictionaries, for functions that pass them on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from hibachi.backend.protocol import Backend
from hibachi.engine.scheduler.policy import Policy
from hibachi.engine.speculation.config import SpeculativeConfig


class EngineOptions(TypedDict, total=False):
    """Options of an engine; see `AutoregressiveBatchInference`."""

    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int | None
    kv_cache_memory_bytes: int | None
    cache_tokens: int | None
    enable_prefix_caching: bool
    scheduling_policy: str | Policy | None
    reserve_all: bool
    max_prefill_tokens: int | None
    max_num_queued_reqs: int | None
    pause_after: int | None
    restart: str | None
    stall_after: float | None
    record: str | Path | None
    overlap: bool | None
    speculative_config: Mapping[str, Any] | str | SpeculativeConfig | None


class BatchOptions(EngineOptions, total=False):
    """All options of `AutoregressiveBatchInference`."""

    stop_token: Any
    stop_rule: Any
    token: Any
    padding_token: Any
    backend: str | Backend[Any] | None
    dtype: str | None
    deterministic: bool | None
