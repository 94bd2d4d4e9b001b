"""Drafters of other packages: those of an entry point of the group `hibachi.drafters`.

An entry point is a callable that takes the size of the model's vocabulary and returns a `Drafter`, for one engine.
"""

from __future__ import annotations

from typing import Any

from hibachi.common.installed import by_name, plugin
from hibachi.engine.speculation.protocol import Drafter
from hibachi.errors import ConfigError, shown, text_of

GROUP = "hibachi.drafters"


def installed() -> list[str]:
    """The names of those that are installed."""
    return list(by_name(GROUP))


def drafter_of(given: str | Drafter, vocab_size: int) -> Drafter:
    """The drafter of that name, made for a model of so many tokens; an object is returned as it is.

    Raises ConfigError, and MissingExtra for one that cannot be imported.
    """
    if not isinstance(given, str):
        return given
    what = f"The drafter {given!r}"
    make = plugin(GROUP, given, {}, what, f"{what} is not installed; there are: {{known}}.")
    try:
        drafter = make(vocab_size)
    except Exception as e:
        raise ConfigError(f"{what} cannot be made: {by_name(GROUP)[given].value} raised {text_of(e)}") from e
    return check_drafter(drafter, what)


def check_drafter(given: Any, name: str) -> Drafter:
    """An object that proposes, as it is. Raises ConfigError for others. name: what the error calls it."""
    if isinstance(given, type) or not callable(getattr(given, "propose", None)):
        what = "a class: pass an instance" if isinstance(given, type) else shown(given)
        raise ConfigError(f"{name} must have the method propose(keys, tokens, most); got {what}.")
    drafter: Drafter = given
    return drafter
