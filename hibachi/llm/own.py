"""Opens a model by its name: model files, or a class of the user's own."""

from __future__ import annotations

import logging
from dataclasses import fields
from functools import partial
from typing import Any, Unpack

from hibachi.backend.discover import resolve, resolve_any
from hibachi.backend.infer import backend_of
from hibachi.common.named import is_named
from hibachi.common.options import check_options
from hibachi.common.phases import phase
from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.batchinference import BatchInference
from hibachi.engine.build import UNSTATED, codebooks_of, limit_of, returns_ids
from hibachi.engine.config import EngineConfig, WorkerConfig
from hibachi.engine.declared import own_params
from hibachi.engine.feedforward import FeedforwardBatchInference
from hibachi.engine.forms import own_vocabulary
from hibachi.engine.kinds import kind_of
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.extra_inputs import example
from hibachi.errors import ConfigError, EngineError, HibachiError, InvalidRequest, shown
from hibachi.llm.drafts import resolved
from hibachi.llm.llm import LLM
from hibachi.llm.options import OPTIONS, TextOptions
from hibachi.llm.texts import Texts
from hibachi.llm.tokenizers.own import NoTokenizer, OwnTokenizer
from hibachi.llm.tokens import Tokens
from hibachi.llm.users_model import model_named
from hibachi.request import Request

log: logging.Logger = logging.getLogger("hibachi.engine")
_OF_FILES = (
    "device",
    "quantization",
    "gguf_unpack",
    "autotune",
    "kernels",
    "numerics",
    "tensor_parallel_size",
    "tp_leaves",
    "pipeline_parallel_size",
)
_ENGINE, _WORKER = ({one.name for one in fields(config)} for config in (EngineConfig, WorkerConfig))


def open_model(model: str, *, feedforward: bool = False, **options: Unpack[TextOptions]) -> Texts | Tokens:
    """Open a model. model: as for `LLM`, or the name of a class, a function or an object (`hibachi.llm.users_model`):
    see `open_own`.
    """
    with phase(f"opening {model}"):
        if is_own(model):
            return open_own(model, feedforward=feedforward, **options)
        if feedforward:
            raise ConfigError(f"feedforward is for a model of one's own, named as pkg:Class; got {model}.")
        return LLM(model, **options)


def open_texts(model: str, **options: Unpack[TextOptions]) -> Texts:
    """`open_model` for models that make text. Raises ConfigError for another."""
    return OwnTexts(model, **options) if is_own(model) else LLM(model, **options)


def is_own(model: str) -> bool:
    """Whether this names a user's own model. An existing folder or file of that name is not one."""
    return is_named(model)


def open_own(model: str, *, feedforward: bool = False, **options: Unpack[TextOptions]) -> Texts | Tokens:
    """Open a user's own model: `OwnTexts` if its engine samples, else `Tokens`, of tokens or of one output per input.

    feedforward: True means `forward` takes single inputs; else as the class says (`hibachi.llm.users_model`). Raises
    ConfigError.
    """
    check_options("A model of one's own", dict(options), OPTIONS)
    made = _made(model, options)
    if feedforward or is_feedforward(made):
        return _warm(Tokens(_forward_engine(made, options), model), made)
    if returns_ids(made):
        return OwnTexts(model, made=made, **options)
    return _warm(Tokens(_token_engine(made, options), model, own_params(made)), made)


def is_feedforward(made: Any) -> bool:
    """Whether a model declares itself feed-forward. Raises ConfigError for labels that are no list of texts."""
    said, labels = getattr(made, "feedforward", None), getattr(made, "labels", None)
    if labels is None or said is False:
        return said is True
    if not labels or not (isinstance(labels, (list, tuple)) and all(isinstance(label, str) for label in labels)):
        raise ConfigError(f"{type(made).__name__}.labels must be a list of texts; got {shown(labels)}.")
    return True


