"""Policies by name: ours, and those that others have installed (entry-point group `hibachi.router_policies`)."""

from __future__ import annotations

from hibachi.common.installed import plugin
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


def policy_of(name: str, flag: str = "--policy") -> Policy:
    """A new one. Raises ConfigError, which names the flag, and MissingExtra for one that lacks a package of its own."""
    what = f"{flag} {name}"
    made: Policy = plugin("hibachi.router_policies", name, POLICIES, what, f"{what}: expected one of {{known}}.")()
    return made
