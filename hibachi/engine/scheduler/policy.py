"""Scheduling policies: which request starts next. A policy owns the queue; no request overtakes the one that it names.


    Fcfs           first come, first served
    Priority       by class, in a class first come, first served; with ageing, no request waits for ever
    Fair           in a class, tenants by turns, so that each gets as many tokens
    Shares         in a class, tenants by rows: one with more than its share gives rows back when another waits
    WaitingServed  a gate before any of these: prompts start together (for models that cannot mix)

A policy of your own has these methods; the entry-point group `hibachi.policies` gives it a name.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

from hibachi.engine.scheduler.sequence import Seq
from hibachi.errors import ConfigError

_NEVER = 2**62  # later than any start


class Policy(Protocol):
    """The order of service. All methods are called by the scheduler, from one thread.

    A policy that takes rows back also has the methods `displaced()` and `weight(tenant)`: see `Shares`.
    """

    def rank(self, seq: Seq) -> Any:
        """The rank of a starting sequence, asked once. Smaller is better; the running sequence with the worst is
        preempted first.
        """
        ...

    def push(self, seq: Seq) -> None:
        """Add a sequence to the queue. seq.started: it ran before, and was preempted."""
        ...

    def peek(self) -> Seq | None:
        """The next sequence to start; None if none waits. Sequences that ended while they waited (seq.finish) are
        passed over.
        """
        ...

    def pop(self, seq: Seq) -> None:
        """The sequence that `peek` named starts."""
        ...

    def left(self, seq: Seq, tokens: int) -> None:
        """A sequence that had started has ended, at a length of `tokens`."""
        ...

    def opens(self, waiting: int, running: int, step: int) -> bool:
        """May waiting requests start in step number `step`? Asked when one waits and a row is free."""
        ...

    def settled(self, seq: Seq) -> float:
        """From this time on no newly arriving request can overtake it; infinity if there is no such time."""
        ...

    def ahead(self, seq: Seq) -> int | None:
        """From `settled` on: most tokens of other sequences that can start before it. None means no bound."""
        ...


class RankQueue:
    """A heap by rank. A sequence that ended while waiting is dropped when it comes to the front, or when half of the
    heap has ended.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Seq]] = []  # (those that were linked have one rank)
        self._ripe = 64  # length at which it is looked through

    def push(self, seq: Seq) -> None:
        if len(self._heap) >= self._ripe:
            self._heap = [item for item in self._heap if item[2].finish is None]
            heapq.heapify(self._heap)
            self._ripe = max(64, 2 * len(self._heap))
        heapq.heappush(self._heap, (seq.rank, seq.number, seq))

    def peek(self) -> Seq | None:
        heap = self._heap
        while heap and heap[0][2].finish is not None:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> Seq:
        return heapq.heappop(self._heap)[2]

    def rows(self, most: int) -> int:
        """The rows that its first `most` sequences would take."""
        return sum(len(seq.bound) for seq in islice(self, most))

    def __iter__(self) -> Iterator[Seq]:
        return (seq for *_, seq in self._heap if seq.finish is None)


def _weights(given: dict[Hashable, float] | None) -> dict[Hashable, float]:
    """Check the weights of tenants. Raises ConfigError."""
    for tenant, weight in (given or {}).items():
        if not weight > 0:
            raise ConfigError(f"A tenant's weight must be > 0; got {weight!r} for {tenant!r}.")
    return dict(given or {})


def most_tokens(seqs: Iterable[Seq]) -> int:
    """Most tokens that these sequences can have at their end, prompts included."""
    return sum(seq.end for seq in seqs)


