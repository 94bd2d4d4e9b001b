"""The options of engines: a record for each kind of engine, with every default and check, and the same names and types
for keyword arguments, as type checkers want them (`Unpack`). tests/test_options.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

from hibachi.backend.protocol import Backend
from hibachi.engine.health import STALL_AFTER
from hibachi.engine.scheduler.policy import Policy
from hibachi.engine.speculation.config import SpeculativeConfig
from hibachi.engine.tiers.config import KVTiers
from hibachi.errors import ConfigError

Check = Callable[[str, Any], None]  # takes name and value; raises ConfigError
NO_LIMIT = "no limit"


def at_least(least: int, none: str | None = None) -> Check:
    """A check for an integer from `least` on. none: what None means, "" where that is not said; None: it is refused."""
    more = f" (or None: {none})" if none else ""

    def check(name: str, value: Any) -> None:
        if value is None and none is not None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} must be an integer >= {least}{more}; got {value!r}.")

    return check


def _seconds(name: str, value: Any) -> None:
    if value is not None and not (isinstance(value, (int, float)) and value > 0):
        raise ConfigError(f"{name} must be a number of seconds > 0 (or None: never); got {value!r}.")


def _restart(name: str, value: Any) -> None:
    if value not in (None, "never", "on_failure"):
        raise ConfigError(f'{name} must be "never" (or None) or "on_failure"; got {value!r}.')


def _tiers(name: str, value: Any) -> None:
    if not isinstance(value, (KVTiers, type(None))):
        raise ConfigError(f"{name} must be KVTiers(...) (or None: the device's memory only); got {value!r}.")


def option(default: Any, check: Check) -> Any:
    """A field with a check. Typed as any value, as `dataclasses.field` is."""
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Options of both batchers; see `AutoregressiveBatchInference`. Raises ConfigError for a wrong value."""

    max_num_queued_reqs: int | None = option(None, at_least(0, NO_LIMIT))
    restart: str | None = option(None, _restart)
    stall_after: float | None = option(STALL_AFTER, _seconds)
    record: str | Path | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            if (check := one.metadata.get("check")) is not None:
                check(one.name, getattr(self, one.name))


class WorkerOptions(TypedDict, total=False):
    """`WorkerConfig` as keyword arguments."""

    max_num_queued_reqs: int | None
    restart: str | None
    stall_after: float | None
    record: str | Path | None


@dataclass(frozen=True, kw_only=True)
class FeedforwardConfig(WorkerConfig):
    """All options of `FeedforwardBatchInference`."""

    max_batch_size: int = option(16, at_least(1))
    backend: str | Backend[Any] | None = None
    token: Any = None


class FeedforwardOptions(WorkerOptions, total=False):
    """`FeedforwardConfig` as keyword arguments."""

    max_batch_size: int
    backend: str | Backend[Any] | None
    token: Any


@dataclass(frozen=True, kw_only=True)
class EngineConfig(WorkerConfig):
    """Options of every engine of tokens; see `AutoregressiveBatchInference`."""

    max_num_seqs: int = option(16, at_least(1))
    max_model_len: int | None = None  # checked with the model's own
    max_num_batched_tokens: int = option(1024, at_least(1))
    block_size: int | None = option(None, at_least(1, ""))
    kv_cache_memory_bytes: int | None = None
    cache_tokens: int | None = option(None, at_least(1, ""))
    enable_prefix_caching: bool = True
    scheduling_policy: str | Policy | None = None
    reserve_all: bool = False
    max_prefill_tokens: int | None = option(None, at_least(1, ""))
    pause_after: int | None = option(None, at_least(1, NO_LIMIT))
    overlap: bool | None = None
    kv_tiers: KVTiers | None = field(default=None, metadata={"check": _tiers})
    speculative_config: Mapping[str, Any] | str | SpeculativeConfig | None = None


class EngineOptions(WorkerOptions, total=False):
    """`EngineConfig` as keyword arguments."""

    max_num_seqs: int
    max_model_len: int | None
    max_num_batched_tokens: int
    block_size: int | None
    kv_cache_memory_bytes: int | None
    cache_tokens: int | None
    enable_prefix_caching: bool
    scheduling_policy: str | Policy | None
    reserve_all: bool
    max_prefill_tokens: int | None
    pause_after: int | None
    overlap: bool | None
    kv_tiers: KVTiers | None
    speculative_config: Mapping[str, Any] | str | SpeculativeConfig | None


@dataclass(frozen=True, kw_only=True)
class BatchConfig(EngineConfig):
    """All options of `AutoregressiveBatchInference`."""

    backend: str | Backend[Any] | None = None
    dtype: str | None = None
    deterministic: bool | None = None
    stop_token: Any = None
    stop_rule: Any = None
    token: Any = None
    padding_token: Any = None


class BatchOptions(EngineOptions, total=False):
    """`BatchConfig` as keyword arguments."""

    backend: str | Backend[Any] | None
    dtype: str | None
    deterministic: bool | None
    stop_token: Any
    stop_rule: Any
    token: Any
    padding_token: Any
