"""At most so many requests at once, whoever sends them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hibachi.api.errors import LIMITED, Refused
from hibachi.web.exchange import Exchange


class Gate:
    """A request counts from when its body is here, before anything of it is read, until it is answered to the end: who
    sends a body slowly takes nobody's place. most: None means any number. It is of one event loop.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._coming: set[Exchange] = set()
        self._inside: set[Exchange] = set()

    @contextmanager
    def around(self, x: Exchange) -> Iterator[None]:
        """The life of a request that counts."""
        self._coming.add(x)
        try:
            yield
        finally:
            self._coming.discard(x)
            self._inside.discard(x)

    def enter(self, x: Exchange) -> None:
        """Its body is here. Raises Refused if there is no room; for a request that does not count, nothing happens."""
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
