"""Versions and entry points of the installed packages.

Looking through all packages takes some 10 ms, so it is done once, and again when a folder that Python imports from has
changed.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib import metadata
from typing import Any


def version(package: str = "hibachi") -> str:
    """ "unknown" where it is not installed, as hibachi in a folder that was copied."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def entry_points(*, group: str) -> metadata.EntryPoints:
    found: metadata.EntryPoints = _all(tuple((place, _changed(place)) for place in sys.path)).select(group=group)
    return found


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
