"""Policies by themselves: who is next, and what each says of those who wait."""

import math

import pytest

from hibachi.engine.scheduler.policy import Fair, Fcfs, Priority, WaitingServed, most_tokens
from hibachi.engine.scheduler.sequence import Seq
from hibachi.errors import ConfigError
from hibachi.request import Finish

from ..lib.leaks import kept


def seq(number, *, priority=0, tenant="", arrival=None, end=10, started=False):
    """As the scheduler hands it to a policy."""
    out = Seq(end - 1, 1, priority=priority, tenant=tenant, arrival=float(number if arrival is None else arrival))
    out.number, out.end, out.started = number, end, started
    return out


def queued(policy, *seqs):
    for s in seqs:
        s.rank = policy.rank(s)
        policy.push(s)
    return policy


def served(policy):
    """The numbers of those who wait, in the order of service."""
    order = []
    while (s := policy.peek()) is not None:
        policy.pop(s)
        order.append(s.number)
    return order


def test_by_arrival_then_by_number():
    seqs = [seq(2, arrival=1), seq(1, arrival=1), seq(3, arrival=0, priority=9), seq(4, arrival=2, priority=-1)]
    assert served(queued(Fcfs(), *seqs)) == [3, 1, 2, 4]


def test_by_class_then_by_arrival():
    seqs = [seq(1, priority=1), seq(2), seq(3, priority=-1), seq(4), seq(5, priority=-1, arrival=0)]
    assert served(queued(Priority(), *seqs)) == [5, 3, 2, 4, 1]


def test_a_class_is_made_up_for_by_waiting():
    seqs = [seq(1, priority=2, arrival=0), seq(2, arrival=19), seq(3, arrival=20), seq(4, arrival=21)]
    assert served(queued(Priority(age=10.0), *seqs)) == [2, 1, 3, 4]


@pytest.mark.parametrize("many", [63, 64, 65, 127, 128, 129, 300])
def test_those_who_ended_are_passed_over_however_many_they_are(many):
    policy, seqs = Fcfs(), [seq(i) for i in range(many)]
    for s in seqs:
        queued(policy, s)
        if s.number % 3:
            s.finish = Finish.CANCELLED
    assert served(policy) == list(range(0, many, 3))


@pytest.mark.parametrize("make", [Fcfs, Priority])
def test_ahead_are_those_ranked_before_it(make):
    seqs = [seq(i, end=10**i) for i in range(4)]
    policy = queued(make(), *seqs)
    assert [policy.ahead(s) for s in seqs] == [0, 1, 11, 111]
    seqs[1].finish = Finish.CANCELLED
    assert policy.ahead(seqs[3]) == 101


def test_from_when_nobody_passes_it():
    assert Fcfs().settled(seq(1, arrival=3, priority=5)) == 3
    assert Priority().settled(seq(1, arrival=3)) == 3
    assert Priority().settled(seq(1, arrival=3, priority=1)) == math.inf
    assert Priority(age=10, best=-1).settled(seq(1, arrival=3, priority=1)) == 23
    assert Priority(age=10, best=-1).settled(seq(1, arrival=3, priority=-1)) == 3


def test_the_tenant_with_the_fewest_tokens_is_next():
    seqs = [seq(i, tenant="a") for i in range(3)] + [seq(i, tenant="b", end=20) for i in range(3, 6)]
    assert served(queued(Fair(), *seqs)) == [0, 3, 1, 2, 4, 5]


def test_with_twice_the_weight_a_tenant_gets_twice_the_tokens():
    seqs = [seq(i, tenant="a") for i in range(6)] + [seq(i, tenant="b") for i in range(6, 12)]
    assert served(queued(Fair({"b": 2.0}), *seqs)) == [0, 6, 7, 1, 8, 9, 2, 10, 11, 3, 4, 5]


def test_what_was_charged_and_not_used_is_given_back():
    policy, first, second = Fair(), seq(1, tenant="a", end=10), seq(2, tenant="a", end=10)
    queued(policy, first, second, seq(3, tenant="b", end=10))
    policy.pop(first)
    assert policy.used("a") == 10
    policy.left(first, 4)
    assert policy.used("a") == 4
    assert served(policy) == [3, 2]
    assert policy.used("a") == 14


def test_credit_beyond_the_largest_request_lapses():
    """A counter falls no further than one request of the largest size below the level of the class."""
    policy = Fair(largest=100)
    for i in range(4):
        queued(policy, seq(i, tenant="a", end=100))
    for i in range(4, 8):
        queued(policy, seq(i, tenant="b", end=100))
    started = []
    for _ in range(6):
        s = policy.peek()
        policy.pop(s)
        started.append(s)
    assert policy.used("a") == policy.used("b") == 300
    for s in started:
        if s.tenant == "a":
            policy.left(s, 0)
    assert policy.used("a") == 100


