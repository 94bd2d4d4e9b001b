"""Which requests wait for what stores have, and for how long: no longer than computing it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from hibachi.engine.scheduler.names import state_name
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import StepPlan
from hibachi.engine.tiers.host import HostTier, Wish

LEAST_WAIT = 0.05  # seconds that a request waits for what stores have, at least
FIRST_WAIT = 5.0  # while nobody knows how long computing takes

T = TypeVar("T")


class PendingLoads(Generic[T]):
    """The requests of one scheduler that wait for what stores have, under keys of the caller's. Not thread-safe.

    brought: told that a request waits no longer, with the error of a store if there was one; in the thread of `host`.
    """

    def __init__(self, host: HostTier, brought: Callable[[T, Exception | None], None]) -> None:
        self.host, self._brought = host, brought
        self._waiting: dict[T, float] = {}
        self._computed: tuple[int, float] = 0, 0.0  # tokens of prompts, seconds of the steps with them

    def took(self, plan: StepPlan, seconds: float) -> None:
        """The time of a step: where it had prompts, it says how long these take."""
        if plan.tokens > len(plan.rows):
            tokens, before = self._computed
            self._computed = (tokens >> 1) + plan.tokens, before / 2 + seconds

    def begin(self, key: T, seq: Seq, scheduler: Scheduler, now: float) -> bool:
        """Look in the stores for what a request begins with; False if there is nothing to look for."""
        size, tiers = scheduler.limits.block_size, scheduler.tiers
        if tiers is None or not self.host.stores or seq.keys is None or seq.begun:
            return False
        names = tiers.names(seq, (seq.prompt_len - 1) // size)
        states: list[bytes] = []
        if scheduler.pool:
            names = names[len(scheduler.pool.match(seq.salt, seq.keys, len(names))[0]) :]
        if scheduler.checkpoints:
            states = [state_name(name) for name in reversed(names)]
        missing = [name for name in (states or names) if not self.host.has(name)]
        if not missing or (states and len(missing) < len(states)):
            return False
        tokens, seconds = self._computed
        each = seconds * size / tokens if tokens else None
        until = now + (FIRST_WAIT if each is None else max(LEAST_WAIT, each * len(names)))
        self._waiting[key] = until
        done: Callable[[Exception | None], None] = lambda failed: self._brought(key, failed)  # noqa: E731
        self.host.bring(Wish(names if scheduler.pool else [], states, each, until, done))
        return True

    def waits(self, key: T) -> bool:
        return key in self._waiting

    def end(self, key: T) -> bool:
        """A request waits no longer; False if it did not."""
        return self._waiting.pop(key, None) is not None

    def late(self, now: float) -> list[T]:
        """The requests whose time to wait is over."""
        return [key for key, until in self._waiting.items() if until <= now] if self._waiting else []

    def next_time(self) -> float | None:
        return min(self._waiting.values(), default=None)
