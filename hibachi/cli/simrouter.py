"""The router of a simulated fleet: the policies, records and digests of `hibachi route`, without a socket."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from random import Random

from hibachi.engine.simulator.simulate import Setup
from hibachi.engine.simulator.trace import Trace
from hibachi.router.affine import FURTHEST, pieces_of
from hibachi.router.policies import Ask, Policy, PowerOfTwo
from hibachi.router.policynames import policy_of
from hibachi.router.queue import Chooser
from hibachi.router.upstreams import Place, Upstream, UpstreamState

DEFAULT = "least-connection"
LIMIT = 64  # requests of a replica at once, where nobody says
TOKEN = 4  # bytes of text


class SimRouter:
    """Before n engines that replay a trace. A request's text is made up: the same for the same keys.

    What the real one has, and this one has not: checks, and what follows from servers that fail or say how busy they
    are; headers that name a session; other tries of what a server refuses. Who waits in line waits as long as it takes.
    """

    upstreams: list[Upstream]

    def __init__(self, trace: Trace, policy: Policy, n: int, limit: int = LIMIT, network: int = 0) -> None:
        self._trace, self._chooser, self._limit, self._full = trace, Chooser(policy), limit, 0
        names = [f"http://10.{network}.{i >> 8}.{i & 255}:8000" for i in range(1, n + 1)]
        self.upstreams = [Upstream(Place(name, limit=limit), UpstreamState.UP) for name in names]
        self._number = {u: i for i, u in enumerate(self.upstreams)}
        self._pieces = lru_cache(1 << 13)(self._digests)  # a trace that is repeated has the same prompts again

    def place(self, i: int, now: float) -> int | None:
        if self._full == len(self.upstreams):
            return None
        free = [u for u in self.upstreams if u.slots > 0] if self._full else self.upstreams
        ask = self.ask(i) if self._chooser.policy.pieces else Ask()
        u = self._chooser.choose(free, self.upstreams, ask, now)
        self._chooser.fill(u)
        self._full += u.in_flight == self._limit
        return self._number[u]

    def emitted(self, engine: int, seconds: float) -> None:
        self.upstreams[engine].took(seconds)

    def ended(self, engine: int) -> None:
        u = self.upstreams[engine]
        self._full -= u.in_flight == self._limit
        u.in_flight -= 1

    def ask(self, i: int) -> Ask:
        """What the policy is told of request i."""
        trace = self._trace
        if trace.keys is None:
            return Ask()
        pieces = self._pieces(tuple(trace.keys[i]), int(trace.prompt[i]))
        if trace.group is not None:
            mark = int(trace.group[i]).to_bytes(4)
            pieces = tuple([piece + mark for piece in pieces])
        return Ask(pieces=pieces)

    def _digests(self, keys: tuple[Hashable, ...], prompt: int) -> tuple[bytes, ...]:
        size = TOKEN * self._trace.key_tokens
        text = b"".join(f"{key!s:<{size}}".encode() for key in keys[: -(-FURTHEST // size)])
        return pieces_of(text[: prompt * TOKEN])


def router_of(setup: Setup, trace: Trace, seed: int = 0) -> SimRouter:
    """The router of a setup with replicas. Where its policy draws, the same seed draws the same. Raises ConfigError,
    MissingExtra.
    """
    policy = policy_of(setup.router or DEFAULT, "--router")
    drawn = PowerOfTwo(Random(seed)) if isinstance(policy, PowerOfTwo) else policy
    return SimRouter(trace, drawn, setup.replicas or 1, setup.max_connections or LIMIT)
