"""Which guides serve: those of an entry point of the group `hibachi.guides`."""

from __future__ import annotations

import os
from importlib.util import find_spec

from hibachi.common.installed import entry_points
from hibachi.engine.guide.protocol import Guides, Vocabulary
from hibachi.errors import ConfigError, MissingExtra

GROUP = "hibachi.guides"
VARIABLE = "HIBACHI_GUIDES"
OWN = "llguidance"


def installed() -> bool:
    """Whether there is a library for `guides_for`; nothing is imported."""
    return (os.environ.get(VARIABLE) or OWN) != OWN or find_spec(OWN) is not None


def guides_for(vocabulary: Vocabulary) -> Guides:
    """The guides that HIBACHI_GUIDES names, else llguidance's. Raises MissingExtra, ConfigError."""
    name = os.environ.get(VARIABLE) or OWN
    if name == OWN:
        from hibachi.engine.guide.llg import LlguidanceGuides

        return LlguidanceGuides(vocabulary)
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted({*found, OWN}))
        raise ConfigError(f"{VARIABLE} must be one of {known}; got {name!r}. Install the package that has it.")
    try:
        make = found[name].load()
    except ImportError as e:
        raise MissingExtra(f"{VARIABLE} is {name!r}, and what it needs is not installed: {e}.") from e
    guides: Guides = make(vocabulary)
    return guides
