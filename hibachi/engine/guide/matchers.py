"""Matchers of the library llguidance, compiled once and used by one guide after the other.

Compiling takes 2 ms and more, copying microseconds. What the library learns of a grammar on the way, the states of its
automaton, is shared by all copies of a matcher, and so are their limit and a lock. So an original serves one guide at a
time and may have few states. A guide that comes to any limit starts again with a matcher that nobody has used: what
others have asked for decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any
from weakref import ref

MOST_STATES = 5_000  # of an original: some 5 MB
MOST, MOST_BYTES = 64, 2**20  # originals that are kept, and their grammars together


class Original:
    """A matcher that has seen nothing. user: who has a copy of it. worn: a copy has come to a limit."""

    __slots__ = ("_matcher", "user", "worn")

    def __init__(self, matcher: Any, user: object) -> None:
        self._matcher, self.user, self.worn = matcher, ref(user), False

    def copy(self) -> Any:
        return self._matcher.deep_copy()


class Matchers:
    """The originals of many grammars. Callable from any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, list[Original]] = OrderedDict()  # the least recently used first
        self.forget()

    def forget(self) -> None:
        """We are in a process that was forked: whoever held the lock is not here."""
        self._lock = Lock()

    def original(self, source: str, user: object, make: Callable[[str, int], Any]) -> Original:
        """One that nobody uses, for a user who drops its copies when it goes. Raises what `make` does.

        make(source, most states): a new LLMatcher that has seen nothing.
        """
        with self._lock:
            free = (each for each in self._kept.get(source, ()) if each.user() is None and not each.worn)
            if (found := next(free, None)) is not None:
                found.user = ref(user)
                self._kept.move_to_end(source)
                return found
        made = Original(make(source, MOST_STATES), user)
        if len(source) <= MOST_BYTES:  # or all others would go, and then it as well
            with self._lock:
                self._keep(source, made)
        return made

    def _keep(self, source: str, made: Original) -> None:
        self._kept[source] = [each for each in self._kept.get(source, ()) if not each.worn] + [made]
        self._kept.move_to_end(source)
        count, size = sum(map(len, self._kept.values())), sum(len(s) * len(of) for s, of in self._kept.items())
        while count > MOST or size > MOST_BYTES:
            oldest, its = next(iter(self._kept.items()))
            its.pop(0)
            count, size = count - 1, size - len(oldest)
            if not its:
                del self._kept[oldest]
