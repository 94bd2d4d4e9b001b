"""Tenants: API keys, the tenant of each, and what each tenant may do."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hibachi.llm.dialects.errors import DENIED, LIMITED, Refused


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant. priority: of its requests, which may ask for a worse one. max_requests: at once, each continuation and
    each vector counted; None means any number. admin: may see data of other tenants.
    """

    priority: int = 0
    max_requests: int | None = None
    admin: bool = False


NOBODY = Tenant()
PART = "x-hibachi-tenant"  # a header, by which a router tells its tenants apart: they share its key


@dataclass(eq=False)
class Tenants:
    """All tenants. keys: (key, name of its tenant). Without any key, every client may send requests and see everything.

    share_prefixes: tenants share common beginnings of prompts; otherwise none finds out what another has sent.
    """

    keys: tuple[tuple[str, str], ...] = ()
    named: Mapping[str, Tenant] = field(default_factory=dict)
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        # Digests are equally long, so that comparing them tells nothing of a key's length either.
        self._digests = [(_digest(key.encode()), name) for key, name in self.keys]
        self.running: Counter[str] = Counter()  # open requests of each
        self.served: Counter[str] = Counter()  # continuations and vectors of each

    def of(self, name: str) -> Tenant:
        return self.named.get(name, NOBODY)

    def whose(self, header: bytes | None) -> str | None:
        """The tenant of a key in the form of the header Authorization; None means it holds no valid key."""
        scheme, _, key = (header or b"").partition(b" ")
        given, found = _digest(key.strip()), None
        for digest, name in self._digests:  # all of them: how long it takes must not tell which was near
            if hmac.compare_digest(digest, given):
                found = name
        return found if scheme.lower() == b"bearer" else None

    def admit(self, header: bytes | None) -> str:
        """The tenant of a key in the form of the header Authorization. Raises Refused."""
        if not self.keys:
            return ""
        found = self.whose(header)
        if found is None:
            raise Refused(
                "No valid API key: expected the header 'Authorization: Bearer KEY', or 'x-api-key: KEY'.",
                status=401,
                kind=DENIED,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found

    def may_see_all(self, header: bytes | None) -> bool:
        """Whether this is the key of an admin, or there are no keys at all."""
        return not self.keys or ((name := self.whose(header)) is not None and self.of(name).admin)

    def check(self, name: str, n: int) -> None:
        """Raise Refused if a tenant may not have this many more continuations."""
        most = self.of(name).max_requests
        if most is None or self.served[name] + n <= most:
            return
        if n > most:
            raise Refused(
                f"At most {most} continuations of yours are served at once, and this request asks for {n}. Ask for "
                f"fewer.",
                code="tenant_limit",
            )
        raise Refused(
            f"At most {most} continuations of yours are served at once; {self.served[name]} are running. Wait for one "
            f"to end.",
            status=429,
            kind=LIMITED,
            code="tenant_limit",
            headers={"Retry-After": "1"},
        )


def salt_of(tenant: str, given: str | None) -> str | None:
    """The cache salt of a tenant's request: the tenant's name, and the salt of the request.

    The length of the name stands before it, so that no salt in a request can equal another tenant's.
    """
    return f"{len(tenant)}:{tenant}{given or ''}" if tenant else given


def named_part(tenant: str, given: Sequence[str]) -> str:
    """What a router with keys sends as PART for one of its tenants. given: values of PART that came to it. They count
    as well: a router in front of this one, whose tenants have one key here, may have sent them.
    """
    return hashlib.blake2b(json.dumps([tenant, *given]).encode(), digest_size=16).hexdigest()


def part_of(header: bytes | None) -> str:
    """The part of a tenant whose request this is, from its header PART; "" means it has none.

    It only divides what the key gives access to, so it may come from anybody. Hashed, a long one takes no more memory.
    """
    return "" if header is None else hashlib.blake2b(header, digest_size=16).hexdigest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
