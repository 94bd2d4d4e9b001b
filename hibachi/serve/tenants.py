"""Who may come: API keys, whose they are, and what each may do."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hibachi.api.errors import DENIED, LIMITED, Refused


@dataclass(frozen=True, slots=True)
class Tenant:
    """priority: of its requests, whatever they say; None: as they say. max_requests: at once; None: any number."""

    priority: int | None = None
    max_requests: int | None = None


@dataclass(eq=False)
class Tenants:
    """keys: (key, name of its tenant). Without any, everybody may come."""

    keys: tuple[tuple[str, str], ...] = ()
    named: Mapping[str, Tenant] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Digests are equally long, so that comparing them tells nothing of a key's length either.
        self._digests = [(_digest(key.encode()), name) for key, name in self.keys]
        self.running: Counter[str] = Counter()

    def of(self, name: str) -> Tenant | None:
        return self.named.get(name)

    def admit(self, header: bytes | None) -> str:
        """Whose key the header Authorization holds. Raises Refused."""
        if not self.keys:
            return ""
        scheme, _, key = (header or b"").partition(b" ")
        given, found = _digest(key.strip()), None
        for digest, name in self._digests:  # all of them: how long it takes must not tell which was near
            if hmac.compare_digest(digest, given):
                found = name
        if scheme.lower() != b"bearer" or found is None:
            raise Refused(
                "No valid API key: expected the header 'Authorization: Bearer KEY'.",
                status=401,
                kind=DENIED,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found

    def check(self, name: str) -> None:
        """Raises Refused for a tenant that has as many requests here as it may."""
        own = self.named.get(name)
        if own is not None and own.max_requests is not None and self.running[name] > own.max_requests:
            raise Refused(
                f"At most {own.max_requests} requests of yours are served at once. Wait for one to end.",
                status=429,
                kind=LIMITED,
                code="tenant_limit",
                headers={"Retry-After": "1"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
