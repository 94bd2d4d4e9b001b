"""Which guides serve: those of an entry point of the group `hibachi.guides`."""

from __future__ import annotations

import os

from hibachi.common.installed import plugin
from hibachi.engine.guide.protocol import Guides, Vocabulary

GROUP = "hibachi.guides"
VARIABLE = "HIBACHI_GUIDES"
OWN = "llguidance"


def guides_for(vocabulary: Vocabulary) -> Guides:
    """The guides that HIBACHI_GUIDES names, else llguidance's. Raises MissingExtra, ConfigError."""
    name = os.environ.get(VARIABLE) or OWN
    unknown = f"{VARIABLE} must be one of {{known}}; got {name!r}. Install the package that has it."
    guides: Guides = plugin(GROUP, name, {OWN: _own}, f"{VARIABLE} is {name!r}, which", unknown)(vocabulary)
    return guides


def _own(vocabulary: Vocabulary) -> Guides:
    from hibachi.engine.guide.llg import LlguidanceGuides

    return LlguidanceGuides(vocabulary)