def test_who_was_preempted_goes_before_new_ones_of_its_class():
    back, new, better = seq(2, started=True), seq(1, tenant="x"), seq(3, priority=-1)
    assert served(queued(Fair(), new, back, better)) == [3, 2, 1]


def test_a_tenant_that_comes_stands_behind_all_who_wait():
    policy = Fair()
    for i in range(3):
        queued(policy, seq(i, tenant="a"))
    policy.pop(policy.peek())
    policy.pop(policy.peek())
    queued(policy, seq(9, tenant="late"))
    assert policy.used("late") == policy.used("a") == 20


def test_counters_go_with_the_last_request():
    policy, only = Fair(), seq(1, tenant="a", priority=3)
    queued(policy, only)
    policy.pop(only)
    assert policy.used("a", 3) == 10
    policy.left(only, 10)
    assert policy.used("a", 3) == 0 and kept(policy) == kept(Fair())


def test_fair_ahead_of_who_was_preempted_are_those_before_it_who_were_as_well():
    back = [seq(i, end=10**i, started=True) for i in range(3)]
    policy = queued(Fair(), *back, seq(9), seq(10, priority=1))
    assert [policy.ahead(s) for s in back] == [0, 1, 11]


def test_fair_ahead_of_the_first_of_a_tenant():
    a, b, late = seq(1, tenant="a", end=10), seq(2, tenant="b", end=30), seq(3, tenant="a", end=10)
    policy = queued(Fair(), a, b, late)
    assert policy.ahead(a) == 30  # as much as a request of the largest size of the other
    assert policy.ahead(b) == 30
    assert policy.ahead(late) is None
    policy.pop(a)
    assert policy.ahead(b) == 30 and policy.ahead(late) == 10 + 30  # what runs of a may come back, and what b is behind
    worse = seq(4, tenant="a", priority=1)
    assert queued(policy, worse).ahead(worse) is None
    back = seq(5, end=7, started=True)
    assert queued(policy, back).ahead(late) == 10 + 30 + 7


def test_fair_ahead_counts_every_other_tenant_and_not_ones_own():
    seqs = [seq(i, tenant=name, end=10) for i, name in enumerate("abc")]
    assert [queued(Fair(), *seqs).ahead(s) for s in seqs] == [20, 20, 20]
    other = seq(9, tenant="x", end=10, priority=1)
    alone = queued(Fair(), seqs[0], other)
    assert alone.ahead(seqs[0]) == 0 and alone.ahead(other) is None


def test_fair_settles_who_is_first_of_its_tenant_in_the_best_class():
    first, second, worse = seq(1, tenant="a"), seq(2, tenant="a"), seq(3, tenant="a", priority=1)
    policy = queued(Fair(), first, second, worse)
    assert policy.settled(first) == 1 and policy.settled(second) == math.inf and policy.settled(worse) == math.inf
    assert Fair().settled(seq(4, started=True)) == 4


def test_the_gate_opens_for_enough_who_wait_or_after_long_enough():
    gate = WaitingServed(1.5, 4)
    assert gate.opens(0, 0, 1)  # nobody runs
    queued(gate, seq(1))
    gate.pop(gate.peek())  # in step 1
    assert [gate.opens(n, 4, 2) for n in (1, 5, 6, 7)] == [False, False, True, True]
    assert [gate.opens(1, 4, step) for step in (3, 4, 5, 6)] == [False, False, True, True]
    assert gate.opens(4, 3, 2) and not gate.opens(3, 3, 2)  # 4.5 is rounded down


def test_the_gate_asks_the_order_behind_it():
    class Shut(Fcfs):
        def opens(self, waiting, running, step):
            return False

    assert not WaitingServed(order=Shut()).opens(9, 0, 1)
    gate, seqs = WaitingServed(patience=7), [seq(1, end=10), seq(2, end=10)]
    queued(gate, *seqs)
    assert [gate.ahead(s) for s in seqs] == [7, 17] and gate.settled(seqs[1]) == 2
    second = seq(3, tenant="a")
    assert queued(WaitingServed(order=Fair()), seq(2, tenant="a"), second).ahead(second) is None


def test_fair_forgets_classes_that_nobody_looks_at():
    policy = queued(Fair(), seq(0))
    for i in range(1, 1000):
        gone = seq(i, priority=i, tenant=f"t{i}")
        queued(policy, gone)
        gone.finish = Finish.CANCELLED
    assert kept(policy) < 1000
    assert served(policy) == [0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Priority(age=0),
        lambda: Priority(age=-1),
        lambda: Fair({"a": 0}),
        lambda: Fair({"a": -1}),
        lambda: WaitingServed(-0.1),
        lambda: WaitingServed(1, -1),
        lambda: WaitingServed(math.nan),
        lambda: Priority(math.nan),
    ],
)
def test_what_has_no_meaning_is_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_limits_of_their_arguments():
    Priority(age=1e-9), Fair({"a": 1e-9}), WaitingServed(0, 0)
    assert most_tokens([seq(1, end=3), seq(2, end=4)]) == 7
