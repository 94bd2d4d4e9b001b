"""Tenants share the time of a device: who asks for little is not slowed down by who asks for much."""

from collections import Counter

import pytest

from hibachi.engine.scheduler.timeshares import StepTimes, TimeShares

from ..lib.leaks import kept


def cpu(tokens):
    """A step of 64 takes six times as long as one of 1."""
    return 3e-3 + 0.27e-3 * tokens


def gpu(tokens):
    return 10e-3 + 0.01e-3 * tokens


class Device:
    """Tenants that want so many tokens in each step. tokens: what each got; steps: in how many it was."""

    def __init__(self, cost=cpu, weights=None, classes=None):
        self.classes = classes or {}
        self.shares = TimeShares(lambda tenant: (weights or {}).get(tenant, 1.0))
        self.cost, self.now, self.tokens, self.steps = cost, 0.0, Counter(), Counter()
        for n in (1, 64):  # it has seen steps of several sizes
            self.shares.took({"x": n}, cost(n))

    def step(self, wanted):
        resting = self.shares.resting(wanted, {tenant: self.classes.get(tenant, 0) for tenant in wanted})
        assert resting < wanted.keys(), "somebody has its turn"
        mine = {tenant: n for tenant, n in wanted.items() if tenant not in resting}
        took = self.cost(sum(mine.values()))
        self.shares.took(mine, took)
        self.now += took
        self.tokens.update(mine)
        self.steps.update(mine.keys())
        return mine

    def run(self, wanted, seconds):
        until = self.now + seconds
        while self.now < until:
            self.step(wanted)


def test_a_line_through_what_steps_took():
    times = StepTimes()
    for n in (1, 64, 8, 64, 64, 1, 30):
        times.add(n, cpu(n))
    for n in (0, 1, 17, 64, 500):
        assert times.of(n) == pytest.approx(cpu(n), rel=1e-6)


def test_what_steps_take_is_learnt_anew():
    times = StepTimes()
    for n in (1, 64) * 200:
        times.add(n, 10 * cpu(n))
    for n in (1, 64) * 300:
        times.add(n, cpu(n))
    assert times.of(32) == pytest.approx(cpu(32), rel=0.05)


@pytest.mark.parametrize("seen", [[], [(8, 1.0)], [(8, 1.0), (8, 2.0)]])
def test_as_long_as_all_steps_were_alike_tokens_cost_the_same(seen):
    times = StepTimes()
    for n, seconds in seen:
        times.add(n, seconds)
    assert times.of(10) / times.of(5) == 2


def test_times_that_fall_with_tokens_are_noise():
    times = StepTimes()
    times.add(1, 2.0)
    times.add(64, 1.0)
    assert times.of(64) == times.of(1) > 0


def test_nobody_sits_out_alone():
    assert TimeShares().resting({"a": 5}, {"a": 0}) == TimeShares().resting({}, {}) == frozenset()


def test_each_of_two_has_half_of_the_time():
    device = Device()
    device.run({"few": 1, "many": 63}, 10.0)
    assert device.tokens["few"] / (10 / cpu(1)) == pytest.approx(0.55, abs=0.1), "of what it would have alone"
    assert device.tokens["many"] / (63 * 10 / cpu(63)) == pytest.approx(0.5, abs=0.1)


def test_each_of_four_has_a_fourth_at_least():
    device = Device()
    wanted = {"a": 1, "b": 2, "c": 20, "d": 41}
    device.run(wanted, 10.0)
    for tenant, n in wanted.items():
        assert device.tokens[tenant] / (n * 10 / cpu(n)) > 0.23, tenant


def test_tenants_that_want_alike_share_their_steps():
    device = Device()
    device.run({"a": 30, "b": 31}, 1.0)
    assert device.steps["a"] == device.steps["b"]


def test_where_steps_of_few_take_as_long_nobody_sits_out():
    device = Device(gpu)
    device.run({"few": 1, "many": 63}, 1.0)
    assert device.steps["few"] == device.steps["many"]


def test_who_comes_for_little_is_served_first():
    device = Device()
    device.run({"many": 63}, 1.0)
    for _ in range(20):
        alone = [device.step({"few": 1, "many": 63}) for _ in range(4)]
        assert alone == [{"few": 1}] * 4
        device.run({"many": 63}, 0.1)


def test_who_comes_back_at_once_has_saved_up_nothing():
    """Coming and going by turns gets no more than staying would."""
    device = Device()
    device.run({"many": 63}, 1.0)
    device.tokens.clear()
    until = device.now + 10
    while device.now < until:
        for _ in range(4):
            device.step({"few": 1, "many": 63})
        device.step({"many": 63})
    assert device.tokens["many"] / (63 * 10 / cpu(63)) > 0.45


def test_a_tenant_that_was_away_has_no_turns_to_catch_up_with():
    device = Device()
    device.run({"few": 1, "many": 63}, 1.0)
    device.run({"many": 63}, 100.0)
    device.steps.clear()
    device.run({"few": 1, "many": 63}, 1.0)
    assert device.steps["many"] / (1 / cpu(63)) > 0.4


def test_who_is_gone_is_forgotten():
    device = Device()
    for n in range(100):
        device.step({f"tenant {n}": 1, "many": 63})
    device.run({"many": 63}, 1.0)
    assert kept(device.shares) < 50


def test_twice_the_weight_is_twice_the_time():
    device = Device(lambda n: 1e-3 * n, {"b": 2.0})
    device.run({"a": 8, "b": 30}, 10.0)
    assert device.tokens["b"] / device.tokens["a"] == pytest.approx(2.0, rel=0.2)


def test_nobody_sits_out_for_a_worse_class():
    device = Device(classes={"nightly": 10})
    device.run({"search": 60, "nightly": 4}, 1.0)
    assert device.steps["search"] == device.steps["nightly"]
    device = Device(classes={"nightly": 10})
    device.run({"search": 4, "nightly": 60}, 1.0)
    assert device.steps["search"] > 2 * device.steps["nightly"]
