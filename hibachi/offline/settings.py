"""The settings of `hibachi run-batch` that are not about files: the model and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hibachi.common.settings import settle as shared
from hibachi.errors import ConfigError
from hibachi.llm.remote.settings import ChatSettings, EngineSettings, LLMSettings, ModelSettings


@dataclass(frozen=True, kw_only=True)
class BatchSettings(ChatSettings, LLMSettings):
    """All of them."""

    command = "run-batch"


GROUPS = shared.groups_of(model=ModelSettings, chats=ChatSettings, engine=EngineSettings)
SETTINGS = shared.by_key(GROUPS)

settle = partial(shared.settle, BatchSettings)
misspelled = partial(shared.misspelled, SETTINGS)


def settings_of(model: str | Path, given: Mapping[str, Any]) -> BatchSettings:
    """Settings by the names of flags, with underscores. Raises ConfigError."""
    flags = {"model": str(model), **given}
    if unknown := [name for name in flags if name not in SETTINGS]:
        raise ConfigError(f"There is no setting {unknown[0]!r}. There are: {', '.join(SETTINGS)}.")
    return settle({}, {}, others=[(key, value, key) for key, value in flags.items()])  # told by their own names
