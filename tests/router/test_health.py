"""Who takes requests: the states of an upstream, and what moves it from one to the next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hibachi.router import health
from hibachi.router.health import Thresholds
from hibachi.router.upstreams import Place, Upstream, UpstreamState

LIMITS = Thresholds(fall=2, rise=1)
MODELS = {"m": {"id": "m"}}


def upstream(state=UpstreamState.UP, **more):
    u = Upstream(Place("http://a", limit=4), **more)
    u.state = state
    return u


def good(u, seconds=0.01):
    health.good_check(u, MODELS, seconds, LIMITS)


def bad(u):
    health.bad_check(u, "no connection", LIMITS)


def test_a_new_one_is_what_its_first_check_says():
    u = upstream(UpstreamState.NEW)
    good(u)
    assert u.takes and u.models == MODELS and u.slots == 4 and not u.why
    u = upstream(UpstreamState.NEW)
    bad(u)
    assert u.state is UpstreamState.ILL and u.why == "no connection" and u.slots == 0


def test_one_bad_check_is_no_illness():
    u = upstream()
    bad(u)
    assert u.state is UpstreamState.UP
    good(u)
    bad(u)
    assert u.state is UpstreamState.UP
    bad(u)
    assert u.state is UpstreamState.ILL


def test_b18_a_request_that_failed_makes_it_ill_until_the_next_good_check():
    u = upstream()
    health.failed(u, "it answered a request with 500")
    assert u.state is UpstreamState.ILL and "500" in u.why
    good(u)
    assert u.state is UpstreamState.TRIED and u.slots == 1
    health.answered(u)
    assert u.state is UpstreamState.UP and u.slots == 4


def test_who_was_ill_is_tried_with_one_request_though_others_are_still_running():
    u = upstream(in_flight=3)
    health.failed(u, "broken")
    good(u)
    assert u.slots == 1
    u.trial, u.in_flight = object(), 4
    assert u.slots == 0
    good(u)
    assert u.state is UpstreamState.TRIED  # the request will show
    u.trial = None
    good(u)
    assert u.state is UpstreamState.UP


def test_a_trial_that_fails_makes_it_ill_again():
    u = upstream(UpstreamState.TRIED, trial=object())
    health.failed(u, "broken")
    assert u.state is UpstreamState.ILL
    good(u)
    assert u.state is UpstreamState.TRIED and u.slots == 1


def test_what_failed_by_the_requests_fault_is_put_back_and_who_is_ill_by_a_check_is_not():
    u = upstream()
    health.failed(u, "broken")
    health.put_back(u)
    assert u.state is UpstreamState.UP
    health.failed(u, "broken")
    bad(u)
    health.put_back(u)
    assert u.state is UpstreamState.ILL


def test_rise_counts_good_checks_in_a_row():
    u, limits = upstream(UpstreamState.ILL), Thresholds(fall=2, rise=3)
    for n in range(5):
        health.good_check(u, MODELS, 0.01, limits)
        if n == 1:
            health.bad_check(u, "late", limits)
    assert u.state is UpstreamState.TRIED


def test_who_says_that_it_shuts_down_takes_nothing_until_it_is_checked():
    u = upstream(in_flight=2)
    health.drain(u, "it is shutting down")
    assert u.state is UpstreamState.DRAINING and u.slots == 0
    bad(u)
    assert u.state is UpstreamState.ILL
    health.drain(u, "again")
    assert u.state is UpstreamState.ILL
    u = upstream(UpstreamState.DRAINING)
    good(u)
    assert u.state is UpstreamState.TRIED


def test_models_of_the_configuration_win_over_what_it_says():
    u = Upstream(Place("http://a", models=("x", "m")))
    good(u)
    assert list(u.models) == ["x", "m"] and u.models["m"] is MODELS["m"]


def test_b12_latency_is_that_of_checks_until_requests_tell():
    u = upstream(UpstreamState.NEW)
    good(u, 0.2)
    assert u.latency == 0.2
    good(u, 0.1)
    assert u.latency == pytest.approx(0.18)
    u.used = 1
    u.took(2.0)
    assert u.latency == 2.0
    good(u, 0.1)
    u.took(1.0)
    assert u.latency == pytest.approx((1.0 + 0.8 * 2.0) / 1.8)
    u.took(0.001, telling=False)  # a refusal is quick, and says nothing
    assert u.latency == pytest.approx(2.6 / 1.8) and sum(u.times.counts) == 3


def test_who_was_slow_once_is_tried_again():
    u = upstream(UpstreamState.NEW)
    good(u, 0.01)
    u.used = 1
    u.took(30.0)
    good(u, 0.01)
    assert u.latency == 30.0
    for _ in range(12):  # without a request between
        good(u, 0.01)
    assert u.latency < 0.05
    u.in_flight, u.latency = 1, 30.0
    good(u, 0.01)
    assert u.latency == 30.0  # it has one that may take as long


@given(st.lists(st.sampled_from(["good", "bad", "failed", "answered", "put back", "drain"])))
def test_whatever_happens_it_is_in_one_state_and_says_why(moves):
    u = upstream(UpstreamState.NEW)
    for move in moves:
        {
            "good": lambda: good(u),
            "bad": lambda: bad(u),
            "failed": lambda: health.failed(u, "failed"),
            "answered": lambda: health.answered(u),
            "put back": lambda: health.put_back(u),
            "drain": lambda: health.drain(u, "it is shutting down"),
        }[move]()
        assert 0 <= u.slots <= 4 and (u.state is UpstreamState.UP) == (not u.why)
        assert u.takes == (u.slots > 0)
    good(u)
    good(u)
    assert u.state is UpstreamState.UP  # two good checks mend everything
