"""Names of options: a misspelt one is answered with the nearest name, an old one with its new name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar, cast

from hibachi.errors import ConfigError
from hibachi.request import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])
SAMPLED = frozenset(f.name for f in fields(SamplingParams))

# The names of vLLM, which came later than these did. Flags, variables and keys of TOML files are the same with dashes.
RENAMED: dict[str, str] = {
    "max_batch_size": "max_num_seqs",
    "max_num_seqs": "max_batch_size",  # of a feed-forward model
    "rows": "max_num_seqs",
    "max_batch_tokens": "max_num_batched_tokens",
    "budget": "max_num_batched_tokens",
    "prefill": "max_prefill_tokens",
    "cache_bytes": "kv_cache_memory_bytes",
    "cache_mib": "kv_cache_memory_bytes",
    "blocks": "num_blocks",
    "prefix_cache": "enable_prefix_caching",
    "no_prefix_cache": "no_enable_prefix_caching",
    "policy": "scheduling_policy",
    "max_waiting": "max_num_queued_reqs",
    "max_queued": "max_num_queued_reqs",
    "max_len": "max_model_len",
    "max_new_tokens": "max_tokens",
    "stop": "stop_rule",
    "cors": "allowed_origins",
}


UNITS = {"cache_mib": ", in bytes: 4096M for what was 4096"}  # where a number means something else by the new name


def renamed(name: str, known: Iterable[str]) -> str | None:
    """The new name of an option that was renamed, if it is one of `known`."""
    new = RENAMED.get(name)
    return new if new is not None and new in known else None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant."""
    near = difflib.get_close_matches(name, known, 1)
    return near[0] if near else None


def spelled(init: F) -> F:
    """Decorator for functions with keyword options: an unknown keyword raises ConfigError and names the nearest
    option, or says that it is a field of SamplingParams.
    """
    parameters = inspect.signature(init).parameters
    known = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    every = {*parameters}

    def check(args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if unknown := options.keys() - every:
            what = init.__name__
            if "self" in every:
                what = type(args[0]).__name__ + ("" if what == "__init__" else f".{what}")
            raise ConfigError(_told(what, min(unknown), known))

    @functools.wraps(init)
    def checked(*args: Any, **options: Any) -> Any:
        check(args, options)
        return init(*args, **options)

    @functools.wraps(init)
    async def awaited(*args: Any, **options: Any) -> Any:
        check(args, options)
        return await init(*args, **options)

    return cast(F, awaited if inspect.iscoroutinefunction(init) else checked)


_OVER_HTTP = {
    "chat_template_kwargs": "it takes variables of the template as options of their own, such as enable_thinking=False",
    "include_reasoning": "an answer has its reasoning beside its text",
    "response_format": "pass SamplingParams(structured_outputs=...), see docs/guided.md",
}


def check_variables(what: str, variables: Iterable[str]) -> None:
    """Check names that a chat template will see. Raises ConfigError for a field of SamplingParams or of a chat over
    HTTP, which was meant for the request.
    """
    if over_http := _OVER_HTTP.keys() & variables:
        raise ConfigError(f"{what} has no option {(name := min(over_http))!r}: {_OVER_HTTP[name]}.")
    if meant := SAMPLED.intersection(variables):
        raise ConfigError(_told(what, min(meant), []))


def check_options(what: str, options: dict[str, Any], known: list[str]) -> None:
    """Check options that are passed on to another function. Raises ConfigError for an unknown name."""
    if unknown := options.keys() - set(known):
        raise ConfigError(_told(what, min(unknown), known))


def _told(what: str, name: str, known: list[str]) -> str:
    if (new := renamed(name, known)) is not None:
        return f"{what} has no option {name!r} any more: it is called {new!r} now."
    if name in SAMPLED:
        return f"{what} has no option {name!r}: it is a field of the parameters. Pass SamplingParams({name}=...)."
    near = nearest(name, known)
    return f"{what} has no option {name!r}; " + (
        f"did you mean {near!r}?" if near else f"expected one of {', '.join(known)}."
    )
