"""Which server gets a request: each policy on records, without a socket."""

import math
from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from importlib.metadata import EntryPoint
from itertools import pairwise
from random import Random

import pytest

from hibachi.errors import ConfigError
from hibachi.router.policies import (
    Ask,
    Homes,
    LeastConnection,
    LeastLatency,
    LeastLoad,
    PowerOfTwo,
    RoundRobin,
    Sticky,
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
    keys, homes = [b"%d" % n for n in range(2000)], Homes()
    four, five = made[:4], made
    before = [homes.of(key, four) for key in keys]
    assert before == [Homes().of(key, four[::-1]) for key in keys]
    assert max(Counter(u.name for u in before).values()) < 600
    moved = [(old, homes.of(key, five)) for key, old in zip(keys, before, strict=True)]
    assert all(new is old or new is made[4] for old, new in moved)
    assert sum(new is not old for old, new in moved) < 500


def test_homes_are_those_of_the_highest_scores_whatever_is_remembered():
    made, homes = upstreams(0, 0, 0, 0, 0, weights=(1.0, 3.0, 1.0, 0.5, 3.0)), Homes()

    def number(name):
        return int.from_bytes(blake2b(name, digest_size=8).digest()) | 1

    def score(u, key):
        return -u.place.weight / math.log((number(key) * number(u.name.encode()) % 2**64 + 0.5) / 2**64)

    for among in (made, made[1:], made[::-1], made):
        for key in [b"%d" % n for n in range(200)] * 2:
            assert homes.of(key, among) is max(among, key=lambda u: score(u, key))
    made[0].place = replace(made[0].place, weight=1e6)  # a reload of the configuration
    assert homes.of(b"0", made) is made[0]


def test_many_servers_are_at_home_for_equally_many():
    made, homes = upstreams(*[0] * 200), Homes()
    found = Counter(homes.of(b"%d" % n, made).name for n in range(20000))
    assert sum((found[u.name] - 100) ** 2 / 100 for u in made) < 280  # chi squared, 199 degrees of freedom: 1 in 7,000


def test_a_heavier_one_is_at_home_for_more():
    made, homes = upstreams(0, 0, weights=(3.0, 1.0)), Homes()
    found = Counter(homes.of(b"%d" % n, made).name for n in range(2000))
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
