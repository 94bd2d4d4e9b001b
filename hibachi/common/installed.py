"""Versions and entry points of the installed packages, and those that are optional.

Looking through all packages takes some 10 ms, so it is done once, and again when a folder that Python imports from has
changed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from typing import Any

from hibachi.errors import ConfigError, MissingExtra, shown, text_of


def version(package: str = "hibachi") -> str:
    """ "unknown" where it is not installed, as hibachi in a folder that was copied."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def entry_points(*, group: str) -> metadata.EntryPoints:
    found: metadata.EntryPoints = _all(tuple((place, _changed(place)) for place in sys.path)).select(group=group)
    return found


def by_name(group: str) -> dict[str, metadata.EntryPoint]:
    """The entry points of a group by their names, in the order of these."""
    return {point.name: point for point in sorted(entry_points(group=group), key=lambda point: point.name)}


def plugin(group: str, name: str, ours: Mapping[str, Any], what: str, unknown: str) -> Any:
    """What a name stands for: one of ours, else the object of an entry point of the group.

    what: the thing that is looked for, as errors begin with it. unknown: the error for a name that nobody has, in which
    {known} stands for all names. Raises ConfigError, and MissingExtra for one that lacks a package of its own.
    """
    if name in ours:
        return ours[name]
    others = by_name(group)
    if name not in others:
        raise ConfigError(unknown.replace("{known}", ", ".join(dict.fromkeys([*ours, *others]))))
    try:
        return others[name].load()
    except ImportError as e:
        raise MissingExtra(f"{what} needs what is not installed: {text_of(e)}") from e
    except Exception as e:
        raise ConfigError(f"{what} cannot be loaded: {text_of(e)}") from e


def with_methods(given: object, methods: Sequence[str], what: str, see: str) -> None:
    """Raise ConfigError unless it is an object with these methods. what: how errors begin. see: what describes them."""
    missing = [name for name in methods if not callable(getattr(given, name, None))]
    if missing or isinstance(given, type):
        why = f"without {', '.join(missing)}" if missing else "a class: pass an instance"
        raise ConfigError(f"{what} has the methods {', '.join(methods)}; got {shown(given)}, {why}. See {see}.")


def need(module: str, what: str, extra: str = "text") -> Any:
    """The module, imported. Raises MissingExtra, which says that `what` needs it, and the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name != module:  # the library is there, but something below it is not
            raise
        raise MissingExtra(
            f"{what} needs the package {module!r}, which is not installed. "
            f"It is in the extra {extra!r}: pip install '.[{extra}]' in the checkout."
        ) from e


@lru_cache(maxsize=1)
def _all(places: tuple[tuple[str, int], ...]) -> Any:
    """All groups of entry points. Their type depends on the version of Python, but always has `select`."""
    return metadata.entry_points()


def _changed(place: str) -> int:
    """When a folder's contents last changed; 0 means there is no such folder."""
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return 0
