"""Which server gets a request: each policy on records, without a socket."""

from collections import Counter
from importlib.metadata import EntryPoint
from itertools import pairwise
from random import Random

import pytest

from hibachi.errors import ConfigError
from hibachi.router.policies import (
    Ask,
    LeastConnection,
    LeastLatency,
    LeastLoad,
    PowerOfTwo,
    RoundRobin,
    Sticky,
    at_home,
    preferred,
    quickest,
)
from hibachi.router.policynames import POLICIES, policy_of
from hibachi.router.upstreams import Place, Upstream, UpstreamState

ASK = Ask("m")


def upstreams(*busy, latency=(), weights=(), loads=()):
    made = []
    for i, n in enumerate(busy):
        place = Place(f"http://host{i}:8000", weight=weights[i] if weights else 1.0)
        u = Upstream(place, state=UpstreamState.UP, in_flight=n)
        u.latency = latency[i] if latency else None
        u.load = loads[i] if loads else None
        made.append(u)
    return made


@pytest.mark.parametrize(
    "busy, expected",
    [((1, 2, 5), [0]), ((0, 0, 5), [0, 1]), ((0, 0, 0), [0, 1, 2])],
)
def test_b09_least_connection(busy, expected):
    chosen = set()
    for quick in range(3):
        made = upstreams(*busy, latency=[0.1 if i == quick else 0.2 for i in range(3)])
        chosen.add(made.index(preferred(made)))
    assert sorted(chosen) == expected


def test_who_processed_fewer_comes_first_of_equals():
    """The text of text-inference-batcher, beside B-09: "the least number of requests processed"; then B-10."""
    made = upstreams(0, 0, 1, latency=(0.1, 0.5, 0.1))
    for u, n in zip(made, (7, 3, 0), strict=True):
        u.processed = n
    for policy in (LeastConnection(), PowerOfTwo(), Sticky()):
        assert policy.choose(made[:2], ASK, 0.0) is made[1]
    made[0].processed = 3
    assert LeastConnection().choose(made, ASK, 0.0) is made[0]


@pytest.mark.parametrize(
    "latency, expected",
    [((1, 2, 5), 0), ((7,), 0), ((3, 3, 3), 0), ((120, 100, 100), 1), ((1, -2, 5), 1), ((0.1, None, 0.2), 1)],
)
def test_b10_least_latency(latency, expected):
    made = upstreams(*[0] * len(latency), latency=latency)
    assert quickest(made) is made[expected]
    assert LeastLatency().choose(made, ASK, 0.0) is made[expected]


def test_the_default_asks_for_latency_where_connections_are_equal():
    made = upstreams(1, 0, 0, latency=(0.1, 0.5, 0.2))
    assert LeastConnection().choose(made, ASK, 0.0) is made[2]


def test_weights_count():
    made = upstreams(3, 2, weights=(4.0, 1.0))
    assert LeastConnection().choose(made, ASK, 0.0) is made[0]


def test_round_robin_goes_by_weight_and_evenly():
    made, policy = upstreams(0, 0, 0, weights=(2.0, 1.0, 1.0)), RoundRobin()
    order = [made.index(policy.choose(made, ASK, 0.0)) for _ in range(8)]
    assert Counter(order) == {0: 4, 1: 2, 2: 2} and order[:4] == order[4:]
    assert all(a != b for a, b in pairwise(order) if a)


def test_power_of_two_avoids_the_busiest():
    made, policy = upstreams(9, 1, 1, 1), PowerOfTwo(Random(1))
    found = Counter(made.index(policy.choose(made, ASK, 0.0)) for _ in range(300))
    assert 0 not in found and min(found.values()) > 50


def test_least_load_believes_what_servers_say():
    made = upstreams(0, 2, 1, loads=(7.0, 0.0, None))
    assert LeastLoad().choose(made, ASK, 0.0) is made[2]
    made[2].in_flight = 4
    assert LeastLoad().choose(made, ASK, 0.0) is made[1]
    heavy = upstreams(0, 0, loads=(4.0, 3.0), weights=(2.0, 1.0))
    assert LeastLoad().choose(heavy, ASK, 0.0) is heavy[0]


def test_the_home_of_a_key_is_the_same_everywhere_and_few_move():
    made = upstreams(0, 0, 0, 0, 0)
    keys = [b"%d" % n for n in range(2000)]
    four, five = made[:4], made
    before = [at_home(key, four)[0] for key in keys]
    assert before == [at_home(key, four[::-1])[0] for key in keys]
    assert max(Counter(u.name for u in before).values()) < 600
    moved = [(old, at_home(key, five)[0]) for key, old in zip(keys, before, strict=True)]
    assert all(new is old or new is made[4] for old, new in moved)
    assert sum(new is not old for old, new in moved) < 500


def test_a_heavier_one_is_at_home_for_more():
    made = upstreams(0, 0, weights=(3.0, 1.0))
    found = Counter(at_home(b"%d" % n, made)[0].name for n in range(2000))
    assert 1350 < found[made[0].name] < 1650


def test_sticky_keeps_to_its_server_while_that_takes_any():
    made, policy = upstreams(5, 0, 0), Sticky()
    ask = Ask("m", sticky="session 1", everyone=made)
    home = policy.choose(made, ask, 0.0)
    assert all(policy.choose(made, ask, float(n)) is home for n in range(5))
    others = [u for u in made if u is not home]
    assert policy.choose(others, ask, 0.0) in others
    assert policy.choose(made, ASK, 0.0) is made[1]


def test_policies_have_names_and_others_may_be_installed(monkeypatch):
    assert {type(policy_of(name)) for name in POLICIES} == set(POLICIES.values())
    theirs = EntryPoint("theirs", "hibachi.router.policies:RoundRobin", "hibachi.router_policies")
    monkeypatch.setattr("hibachi.common.installed.entry_points", lambda group: [theirs])
    assert isinstance(policy_of("theirs"), RoundRobin)
    with pytest.raises(ConfigError, match=r"--policy other: expected one of least-connection, .*, theirs"):
        policy_of("other")
