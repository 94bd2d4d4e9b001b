"""Names of special tokens that are text as any: marked in what users say, before a chat template is rendered around it.

Without that, a user who writes the name of an end token closes the own turn, and may begin one of the system.
"""

from __future__ import annotations

import re
from collections.abc import Collection

MARK = "\ufdd0"
"""Behind the first letter of such a name: a code point that Unicode keeps for uses within a program."""


class Guard:
    """Marks names, and takes the marks away."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, self._names)) or "(?!)")

    def guarded(self, text: str) -> str:
        """With its names marked."""
        return self._find.sub(lambda found: found[0][0] + MARK + found[0][1:], text)

    def bare(self, text: str) -> str:
        """Without marks. A mark that stands in no name is left."""
        if MARK not in text:
            return text
        return re.sub(MARK, lambda found: "" if self._marks(text, found.start()) else MARK, text)

    def _marks(self, text: str, at: int) -> bool:
        return at > 0 and any(text[at - 1] == n[0] and text.startswith(n[1:], at + 1) for n in self._names)