class Priority:
    """By `priority`, smaller first; in a class, by arrival. As in vLLM.

    age: seconds of waiting that make up for one class. A request of class p is not overtaken by one that arrives more
    than age * (p - best) seconds later. None means that classes are absolute, and a lower one may starve.
    best: the best class in use; only the bounds rely on it. Bound: from that time on a request starts after at most as
    many steps as the requests ranked before it have tokens.
    """

    age: float | None
    best: int

    def __init__(self, age: float | None = None, best: int = 0) -> None:
        if age is not None and not age > 0:
            raise ConfigError(f"age must be a number of seconds > 0 (or None: no ageing); got {age!r}.")
        self.age, self.best = age, best
        self._queue = RankQueue()

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

    In each class a tenant has a virtual token counter (after Sheng et al. 2024): a request is charged its prompt and
    its limit of new tokens when it starts, over the tenant's weight, and what it did not use is given back when it
    ends. Charging at the start instead of token by token keeps the counters of tenants that wait in one class within
    two requests of the largest size (over the smallest weight) of each other, whatever the number of rows. Credit that
    would break this lapses, so a tenant whose requests end far before their limits can get less than its share. A
    tenant that returns joins at the end of the queue: no tenant saves up turns, or gets ahead under a new name.

    Deficit round robin would give the same bound, but a tenant with small requests would send a whole quantum of them
    at a time, and the quantum must be as large as the largest request. Here turns are as fine as requests are, and
    there is nothing to set. The request that starts first is preempted last, whatever its tenant.

    Bound: the first of its tenant's requests starts after at most as many steps as there are tokens in the running
    requests and in as much of each other tenant's as the counters allow, provided that no request asks for more than
    `largest` or for a better class than `best`. Later requests of a tenant wait for their turns: how long depends on
    the tenants that arrive meanwhile.
    """

    largest: int
    best: int

    def __init__(self, weights: dict[Hashable, float] | None = None, best: int = 0, largest: int = 1) -> None:
        """weights: a tenant's share (1 if not named); a tenant with weight 2 gets twice the tokens.

        best: the best class in use. largest: tokens of the largest request, if known; it grows with the requests that
        come.
        """
        self._weights = _weights(weights)
        self.best, self.largest = best, largest
        self._queues: dict[int, dict[Hashable, RankQueue]] = {}  # sequences that have not started, by class and tenant
        self._back = RankQueue()  # preempted sequences: they were charged, and go before new ones of their class
        self._used: dict[tuple[int, Hashable], float] = {}  # the counters of tenants with waiting or running requests
        self._running: dict[tuple[int, Hashable], int] = {}  # tokens that their running requests were charged
        # the counter of the tenant that was served last in a class, before it was charged
        self._level: dict[int, float] = {}
        self._started = 0
        self._ripe = 64  # counters at which all queues are looked through

    def used(self, tenant: Hashable, priority: int = 0) -> float:
        """Tokens that a tenant was charged in a class, over its weight, on top of the level at which it joined."""
        return self._used.get((priority, tenant), 0.0)

    def rank(self, seq: Seq) -> Any:
        return seq.priority, seq.arrival, seq.number

    def push(self, seq: Seq) -> None:
        self.largest = max(self.largest, seq.end)
        if seq.started:
            self._back.push(seq)
            return
        if len(self._used) >= self._ripe:  # queues in which all sequences have ended and that were not looked at since
            for priority in list(self._queues):
                self._heads(priority)
            self._ripe = max(64, 2 * len(self._used))
        key = seq.priority, seq.tenant
        queues = self._queues.setdefault(seq.priority, {})
        if seq.tenant not in queues or queues[seq.tenant].peek() is None:
            waiting = [self._used[seq.priority, tenant] for tenant, queue in queues.items() if queue.peek()]
            level = max([self._level.setdefault(seq.priority, 0.0), *waiting])
            self._used[key] = max(self._used.get(key, level), level)
        queues.setdefault(seq.tenant, RankQueue()).push(seq)

    def peek(self) -> Seq | None:
        back = self._back.peek()
        for priority in sorted(self._queues):
            if back is not None and back.priority <= priority:
                return back
            if heads := self._heads(priority):
                return min(heads, key=lambda seq: (self._used[priority, seq.tenant], seq.rank))
        return back

    def pop(self, seq: Seq) -> None:
        if seq.started:
            self._back.pop()
            return
        key = seq.priority, seq.tenant
        queue = self._queues[seq.priority][seq.tenant]
        queue.pop()
        self._level[seq.priority] = max(self._level[seq.priority], self._used[key])
        self._used[key] += self._cost(seq.tenant, seq.end)
        self._running[key] = self._running.get(key, 0) + seq.end
        self._started += 1
        seq.rank = seq.priority, self._started  # it has started: no sequence that starts later comes before it
        if queue.peek() is None:
            self._drop(*key)

    def left(self, seq: Seq, tokens: int) -> None:
        if seq.alone:  # what it is of was charged
            return
        key = seq.priority, seq.tenant
        self._running[key] -= seq.end
        used = self._used[key]
        lowest = self._level[seq.priority] - self._cost(seq.tenant, self.largest)
        self._used[key] = max(used - self._cost(seq.tenant, seq.end - tokens), min(used, lowest))
        self._forget(key)

    def opens(self, waiting: int, running: int, step: int) -> bool:
        return True

    def settled(self, seq: Seq) -> float:
        if seq.priority > self.best:
            return math.inf
        first = seq.started or self._queues[seq.priority][seq.tenant].peek() is seq
        return seq.arrival if first else math.inf  # later requests of the tenants that are here are counted in `ahead`

    def ahead(self, seq: Seq) -> int | None:
        priority = seq.priority
        if any(s.priority < priority for s in self._all()):
            return None
        back = [s for s in self._back if s.priority == priority]
        if seq.started:
            return most_tokens(s for s in back if s.rank < seq.rank)
        queues = self._queues[priority]
        if queues[seq.tenant].peek() is not seq:
            return None
        mine = self._used[priority, seq.tenant]
        tokens = float(most_tokens(back))
        for (p, tenant), used in self._used.items():
            if p == priority and tenant != seq.tenant:
                # It is served until its counter has passed ours; what its running requests give back comes on top.
                gap = (mine - used) * self._weights.get(tenant, 1.0) if tenant in queues else 0.0
                gap += self._running.get((p, tenant), 0)
                tokens += gap + self.largest if gap >= 0 else 0
        return math.ceil(tokens)

    def _heads(self, priority: int) -> list[Seq]:
        """The first sequence of each tenant in a class; a queue in which all have ended is dropped."""
        heads = []
        for tenant, queue in list(self._queues[priority].items()):
            head = queue.peek()
            if head is None:
                self._drop(priority, tenant)
            else:
                heads.append(head)
        return heads

    def _cost(self, tenant: Hashable, tokens: int) -> float:
        return tokens / self._weights.get(tenant, 1.0)

    def _all(self) -> Iterator[Seq]:
        yield from self._back
        for queues in self._queues.values():
            for queue in queues.values():
                yield from queue

    def _drop(self, priority: int, tenant: Hashable) -> None:
        """Drop the empty queue of this tenant in this class."""
        del self._queues[priority][tenant]
        if not self._queues[priority]:
            del self._queues[priority]
        self._forget((priority, tenant))

    def _forget(self, key: tuple[int, Hashable]) -> None:
        """Drop the counter of a tenant that has no request here any more."""
        priority, tenant = key
        if not self._running.get(key) and tenant not in self._queues.get(priority, {}):
            self._running.pop(key, None)
            self._used.pop(key, None)
            if all(p != priority for p, _ in self._used):
                del self._level[priority]


class Shares:
    """Tenants by rows: the next request is of the tenant that holds the fewest, over its weight. Classes come first.

    When another tenant waits and all rows are taken, the one with the most gives some back (`displaced`), until both
    hold as many. The last of its requests that started, never its first, go back to the queue and compute the end of
    their tokens again. So a new tenant waits one step where another holds more than one row, however much others have
    asked for. A class gives rows to its own tenants and to better classes. Linked sequences hold a row each; they go
    back one by one where each is on its own (samples after their fork), else all together or not at all.

    `Fair` counts tokens and takes no row back: a request that arrives while all rows are taken waits until one ends.
    Here no bound is given: how soon the requests of a tenant after its first start depends on later arrivals.
    """

    def __init__(self, weights: dict[Hashable, float] | None = None) -> None:
        """weights: a tenant's share (1 if not named); a tenant with weight 2 may hold twice the rows."""
        self._weights = _weights(weights)
        self._queues: dict[int, dict[Hashable, RankQueue]] = {}  # by class and tenant
        # What started and has not ended, even if paused and without a row. A ticket stands for its sequences, but for
        # those that were sent back alone.
        self._holders: set[Seq] = set()
        self._served: dict[Hashable, int] = {}  # when each tenant that is here was last served
        self._started = 0
        self._ripe = 64  # classes at which all are looked through

    def rank(self, seq: Seq) -> Any:
        return seq.priority, _NEVER, seq.arrival, seq.number

    def push(self, seq: Seq) -> None:
        self._holders.discard(seq)
        # classes in which all sequences have ended and that were not looked at since
        if len(self._queues) >= self._ripe:
            for priority in list(self._queues):
                self._living(priority)
            self._ripe = max(64, 2 * len(self._queues))
        self._served.setdefault(seq.tenant, self._started)
        self._queues.setdefault(seq.priority, {}).setdefault(seq.tenant, RankQueue()).push(seq)

    def peek(self) -> Seq | None:
        heads = self._heads()
        if len(heads) < 2:
            return next(iter(heads.values()), None)
        rows = self._rows()
        return heads[min(heads, key=lambda t: (self._load(rows, t, 1), self._served[t], heads[t].rank))]

    def pop(self, seq: Seq) -> None:
        self._queues[seq.priority][seq.tenant].pop()
        self._holders.add(seq)
        self._started += 1
        self._served[seq.tenant] = self._started
        if not seq.started:
            seq.rank = seq.priority, self._started, 0.0, 0  # no sequence that starts later comes before it

    def left(self, seq: Seq, tokens: int) -> None:
        self._holders.discard(seq)
        self._forget(seq.tenant)

    def opens(self, waiting: int, running: int, step: int) -> bool:
        return True

    def weight(self, tenant: Hashable) -> float:
        return self._weights.get(tenant, 1.0)

    def displaced(self) -> list[Seq]:
        """The sequences that must give back their rows, because a tenant with fewer rows waits; asked when too few are
        free. A ticket stands for all of its sequences.
        """
        heads = self._heads()
        if not heads:
            return []
        held: dict[Hashable, list[Seq]] = {}
        for seq in sorted(self._holders, key=lambda s: (s.rank, s.number)):  # those that were linked have one rank
            held.setdefault(seq.tenant, []).extend(_apart(seq))
        rows = self._rows()
        priority = next(iter(heads.values())).priority
        waiting = {t: self._queues[priority][t].rows(rows.total()) for t in heads}
        out: list[Seq] = []
        while waiting:
            taker = min(waiting, key=lambda t: (self._load(rows, t, 1), self._served[t]))
            givers = [t for t, seqs in held.items() if t != taker and len(seqs) > 1 and seqs[-1].priority >= priority]
            giver = max(givers, key=lambda t: self._load(rows, t, 0), default=None)
            given = 0 if giver is None else len(held[giver][-1].bound)
            if giver is None or self._load(rows, giver, -given) < self._load(rows, taker, 1):
                break
            out.append(held[giver].pop())
            rows[giver] -= given
            rows[taker] += given
            waiting[taker] -= given
            if waiting[taker] <= 0:
                del waiting[taker]
        return out

    def settled(self, seq: Seq) -> float:
        return math.inf

    def ahead(self, seq: Seq) -> int | None:
        return None

    def _heads(self) -> dict[Hashable, Seq]:
        """The first sequence of each tenant, in the best class in which any waits."""
        return next((heads for priority in sorted(self._queues) if (heads := self._living(priority))), {})

    def _living(self, priority: int) -> dict[Hashable, Seq]:
        """The first sequence of each tenant in a class. Nothing is kept of a class in which all have ended."""
        queues, heads = self._queues[priority], {}
        for tenant, queue in list(queues.items()):
            if (head := queue.peek()) is None:
                del queues[tenant]
                self._forget(tenant)
            else:
                heads[tenant] = head
        if not heads:
            del self._queues[priority]
        return heads

    def _rows(self) -> Counter[Hashable]:
        rows = Counter[Hashable]()
        for seq in self._holders:
            rows[seq.tenant] += sum(len(each.bound) for each in _apart(seq))
        return rows

    def _load(self, rows: Counter[Hashable], tenant: Hashable, more: int) -> float:
        """The rows that a tenant would hold with this many more, over its weight."""
        return (rows[tenant] + more) / self.weight(tenant)

    def _forget(self, tenant: Hashable) -> None:
        """Drop all that is kept of a tenant that has no request here any more."""
        if not any(tenant in queues for queues in self._queues.values()) and not any(
            seq.tenant == tenant for seq in self._holders
        ):
            self._served.pop(tenant, None)


