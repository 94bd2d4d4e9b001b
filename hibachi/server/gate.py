"""Limits the number of requests that are served at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hibachi.llm.dialects.errors import LIMITED, Refused
from hibachi.server.web.exchange import Exchange


class Gate:
    """A request counts from when its body is complete, before it is parsed, until its answer is complete: a client that
    sends slowly takes no place. most: None means any number. It belongs to one event loop.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._coming: set[Exchange] = set()
        self._inside: set[Exchange] = set()

    @contextmanager
    def around(self, x: Exchange) -> Iterator[None]:
        """Count a request for as long as this block lasts."""
        self._coming.add(x)
        try:
            yield
        finally:
            self._coming.discard(x)
            self._inside.discard(x)

    def enter(self, x: Exchange) -> None:
        """The body of a request is complete. Raises Refused if there is no room; a request that does not count always
        passes.
        """
        if x not in self._coming or self.most is None:
            return
        if len(self._inside) >= self.most:
            raise Refused(
                "Model is overloaded",  # as TGI says it
                status=429,
                kind=LIMITED,
                code="overloaded",
                headers={"Retry-After": "1"},
            )
        self._inside.add(x)
