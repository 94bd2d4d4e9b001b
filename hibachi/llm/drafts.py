"""A draft model by its name: loaded as the main model is, and its tokens compared with that one's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.discover import resolve_or_best
from hibachi.common.named import is_named
from hibachi.common.phases import phase
from hibachi.engine.forms import vocabulary_of
from hibachi.engine.guide.protocol import Vocabulary
from hibachi.engine.speculation.choose import check_same
from hibachi.engine.speculation.config import SpeculativeConfig, as_config
from hibachi.llm.model.files import locate, open_files
from hibachi.llm.model.registry import load_model
from hibachi.llm.tokenizers.own import OwnTokenizer
from hibachi.llm.users_model import model_named


def resolved(
    given: Mapping[str, Any] | str | SpeculativeConfig | None,
    backend: Any,
    dtype: str | None,
    vocabulary: Callable[[], Vocabulary],
) -> SpeculativeConfig | None:
    """`as_config`, with the draft model that it names, loaded.

    backend, dtype: of the main model, which the draft model has too unless the config says otherwise. vocabulary: makes
    the main model's. Raises ConfigError, and what loading a model raises.
    """
    config = as_config(given)
    if config is None or not isinstance(config.model, (str, os.PathLike)):
        return config
    name = os.fspath(config.model)
    with phase(f"opening the draft model {name}"):
        on = backend if config.backend is None else config.backend
        if is_named(name):
            model = model_named(name, on)
            own = getattr(model, "tokenizer", None)
            tokenizer: Any = None if own is None else OwnTokenizer(own)
        else:
            library = on if isinstance(on, ArrayBackend) else resolve_or_best(on)
            files = open_files(locate(name))
            model = load_model(files, library, dtype=config.dtype or dtype)
            tokenizer = files.tokenizer(vocab_size=model.vocab_size)
        size = getattr(model, "vocab_size", None) or 0
        check_same(vocabulary(), vocabulary_of(tokenizer, size, ()), name)
    return replace(config, model=model, same=True)
