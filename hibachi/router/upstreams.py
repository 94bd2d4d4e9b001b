"""Records of the servers behind the router. Data only: other modules fill them in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

SLOWER = 0.2  # how much the latest request counts in `latency`
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the buckets of times, in seconds; the last one is open."""


class UpstreamState(Enum):
    """NEW: not asked yet. UP: takes requests. TRIED: was ill, and takes one at a time until that one is answered. ILL:
    takes none. DRAINING: takes none, and ends those that it has.
    """

    NEW = "new"
    UP = "up"
    TRIED = "tried"
    ILL = "ill"
    DRAINING = "draining"


@dataclass(slots=True)
class Times:
    """A histogram. counts: of each bucket of `BOUNDS`, and of what is longer than all."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.total += seconds
        for i, bound in enumerate(BOUNDS):
            if seconds <= bound:
                self.counts[i] += 1
                return
        self.counts[-1] += 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is, and what its operator said of it: an entry of the configuration, at one of its addresses.

    url: scheme, host and port, without a path; as it is written in `X-Upstream-Origin`. address: of several that the
    name stands for, else "". limit: requests at once. models: it has these, whatever it says; (): what it says. key:
    for checks, and for requests where the router has keys of its own. ca: a file of certificates that are trusted
    besides. server_name: what its certificate must say; "": the host of `url`.
    """

    url: str
    address: str = ""
    limit: int = 64
    weight: float = 1.0
    models: tuple[str, ...] = ()
    key: str = field(default="", repr=False)
    ca: str = ""
    server_name: str = ""

    @property
    def name(self) -> str:
        return f"{self.url}@{self.address}" if self.address else self.url


@dataclass(eq=False, slots=True)
class Upstream:
    """One server, as the router sees it. Times are those of a clock that never goes back, in seconds."""

    place: Place
    state: UpstreamState = UpstreamState.NEW
    models: Mapping[str, Any] = field(default_factory=dict)  # by id: what `/v1/models` says of it
    in_flight: int = 0
    trial: object = None  # the request under way that is to show whether it works again; None: there is none
    latency: float | None = None  # seconds to the first byte of an answer: of checks, until requests tell
    load: float | None = None  # requests that wait or run there, as it says itself
    why: str = "it has not been asked yet"  # it takes no requests
    good: int = 0  # checks in a row
    bad: int = 0
    faults: int = 0  # of requests, since the last good check
    gone: bool = False  # no connection to it could be opened, so that it holds nothing that it held
    processed: float = 0.0  # requests that it was given, for its weight
    used_before: int = 0  # requests, at the last check
    samples: int = 0  # times of requests
    mass: float = 0.0  # the weight that these have in `latency`; 0: there it is that of checks
    # How its answers end; see `outliers`. Counts are of late: older ones fade.
    whole: float = 0.0
    faulty: float = 0.0
    last_fault: str = ""
    gap: float = 0.0  # requests that others get between two of it; more than 1: it is suspect
    rest: float = 0.0  # of these, those that are still to come
    until: float = 0.0  # the time at which they need not come any more
    # For reports.
    used: int = 0
    affine: int = 0  # requests that went where their prefix is at home
    answers: Counter[int] = field(default_factory=Counter)  # by status
    errors: Counter[str] = field(default_factory=Counter)  # by kind
    retries: int = 0  # requests that came here after another had failed
    times: Times = field(default_factory=Times)

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def servers(self) -> set[str]:
        """What the ids of responses have in them that are kept there: of a router, those of all servers behind it."""
        told = [entry.get("server") for entry in self.models.values() if isinstance(entry, Mapping)]
        each = [one for said in told for one in (said if isinstance(said, list) else [said])]
        return {one for one in each if isinstance(one, str)}

    @property
    def origin(self) -> str:
        """What `X-Upstream-Origin` says: as configured, with the address where there are several."""
        place = self.place
        return f"{place.url} ({place.address})" if place.address else place.url

    @property
    def takes(self) -> bool:
        return self.state is UpstreamState.UP or self.state is UpstreamState.TRIED

    @property
    def slots(self) -> int:
        """Free ones. Where it is tried again, there is one."""
        free = self.place.limit - self.in_flight
        if self.state is UpstreamState.UP:
            return free
        return min(free, 1) if self.state is UpstreamState.TRIED and not self.trial else 0

    def took(self, seconds: float, *, telling: bool = True) -> int:
        """A request had its first byte after so long. telling: others will take as long; refusals are quick. Returns
        the number of the sample in `latency`.
        """
        self.times.add(seconds)
        if not telling:
            return 0
        if self.latency is None or not self.mass:
            self.latency = 0.0
        self.samples += 1
        self.mass += SLOWER * (1 - self.mass)
        self.latency += SLOWER / self.mass * (seconds - self.latency)
        return self.samples

    def took_not(self, seconds: float, sample: int) -> None:
        """The answer failed, and its time is none: `latency` is what it would be without it."""
        part = SLOWER * (1 - SLOWER) ** (self.samples - sample)
        if self.latency is None or not sample:
            return
        if self.mass - part < 1e-6:
            self.latency, self.mass = None, 0.0
        else:
            self.latency += part / (self.mass - part) * (self.latency - seconds)
            self.mass -= part
