"""Time shares: which tenants compute in the next step, where a step takes longer the more rows it has.

Equal rows are no fair share of time: one request beside sixty-three others waits for a step of sixty-four rows with
each of its tokens. So the time of a step is charged to tenants by their tokens in it. The turn goes to the tenant whose
part of a step would end first if each tenant had a device of its own; tenants with as few tokens go along, the others
sit out. Each tenant gets as much of the time as it can use, and none is slowed down by more than the number of tenants.
It costs throughput, as steps are less full. Where a small step takes nearly as long as a full one (a GPU that is not
full) no tenant would gain, and none sits out.

Virtual finishing times after Demers et al. 1989 (fair queueing), for parts of steps in place of packets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

GAIN = 0.5  # a step without the tenants that sit out must take less than this part of a step with all
FADE = 0.98  # weight of an older step, to the power of its age, because times of steps drift


class StepTimes:
    """Estimates the time of a step from its tokens: a straight line through the latest steps (least squares)."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._n = FADE * self._n + 1.0
        self._x = FADE * self._x + tokens
        self._y = FADE * self._y + seconds
        self._xx = FADE * self._xx + float(tokens) * tokens
        self._xy = FADE * self._xy + seconds * tokens

    def of(self, tokens: int) -> float:
        """Seconds of a step with this many tokens, up to a factor where all steps had as many: then all tokens cost the
        same.
        """
        spread = self._n * self._xx - self._x * self._x
        if spread <= 1e-6 * self._n * self._xx:
            return float(tokens)
        slope = max((self._n * self._xy - self._x * self._y) / spread, 0.0)
        start = max((self._y - slope * self._x) / self._n, 0.0)
        return start + slope * tokens


class TimeShares:
    """The times of tenants that have something to compute. It reads no clock: `took` reports times."""

    def __init__(self, weight: Callable[[Hashable], float] = lambda tenant: 1.0) -> None:
        """weight: a tenant's share; a tenant with weight 2 gets twice the time."""
        self.times: StepTimes = StepTimes()
        self._weight = weight
        self._spent: dict[Hashable, float] = {}
        self._level = 0.0  # what the one that was charged least has been charged

    def resting(self, wanted: Mapping[Hashable, int], best: Mapping[Hashable, int]) -> frozenset[Hashable]:
        """The tenants that sit out the next step. wanted: tokens that each tenant would compute in it, > 0; best: its
        best class.

        No tenant sits out for tenants of worse classes.
        """
        spent = self._spent
        here = [spent[tenant] for tenant in wanted if tenant in spent]
        self._level = level = max(min(here, default=0.0), self._level)
        # A new tenant starts without credit; one that returns at once still has what it was charged.
        kept = {tenant: so_far for tenant, so_far in spent.items() if so_far > level}
        self._spent = spent = kept | {tenant: max(spent.get(tenant, level), level) for tenant in wanted}
        if len(wanted) < 2:
            return frozenset()
        ends = {t: spent[t] + self.times.of(n) / self._weight(t) for t, n in wanted.items()}
        turn = min(ends, key=lambda t: (ends[t], wanted[t]))
        few = {t: n for t, n in wanted.items() if n <= wanted[turn] or best[t] < best[turn]}
        if self.times.of(sum(few.values())) > GAIN * self.times.of(sum(wanted.values())):
            return frozenset()
        return frozenset(wanted.keys() - few.keys())

    def took(self, computed: Mapping[Hashable, int], seconds: float) -> None:
        """Report the time of a step, with its tokens of each tenant."""
        total = sum(computed.values())
        if not total:
            return
        self.times.add(total, seconds)
        for tenant, tokens in computed.items():
            if tenant in self._spent:
                self._spent[tenant] += seconds * tokens / total / self._weight(tenant)
