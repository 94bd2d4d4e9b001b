"""Leave for pages of other origins to ask (the Fetch standard's CORS protocol), in the place of the upstreams' own."""

from __future__ import annotations

from collections.abc import Sequence

Headers = list[tuple[bytes, bytes]]
MAX_AGE = b"600"  # seconds that a browser remembers


class Cors:
    """origins: "*" is any."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = "*" in origins
        self._origins = {origin.encode().rstrip(b"/").lower() for origin in origins}

    def preflight(self, headers: dict[bytes, bytes], method: str) -> Headers | None:
        """The answer to a browser that asks before it asks; None: this is no such question."""
        wanted = headers.get(b"access-control-request-method")
        if method != "OPTIONS" or wanted is None or b"origin" not in headers:
            return None
        told = self.told(headers)
        if told:
            told += [(b"access-control-allow-methods", wanted), (b"access-control-max-age", MAX_AGE)]
            if asked := headers.get(b"access-control-request-headers"):
                told.append((b"access-control-allow-headers", asked))
        return told

    def told(self, headers: dict[bytes, bytes]) -> Headers:
        """What an answer says. headers: of the request."""
        origin = headers.get(b"origin")
        if self._any:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"*")]
        if origin is None or origin.lower() not in self._origins:
            return [(b"vary", b"Origin")]
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"*"),
            (b"vary", b"Origin"),
        ]

    def instead(self, answer: Headers, request: dict[bytes, bytes]) -> Headers:
        """An upstream's headers with ours in the place of its own."""
        kept = [(name, value) for name, value in answer if not name.lower().startswith(b"access-control-")]
        return kept + self.told(request)
