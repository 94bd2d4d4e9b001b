"""Requests that begin alike share a server, and none gets more than it should."""

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.router_trace import led, most, moved, replay
from benchmarks.simulator import lru
from hibachi.cli.simrouter import SimRouter
from hibachi.engine.simulator.trace import Trace
from hibachi.router.affine import BESIDES, FURTHEST, MORE, SPAN, STEP, Latest, PrefixAffine, pieces_of
from hibachi.router.policies import Ask, LeastConnection
from hibachi.router.upstreams import Place, Upstream, UpstreamState

from ..lib.leaks import kept

QUIET = dict(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def servers(*weights, limit=64):
    return [Upstream(Place(f"http://s{i}", limit=limit, weight=w), UpstreamState.UP) for i, w in enumerate(weights)]


def ask(text, among, model=""):
    return Ask(model=model, pieces=pieces_of(text.encode()), everyone=among)


def text(name, pieces=1):
    return "".join(f"{f'{name}, {i}':{STEP}}" for i in range(pieces))


# What a server is: its weight, how many requests it has, and whether it has a free slot.
WORLDS = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0, 4.0]), st.integers(0, 30)), min_size=1, max_size=6)


@given(st.sampled_from([b"a", b"ab", b"abc"]), st.integers(0, 5 * STEP), st.integers(0, 2 * STEP))
@settings(**QUIET, max_examples=50)
def test_a_text_that_goes_on_keeps_its_pieces(of, begin, more):
    first, longer = (pieces_of((of * n)[:n]) for n in (begin, begin + more))
    assert longer[: len(first)] == first and len(first) == begin // STEP
    assert len(set(longer)) == len(longer)  # each of all up to there, even where the text repeats itself


def test_pieces_tell_texts_apart_up_to_a_limit():
    long = b"a" * (FURTHEST + 1)
    assert len(pieces_of(long)) == FURTHEST // STEP and pieces_of(long) == pieces_of(long + b"b" * STEP)
    assert pieces_of(b"b" + long[1:])[0] != pieces_of(long)[0]
    assert pieces_of(long[: STEP - 1]) == ()


@given(WORLDS, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=60), st.data())
@settings(**QUIET, max_examples=100)
def test_one_of_those_that_are_free_within_the_bound(world, texts, data):
    everyone = servers(*(weight for weight, _ in world))
    for u, (_, busy) in zip(everyone, world, strict=True):
        u.in_flight = busy
    policy = PrefixAffine()
    for name, length in texts:
        free = data.draw(st.lists(st.sampled_from(everyone), min_size=1, unique=True))
        given_ask = ask(text(name, length), everyone)
        chosen = policy.choose(free, given_ask, 0.0)
        home, expected = policy.home(given_ask, everyone), LeastConnection().choose(free, given_ask, 0.0)
        if home in free:
            share = home.place.weight / sum(u.place.weight for u in everyone)
            if home.in_flight + 1 <= math.ceil(MORE * share * (sum(u.in_flight for u in everyone) + 1)) + BESIDES:
                expected = home
        assert chosen is expected and chosen in free
        chosen.in_flight += 1


@given(WORLDS)
@settings(**QUIET, max_examples=50)
def test_without_pieces_the_least_busy(world):
    everyone = servers(*(weight for weight, _ in world))
    for u, (_, busy) in zip(everyone, world, strict=True):
        u.in_flight = busy
    policy, short = PrefixAffine(), ask("short", everyone)
    assert policy.choose(everyone, short, 0.0) is LeastConnection().choose(everyone, short, 0.0)
    assert policy.home(short, everyone) is None


@given(st.permutations(range(5)), st.lists(st.integers(0, 200), max_size=80))
@settings(**QUIET, max_examples=50)
def test_routers_that_do_not_talk_agree(order, seen):
    mine, yours = PrefixAffine(), PrefixAffine()
    here, there = servers(1, 1, 1, 2, 4), servers(1, 1, 1, 2, 4)
    for name in seen:  # of which the other knows nothing
        mine.choose(here, ask(text(name, 2), here), 0.0)
    for name in range(50):
        my_home = mine.home(ask(text(name, 2), here), here)
        your_home = yours.home(ask(text(name, 2), there), [there[i] for i in order])
        assert my_home is not None and your_home is not None and my_home.name == your_home.name


def test_routers_agree_behind_a_system_prompt():
    rng, everyone = random.Random(0), servers(1, 1, 1, 1)
    routers, differ = (PrefixAffine(), PrefixAffine()), []
    for _ in range(2000):
        one = ask(text("system", 16) + text(rng.randrange(300), 2), everyone)
        rng.choice(routers).choose(everyone, one, 0.0)
        differ.append(routers[0].home(one, everyone) is not routers[1].home(one, everyone))
    assert not any(differ[300:])


def test_one_that_comes_or_goes_moves_its_share_only():
    five = servers(1, 1, 1, 1, 1)
    policy, moves = PrefixAffine(), Counter()
    for name in range(2000):
        one = ask(text(name), five)
        before, after = policy.home(one, five[:4]), policy.home(one, five)
        moves[before is not after] += 1
        assert after is before or after is five[4]  # and the same the other way round, when it goes
    assert 0.17 < moves[True] / 2000 < 0.23


def test_weights_count():
    everyone = servers(1, 2, 5)
    homes = Counter(PrefixAffine().home(ask(text(name), everyone), everyone).name for name in range(4000))
    assert [homes[u.name] / 4000 for u in everyone] == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.03)
    policy = PrefixAffine()
    for name in range(400):  # nobody ends
        policy.choose(everyone, ask(text(name), everyone), 0.0).in_flight += 1
    for u in everyone:
        assert u.in_flight <= math.ceil(MORE * u.place.weight / 8 * 400) + BESIDES


