"""Health of upstreams: how checks and answers change an upstream's state. Pure: no clock, no socket.

NEW -- good --> UP            ILL -- `rise` good checks --> TRIED -- an answer, or a good check --> UP
 `---- bad ---> ILL           UP -- `fall` bad checks, or a request that failed --> ILL
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hibachi.router import outliers
from hibachi.router.upstreams import SLOWER, Upstream, UpstreamState

FORGETS = 0.5  # how much of its latency an upstream loses with a check, when it had no request since the one before


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Checks in a row after which an upstream is ill, and after which it is tried again."""

    fall: int = 2
    rise: int = 1


def good_check(u: Upstream, models: Mapping[str, Any], seconds: float, limits: Thresholds) -> None:
    """Record a good check, which took this many seconds and named these models."""
    u.good, u.bad = u.good + 1, 0
    if u.gone:
        u.gone = False
        outliers.begin_again(u)
    u.models = {name: models.get(name, {"id": name, "object": "model"}) for name in u.place.models} or dict(models)
    if u.mass and u.used == u.used_before and not u.in_flight and u.latency is not None:
        u.latency += FORGETS * (seconds - u.latency)  # else one that was slow once would never be tried again
    u.used_before = u.used
    if not u.mass:
        u.latency = seconds if u.latency is None else u.latency + SLOWER * (seconds - u.latency)
    if u.state is UpstreamState.NEW or (u.state is UpstreamState.TRIED and not u.trial):
        _up(u)
    elif u.state is UpstreamState.DRAINING or (u.state is UpstreamState.ILL and u.good >= limits.rise):
        u.state, u.trial, u.why = UpstreamState.TRIED, None, "it is tried again, with one request at a time"


def bad_check(u: Upstream, why: str, limits: Thresholds, *, gone: bool = False) -> None:
    """gone: no connection could be opened."""
    u.good, u.bad, u.gone = 0, u.bad + 1, gone or u.gone
    if u.state in (UpstreamState.NEW, UpstreamState.TRIED, UpstreamState.DRAINING) or (
        u.state is UpstreamState.UP and u.bad >= limits.fall
    ):
        u.state = UpstreamState.ILL
    if u.state is UpstreamState.ILL:
        u.why = why


def failed(u: Upstream, why: str) -> None:
    """A request that it had, or could not be given, failed: it is ill until the next good check."""
    u.faults += 1
    if u.takes:
        u.state, u.why, u.good = UpstreamState.ILL, why, 0


def answered(u: Upstream) -> None:
    """A request has its answer, or the beginning of it, and it is no fault of the server's."""
    if u.state is UpstreamState.TRIED:
        _up(u)


def put_back(u: Upstream) -> None:
    """Undo a failure that was the request's fault. An upstream that a check found ill stays ill."""
    if u.state in (UpstreamState.ILL, UpstreamState.TRIED) and u.faults and not u.bad:
        _up(u)


def drain(u: Upstream, why: str) -> None:
    """It takes no further requests, and says so itself, or the operator does."""
    if u.takes or u.state is UpstreamState.NEW:
        u.state, u.why = UpstreamState.DRAINING, why


def _up(u: Upstream) -> None:
    u.state, u.trial, u.why, u.faults = UpstreamState.UP, None, "", 0
