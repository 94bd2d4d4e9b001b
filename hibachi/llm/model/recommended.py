"""How the makers of well-known chat models say that they should be sampled, for files that do not say it themselves.

A folder in Hugging Face layout says it in generation_config.json, and a GGUF file in entries of its own
(`hibachi.llm.model.generation`); many of either do not.
"""

from __future__ import annotations

import re
from typing import Any

from hibachi.llm.model.files import ModelFiles
from hibachi.request import DRAWN

USUAL = {"temperature": 0.7, "top_p": 0.9}
"""Sampling for a conversation with a model that has no recommendation."""

# By a part of the name, in small letters with "-" between words. From the model cards and the generation_config.json of
# the original repositories on the Hugging Face Hub.
_KNOWN: dict[str, dict[str, Any]] = {
    "smollm2": {"temperature": 0.2, "top_p": 0.9},
    "smollm3": {"temperature": 0.6, "top_p": 0.95},
    "qwen2-5": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "qwen3": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    "llama-3": {"temperature": 0.6, "top_p": 0.9},
    "gemma-3": {"temperature": 1.0, "top_p": 0.95, "top_k": 64},
}


def chat_sampling(files: ModelFiles) -> dict[str, Any]:
    """Fields of SamplingParams for a conversation: what its files say of sampling, else what is known of a model of
    this name, else `USUAL`. Raises InvalidModelFiles for what the files say and cannot be used."""
    given = files.generation.params()
    if any(name in given for name in DRAWN):
        return given
    return next((known for part, known in _KNOWN.items() if _has(files, part)), USUAL) | given


def _has(files: ModelFiles, part: str) -> bool:
    return any(re.search(rf"(?:^|-){part}(?:-|$)", name) for name in _names(files))


def _names(files: ModelFiles) -> list[str]:
    """What the model is called, by its files and by where they lie; the Hub's cache has the name two folders up."""
    said = [files.config.get("_name_or_path")]
    if files.gguf is not None:
        said += [files.gguf.metadata.get(f"general.{key}") for key in ("name", "basename")]
    said += files.path.absolute().parts[-3:]
    return [re.sub("[^a-z0-9]+", "-", name.lower()) for name in said if isinstance(name, str)]
