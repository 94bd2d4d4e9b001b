"""Loads the model that the settings name."""

from __future__ import annotations

import logging

from hibachi.engine.build import WHOLE_SEQUENCES
from hibachi.engine.scheduler.policy import Fair, Policy, Priority, WaitingServed
from hibachi.llm.options import TextOptions
from hibachi.llm.remote.opening import open_settled
from hibachi.server.served import Served
from hibachi.server.settings import ServeSettings
from hibachi.server.web.keys import tenants_of
from hibachi.server.web.tenants import Tenants

log: logging.Logger = logging.getLogger("hibachi.serve")


def opened(settings: ServeSettings, tenants: Tenants | None = None) -> Served:
    """The model, loaded and warmed up. Raises what making a model raises, and ConfigError."""
    tenants = tenants_of(settings) if tenants is None else tenants
    texts, template = open_settled(settings, **options(settings, tenants))
    try:
        if settings.seed is not None:
            texts.default_params = texts.default_params.with_(seed=settings.seed)
        if WHOLE_SEQUENCES in texts.engine.facts.remarks:
            log.warning("%s is slow with many requests: %s (docs/models.md)", settings.model, WHOLE_SEQUENCES)
        return Served(texts, settings, template, tenants)
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


def _waiting_served(settings: ServeSettings, several: bool) -> Policy | None:
    """The policy that TGI's flags ask for, if they do. several: there are several tenants."""
    gate = None if settings.tgi is None else settings.tgi.gate()
    if gate is None:
        return None
    ratio, patience = gate
    return WaitingServed(ratio, patience, Fair() if several else Priority())
