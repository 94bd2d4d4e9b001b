"""Replays a trace: the production scheduler plans each step, and a virtual clock moves on by what the step would take.

The clock counts whole picoseconds, so many equal steps can be done at once (`hibachi.engine.scheduler.stretch`) and
come to exactly what they come to one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields

import numpy as np

from hibachi.engine.scheduler.links import most_alike
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq, linked
from hibachi.engine.scheduler.step import Ints, Sent, StepPlan
from hibachi.engine.scheduler.stretch import Stretch, look_ahead
from hibachi.engine.simulator.feed import Arrivals, Feed
from hibachi.engine.simulator.guesses import Guesses, Guessing
from hibachi.engine.simulator.outcome import NEVER, SimOutcome
from hibachi.engine.simulator.steptime import StepTime
from hibachi.engine.simulator.tiers import SimTiers
from hibachi.engine.simulator.trace import PICOSECONDS, Numbers, Trace
from hibachi.errors import InvalidTrace, PromptTooLong, QueueFull


@dataclass(frozen=True, slots=True)
class _Cost:
    """A `StepTime` in whole picoseconds."""

    step: int
    token: int
    row: int
    position: int
    pair: int

    @classmethod
    def of(cls, time: StepTime) -> _Cost:
        return cls(*(round(getattr(time, f.name) * PICOSECONDS) for f in fields(cls)))

    def of_plan(self, plan: StepPlan) -> tuple[int, int]:
        """(picoseconds, tokens) of a step."""
        q, rows = plan.q if plan.draft is None else plan.q + plan.draft, len(plan.rows)
        tokens = int(np.add.reduce(q))
        positions = int(np.add.reduce(plan.start)) + tokens
        if tokens == rows:  # each looks at its own positions
            pairs = positions
        else:
            q = q.astype(np.int64)
            pairs = int(np.add.reduce(q * plan.start + q * (q + 1) // 2))
        return (
            self.step + self.token * tokens + self.row * rows + self.position * positions + self.pair * pairs,
            tokens,
        )

    def of_stretch(self, rows: int, positions: int) -> tuple[int, int]:
        """Picoseconds of its first step, and by how many each further one takes longer."""
        growth = (self.position + self.pair) * rows
        return self.step + (self.token + self.row) * rows + (self.position + self.pair) * positions, growth


@dataclass(slots=True, eq=False)
class _StretchAhead:
    """The first `steps` of a stretch that begins at `clock`."""

    stretch: Stretch
    clock: int
    first: int
    growth: int
    steps: int

    @property
    def end(self) -> int:
        return self.clock + span(self.steps, self.first, self.growth)

    def cut(self, at: int) -> None:
        """No step begins at this time or later."""
        self.steps = min(self.steps, beginning_before(at - self.clock, self.first, self.growth))


class TraceReplay:
    """One trace through one scheduler. `run` does it all; keys: share prefixes, if the trace knows any. each: tokens
    that a row gets in a step, or what is left of its output. guesses: tokens are proposed. samples: continuations of a
    request, as many of them linked as there is room for; it ends with the last of them.

    Whoever has several `add`s requests to each, `begin`s what comes next, and `settle`s it at its `end`. All of their
    times are picoseconds.
    """

    trace: Trace
    scheduler: Scheduler
    end: float  # of what has begun; infinity: nothing has
    emitted: Numbers  # requests whose first token came with what was settled last: int64 [n]
    finished: Sequence[Seq]  # that ended with it

    def __init__(
        self,
        trace: Trace,
        scheduler: Scheduler,
        time: StepTime,
        *,
        keys: bool = True,
        each: int = 1,
        guesses: Guesses | None = None,
        samples: int = 1,
    ) -> None:
        self.trace, self._samples = trace, samples
        self.outcome: SimOutcome = SimOutcome(len(trace))
        self._cost, self._each = _Cost.of(time), each
        self._guessing = None if guesses is None else Guessing(guesses, len(trace))
        self._keys = trace.block_keys(scheduler.limits.block_size) if keys and scheduler.pool else lambda i: None
        self.take(scheduler, None)

    def beside(self, scheduler: Scheduler, tiers: SimTiers | None = None) -> TraceReplay:
        """Another engine for requests of the same trace. What comes of them is in the same outcome."""
        other = copy(self)
        other.take(scheduler, tiers)
        return other

    def take(self, scheduler: Scheduler, tiers: SimTiers | None) -> None:
        """Begin with this scheduler, in which nothing is."""
        rows = scheduler.limits.rows
        self.scheduler, self._tiers = scheduler, tiers
        self._last = np.full(rows, NEVER, np.int64)  # when each row got its last token
        self._owner = np.zeros(rows, np.int64)  # the request that has the row
        self._silent = 0  # rows that have had no token yet
        self._nobody = np.zeros(rows, np.bool_)
        self._ahead: _StretchAhead | None = None
        self._steps = False  # steps are under way that are committed
        self.end, self.emitted, self.finished = math.inf, self._owner[:0], ()

    def run(self, fast: bool = True, feed: Feed | None = None, tiers: SimTiers | None = None) -> SimOutcome:
        """Replay everything, until the last request has ended. fast: do uneventful steps at once; the result is the
        same. feed: says which requests come when (None means as the trace does). tiers: of the scheduler.

        Raises InvalidTrace if the scheduler will not go on, which only a policy that lets no request start can cause.
        """
        scheduler, self._tiers = self.scheduler, tiers
        feed = feed or Arrivals(self.trace)
        clock = 0
        while True:
            while (i := feed.take(clock, scheduler.waiting + scheduler.running)) is not None:
                self.add(i, clock)
            self.begin(clock, fast)
            if feed.next < self.end:
                self.cut(int(feed.next))
            if self.end == math.inf:
                break
            clock = self.settle()
        self.outcome.clock = clock
        self.close()
        return self.outcome

    def add(self, i: int, clock: int) -> bool:
        """Request i comes; False means that it is refused, which is counted."""
        trace = self.trace
        prompt, output, priority = int(trace.prompt[i]), int(trace.output[i]), int(trace.priority[i])
        tenant, arrival = trace.tenant[i] if trace.tenant else "", float(trace.arrival[i]) / PICOSECONDS

        def made() -> Seq:
            return Seq(prompt, output, owner=i, priority=priority, tenant=tenant, arrival=arrival, keys=self._keys(i))

        try:
            most = self._samples if self._samples == 1 else most_alike(self.scheduler.limits, prompt, output)
            for at in range(0, self._samples, most):
                seqs = [made() for _ in range(min(most, self._samples - at))]
                seqs[0].held = self._tiers is not None and self._tiers.begin(seqs[0], clock)
                self.scheduler.add(seqs[0] if len(seqs) == 1 else linked(seqs, alike=True, parts=True), arrival)
        except (PromptTooLong, QueueFull) as e:
            cause = type(e).__name__
            self.outcome.refused[cause] = self.outcome.refused.get(cause, 0) + 1
            return False
        return True

    def begin(self, clock: int, fast: bool = True) -> None:
        """Begin the next step, or uneventful ones. What began before is settled."""
        scheduler, tiers = self.scheduler, self._tiers
        wake = math.inf if tiers is None else tiers.move(clock)
        if self._guessing is not None:
            self._guessing.propose(scheduler)
        if fast and self._each == 1 and (stretch := look_ahead(scheduler)):
            first, growth = self._cost.of_stretch(len(stretch.rows), stretch.positions)
            self._ahead = _StretchAhead(stretch, clock, first, growth, stretch.steps)
            if wake < self._ahead.end:
                self._ahead.cut(int(wake))
            self.end = self._ahead.end
            return
        self._suspend(scheduler.make_room())
        plan = scheduler.schedule(clock / PICOSECONDS)
        if plan is not None:
            self.end, self._steps = self._step(plan, clock), True
        else:
            self.end = int(wake) if wake < math.inf else wake

    def cut(self, at: int) -> None:
        """Something comes at this time, before the end. The step that is under way then is the last."""
        if self._ahead is not None:
            self._ahead.cut(at)
            self._stretch(self._ahead)
        elif not self._steps:
            self.end = at

    def settle(self) -> int:
        """What has begun has ended; returns when."""
        if self._ahead is not None:
            self._stretch(self._ahead)
        elif not self._steps:
            self.emitted, self.finished = self._owner[:0], ()
        end = int(self.end)
        self._steps, self.end = False, math.inf
        return end

    def close(self) -> None:
        """Nothing else is to come: what the scheduler counted goes to the outcome. Raises InvalidTrace, as `run`."""
        scheduler, outcome = self.scheduler, self.outcome
        if scheduler.waiting or scheduler.running:
            raise InvalidTrace(
                f"{self.trace.name}: the policy lets none of {scheduler.waiting} waiting requests in while "
                f"{scheduler.running} run, and nothing else is to come. Choose another policy."
            )
        outcome.preemptions += scheduler.counts.preemptions
        outcome.hit_tokens += scheduler.counts.prefix_hits
        outcome.evictions += scheduler.pool.evictions if scheduler.pool else 0
        outcome.disk_loads += self._tiers.counts.brought if self._tiers else 0

    def _suspend(self, sent: Sent) -> None:
        """These have lost their rows."""
        for seq, row in sent:
            self.outcome.last[seq.owner] = self._last[row]
            self._silent -= self.outcome.last[seq.owner] == NEVER

    def _step(self, plan: StepPlan, clock: int) -> int:
        """One planned step; returns the clock after it."""
        outcome, scheduler = self.outcome, self.scheduler
        took, tokens = self._cost.of_plan(plan)
        if self._tiers is not None:
            took = self._tiers.before(plan, took, outcome)
        now = clock + took
        outcome.steps += 1
        outcome.planned += 1
        outcome.computed_tokens += tokens
        self._suspend(plan.preempted)
        for seq in plan.fresh:
            i = seq.owner
            self._owner[seq.row] = i
            self._last[seq.row] = outcome.last[i]
            self._silent += outcome.last[i] == NEVER
            if outcome.started[i] == NEVER:
                outcome.started[i] = clock
                outcome.prompt_tokens += seq.prompt_len
        rows, counts = plan.rows[plan.emit], None
        if plan.draft is not None and self._guessing is not None:
            draft = plan.draft[plan.emit]
            kept = self._guessing.kept(draft)
            counts = kept + np.int32(1)
            outcome.proposed_tokens += int(draft.sum())
            outcome.accepted_tokens += int(kept.sum())
            outcome.new_tokens += int(kept.sum())
        self._tokens(rows, now, counts)
        if self._each > 1:
            counts = np.minimum(self._each, scheduler.table.end[rows] - plan.end[plan.emit])
            more = int(counts.sum()) - len(rows)
            outcome.new_tokens += more
            outcome.gaps.add(np.zeros(more, np.int64))  # they come together
        outcome.timeline.add(clock, now, scheduler.waiting, scheduler.running, self._held())
        forks = [(seq, seq.link.seqs[0]) for seq in plan.seqs if seq.vacant and seq.link] if plan.linked else []
        self._end(scheduler.commit(plan, self._nobody[: len(rows)], counts, forks).finished, now)
        return now

    def _stretch(self, ahead: _StretchAhead) -> None:
        """Steps that all begin before something comes."""
        outcome, scheduler, rows, steps = self.outcome, self.scheduler, ahead.stretch.rows, ahead.steps
        first, growth, end = ahead.first, ahead.growth, ahead.end
        self._ahead, self._steps, self.end = None, True, end
        self._tokens(rows, ahead.clock + first)
        if steps > 1:
            outcome.gaps.add_run(first + growth, growth, steps - 1, len(rows))
            outcome.new_tokens += len(rows) * (steps - 1)
            self._last[rows] = end
        outcome.steps += steps
        outcome.computed_tokens += len(rows) * steps
        outcome.timeline.add(ahead.clock, end, scheduler.waiting, len(rows), self._held())
        self._end(ahead.stretch.run(steps), end)

    def _tokens(self, rows: Numbers, now: int, counts: Ints | None = None) -> None:
        """These rows have got a token, or `counts` tokens that share the time since the one before."""
        last = self._last[rows]
        self._last[rows] = now
        self.outcome.new_tokens += len(rows)
        self.emitted = self._owner[:0]
        if self._silent:
            first = last == NEVER
            if n := int(np.count_nonzero(first)):
                self.emitted = self._owner[rows[first]]
                self.outcome.first[self.emitted] = now
                self._silent -= n
                last, counts = last[~first], None if counts is None else counts[~first]
        gaps = now - last
        self.outcome.gaps.add(gaps if counts is None else np.repeat(gaps // counts, counts))

    def _end(self, finished: list[Seq], now: int) -> None:
        self.finished = finished
        for seq in finished:
            self.outcome.last[seq.owner] = now

    def _held(self) -> int:
        pool = self.scheduler.pool
        return pool.usable - pool.free if pool else 0


def span(steps: int, first: int, growth: int) -> int:
    """first + (first + growth) + ..., this many terms."""
    return steps * first + growth * (steps * (steps - 1) // 2)


def beginning_before(room: int, first: int, growth: int) -> int:
    """How many steps, the first of them now, begin before `room` > 0 is over."""
    if not growth:
        return (room - 1) // first + 1
    b = 2 * first - growth
    n = (math.isqrt(b * b + 8 * growth * room) - b) // (2 * growth)
    while span(n, first, growth) >= room:  # the root was rounded
        n -= 1
    while span(n + 1, first, growth) < room:
        n += 1
    return n + 1
