"""What a user says about proposals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from hibachi.engine.speculation.find import check_drafter, installed
from hibachi.engine.speculation.ngram import LENGTH
from hibachi.engine.speculation.protocol import Drafter
from hibachi.errors import ConfigError, shown

METHODS = ("ngram", "draft_model")  # our own
MOST = 64  # proposals of a row in a step


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """vLLM's names. auto: proposals are made where they pay only.

    method: one of `METHODS`, the name of an installed drafter, or a drafter.
    num_speculative_tokens: the most proposals of a row in a step. prompt_lookup_min, prompt_lookup_max: lengths of the
    n-grams that are looked for. model: of the method "draft_model", an object with `step` and `cache_spec`, or its name
    or path. dtype, backend: of that model; None means as the main model's. same: its vocabulary
    was compared with the main model's; nobody says that.
    """

    method: str | Drafter = "ngram"
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = LENGTH
    prompt_lookup_max: int = LENGTH
    auto: bool = True
    model: Any = None
    dtype: str | None = None
    backend: Any = None
    same: bool = False


def as_config(given: Any) -> SpeculativeConfig | None:
    """given: "auto", "off" or None, a mapping with vLLM's names, or its JSON. None means no proposals. Raises
    ConfigError.
    """
    if isinstance(given, SpeculativeConfig):
        return given
    if given is None or given == "off":
        return None
    if given == "auto":
        return SpeculativeConfig(prompt_lookup_min=2, prompt_lookup_max=4)
    said = given
    if isinstance(given, str):
        with suppress(ValueError):
            given = json.loads(given)
    if not isinstance(given, Mapping):
        raise ConfigError(
            'speculative_config must be "auto", "off" (or None), or a mapping such as {"method": "ngram", '
            f'"num_speculative_tokens": 4}}; got {shown(said)}.'
        )
    known = [f.name for f in fields(SpeculativeConfig) if f.name != "same"]
    if others := [name for name in given if name not in known]:
        raise ConfigError(f"speculative_config has no field {shown(others[0])}; it has {', '.join(known)}.")
    named = {"auto": False, "num_speculative_tokens": None, **given}
    least, most = named.pop("prompt_lookup_min", None), named.pop("prompt_lookup_max", None)
    model, dtype, backend = named.pop("model", None), named.pop("dtype", None), named.pop("backend", None)
    method = named.pop("method", "ngram" if model is None else "draft_model")
    k, auto = named.pop("num_speculative_tokens"), named.pop("auto")
    _check_method(method)
    # vLLM's rule: one of the two lengths alone stands for both.
    if least is None and most is None:
        least = most = LENGTH
    least, most = (most if least is None else least), (least if most is None else most)
    _check_int("num_speculative_tokens", 1 if k is None else k, 1, MOST)
    _check_int("prompt_lookup_min", least, 1, MOST)
    _check_int("prompt_lookup_max", most, least, MOST)
    if not isinstance(auto, bool):
        raise ConfigError(f"speculative_config: auto must be True or False; got {shown(auto)}.")
    if k is None:
        raise ConfigError(f"speculative_config must say num_speculative_tokens, from 1 to {MOST}; got {shown(given)}.")
    if isinstance(model, str) and not model:
        raise ConfigError(
            'speculative_config: model must be the name or path of a draft model, such as "tiny-draft"; got an empty '
            "one. Leave it out for n-grams."
        )
    if (method == "draft_model") != (model is not None):
        raise ConfigError(
            'speculative_config: {"method": "draft_model"} needs "model": its name or path, or an object with `step` '
            f"and `cache_spec`; and no other method has one. Got method={shown(method)}, model={shown(model)}."
        )
    for name, value in (("dtype", dtype), ("backend", backend)):
        if value is not None and model is None:
            raise ConfigError(
                f"speculative_config: {name} is of the draft model, and there is none; got {shown(value)}."
            )
    return SpeculativeConfig(method, k, least, most, auto, model, dtype, backend)


def _check_method(method: Any) -> None:
    if not isinstance(method, str):
        check_drafter(method, "speculative_config: method")
    elif method not in METHODS and method not in (others := installed()):
        raise ConfigError(
            f"speculative_config: method must be one of {', '.join([*METHODS, *others])}, or a drafter; got "
            f"{shown(method)}. Install the package that has it."
        )


def _check_int(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"speculative_config: {name} must be an integer from {least} to {most}; got {shown(value)}.")
