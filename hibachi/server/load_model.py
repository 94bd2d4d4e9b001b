"""Loads the model that the settings name."""

from __future__ import annotations

import logging
from dataclasses import replace

from hibachi.engine.build import WHOLE_SEQUENCES
from hibachi.engine.scheduler.policy import Fair, Policy, Priority, WaitingServed
from hibachi.llm.dialects.openai.bodies import Bounds
from hibachi.llm.dialects.responses.store import Stores
from hibachi.llm.dialects.tgi.limits import TgiLimits
from hibachi.llm.options import TextOptions
from hibachi.llm.remote.identity import name_of, system_fingerprint
from hibachi.llm.remote.opening import open_settled
from hibachi.llm.remote.settings import parsers_of
from hibachi.server.served import Served
from hibachi.server.settings import ServeSettings
from hibachi.server.tgi_settings import NAME, NAMELESS
from hibachi.server.web.keys import tenants_of
from hibachi.server.web.tenants import Tenants

log: logging.Logger = logging.getLogger("hibachi.serve")


def opened(settings: ServeSettings, tenants: Tenants | None = None) -> Served:
    """The model, loaded and warmed up. Raises what making a model raises, and ConfigError."""
    tenants = tenants_of(settings) if tenants is None else tenants
    parsers = parsers_of(settings)
    texts, template = open_settled(settings, **options(settings, tenants))
    try:
        if settings.seed is not None:
            texts.default_params = texts.default_params.with_(seed=settings.seed)
        if WHOLE_SEQUENCES in texts.engine.facts.remarks:
            log.warning("%s is slow with many requests: %s (docs/models.md)", settings.model, WHOLE_SEQUENCES)
        return Served(
            texts,
            settings.served_model_name or names_of(settings),
            settings.model,
            texts.engine.facts.limits.max_model_len,
            bounds=bounds_of(settings, texts.engine.facts.limits.rows),
            max_body=settings.max_body_size,
            chat_template=template,
            tenants=tenants,
            timeout=settings.request_timeout or None,
            queue_timeout=settings.queue_timeout or None,
            arrival=settings.arrival_timeout or None,
            tgi=None if settings.tgi is None else TgiLimits(**settings.tgi.limits()),
            nameless=frozenset() if settings.tgi is None else NAMELESS,
            parsers=parsers,
            fingerprint=system_fingerprint(texts.engine.facts, settings.model),
            responses=Stores(settings.responses_store),
        )
    except BaseException:
        texts.close()
        raise


def options(settings: ServeSettings, tenants: Tenants) -> TextOptions:
    """The options that serving adds to `engine_options`."""
    several = len({name for _, name in tenants.keys}) > 1
    found = TextOptions(
        max_num_queued_reqs=settings.max_num_queued_reqs,
        pause_after=settings.pause_after or None,
        restart="on_failure" if settings.restart else None,
        scheduling_policy=settings.scheduling_policy
        or _waiting_served(settings, several)
        or ("shares" if several else None),
    )
    if settings.tgi is not None and settings.kv_cache_memory_bytes is None:
        found["cache_tokens"] = settings.tgi.max_batch_total_tokens
    return found


def names_of(settings: ServeSettings) -> tuple[str, ...]:
    """The default names of the model."""
    own = name_of(settings.model)
    return (own,) if settings.tgi is None else tuple(dict.fromkeys((NAME, own)))


def bounds_of(settings: ServeSettings, rows: int) -> Bounds:
    """The bounds of requests. rows: of the batch."""
    found = Bounds(
        n=settings.max_n,
        logprobs=settings.max_logprobs,
        rows=rows + settings.max_num_queued_reqs,
        new=settings.max_tokens,
    )
    return found if settings.tgi is None else replace(found, prompts=settings.tgi.max_client_batch_size)


def _waiting_served(settings: ServeSettings, several: bool) -> Policy | None:
    """The policy that TGI's flags ask for, if they do. several: there are several tenants."""
    gate = None if settings.tgi is None else settings.tgi.gate()
    if gate is None:
        return None
    ratio, patience = gate
    return WaitingServed(ratio, patience, Fair() if several else Priority())
