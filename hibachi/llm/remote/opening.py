"""From settings to a language model that is ready: its engine, what it answers by default, and its first tokens."""

from __future__ import annotations

import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack

from hibachi.common.phases import phase
from hibachi.errors import ConfigError, EngineError, HibachiError, InvalidModelFiles, InvalidRequest
from hibachi.llm.model.generation import Generation
from hibachi.llm.options import OPTIONS, TextOptions
from hibachi.llm.own import is_own, open_model
from hibachi.llm.remote.llm import open_remote
from hibachi.llm.remote.settings import LLMSettings, tiers_of
from hibachi.llm.texts import Texts
from hibachi.llm.tokens import Tokens
from hibachi.request import SamplingParams

log: logging.Logger = logging.getLogger("hibachi.remote")


def open_settled(
    settings: LLMSettings, *, feedforward: bool = False, **more: Unpack[TextOptions]
) -> tuple[Texts | Tokens, str | None]:
    """The model, loaded and warm, and the chat template: the name of one of the model's, or Jinja source; None means of
    one that makes no text.

    feedforward, more: as for `open_model`, besides what the settings say. What can be wrong in the settings alone
    is found before the model is loaded.

    Raises what making a model raises, and ConfigError.
    """
    template, generation = template_of(settings.chat_template), generation_of(settings.generation_config)
    make = open_remote if settings.engine == "child" and not is_follower(settings) else open_model
    options = engine_options(settings)
    options.update(more)
    texts = make(settings.model, feedforward=feedforward, **options)
    try:
        if isinstance(texts, Tokens):
            _only_tokens(settings)
            return texts, None
        check_template(settings.chat_template, template, texts.tokenizer)
        if generation is not None:
            texts.default_params = SamplingParams(**generation.params())
            texts.rules = generation.rules(texts.vocab_size or 0, texts.eos_ids)
        _warm(texts, template)
    except BaseException:
        texts.close()
        raise
    return texts, template


def is_follower(settings: LLMSettings) -> bool:
    """Whether this process is a rank that another one leads: opening the model returns when that has closed, by
    SystemExit.
    """
    several = (settings.tensor_parallel_size, settings.pipeline_parallel_size) != (1, 1)
    launched = several and "WORLD_SIZE" in os.environ
    return launched and int(os.environ.get("RANK", "0")) > 0


def _only_tokens(settings: LLMSettings) -> None:
    """Raises ConfigError for what only a model that makes text has."""
    asked = {"--chat-template": settings.chat_template, "--generation-config": settings.generation_config}
    for flag, given in asked.items():
        if given not in (None, "auto"):
            raise ConfigError(f"{flag} {given}: {settings.model} makes no text. Leave it out.")


def engine_options(settings: LLMSettings) -> TextOptions:
    """What settings say, as options of `open_model` and `open_remote`; what was not decided is left out."""
    names = [one.name for one in fields(LLMSettings) if one.name in OPTIONS]
    given: Any = {name: value for name in names if (value := getattr(settings, name)) is not None}
    options: TextOptions = given
    options["stall_after"] = settings.stall_after or None
    if (tiers := tiers_of(settings)) is not None:
        options["kv_tiers"] = tiers
    if not settings.gguf_unpack:
        del options["gguf_unpack"]
    if settings.tensor_parallel_size == 1:
        del options["tensor_parallel_size"]
    if settings.pipeline_parallel_size == 1:
        del options["pipeline_parallel_size"]
    if is_own(settings.model):
        options.pop("autotune", None)  # it has no kernels to choose from
    return options


def _warm(texts: Texts, template: str | None) -> None:
    """The first tokens, so that no request waits for what is made once. Raises EngineError, and ConfigError."""
    try:
        with phase("computing the first tokens"):
            texts.generate([[0]], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    except EngineError:
        raise
    except HibachiError as e:  # a model of one's own may want longer prompts
        log.warning("the model was tried with the prompt [0], and failed: %s", e)
    getattr(texts.tokenizer, "fewest_tokens", len)("a")  # it finds out how long tokens are, once
    if template is None and not texts.tokenizer.chat_templates:
        return
    more = {} if template is None else {"chat_template": template}
    try:
        texts.tokenizer.render_chat([{"role": "user", "content": "Hello"}], **more)
    except InvalidRequest as e:  # it may be a template that wants more
        log.warning("the chat template was tried with a greeting, and failed: %s", e)
    except InvalidModelFiles as e:
        log.warning("%s", e)


def check_template(given: str | None, template: str | None, tokenizer: Any) -> None:
    """Is it a template, or the name of one of the model's? given: as --chat-template says. template: see
    `template_of`. Raises ConfigError.
    """
    if template is None:
        return
    if "{" not in template and template not in tokenizer.chat_templates:
        known = ", ".join(tokenizer.chat_templates) or "none"
        raise ConfigError(
            f"--chat-template {given}: expected a file, Jinja source, or the name of one of the model's templates, of "
            f"which there are: {known}."
        )
    try:
        tokenizer.render_chat([{"role": "user", "content": "Hello"}], chat_template=template)
    except InvalidModelFiles as e:
        raise ConfigError(f"--chat-template: {e}") from e
    except InvalidRequest:
        pass  # it may be a template that wants more


def template_of(given: str | None) -> str | None:
    """What a file of that name holds; else as it is: a name, or Jinja source. Raises ConfigError."""
    if given is None or "{" in given:
        return given
    file = Path(given)
    try:
        if file.is_file():
            return file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--chat-template {given}: {e}.") from e
    if "/" in given or file.suffix:
        raise ConfigError(f"--chat-template {given}: there is no such file.")
    return given


def generation_of(which: str) -> Generation | None:
    """What is recommended in place of what the model's files say, which None means. Raises ConfigError."""
    if which == "auto":
        return None
    if which == "vllm":
        return Generation({})
    folder = Path(which).parent if Path(which).name == "generation_config.json" else Path(which)
    if not (folder / "generation_config.json").is_file():
        raise ConfigError(
            f"--generation-config {which}: expected auto, vllm, or a folder with a generation_config.json."
        )
    return Generation.read(folder)
