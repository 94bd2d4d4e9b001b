"""Upstreams whose answers fail get few requests while others have none that do (outlier detection). Pure: no clock.

A fault weighs by its share of an upstream's recent answers, however good its checks are. One that is suspect gets a
request at a time, and between two of them others get `gap` requests, or some time passes. Where nobody else takes
requests, nobody is suspect.
"""

from __future__ import annotations

from collections.abc import Sequence

from hibachi.router.upstreams import Upstream

RECENT = 0.95  # what an answer counts for once there is a further one
SPARSE = 3000.0  # requests that others get for each of one whose answers all fail; with the cube of the share
SHORTEST, PER_GAP = 30.0, 0.1  # seconds after which it gets a request anyway: at least, and of `gap`
RESTARTED = 0.25  # faults that count still when it was gone, and has begun again


def suspect(u: Upstream) -> bool:
    return u.gap > 1


def share(u: Upstream) -> float:
    """Of its recent answers, those that failed; as if one more had been neither."""
    return u.faulty / (u.faulty + u.whole + 1)


def told(u: Upstream) -> str:
    """Why it is suspect, and what it gets."""
    return f"{share(u):.0%} of its answers failed of late ({u.last_fault}); 1 request, then {u.gap:.0f} to others"


def fault(u: Upstream, why: str, now: float) -> None:
    """An answer of it failed, and it is to blame."""
    u.whole, u.faulty, u.last_fault = RECENT * u.whole, RECENT * u.faulty + 1, why
    _weigh(u)
    rest(u, now)


def whole(u: Upstream) -> None:
    """An answer of it was."""
    u.whole, u.faulty = RECENT * u.whole + 1, RECENT * u.faulty
    _weigh(u)


def take_back(u: Upstream) -> None:
    """A fault was none of its own."""
    u.faulty = max(0.0, u.faulty - 1)
    _weigh(u)


def begin_again(u: Upstream) -> None:
    """It was gone, and is another process now: most is forgotten, and it is tried at once."""
    u.whole, u.faulty, u.until = 0.0, min(u.faulty, RESTARTED), 0.0
    _weigh(u)


def rest(u: Upstream, now: float) -> None:
    """From now on others get requests."""
    u.rest, u.until = u.gap, now + max(SHORTEST, PER_GAP * u.gap)


def trusted(able: Sequence[Upstream], now: float) -> Sequence[Upstream]:
    """Of those that take requests and may get this one, those that should: suspects when they have rested, and all
    where all are suspect.
    """
    well = [u for u in able if u.gap <= 1]
    if not well or len(well) == len(able):
        return able
    return well + [u for u in able if u.gap > 1 and u.trial is None and (u.rest <= 0 or now >= u.until)]


def given(u: Upstream, able: Sequence[Upstream], now: float) -> bool:
    """One of these gets a request. Is it a trial, as it is suspect and others are not?"""
    for other in able:
        if other.gap > 1 and other is not u:
            other.rest -= 1
    trial = u.gap > 1 and any(other.gap <= 1 for other in able)
    if trial:
        rest(u, now)
    return trial


def _weigh(u: Upstream) -> None:
    u.gap = SPARSE * share(u) ** 3
    u.rest = min(u.rest, u.gap)
