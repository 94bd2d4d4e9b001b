"""Who makes way: kvboost's cases, and any sequence of calls beside a list that is sorted each time."""

import math
import random

import pytest

from hibachi.engine.tiers.keeping import EVICTIONS, Keeper


def stored(keeper, importances):
    return [keeper.admit(b"%d" % i, 1, importance) for i, importance in enumerate(importances, 1)]


def test_k20_the_least_important_outside_the_window_makes_way():
    keeper = Keeper(3, "importance", window=1)
    assert stored(keeper, [5, 1, 9, 2]) == [[], [], [], [b"2"]]
    assert list(keeper) == [b"1", b"3", b"4"]


@pytest.mark.parametrize("policy", EVICTIONS)
def test_k21_a_window_as_large_as_what_is_kept_refuses_what_is_new(policy):
    keeper = Keeper(2, policy, window=8)
    assert stored(keeper, [5, 1, 9, 2]) == [[], [], None, None]
    assert list(keeper) == [b"1", b"2"] and keeper.used == 2


class Oracle:
    """Entries in a list, the one that was used longest ago first: [name, size, importance, uses, pins]."""

    def __init__(self, capacity, policy, window):
        self.capacity, self.window, self.entries = capacity, window, []
        self.rank = {"lru": lambda e: 0, "frequency": lambda e: e[3], "importance": lambda e: (e[2], e[3])}[policy]

    def admit(self, name, size, importance):
        if self.named(name):
            self.use(name)
            return []
        may = [entry for entry in self.entries[: max(0, len(self.entries) - self.window)] if not entry[4]]
        may.sort(key=self.rank)  # stable: then by their last use
        gone = []
        while sum(entry[1] for entry in self.entries if entry not in gone) + size > self.capacity:
            if not may:
                return None
            gone.append(may.pop(0))
        self.entries = [entry for entry in self.entries if entry not in gone]
        self.entries.append([name, size, -math.inf if math.isnan(importance) else importance, 1, 0])
        return [entry[0] for entry in gone]

    def use(self, name):
        for entry in self.named(name):
            self.entries.remove(entry)
            self.entries.append(entry)
            entry[3] += 1

    def drop(self, name):
        self.entries = [entry for entry in self.entries if entry[0] != name]

    def pin(self, name):
        for entry in self.named(name):
            entry[4] += 1
        return bool(self.named(name))

    def unpin(self, name):
        for entry in self.named(name):
            entry[4] = max(0, entry[4] - 1)

    def weigh(self, name, importance):
        for entry in self.named(name):
            entry[2] = importance

    def named(self, name):
        return [entry for entry in self.entries if entry[0] == name]


CALLS = ["admit"] * 6 + ["use"] * 3 + ["drop"] * 3 + ["pin"] + ["unpin"] * 2 + ["weigh"]
SIZES = [0, *[1] * 9, 2, 3, 12, 20, 40]
IMPORTANCES = [0.0, 1.0, 2.5, -math.inf, math.inf, math.nan]


@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("policy", EVICTIONS)
def test_any_calls_keep_what_a_sorted_list_keeps(policy, window):
    rng = random.Random(f"{policy} {window}")
    keeper, oracle = Keeper(24, policy, window), Oracle(24, policy, window)
    for i in range(3000):
        for _ in range(200 if i % 100 == 0 else 0):  # what comes and goes leaves nothing behind
            assert keeper.admit(b"brief", 0, 3.0) == []
            keeper.drop(b"brief")
        call, name = rng.choice(CALLS), b"%d" % rng.randrange(60)
        more = (rng.choice(SIZES), rng.choice(IMPORTANCES)) if call == "admit" else ()
        more = (rng.choice(IMPORTANCES[:3]),) if call == "weigh" else more
        found = getattr(keeper, call)([name] if call == "weigh" else name, *more)
        assert found == getattr(oracle, call)(name, *more), (call, name, *more)
        assert list(keeper) == [entry[0] for entry in oracle.entries]
        assert (name in keeper) == bool(oracle.named(name))
        assert keeper.used == sum(entry[1] for entry in oracle.entries)
        assert len(vars(keeper)["_heap"]) <= 2 * 60 + 65  # nothing is taken from its middle
    keeper.clear()
    assert (list(keeper), keeper.used) == ([], 0) and keeper.admit(b"", 24) == []
