"""A user's own model by name: `package.module:Name`, or `path/to/file.py:Name`."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from hibachi.engine.build import level_of
from hibachi.errors import ConfigError
from hibachi.named import object_named
from hibachi.tensor.array_backend import ArrayBackend
from hibachi.tensor.discover import resolve


def model_named(spec: str, backend: str | ArrayBackend | None = None) -> Any:
    """The model called `spec`, an object on some rung of the ladder.

    A class is instantiated and a function called: with `backend=` (None: NumPy) if it has a parameter of that name,
    else without arguments. Any other object is used as it is.

    Raises ConfigError if there is no such name, if making the model raises (the original is in `__cause__`), or if it
    has the methods of no rung; BackendNotFound or BackendNotInstalled.
    """
    found = object_named(spec)
    if inspect.isclass(found) or inspect.isroutine(found) or isinstance(found, partial):
        found = _make(spec, found, backend)
    level_of(found)
    return found


def _make(spec: str, make: Any, backend: str | ArrayBackend | None) -> Any:
    try:
        takes = "backend" in inspect.signature(make).parameters
    except (TypeError, ValueError):  # some classes and functions in C have no signature
        takes = False
    given = {"backend": resolve(backend) if isinstance(backend, str) else backend or resolve("numpy")} if takes else {}
    try:
        return make(**given)
    except Exception as e:
        raise ConfigError(
            f"{spec} could not be made: {type(e).__name__}: {e}. A class or function is called with backend= if it has "
            f"such a parameter, and with nothing else; name a function that returns the model ready to run."
        ) from e
