"""Slots, and requests that wait for one: a queue for each model, fair between clients, with hand-off at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hibachi.router import outliers
from hibachi.router.fleet import ANY, Fleet
from hibachi.router.policies import Ask, Policy
from hibachi.router.upstreams import Upstream, UpstreamState

LAG = 64.0  # requests for its weight that an upstream gets at most because others were given more before


class NoSlot(Exception):
    """why: "full": the queue is full; "late": no slot came in time; "none": no upstream takes requests for this
    model; "lost": what it is about is in no memory any more.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(eq=False, slots=True)
class Waiter:
    """A waiting request. model: ANY, or the one that it needs. who: the key or address of its client. avoid: upstreams
    where it has been already.
    """

    ask: Ask
    who: str
    avoid: tuple[Upstream, ...]
    came: float
    slot: asyncio.Future[Upstream]
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def refuse(self, why: str) -> None:
        if not self.slot.done():
            self.slot.set_exception(NoSlot(why))


class Chooser:
    """Chooses upstreams by a policy, and counts what they are given."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._most = 0.0  # that an upstream was given: no `processed` is more

    def choose(self, free: Sequence[Upstream], fit: Sequence[Upstream], ask: Ask, now: float) -> Upstream:
        """One of those with a free slot. fit: all that should get such a request, with a free slot or not."""
        if len(free) == 1:
            return free[0]
        u = self.policy.choose(free, replace(ask, everyone=fit) if ask.sticky or ask.pieces else ask, now)
        if u.processed < self._most - LAG:
            u.processed = max(u.processed, max([v.processed for v in free]) - LAG)
        return u

    def fill(self, u: Upstream) -> None:
        u.in_flight += 1
        u.processed += 1 / u.place.weight
        self._most = max(self._most, u.processed)


class Queues:
    """Gives slots of the fleet to requests. most: how many may wait in all. wait_for: seconds, where no upstream takes
    requests.
    """

    waiting: int

    def __init__(self, fleet: Fleet, policy: Policy, *, most: int = 1024, wait_for: float = 5.0) -> None:
        self.fleet, self.policy, self._chooser = fleet, policy, Chooser(policy)
        self._most, self._wait_for = most, wait_for
        self._lines: dict[str, OrderedDict[str, deque[Waiter]]] = {}
        self.waiting = 0

    def take(self, ask: Ask, avoid: tuple[Upstream, ...] = ()) -> Upstream | None:
        """A slot, if one is free now. Requests that wait already could not use it: they are served as slots become
        free.
        """
        now = asyncio.get_running_loop().time()
        able = self._able(ask, avoid)
        fit = outliers.trusted(able, now)
        free = [u for u in fit if u.slots > 0]
        if not free:
            return None
        u = self._chooser.choose(free, fit, ask, now)
        self._fill(u, ask, able, now)
        return u

    def _able(self, ask: Ask, avoid: tuple[Upstream, ...]) -> list[Upstream]:
        """Upstreams that take such a request, with a free slot or not."""
        return [u for u in self.fleet.having(ask.model) if u.takes and may_have(u, ask, avoid)]

    async def wait(self, ask: Ask, who: str, seconds: float, avoid: tuple[Upstream, ...] = ()) -> Upstream:
        """A slot, as soon as there is one. Raises NoSlot."""
        loop = asyncio.get_running_loop()
        if self.waiting >= self._most and not self._displace(who):
            raise NoSlot("full")
        waiter = Waiter(ask, who, avoid, loop.time(), loop.create_future())
        waiter.timers.append(loop.call_later(seconds, waiter.refuse, "late"))
        line = self._lines.setdefault(ask.model, OrderedDict())
        line.setdefault(who, deque()).append(waiter)
        self.waiting += 1
        self._look(waiter)
        try:
            return await waiter.slot
        except asyncio.CancelledError:
            if waiter.slot.done() and not waiter.slot.cancelled() and waiter.slot.exception() is None:
                self.give_back(waiter.slot.result(), ask)  # it came as the client left
            raise
        finally:
            for timer in waiter.timers:
                timer.cancel()
            self.waiting -= 1
            self._forget(waiter)

    def _displace(self, who: str) -> bool:
        """Drop the newest waiter of another client, if that client has more than this one would have."""
        of: dict[str, list[Waiter]] = {}
        for line in self._lines.values():
            for client, waiters in line.items():
                of.setdefault(client, []).extend(w for w in waiters if not w.slot.done())
        most = max(of.values(), key=len, default=[])
        if len(most) <= len(of.get(who, ())) + 1:
            return False
        max(reversed(most), key=lambda w: w.came).refuse("full")  # several may come in one tick of the clock
        return True

    def give_back(self, u: Upstream, ask: Ask) -> None:
        """A slot of this request is free again; a request that waits for it gets it at once."""
        assert u.in_flight > 0, "a slot is given back twice"
        u.in_flight -= 1
        if u.trial is ask:
            u.trial = None  # also where its client has left, so that it showed nothing
        if not u.in_flight and u in self.fleet.leaving:
            self.fleet.leaving.remove(u)
        self.serve(u)
        if self.waiting:
            for other in self.fleet.upstreams:
                if outliers.suspect(other):
                    self.serve(other)

    def serve(self, u: Upstream) -> None:
        """Give free slots of an upstream to waiting requests."""
        now = asyncio.get_running_loop().time() if self.waiting else 0.0
        while self.waiting and u.slots > 0 and (waiter := self._next(u, now)) is not None:
            self._fill(u, waiter.ask, self._able(waiter.ask, waiter.avoid), now)
            waiter.slot.set_result(u)

    def _fill(self, u: Upstream, ask: Ask, able: list[Upstream], now: float) -> None:
        """able: upstreams of which any might have had it."""
        self._chooser.fill(u)
        if outliers.given(u, able, now) or u.state is UpstreamState.TRIED:
            u.trial = ask

    def changed(self) -> None:
        """An upstream takes requests now, or takes none any more."""
        for u in self.fleet.upstreams:
            self.serve(u)
        for line in self._lines.values():
            for waiters in line.values():
                for waiter in waiters:
                    self._look(waiter)

    def _look(self, waiter: Waiter) -> None:
        """If no upstream takes its requests, it waits only for this long, and not at all if it waits for nothing."""
        if self.fleet.lost(waiter.ask):
            waiter.refuse("lost")
        if len(waiter.timers) == 1 and not self._hope(waiter):
            loop = asyncio.get_running_loop()
            waiter.timers.append(loop.call_later(self._wait_for, self._despair, waiter))

    def _hope(self, waiter: Waiter) -> bool:
        return any(may_have(u, waiter.ask, waiter.avoid) for u in self.fleet.taking(waiter.ask.model))

    def _despair(self, waiter: Waiter) -> None:
        if not self._hope(waiter):
            waiter.refuse("none")
        else:
            del waiter.timers[1:]  # an upstream does, and it waits for a slot there

    def _next(self, u: Upstream, now: float) -> Waiter | None:
        """The next request for a slot of this upstream: of the first requests in the queues of its models, the one that
        came first.
        """
        mine = [model for model in self._lines if model == ANY or model in u.models]
        found = [waiter for model in mine if (waiter := self._first(model, u, now)) is not None]
        if not found:
            return None
        waiter = min(found, key=lambda w: w.came)
        line = self._lines[waiter.ask.model]
        line[waiter.who].remove(waiter)
        line.move_to_end(waiter.who)  # its client's next one comes after those of others
        return waiter

    def _first(self, model: str, u: Upstream, now: float) -> Waiter | None:
        return next((w for w in self._in_turn(model) if not w.slot.done() and self._fits(u, w, now)), None)

    def _fits(self, u: Upstream, waiter: Waiter, now: float) -> bool:
        if not may_have(u, waiter.ask, waiter.avoid):
            return False
        return not outliers.suspect(u) or u in outliers.trusted(self._able(waiter.ask, waiter.avoid), now)

    def _in_turn(self, model: str) -> Iterator[Waiter]:
        """One of each client, then the next one of each."""
        line = list(self._lines[model].values())
        for n in range(max(map(len, line), default=0)):
            yield from (waiters[n] for waiters in line if n < len(waiters))

    def _forget(self, waiter: Waiter) -> None:
        line = self._lines.get(waiter.ask.model)
        waiters = None if line is None else line.get(waiter.who)
        if line is None or waiters is None:
            return  # others of the same line were the last to leave it
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            del line[waiter.who]
            if not line:
                del self._lines[waiter.ask.model]


def may_have(u: Upstream, ask: Ask, avoid: tuple[Upstream, ...]) -> bool:
    """May it get this request? By names: one that left the configuration and came back is still the same server."""
    if not (ask.only or avoid):
        return True
    return (not ask.only or u.name == ask.only) and all(u.name != other.name for other in avoid)
