"""Which server gets a request: a class for each way to choose.

A policy is shown the servers that have the model and a free slot, and names one of them. It does nothing else: records
and the time are given to it, so that it can be tried without a socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import inf, log
from random import Random
from typing import Protocol

from hibachi.router.upstreams import Place, Upstream

REMEMBERED = 512  # homes, for each server


@dataclass(frozen=True, slots=True)
class Ask:
    """What a policy is told of a request. pieces: digests of the beginning of its text, each of all up to some length.

    sticky: what the header says that ties requests together. everyone: servers that have the model and take requests,
    with a free slot or not, except for those that are suspect.
    """

    model: str = ""
    pieces: tuple[bytes, ...] = ()
    sticky: str = ""
    only: str = ""  # the name of the one upstream that keeps what it is about
    in_memory: bool = False  # so that it is lost when that upstream is gone
    everyone: Sequence[Upstream] = ()


class Policy(Protocol):
    """pieces: does it look at the text? loads: does it want to know how much is to do in each server?"""

    pieces: bool
    loads: bool

    def choose(self, free: Sequence[Upstream], ask: Ask, now: float) -> Upstream:
        """One of `free`, of which there is at least one. now: seconds of a clock that never goes back."""
        ...


def _latency(u: Upstream) -> float:
    return -inf if u.latency is None else u.latency


def quickest(free: Sequence[Upstream]) -> Upstream:
    """The upstream with the least latency, of equals the first; one of unknown latency comes before the others."""
    return min(free, key=_latency)


def preferred(free: Sequence[Upstream]) -> Upstream:
    """The fewest requests that it has, for its weight; of equals, the fewest that it was given; then the quickest."""
    busy = [u.in_flight / u.place.weight for u in free]
    least = min(busy)
    idlest = [u for u, n in zip(free, busy, strict=True) if n == least]
    fewest = min([u.processed for u in idlest])
    return quickest([u for u in idlest if u.processed == fewest])


class LeastConnection:
    """The fewest requests, as text-inference-batcher says it: those that it has, then those that it had."""

    pieces = loads = False

    def choose(self, free: Sequence[Upstream], ask: Ask, now: float) -> Upstream:
        return preferred(free)


class LeastLatency:
    """The least latency, as the latest requests had it."""

    pieces = loads = False

    def choose(self, free: Sequence[Upstream], ask: Ask, now: float) -> Upstream:
        return quickest(free)


class RoundRobin:
    """One after the other, each as often as its weight says."""

    pieces = loads = False

    def __init__(self) -> None:
        self._turns: dict[str, float] = {}

    def choose(self, free: Sequence[Upstream], ask: Ask, now: float) -> Upstream:
        # Smooth weighted round robin, as nginx has it: each gains its weight, and the richest pays for all.
        turns = self._turns
        for u in free:
            turns[u.name] = turns.get(u.name, 0.0) + u.place.weight
        best = max(free, key=lambda u: turns[u.name])
        turns[best.name] -= sum(u.place.weight for u in free)
        return best


class PowerOfTwo:
    """The less busy of two that are drawn (Mitzenmacher 2001): routers that do not talk do not all choose the same."""

    pieces = loads = False

    def __init__(self, random: Random | None = None) -> None:
        self._random = random or Random()

    def choose(self, free: Sequence[Upstream], ask: Ask, now: float) -> Upstream:
        return preferred(free if len(free) <= 2 else self._random.sample(list(free), 2))


class LeastLoad:
    """The fewest requests that wait there, by its own account, and that we have sent it."""

    pieces, loads = False, True

    def choose(self, free: Sequence[Upstream], ask: Ask, now: float) -> Upstream:
        return min(free, key=lambda u: (((u.load or 0.0) + u.in_flight) / u.place.weight, u.latency or 0.0))


class Homes:
    """The server that gets what has a key, the same in every router.

    Rendezvous hashing (Thaler & Ravishankar 1998) with weights: one that comes or goes moves its own share only. Homes
    are remembered while the servers and their weights stay.
    """

    def __init__(self) -> None:
        self.weight = 0.0  # of all servers
        self._places: list[Place] = []
        self._names: dict[float, list[int]] = {}  # by weight: the servers' names as numbers
        self._at: dict[float, list[int]] = {}  # where these servers stand
        self._known: dict[bytes, int] = {}

    def of(self, key: bytes, among: Sequence[Upstream]) -> Upstream:
        """One of these, of which there is at least one."""
        places = [u.place for u in among]
        if places != self._places:
            self._places, self._names, self._at, self._known = places, {}, {}, {}
            self.weight = sum(place.weight for place in places)
            for i, place in enumerate(places):
                self._names.setdefault(place.weight, []).append(_number(place.name.encode()))
                self._at.setdefault(place.weight, []).append(i)
        if key not in self._known:
            if len(self._known) >= REMEMBERED * len(places):
                self._known.clear()
            self._known[key] = self._find(_number(key))
        return among[self._known[key]]

    def _find(self, key: int) -> int:
        best, most = 0, 0.0
        for weight, names in self._names.items():
            products = [key * name % 2**64 for name in names]
            product = max(products)  # of one weight, this has the highest score
            score = -weight / log((product + 0.5) / 2**64)
            if score > most:
                best, most = self._at[weight][products.index(product)], score
        return best


def _number(name: bytes) -> int:
    """An odd one of 64 bits. The product of two is as good as a hash of both, and takes a fifth of the time."""
    return int.from_bytes(blake2b(name, digest_size=8).digest()) | 1


class Sticky:
    """Requests with the same header go to the same server while it has a free slot; others as `LeastConnection`."""

    pieces = loads = False

    def __init__(self) -> None:
        self._homes = Homes()

    def choose(self, free: Sequence[Upstream], ask: Ask, now: float) -> Upstream:
        if not ask.sticky:
            return preferred(free)
        key = ask.sticky.encode("latin-1")
        home = self._homes.of(key, ask.everyone or free)
        return home if home in free else Homes().of(key, free)
