"""Forms whose masks take long: they take turns, and nobody else is slower for it."""

import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from hibachi import InvalidRequest, StructuredOutputs
from hibachi.engine.guide.protocol import Vocabulary
from hibachi.engine.guide.turns import FREE, MOST, SHARE, FormTime, Turns
from hibachi.engine.runners.guiding import Guided, completed, masks
from hibachi.testing.toys import SumOwn, SumPaged, expected

from ..lib.waits import until
from .test_engine import Slow, engine, params
from .toyguides import ToyGuides, rule


def dear(seconds, **more):
    return params(rule([5, 6], [7], **{"most": 12, "dear": seconds} | more))


def answer(stream):
    """Its tokens, or the message of its error."""
    try:
        return stream.collect()
    except InvalidRequest as e:
        return str(e)


@pytest.mark.parametrize("cheap", [0, 4])
def test_a_bystander_keeps_its_pace_whatever_the_masks_of_others_take(cheap):
    """63 rows six times, each mask 10 ms: of the time until the bystander's end they take a small part, and never
    much at once. With cheap masks first, nobody can know.
    """
    with engine(Slow, max_num_seqs=64, max_model_len=600) as e:
        guides, began = e.forms.guides, time.perf_counter()
        bystander = e.run([1, 2], max_tokens=250)
        until(lambda: e.stats().running == 1)
        others = [e.run([1, i % 5], dear(0.01, cheap=cheap)) for i in range(6 * 63)]
        assert bystander.collect() == expected([1, 2], 250)
        elapsed, calls = time.perf_counter() - began, list(guides.calls)
        assert max(calls) < 2 * MOST
        assert sum(calls) < 0.15 * elapsed + 0.7
        for stream in others:
            stream.close()
        e.core.scheduler.check()


@pytest.mark.parametrize("model", [SumPaged, SumOwn], ids=["paged", "own cache"])
def test_masks_of_two_milliseconds_end_nobody(model):
    """Beside one that goes on for long, and others that want their rows: all get what they get alone."""
    with engine(model, max_num_seqs=4, max_model_len=4096) as e:
        alone = e.run([1], dear(0)).collect()
        bystander = e.run([1, 2], max_tokens=4000)
        slow = [e.run([1], dear(0.002)) for _ in range(6)]
        until(lambda: e.stats().running == 4)
        others = [e.run([1, i], max_tokens=30) for i in range(6)]
        assert [s.collect() for s in others] == [expected([1, i], 30) for i in range(6)]
        bystander.close()
        assert [s.collect() for s in slow] == [alone] * 6
        e.core.scheduler.check()


def test_rows_that_turn_slow_in_one_step_end_by_name_before_all_wait_for_long():
    guides, turns = ToyGuides(Vocabulary([b""] * 32)), Turns()
    form = turns.form("dear")
    made = guides.compile(guides.check(StructuredOutputs(**rule([5], most=9, dear=0.01))))
    some = [Guided(guides, made, (), form) for _ in range(63)]
    failed = masks(some, np.zeros((63, 1), np.uint32))
    assert failed[:4] == [None] * 4 and all("take too long" in str(e) for e in failed[-20:])
    assert sum(guides.calls) < 2 * MOST


def test_what_taking_a_token_takes_counts_with_its_mask():
    guides, turns = ToyGuides(Vocabulary([b""] * 32)), Turns()
    guide = guides.compile(guides.check(StructuredOutputs(**rule([5], most=9))))
    one = Guided(guides, guide, (), turns.form("dear"))
    advance, job = guide.advance, SimpleNamespace(guided=one)
    guide.advance = lambda tokens: time.sleep(0.01) or advance(tokens)
    for _ in range(2):
        completed([job], np.array([5]), [False], [False])
        masks([one], np.zeros((1, 1), np.uint32))
    assert 0.005 < one.form.seconds < 0.1


def test_a_form_whose_single_tokens_take_longer_than_all_may_wait_ends_by_name():
    with engine() as e:
        assert "take too long to work out" in answer(e.run([1], dear(1.2 * MOST)))


@dataclass(eq=False)
class Taker:
    form: FormTime
    latest: float = 0.0


def test_the_form_that_has_taken_least_goes_first_within_the_share():
    turns = Turns()
    rows = [Taker(turns.form(source)) for source in "aaab"]
    for each in rows:
        each.form.expect(0.01)
    now = time.perf_counter()
    rows[0].form.note(4, 0.04)
    assert turns.go(rows, others=True, now=now) == [rows[3], *rows[:1]]  # 10 ms are left of 50
    rows[3].form.note(1, 0.2)
    rows[3].form.note(1, 0.2)
    assert turns.go(rows, others=True, now=now) == []
    assert turns.go(rows, others=True, now=now + 0.1 / SHARE) == []
    assert turns.go(rows, others=True, now=now + 0.5 / SHARE)[0] is rows[0]
    rows[3].form.note(1, 9.0)
    assert len(turns.go(rows, others=False, now=now)) > 1  # nobody is there to wait for them


def test_one_call_that_takes_long_says_nothing():
    turns = Turns()
    form = turns.form("a")
    form.expect(0.03)  # a first mask is taken in a thread that others hold up
    for seconds in [FREE, 0.05, FREE, FREE, 0.05, FREE]:
        form.note(1, seconds)
        assert not form.slow and not turns.some
    form.note(1, 0.05)
    form.note(1, 0.05)
    assert form.slow and turns.some
    assert [form.note(1, FREE) for _ in range(300)] and not form.slow
