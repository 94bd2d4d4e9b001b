"""Scheduling policies by name: built-in ones, and installed ones (entry-point group `hibachi.policies`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hibachi.common.installed import plugin, with_methods
from hibachi.engine.scheduler.policy import Fair, Fcfs, Policy, Priority, Shares, WaitingServed

GROUP = "hibachi.policies"
SHIPPED: dict[str, Callable[[], Policy]] = {
    "fcfs": Fcfs,
    "priority": Priority,
    "fair": Fair,
    "shares": Shares,
    "waiting-served": WaitingServed,
}
_METHODS = ("rank", "push", "peek", "pop", "left", "opens", "settled", "ahead")


def policy_of(given: Any) -> Policy:
    """A policy from its name; an object is returned as it is; None means by priority. Each engine needs one of its own.

    Raises ConfigError for an unknown name, or an object that is no policy.
    """
    if given is None:
        return Priority()
    if isinstance(given, str):
        unknown = f"No policy is called {given!r}: expected one of {{known}}, or a policy object."
        given = plugin(GROUP, given, dict(sorted(SHIPPED.items())), f"The policy {given!r}", unknown)()
    with_methods(given, _METHODS, "A policy", "hibachi.Policy")
    policy: Policy = given
    return policy
