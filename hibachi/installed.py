"""Entry points of the packages that are installed.

To look through all packages takes some 10 ms, so it is done once, and again when a folder that Python imports from has
changed.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib import metadata
from typing import Any


def entry_points(*, group: str) -> metadata.EntryPoints:
    found: metadata.EntryPoints = _all(tuple((place, _changed(place)) for place in sys.path)).select(group=group)
    return found


@lru_cache(maxsize=1)
def _all(places: tuple[tuple[str, int], ...]) -> Any:
    """All groups; of a type that depends on the version of Python, but can always `select`."""
    return metadata.entry_points()


def _changed(place: str) -> int:
    """When something was last put into a folder, or taken out; 0: there is none."""
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return 0
