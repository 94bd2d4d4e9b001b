"""What a model's class says of its requests: its tokens, its stop rules, its sampling parameters. Engines read it here,
so it holds however the model is run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hibachi.errors import ConfigError, InvalidRequest, text_of
from hibachi.request import SamplingParams, StopRule, as_params, as_rule


def own_tokens(model: Any) -> dict[str, Any]:
    """The model's attributes `token`, `stop_token` and `padding_token`; None stands for each that it lacks."""
    found = {name: getattr(model, name, None) for name in ("token", "stop_token", "padding_token")}
    return {name: None if callable(value) else value for name, value in found.items()}  # a layer may have such a name


def own_stop(model: Any, *, eos: bool = True) -> StopRule | None:
    """The stop rules of a model: its attributes `stop_rule` and, with eos, `eos_ids`; None means it has neither.

    Raises ConfigError.
    """
    ids, stop = (getattr(model, "eos_ids", None) if eos else None), getattr(model, "stop_rule", None)
    try:
        found = None if stop is None and ids is None else as_rule(stop)
        return found and replace(found, tokens=(*found.tokens, *(() if ids is None else ids)))
    except (InvalidRequest, TypeError) as e:
        raise ConfigError(
            f"{type(model).__name__}: stop_rule and eos_ids must be tokens or rules: {text_of(e)}."
        ) from e


def own_params(model: Any) -> SamplingParams:
    """The sampling parameters of requests that bring none: the model's attribute `default_params`. Raises
    ConfigError.
    """
    try:
        return as_params(getattr(model, "default_params", None), SamplingParams())
    except InvalidRequest as e:
        raise ConfigError(f"{type(model).__name__}.default_{e}") from e