def _apart(seq: Seq) -> list[Seq]:
    """Of a sequence that holds rows, or of a ticket: what can be sent back by itself."""
    if seq.link is None or not seq.link.parted or seq is not seq.link.ticket:
        return [seq] if seq.row >= 0 else []
    return [each for each in seq.link.seqs if each.row >= 0 and not each.alone]


class WaitingServed:
    """Lets prompts start when enough of them wait, or when they have waited long enough. As TGI's router does.

    For models that cannot compute prompts beside tokens, where each prompt makes all requests wait. ratio: how many
    must wait for each running one. patience: steps after which a single waiting one is enough. order: the policy that
    orders them (default: Fcfs).
    """

    ratio: float
    patience: int
    rank: Callable[[Seq], Any]
    push: Callable[[Seq], None]
    peek: Callable[[], Seq | None]
    left: Callable[[Seq, int], None]

    def __init__(self, ratio: float = 1.2, patience: int = 20, order: Policy | None = None) -> None:
        if not ratio >= 0 or not patience >= 0:
            raise ConfigError(f"ratio and patience must be >= 0; got {ratio!r} and {patience!r}.")
        self.ratio, self.patience = ratio, patience
        self.order: Policy = Fcfs() if order is None else order
        self.rank, self.push, self.peek, self.left = self.order.rank, self.order.push, self.order.peek, self.order.left
        self._step = self._last = 0  # the current step, and the last one in which a request started

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
