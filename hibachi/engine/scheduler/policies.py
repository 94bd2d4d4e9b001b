"""Scheduling policies by name: built-in ones, and installed ones (entry-point group `hibachi.policies`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hibachi.common.installed import plugin
from hibachi.engine.scheduler.policy import Fair, Fcfs, Policy, Priority, Shares, WaitingServed
from hibachi.errors import ConfigError

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
    missing = [name for name in _METHODS if not callable(getattr(given, name, None))]
    if missing or isinstance(given, type):
        raise ConfigError(
            f"A policy has the methods {', '.join(_METHODS)}; got {given!r}"
            + (f", without {', '.join(missing)}" if missing else ", a class: pass an instance")
            + ". See hibachi.Policy."
        )
    policy: Policy = given
    return policy