def test_a_conversation_stays_while_its_server_is_not_overloaded():
    everyone, policy = servers(1, 1, 1, 1), PrefixAffine()
    for turn in range(1, 200):  # so common that it might be taken for a system prompt
        one = ask(text("story", turn), everyone)
        chosen = policy.choose(everyone, one, 0.0)
        assert chosen is policy.home(one, everyone) is policy.home(ask(text("story"), everyone), everyone)


def test_a_home_that_is_full_or_overloaded_is_passed_over_and_still_known():
    everyone, policy = servers(1, 1, 1, 1), PrefixAffine()
    one = ask(text("story"), everyone)
    home = policy.home(one, everyone)
    others = [u for u in everyone if u is not home]
    assert policy.choose(others, one, 0.0) in others
    home.in_flight = 4
    assert policy.choose(everyone, one, 0.0) in others
    home.in_flight = 3
    assert policy.choose(everyone, one, 0.0) is home is policy.home(one, everyone)


def test_the_same_prompt_over_and_over_goes_to_all():
    everyone, policy, running = servers(1, 1, 1, 1), PrefixAffine(), []
    for _ in range(1000):
        running.append(policy.choose(everyone, ask(text("again", 8), everyone), 0.0))
        running[-1].in_flight += 1
        if len(running) > 100:
            running.pop(0).in_flight -= 1
        assert max(u.in_flight for u in everyone) <= math.ceil(MORE * len(running) / 4) + BESIDES
    assert min(u.in_flight for u in everyone) > 15


@pytest.mark.parametrize("length", [1, 4, 16, 48])
def test_a_system_prompt_does_not_pile_up(length):
    everyone, policy, rng, went = servers(1, 1, 1, 1), PrefixAffine(), random.Random(1), []
    for _ in range(2000):  # each ends before the next comes, so that no bound helps
        name = rng.randrange(500)
        went.append((name, policy.choose(everyone, ask(text("system", length) + text(name), everyone), 0.0).name))
    later = went[400:]
    assert max(Counter(server for _, server in later).values()) / len(later) < 1.2 / 4
    assert len(set(later)) == len({name for name, _ in later})  # and each conversation stays where it is


def test_models_have_system_prompts_of_their_own():
    everyone, policy, rng = servers(1, 1, 1, 1), PrefixAffine(), random.Random(2)
    went = Counter()
    for i in range(9000):
        rare = i % 60 == 0
        front = text("rare", 2) if rare else ""
        one = ask(front + text(rng.randrange(1000)), everyone, model="rare" if rare else "other")
        chosen = policy.choose(everyone, one, 0.0)
        went[chosen.name] += rare and i > 2000
    assert max(went.values()) < 0.4 * sum(went.values())


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 6)), max_size=20), st.integers(1, 99))
@settings(**QUIET, max_examples=50)
def test_what_is_long_ago_is_forgotten(requests, most):
    """As if it had never been."""
    latest, empty = Latest(), Latest()
    for name, length in 9 * requests:  # so that some are common
        latest.add(pieces_of(text(name, length).encode()), most)
    for _ in range(most):
        latest.add((), most)
        empty.add((), most)
    assert kept(latest) <= kept(empty) + 1  # the count of beginnings stays
    assert not any(latest.shared(pieces_of(text(name, 6).encode())) for name in (0, 1))


def test_a_document_stays_together_except_while_very_many_ask_about_it():
    everyone, policy = servers(1, 1, 1, 1), PrefixAffine()

    def homes(times, front, others):
        """Where questions about a document go, with so many other requests between two of them."""
        found = set()
        for i in range(times):
            found.add(policy.choose(everyone, ask(text(front, 4) + text(f"{i} of {times}"), everyone), 0.0).name)
            for j in range(others):
                policy.choose(everyone, ask(text(f"{i}, {j}, {times}"), everyone), 0.0)
        return found

    assert len(homes(60, "document", 40)) == 1
    assert len(homes(60, "document", 20)) == 4
    homes(1, "another", SPAN * len(everyone))
    assert len(homes(12, "document", 40)) == 1


def made_up():
    """1,500 requests about 120 documents, each longer than what a server could hold of all."""
    rng = np.random.default_rng(0)
    which = rng.integers(0, 120, 1500)
    keys = [(*(f"{d}, {i}" for i in range(40)), f"question {q}") for q, d in enumerate(which.tolist())]
    at = np.sort(rng.integers(0, 300 * 10**12, 1500))
    return Trace(
        "made up", at, np.full(1500, 41 * 512), np.full(1500, 100), np.zeros(1500, np.int64), keys=keys, key_tokens=512
    )


@pytest.mark.parametrize("system", [0, 8])
def test_more_is_hit_in_a_trace_and_nobody_has_much_more(system):
    trace = led(made_up(), system).faster(0.8)
    plain, affine = replay(trace, LeastConnection()), replay(trace, PrefixAffine())
    assert affine.hit > 1.5 * plain.hit and affine.first < plain.first
    assert affine.hit > 0.9 * lru(trace, 8000)
    assert affine.requests < MORE and affine.requests == most(list(Counter(affine.chosen).values()))


def test_a_fifth_server_takes_a_quarter_of_the_prefixes_at_most():
    trace = made_up()
    five = SimRouter(trace, PrefixAffine(), 5).upstreams
    moves, prefixes = moved(trace, five[:4], five)
    assert 0 < moves <= prefixes / 4
