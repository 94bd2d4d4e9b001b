"""An option that is misspelt is answered with the nearest name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from hibachi.errors import ConfigError

F = TypeVar("F", bound=Callable[..., None])


def spelled(init: F) -> F:
    """For an `__init__` whose options are keywords: raises ConfigError for one that it does not have."""
    known = [p.name for p in inspect.signature(init).parameters.values() if p.kind is p.KEYWORD_ONLY]
    every = {*inspect.signature(init).parameters}

    @functools.wraps(init)
    def checked(self: Any, /, *args: Any, **options: Any) -> None:
        if unknown := options.keys() - every:
            raise ConfigError(_told(type(self).__name__, min(unknown), known))
        init(self, *args, **options)

    return cast(F, checked)


def check_options(what: str, options: dict[str, Any], known: list[str]) -> None:
    """The same for options that are passed on. Raises ConfigError."""
    if unknown := options.keys() - set(known):
        raise ConfigError(_told(what, min(unknown), known))


def _told(what: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"{what} has no option {name!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}."
    )
