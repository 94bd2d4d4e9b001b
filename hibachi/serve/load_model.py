"""From settings to a model that serves: its engine, what it answers by default, and its first tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hibachi.api.bodies import Bounds
from hibachi.errors import ConfigError, EngineError, HibachiError, InvalidModelFiles, InvalidRequest
from hibachi.lm.own import is_own, open_texts
from hibachi.lm.texts import Texts
from hibachi.model.generation import generation_defaults
from hibachi.remote.llm import RemoteLLM
from hibachi.request import SamplingParams
from hibachi.serve.served import Served
from hibachi.web.keys import tenants_of
from hibachi.web.tenants import Tenants

log: logging.Logger = logging.getLogger("hibachi.serve")


def opened(settings: SimpleNamespace, tenants: Tenants | None = None) -> Served:
    """The model, loaded and warm. Raises what making a model raises, and ConfigError."""
    tenants = tenants_of(settings) if tenants is None else tenants
    template, defaults = _template(settings.chat_template), _defaults(settings.generation_config)
    texts = (RemoteLLM if settings.engine == "child" else open_texts)(settings.model, **options(settings, tenants))
    try:
        if template is not None and "{" not in template and template not in texts.tokenizer.chat_templates:
            known = ", ".join(texts.tokenizer.chat_templates) or "none"
            raise ConfigError(
                f"--chat-template {settings.chat_template}: expected a file, Jinja source, or the name of one of the "
                f"model's templates, of which there are: {known}."
            )
        own = texts.default_params if defaults is None else defaults
        texts.default_params = own if settings.seed is None else own.with_(seed=settings.seed)
        served = Served(
            texts,
            settings.served_model_name or (_name(settings.model),),
            settings.model,
            texts.engine.facts.limits.max_len,
            bounds=Bounds(
                n=settings.max_n,
                logprobs=settings.max_logprobs,
                rows=texts.engine.facts.limits.rows + settings.max_num_queued_reqs,
                new=settings.max_tokens,
            ),
            max_body=settings.max_body_size,
            chat_template=template,
            tenants=tenants,
            timeout=settings.request_timeout or None,
            queue_timeout=settings.queue_timeout or None,
            arrival=settings.arrival_timeout or None,
        )
        warm(served)
    except BaseException:
        texts.close()
        raise
    return served


def options(settings: SimpleNamespace, tenants: Tenants) -> dict[str, Any]:
    """For `open_texts` or `RemoteLLM`; what was not decided is left out."""
    several = len({name for _, name in tenants.keys}) > 1
    found = dict(
        backend=settings.backend,
        device=settings.device,
        dtype=settings.dtype,
        quantization=settings.quantization,
        autotune=None if is_own(settings.model) else settings.autotune,  # it has no kernels to choose from
        kernels=settings.kernels,
        deterministic=settings.deterministic,
        max_model_len=settings.max_model_len,
        max_batch_size=settings.max_num_seqs,
        max_batch_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        cache_bytes=settings.kv_cache_memory_bytes,
        prefix_cache=settings.enable_prefix_caching,
        policy=settings.scheduling_policy or ("shares" if several else None),
        max_waiting=settings.max_num_queued_reqs,
        pause_after=settings.pause_after or None,
        restart="on_failure" if settings.restart else None,
    )
    return {name: value for name, value in found.items() if value is not None} | {
        "stall_after": settings.stall_after or None
    }


def _name(model: str) -> str:
    """What a model is called if nobody says so: of files, no more than the last part of the path."""
    return Path(model).name if Path(model).exists() else model


def about(texts: Texts) -> str:
    """The engine in a few words."""
    engine = texts.engine
    facts = engine.facts
    library, device, *_ = facts.fingerprint.split("; ")
    same = "deterministic" if facts.deterministic else "not deterministic"
    where = "this process" if engine.pid is None else f"process {engine.pid}"
    return f"{library} on {device}, {facts.dtype}, {same}; engine in {where}"


def warm(served: Served) -> None:
    """The first tokens, so that no request waits for what is made once. Raises EngineError."""
    texts = served.texts
    try:
        texts.generate([[0]], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    except EngineError:
        raise
    except HibachiError as e:  # a model of one's own may want longer prompts
        log.warning("the model was tried with the prompt [0], and failed: %s", e)
    getattr(texts.tokenizer, "fewest_tokens", len)("a")  # it finds out how long tokens are, once
    templates = texts.tokenizer.chat_templates
    if templates or served.chat_template is not None:
        more = {"chat_template": served.chat_template} if served.chat_template is not None else {}
        try:
            texts.tokenizer.render_chat([{"role": "user", "content": "Hello"}], **more)
        except InvalidRequest as e:  # it may be a template that wants more
            log.warning("the chat template was tried with a greeting, and failed: %s", e)
        except InvalidModelFiles as e:
            if served.chat_template is not None:
                raise ConfigError(f"--chat-template: {e}") from e
            log.warning("%s", e)


def _template(given: str | None) -> str | None:
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


def _defaults(which: str) -> SamplingParams | None:
    """Of requests that do not say how to sample; None: as the model's files say. Raises ConfigError."""
    if which == "auto":
        return None
    if which == "vllm":
        return SamplingParams()
    folder = Path(which).parent if Path(which).name == "generation_config.json" else Path(which)
    if not (folder / "generation_config.json").is_file():
        raise ConfigError(
            f"--generation-config {which}: expected auto, vllm, or a folder with a generation_config.json."
        )
    return SamplingParams(**generation_defaults(folder))
