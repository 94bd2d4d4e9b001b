"""Who is served next. A policy owns the queue; the scheduler asks it, and nobody overtakes who is next.

    Fcfs           first come, first served
    Priority       by class, in a class first come, first served; with ageing, nobody waits for ever
    Fair           in a class, tenants by turns, so that each gets as many tokens
    WaitingServed  a gate before any of these: prompts start together (for models that cannot mix)

A policy of one's own has these methods; the entry-point group `hibachi.policies` gives it a name.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Protocol

from hibachi.errors import ConfigError
from hibachi.plan.sequence import Seq


class Policy(Protocol):
    """The order of service. All methods are called by the scheduler, from one thread."""

    def rank(self, seq: Seq) -> Any:
        """Its place among those who run, asked once: the last is preempted first. Smaller is better."""
        ...

    def push(self, seq: Seq) -> None:
        """It waits. seq.started: it ran before, and was preempted."""
        ...

    def peek(self) -> Seq | None:
        """Who is next; None if nobody waits. Those who ended while they waited (seq.finish) are passed over."""
        ...

    def pop(self, seq: Seq) -> None:
        """The one that `peek` named starts."""
        ...

    def left(self, seq: Seq, tokens: int) -> None:
        """It ended, having started, at a length of `tokens`."""
        ...

    def opens(self, waiting: int, running: int, step: int) -> bool:
        """May somebody start in this step (its number)? Asked when somebody waits and a row is free."""
        ...

    def settled(self, seq: Seq) -> float:
        """The time after which nobody who comes can be served before it; infinity if there is none."""
        ...

    def ahead(self, seq: Seq) -> int | None:
        """From `settled` on: most tokens of others that can be started before it. None: no bound."""
        ...


class _Queue:
    """A heap by rank. Who ended while waiting is dropped when it comes to the front, or when half of it is such."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, Seq]] = []
        self._ripe = 64  # length at which it is looked through

    def push(self, seq: Seq) -> None:
        if len(self._heap) >= self._ripe:
            self._heap = [item for item in self._heap if item[1].finish is None]
            heapq.heapify(self._heap)
            self._ripe = max(64, 2 * len(self._heap))
        heapq.heappush(self._heap, (seq.rank, seq))

    def peek(self) -> Seq | None:
        heap = self._heap
        while heap and heap[0][1].finish is not None:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Seq:
        return heapq.heappop(self._heap)[1]

    def __iter__(self) -> Iterator[Seq]:
        return (seq for _, seq in self._heap if seq.finish is None)


def most_tokens(seqs: Iterable[Seq]) -> int:
    """How many tokens these come to at most, prompts included."""
    return sum(seq.end for seq in seqs)


class Priority:
    """By `priority`, smaller first; in a class, by arrival. As in vLLM.

    age: seconds of waiting that make up for one class. A request of class p is passed by nobody who comes more than
    age * (p - best class) after it. None: classes are absolute, and a lower one may starve.
    Bound: from then on it starts after at most as many steps as those ranked before it have tokens.
    """

    def __init__(self, age: float | None = None, best: int = 0) -> None:
        if age is not None and not age > 0:
            raise ConfigError(f"age must be a number of seconds > 0 (or None: no ageing); got {age!r}.")
        self.age, self.best = age, best
        self._queue = _Queue()

    def rank(self, seq: Seq) -> Any:
        # priority - waited / age orders as this does at any time, so it need not be asked again.
        return (
            (seq.priority, seq.arrival, seq.number)
            if self.age is None
            else (seq.priority * self.age + seq.arrival, seq.number)
        )

    def push(self, seq: Seq) -> None:
        self._queue.push(seq)

    def peek(self) -> Seq | None:
        return self._queue.peek()

    def pop(self, seq: Seq) -> None:
        popped = self._queue.pop()
        assert popped is seq

    def left(self, seq: Seq, tokens: int) -> None:
        pass

    def opens(self, waiting: int, running: int, step: int) -> bool:
        return True

    def settled(self, seq: Seq) -> float:
        if seq.priority <= self.best:
            return seq.arrival
        return math.inf if self.age is None else seq.arrival + self.age * (seq.priority - self.best)

    def ahead(self, seq: Seq) -> int | None:
        return most_tokens(s for s in self._queue if s.rank < seq.rank)


class Fcfs(Priority):
    """First come, first served. `priority` counts for nothing."""

    def __init__(self) -> None:
        super().__init__()

    def rank(self, seq: Seq) -> Any:
        return seq.arrival, seq.number

    def settled(self, seq: Seq) -> float:
        return seq.arrival


