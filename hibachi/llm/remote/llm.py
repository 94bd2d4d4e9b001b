"""Texts, or other tokens, by an engine in another process."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any, Unpack

from hibachi.common.named import look_beside
from hibachi.common.options import check_options
from hibachi.engine.speculation.config import as_config
from hibachi.errors import ConfigError, shown
from hibachi.llm.model.files import locate, open_files
from hibachi.llm.model.generation import NO_RULES
from hibachi.llm.model.pooling import pooling_of
from hibachi.llm.options import OPTIONS, TextOptions
from hibachi.llm.own import is_own, no_text
from hibachi.llm.remote.engine import RemoteEngine
from hibachi.llm.texts import Texts
from hibachi.llm.tokens import Tokens
from hibachi.request import Pooling, SamplingParams


def open_remote(model: str, *, feedforward: bool = False, **options: Unpack[TextOptions]) -> Texts | Tokens:
    """`open_model`, with the engine in another process."""
    engine = _started("RemoteLLM", model, options, feedforward)
    if engine.facts.arrays:
        return Tokens(engine, model, engine.ready.default_params)
    return RemoteLLM(model, engine=engine)


def _started(name: str, model: str, options: TextOptions, feedforward: bool = False) -> RemoteEngine:
    """Start the engine's process. name: the class that passes the options on, for errors."""
    check_options(name, dict(options), OPTIONS)
    if "backend" in options and not isinstance(options["backend"], (str, type(None))):
        raise ConfigError("For an engine in another process a backend is given by its name.")
    speculation = as_config(options.get("speculative_config"))
    for what in ("model", "backend", "method"):
        given = getattr(speculation, what, None)
        if not isinstance(given, (str, os.PathLike, type(None))):
            raise ConfigError(
                f"For an engine in another process the {what} of speculative_config is given by its name; got "
                f"{shown(given)}."
            )
    return RemoteEngine(model, feedforward=feedforward, **options)


class RemoteLLM(Texts):
    """`LLM`, or a model of one's own, with its engine in another process. Texts are made here.

    model, options: as for `open_texts` and `RemoteEngine`. engine: of this model, if it runs already. Raises what
    making the model raises, and ConfigError for one that makes no text.
    """

    def __init__(
        self, model: str | Path, *, engine: RemoteEngine | None = None, **options: Unpack[TextOptions]
    ) -> None:
        model = str(model)
        if engine is None:
            engine = _started(type(self).__name__, model, options)
        facts, ready, rules = engine.facts, engine.ready, NO_RULES
        try:
            if is_own(model):
                if ready.tokenizer is None:
                    raise ConfigError(no_text(model, "has only `forward`, or returns tokens"))
                tokenizer, params = _unpickled(ready.tokenizer, model), ready.default_params
            else:
                files = open_files(locate(model))
                tokenizer = files.tokenizer(vocab_size=facts.vocab_size)
                params = SamplingParams(**files.generation.params())
                rules = files.generation.rules(facts.vocab_size or 0, ready.eos_ids)
        except BaseException:
            engine.close()
            raise
        self._path = None if is_own(model) else files.path
        super().__init__(engine, tokenizer, vocab_size=facts.vocab_size, eos_ids=ready.eos_ids, default_params=params)
        self.rules = rules

    def _pooling(self, asked: Pooling | None) -> tuple[Pooling, bool]:
        return super()._pooling(asked) if asked or self._path is None else pooling_of(self._path)


def _unpickled(tokenizer: bytes, model: str) -> Any:
    """Raises ConfigError."""
    look_beside(model)  # its class may stand in the module of the model, or in one beside it
    try:
        return pickle.loads(tokenizer)
    except Exception as e:
        raise ConfigError(
            f"The tokenizer of {model} comes from the engine's process, and cannot be made here: {type(e).__name__}: "
            f"{e}. Define its class where both processes can import it, such as beside the model, or run the engine in "
            f"the same process (--engine own)."
        ) from e
