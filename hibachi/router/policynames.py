"""Policies by name: ours, and those that others have installed (entry-point group `hibachi.router_policies`)."""

from __future__ import annotations

from hibachi.common.installed import entry_points
from hibachi.errors import ConfigError
from hibachi.router.affine import PrefixAffine
from hibachi.router.policies import (
    LeastConnection,
    LeastLatency,
    LeastLoad,
    Policy,
    PowerOfTwo,
    RoundRobin,
    Sticky,
)

POLICIES: dict[str, type[Policy]] = {
    "least-connection": LeastConnection,
    "least-latency": LeastLatency,
    "round-robin": RoundRobin,
    "power-of-two": PowerOfTwo,
    "least-load": LeastLoad,
    "prefix-affine": PrefixAffine,
    "sticky": Sticky,
}


def policy_of(name: str) -> Policy:
    """A new one. Raises ConfigError."""
    if name in POLICIES:
        return POLICIES[name]()
    found = {point.name: point for point in entry_points(group="hibachi.router_policies")}
    if name not in found:
        known = ", ".join([*POLICIES, *sorted(found)])
        raise ConfigError(f"--policy {name}: expected one of {known}.")
    made: Policy = found[name].load()()
    return made