class Fair:
    """Tenants by turns: the next request is of the tenant with the fewest tokens so far. Classes come before tenants.

    A virtual token counter a tenant (after Sheng et al. 2024): a request is charged its prompt and its limit of new
    tokens when it starts, and what it did not use is given back when it ends. Charging at the start instead of token by
    token keeps the counters of two tenants that both have requests waiting within two requests of the largest size of
    each other, whatever the number of rows: credit beyond one such request is not carried along. A tenant that comes
    (back) starts at the level of those who are there: nobody saves up turns.

    Bound: a request starts after at most as many steps as there are tokens in the running requests, in its own tenant's
    before it, and in as much of each other tenant's as their counters allow.
    """

    def __init__(self, weights: dict[Hashable, float] | None = None) -> None:
        """weights: what a tenant's share counts (1 if not named): with 2 it gets twice the tokens."""
        self._weights = dict(weights or {})
        for tenant, weight in self._weights.items():
            if not weight > 0:
                raise ConfigError(f"A tenant's weight must be > 0; got {weight!r} for {tenant!r}.")
        self._classes: dict[int, dict[Hashable, _Queue]] = {}  # those who have not started
        self._back = _Queue()  # those who were preempted: they were charged, and go before new ones of their class
        self._used: dict[Hashable, float] = {}  # the counters of those who wait or run
        self._running: dict[Hashable, int] = {}
        self._level = 0.0  # of the tenant that was served last
        self.largest = 1  # tokens of the largest request so far

    def used(self, tenant: Hashable) -> float:
        """Tokens that a tenant was charged, over its weight, since it came (on top of the level at which it came)."""
        return self._used.get(tenant, 0.0)

    def rank(self, seq: Seq) -> Any:
        return seq.priority, seq.arrival, seq.number

    def push(self, seq: Seq) -> None:
        self.largest = max(self.largest, seq.end)
        if seq.started:
            self._back.push(seq)
            return
        if seq.tenant not in self._used:
            waiting = [self._used[t] for tenants in self._classes.values() for t, q in tenants.items() if q.peek()]
            self._used[seq.tenant] = max([self._level, *([min(waiting)] if waiting else [])])
        self._classes.setdefault(seq.priority, {}).setdefault(seq.tenant, _Queue()).push(seq)

    def peek(self) -> Seq | None:
        back = self._back.peek()
        for priority in sorted(self._classes):
            if back is not None and back.priority <= priority:
                return back
            heads = []
            for tenant, queue in list(self._classes[priority].items()):
                head = queue.peek()
                if head is None:
                    del self._classes[priority][tenant]
                    self._forget(tenant)
                else:
                    heads.append(head)
            if heads:
                return min(heads, key=lambda seq: (self._used[seq.tenant], seq.rank))
            del self._classes[priority]
        return back

    def pop(self, seq: Seq) -> None:
        if seq.started:
            self._back.pop()
            return
        self._classes[seq.priority][seq.tenant].pop()
        self._level = max(self._level, self._used[seq.tenant])
        self._used[seq.tenant] += self._cost(seq.tenant, seq.end)
        self._running[seq.tenant] = self._running.get(seq.tenant, 0) + 1

    def left(self, seq: Seq, tokens: int) -> None:
        tenant = seq.tenant
        self._running[tenant] -= 1
        others = [self._used[t] for tenants in self._classes.values() for t, q in tenants.items() if q.peek()]
        lowest = min(others, default=self._used[tenant]) - self._cost(tenant, self.largest)
        self._used[tenant] = min(
            self._used[tenant], max(self._used[tenant] - self._cost(tenant, seq.end - tokens), lowest)
        )
        self._forget(tenant)

    def opens(self, waiting: int, running: int, step: int) -> bool:
        return True

    def settled(self, seq: Seq) -> float:
        return seq.arrival  # what others may still bring is in `ahead`

    def ahead(self, seq: Seq) -> int | None:
        if any(s.priority < seq.priority for s in self._all()):
            return None
        own = most_tokens(s for s in self._classes[seq.priority].get(seq.tenant, ()) if s.rank < seq.rank)
        mine = self._used[seq.tenant] + self._cost(seq.tenant, own + self.largest)
        others = {t: u for t, u in self._used.items() if t != seq.tenant}
        more = sum(max(0.0, mine - used) * self._weights.get(t, 1.0) + self.largest for t, used in others.items())
        return own + most_tokens(self._back) + math.ceil(more)

    def _cost(self, tenant: Hashable, tokens: int) -> float:
        return tokens / self._weights.get(tenant, 1.0)

    def _all(self) -> Iterator[Seq]:
        yield from self._back
        for tenants in self._classes.values():
            for queue in tenants.values():
                yield from queue

    def _forget(self, tenant: Hashable) -> None:
        """Drop the counter of a tenant that has nothing here any more."""
        if not self._running.get(tenant) and not any(tenant in tenants for tenants in self._classes.values()):
            self._running.pop(tenant, None)
            self._used.pop(tenant, None)


class WaitingServed:
    """Lets prompts in when enough of them wait, or when they have waited long enough. As TGI's router does.

    For models that cannot compute prompts beside tokens, where each prompt makes everybody wait. ratio: how many must
    wait for each that runs. patience: steps after which one that waits is enough. order: who is next (default: Fcfs).
    """

    def __init__(self, ratio: float = 1.2, patience: int = 20, order: Policy | None = None) -> None:
        if not ratio >= 0 or not patience >= 0:
            raise ConfigError(f"ratio and patience must be >= 0; got {ratio!r} and {patience!r}.")
        self.ratio, self.patience = ratio, patience
        self.order: Policy = Fcfs() if order is None else order
        self.rank, self.push, self.peek, self.left = self.order.rank, self.order.push, self.order.peek, self.order.left
        self._step = self._last = 0  # the step at hand, and that in which somebody started last

    def pop(self, seq: Seq) -> None:
        self._last = self._step
        self.order.pop(seq)

    def opens(self, waiting: int, running: int, step: int) -> bool:
        self._step = step
        enough = step - self._last >= self.patience or waiting >= math.floor(self.ratio * running)
        return (not running or enough) and self.order.opens(waiting, running, step)

    def settled(self, seq: Seq) -> float:
        return self.order.settled(seq)

    def ahead(self, seq: Seq) -> int | None:
        ahead = self.order.ahead(seq)
        return None if ahead is None else ahead + self.patience
