"""A model by its name, whatever it is: files, or a class of the user's own."""

from __future__ import annotations

from typing import Any, Unpack

from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.build import level_of
from hibachi.engine.options import EngineOptions
from hibachi.errors import ConfigError
from hibachi.lm.llm import LLM
from hibachi.lm.named import model_named
from hibachi.lm.options import OPTIONS, TextOptions
from hibachi.lm.texts import Texts
from hibachi.model.text.own import NoTokenizer, OwnTokenizer
from hibachi.named import is_named
from hibachi.options import check_options
from hibachi.request import SamplingParams
from hibachi.tensor.discover import resolve
from hibachi.tensor.whose import backend_of

_OF_FILES = ("device", "quantization", "autotune", "kernels")


def open_texts(model: str, **options: Unpack[TextOptions]) -> Texts:
    """model: as for `LLM`, or the name of a class, a function or a model (`hibachi.named`)."""
    return OwnTexts(model, **options) if is_own(model) else LLM(model, **options)


def is_own(model: str) -> bool:
    """Does this name a model of one's own? A folder or file of that name is taken for one."""
    return is_named(model)


class OwnTexts(Texts):
    """A model of one's own, of level 1 or 2 (docs/models.md).

    Its attribute `tokenizer` has encode(text) -> ids and decode(ids) -> text, and perhaps a `chat_template`; without
    one, prompts are token ids. `eos_ids`: tokens that end a text.

    Raises ConfigError.
    """

    def __init__(self, model: str, **options: Unpack[TextOptions]) -> None:
        check_options(type(self).__name__, dict(options), OPTIONS)
        for name in _OF_FILES:
            if options.get(name) not in (None, "none"):
                raise ConfigError(f"{name} is for models from files; {model} decides for itself. Leave it out.")
        backend, dtype = options.get("backend"), options.get("dtype")
        if isinstance(backend, str):
            backend = resolve(backend)
        made = model_named(model, backend)
        self.model: Any = made
        if level_of(made) == 0:
            raise ConfigError(
                f"Text takes a model that returns logits: expected `logits(tokens, lengths)` or `step(params, cache, "
                f"x)`; {model} has only `forward`."
            )
        own = getattr(made, "tokenizer", None)
        self.portable_tokenizer: NoTokenizer | OwnTokenizer = NoTokenizer() if own is None else OwnTokenizer(own)
        library: Any = backend_of(backend, made) or resolve("numpy")
        deterministic = options.get("deterministic")
        others: Any = {name: value for name, value in options.items() if name in EngineOptions.__annotations__}
        engine = AutoregressiveBatchInference(
            made, backend=library, dtype=dtype or "float32", deterministic=deterministic, **others
        )
        super().__init__(
            engine,
            self.portable_tokenizer,
            vocab_size=made.vocab_size,
            eos_ids=getattr(made, "eos_ids", ()),
            default_params=SamplingParams(),
        )
