"""The settings of `hibachi run-batch` that are not about files: the model and its engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from hibachi.common.settings import settle as shared
from hibachi.llm.remote.settings import ChatSettings, EngineSettings, LLMSettings, ModelSettings


@dataclass(frozen=True, kw_only=True)
class BatchSettings(ChatSettings, LLMSettings):
    """All of them."""

    command = "run-batch"


GROUPS = shared.groups_of(model=ModelSettings, chats=ChatSettings, engine=EngineSettings)
SETTINGS = shared.by_key(GROUPS)

settle = partial(shared.settle, BatchSettings)
misspelled = partial(shared.misspelled, SETTINGS)