class OwnTexts(Texts):
    """A user's own model whose engine samples: of level 1, or of level 2 with logits (docs/models.md).

    Its attribute `tokenizer` has encode(text) -> ids and decode(ids) -> text, and perhaps a `chat_template`; without
    one, prompts are token ids. `eos_ids`: tokens that end a text. `default_params`: a SamplingParams for requests that
    bring none. made: the model object, if it exists already.

    Raises ConfigError.
    """

    def __init__(self, model: str, *, made: Any = None, **options: Unpack[TextOptions]) -> None:
        check_options(type(self).__name__, dict(options), OPTIONS)
        made = _made(model, options) if made is None else made
        self.model: Any = made
        if kind_of(made) is ModelKind.FORWARD or is_feedforward(made):
            raise ConfigError(no_text(model, "has only `forward`"))
        if codebooks_of(made) is not None:
            raise ConfigError(no_text(model, "has tokens of several codebooks"))
        own = getattr(made, "tokenizer", None)
        self.portable_tokenizer: NoTokenizer | OwnTokenizer = NoTokenizer() if own is None else OwnTokenizer(own)
        engine = _engine(made, options, max_model_len=options.get("max_model_len"))
        super().__init__(
            engine,
            self.portable_tokenizer,
            vocab_size=made.vocab_size,
            eos_ids=engine.facts.eos_ids,
            default_params=own_params(made),
        )


def no_text(model: str, got: str) -> str:
    """Why this model makes no text, for a message."""
    return (
        f"Text takes a model that returns logits: expected `logits(tokens, lengths)` or `step(params, cache, x)` with "
        f"`vocab_size`; {model} {got}."
    )


def _made(model: str, options: TextOptions) -> Any:
    for name in _OF_FILES:
        if options.get(name) not in (None, "none", False):
            raise ConfigError(f"{name} is for models from files; {model} decides for itself. Leave it out.")
    return model_named(model, options.get("backend"))


def _token_engine(made: Any, options: TextOptions) -> AutoregressiveBatchInference[Any, Any]:
    """The engine of a model whose tokens are arrays. Where nothing limits the length of a request, the limit is very
    large.
    """
    longest = options.get("max_model_len")
    if longest is None and limit_of(made) is None:
        longest = UNSTATED
    return _engine(made, options, max_model_len=longest)


def _engine(made: Any, options: TextOptions, *, max_model_len: int | None) -> AutoregressiveBatchInference[Any, Any]:
    others: Any = {name: value for name, value in options.items() if name in _ENGINE}
    others |= {"max_model_len": max_model_len, "deterministic": options.get("deterministic")}
    library = _library(made, options)
    others["speculative_config"] = resolved(
        options.get("speculative_config"), library, options.get("dtype"), partial(own_vocabulary, made)
    )
    try:
        return AutoregressiveBatchInference(made, backend=library, dtype=options.get("dtype"), **others)
    except InvalidRequest as e:  # of its own stop tokens and padding, where its tokens' kind is known
        raise ConfigError(f"{type(made).__name__}: {e}") from e


def _forward_engine(made: Any, options: TextOptions) -> FeedforwardBatchInference[Any]:
    others: Any = {name: value for name, value in options.items() if name in _WORKER}
    if "max_num_seqs" in options:
        others["max_batch_size"] = options["max_num_seqs"]
    return FeedforwardBatchInference(made, backend=_library(made, options), **others)


def _library(made: Any, options: TextOptions) -> Any:
    backend = options.get("backend")
    if isinstance(backend, str):
        backend = resolve_any(backend)
    return backend_of(backend, made) or resolve("numpy")


def _warm(tokens: Tokens, made: Any) -> Tokens:
    """Run one of the model's `example_prompts`, if it has any, so that work of the first call is done now."""
    examples = getattr(made, "example_prompts", None)
    try:
        for prompt in list(examples() if callable(examples) else examples or ())[:1]:
            engine = tokens.engine
            assert isinstance(engine, BatchInference)
            new = None if engine.facts.feedforward else 2
            inputs = {name: example(one, n=len(prompt) + 1) for name, one in engine.facts.inputs.items()}
            engine.submit(engine.check(Request(prompt, max_tokens=new, inputs=inputs or None))).collect()
    except EngineError:
        tokens.close()
        raise
    except HibachiError as e:
        log.warning("the model was tried with the first of its example_prompts, and failed: %s", e)
    return tokens
