"""From settings to a model that is served."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hibachi.api.bodies import Bounds
from hibachi.remote.opening import open_settled
from hibachi.serve.served import Served
from hibachi.web.keys import tenants_of
from hibachi.web.tenants import Tenants


def opened(settings: SimpleNamespace, tenants: Tenants | None = None) -> Served:
    """The model, loaded and warm. Raises what making a model raises, and ConfigError."""
    tenants = tenants_of(settings) if tenants is None else tenants
    texts, template = open_settled(settings, **options(settings, tenants))
    try:
        if settings.seed is not None:
            texts.default_params = texts.default_params.with_(seed=settings.seed)
        return Served(
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
    except BaseException:
        texts.close()
        raise


def options(settings: SimpleNamespace, tenants: Tenants) -> dict[str, Any]:
    """What serving adds to `engine_options`; what was not decided is left out."""
    several = len({name for _, name in tenants.keys}) > 1
    found = dict(
        policy=settings.scheduling_policy or ("shares" if several else None),
        max_waiting=settings.max_num_queued_reqs,
        pause_after=settings.pause_after or None,
        restart="on_failure" if settings.restart else None,
    )
    return {name: value for name, value in found.items() if value is not None}


def _name(model: str) -> str:
    """What a model is called if nobody says so: of files, no more than the last part of the path."""
    return Path(model).name if Path(model).exists() else model
