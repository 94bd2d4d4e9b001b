"""A model by its name, whatever it is: files, or a class of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.build import level_of
from hibachi.errors import ConfigError
from hibachi.lm.llm import LLM
from hibachi.lm.texts import Texts
from hibachi.model.text.own import NoTokenizer, OwnTokenizer
from hibachi.request import SamplingParams

_OF_FILES = ("device", "quantization", "autotune", "deterministic")


def open_texts(model: str, **options: Any) -> Texts:
    """model: as for `LLM`; or "package.module:Class" or "file.py:Class", which is called without arguments."""
    return OwnTexts(model, **options) if is_own(model) else LLM(model, **options)


def is_own(model: str) -> bool:
    """Does this name a class? A folder or file of that name is taken for one."""
    place, colon, name = model.rpartition(":")
    return bool(colon and place and name.isidentifier()) and not Path(model).exists()


class OwnTexts(Texts):
    """A model of one's own, of level 1 or 2 (docs/models.md).

    Its attribute `tokenizer` has encode(text) -> ids and decode(ids) -> text, and perhaps a `chat_template`; without
    one, prompts are token ids. `eos_ids`: tokens that end a text.

    Raises ConfigError.
    """

    def __init__(self, model: str, *, backend: Any = None, dtype: str | None = None, **options: Any) -> None:
        for name in _OF_FILES:
            if options.pop(name, None) not in (None, "none"):
                raise ConfigError(f"{name} is for models from files; {model} decides for itself. Leave it out.")
        self.model = made = _make(model)
        if level_of(made) == 0:
            raise ConfigError(
                f"Text takes a model that returns logits: expected `logits(tokens, lengths)` or `step(params, cache, "
                f"x)`; {model} has only `forward`."
            )
        own = getattr(made, "tokenizer", None)
        self.portable_tokenizer = NoTokenizer() if own is None else OwnTokenizer(own)
        if backend is None and getattr(made, "backend", None) is None:
            backend = "numpy"
        engine = AutoregressiveBatchInference(made, backend=backend, dtype=dtype or "float32", **options)
        super().__init__(
            engine,
            self.portable_tokenizer,
            vocab_size=made.vocab_size,
            eos_ids=getattr(made, "eos_ids", ()),
            default_params=SamplingParams(),
        )


def _make(model: str) -> Any:
    """The object that a name stands for. Raises ConfigError."""
    name = model.rpartition(":")[2]
    try:
        found = getattr(module_of(model), name)
        return found() if isinstance(found, type) or callable(found) else found
    except ConfigError:
        raise
    except Exception as e:
        raise ConfigError(
            f"{model} cannot be made: {type(e).__name__}: {e}. Expected package.module:Class or file.py:Class, and a "
            f"class that takes no arguments."
        ) from e


def module_of(model: str) -> Any:
    """Where the class stands. Raises ConfigError, or what reading it raises."""
    place = model.rpartition(":")[0]
    if not place.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")  # as `python -m` would have it
        return importlib.import_module(place)
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ConfigError(f"{place} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # pickle and dataclasses look for it there
    spec.loader.exec_module(module)
    return module
