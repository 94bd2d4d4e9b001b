"""What the log says once, whatever clients send again."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from hibachi.errors import shown

MOST = 256  # things; what comes later is not said, so that nobody fills the log


class Once:
    """Warns of each thing once. May be used from any thread."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said = set[Hashable]()

    def warning(self, thing: Hashable, message: str, *values: object) -> None:
        """values: of the message; their beginnings are shown."""
        if thing not in self._said and len(self._said) < MOST:
            self._said.add(thing)
            self._log.warning(message, *map(shown, values))
