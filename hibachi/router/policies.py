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
from typing import Any, Protocol

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
    return min(idlest, key=lambda u: (u.processed, _latency(u)))


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
        self._places: list[Place] = []
        self._hashes: dict[float, list[Any]] = {}  # by weight: hashes that have the servers' names
        self._numbers: dict[float, list[int]] = {}  # of these servers
        self._known: dict[bytes, int] = {}

    def of(self, key: bytes, among: Sequence[Upstream]) -> Upstream:
        """One of these, of which there is at least one."""
        places = [u.place for u in among]
        if places != self._places:
            self._places, self._hashes, self._numbers, self._known = places, {}, {}, {}
            for i, place in enumerate(places):
                name = place.name.encode()
                salt = name if len(name) <= 64 else blake2b(name).digest()  # no key may be longer
                self._hashes.setdefault(place.weight, []).append(blake2b(digest_size=8, key=salt))
                self._numbers.setdefault(place.weight, []).append(i)
        if key not in self._known:
            if len(self._known) >= REMEMBERED * len(places):
                self._known.clear()
            self._known[key] = self._find(key)
        return among[self._known[key]]

    def _find(self, key: bytes) -> int:
        best, most = 0, 0.0
        for weight, hashes in self._hashes.items():
            made = [each.copy() for each in hashes]
            digests = [each.update(key) or each.digest() for each in made]
            digest = max(digests)  # of one weight, this has the highest score
            score = -weight / log((int.from_bytes(digest) + 0.5) / 2**64)
            if score > most:
                best, most = self._numbers[weight][digests.index(digest)], score
        return best


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
