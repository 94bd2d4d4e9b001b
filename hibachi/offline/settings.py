"""The settings of `hibachi run-batch` that are not about files: the model and its engine."""

from __future__ import annotations

from functools import partial

from hibachi.common.settings import settle as shared
from hibachi.common.settings.kinds import Setting, choice, seconds
from hibachi.llm.remote.settings import CHAT, ENGINE, MODEL

GROUPS: dict[str, tuple[Setting, ...]] = {
    "model": MODEL,
    "chats": CHAT,
    "engine": (
        Setting("engine", choice("child", "own"), "child", "process of the engine: its own, or this one"),
        *ENGINE,
        Setting(
            "stall-after",
            seconds(),
            120.0,
            "seconds without a step after which the engine counts as lost; 0 means never",
        ),
    ),
}
SETTINGS = shared.by_key(GROUPS)

settle = partial(shared.settle, SETTINGS, "run-batch")
misspelled = partial(shared.misspelled, SETTINGS)
