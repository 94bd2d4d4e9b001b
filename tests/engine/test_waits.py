"""Steps that may begin before the last one is read have proposals only where it pays to wait."""

import random

import pytest

from hibachi import SamplingParams
from hibachi.engine.speculation.drafting import Direct, Drafting
from hibachi.engine.speculation.howmany import REST, WINDOW, HowMany, Waits
from hibachi.engine.speculation.ngram import NgramDrafter
from hibachi.testing.toys import expected

from .test_overlap import GREEDY, OTHERS, Late, finish, served
from .test_speculation import Oracle, Random


def run(waits, steps, ahead, waited, tokens, rows=2):
    """Steps that take so many seconds; which of them were waited for. tokens: of a row in a waited step."""
    found = []
    for _ in range(steps):
        found.append(waits.waiting)
        if waits.waiting:
            waits.note_waited(rows, tokens * rows, waited)
        else:
            waits.note_ahead(rows, ahead)
    return found


def test_steps_are_waited_for_while_their_tokens_come_faster():
    waits = Waits()
    found = run(waits, 500, ahead=1.0, waited=1.5, tokens=2)
    assert not any(found[: REST[0]]) and all(found[REST[0] :])
    assert not any(run(waits, 4 * WINDOW, ahead=1.0, waited=1.5, tokens=1)[WINDOW:])  # no longer


def test_what_does_not_pay_is_tried_ever_more_rarely():
    found = run(Waits(), 20_000, ahead=1.0, waited=1.5, tokens=1)
    assert 0 < sum(found) <= 10 * WINDOW and found[REST[0] : REST[0] + WINDOW] == [True] * WINDOW


def test_nothing_is_waited_for_at_sizes_that_were_not_seen():
    waits = Waits()
    run(waits, REST[0], 1.0, 1.0, 1)
    assert waits.waiting
    for _ in range(WINDOW):
        waits.note_waited(40, 400, 0.1)  # so nothing is known about what they would take otherwise
    assert not waits.waiting


def test_proposals_asked_for_by_name_are_waited_for(serve):
    backend = Late()
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2}
    engine = served(serve, backend, speculative_config=config)
    assert list(engine.run([1, 2], GREEDY, max_tokens=40)) == expected([1, 2], 40)
    assert engine.meters().drafted.accepted > 20 and backend.ahead <= 1
    assert engine.stats().steps < 25
    finish(engine)


def test_auto_begins_steps_ahead_and_waits_now_and_then(serve):
    backend = Late()
    engine = served(serve, backend)
    how = HowMany()
    engine.core.drafting, engine.core.waits = Drafting(Direct(NgramDrafter(2, 4), 10, how), 4, how), Waits()
    assert list(engine.run([1, 2], GREEDY, max_tokens=400)) == expected([1, 2], 400)
    assert backend.ahead >= 64 and engine.meters().drafted.proposed
    finish(engine)


class AtRandom:
    """Waits for some steps, and is told of all."""

    def __init__(self):
        self.random, self.waited, self.ahead = random.Random(0), 0, 0

    @property
    def waiting(self):
        return self.random.random() < 0.4

    def note_waited(self, rows, tokens, seconds):
        self.waited += 1

    def note_ahead(self, rows, seconds):
        self.ahead += 1


@pytest.mark.parametrize("drafter", [lambda: Oracle(2), Random])
def test_answers_are_the_same_whichever_steps_are_waited_for(serve, drafter):
    kinds = [*[GREEDY] * 12, *OTHERS, SamplingParams(temperature=1, seed=3, max_tokens=None)]

    def answers(engine):
        streams = [engine.run([i % 10, 2], kinds[i % len(kinds)], max_tokens=4 + i) for i in range(24)]
        return [(list(s), s.finish_reason, s.logprobs) for s in streams]

    want = answers(served(serve, Late(), overlap=False))
    for options in ({}, {"cache_tokens": 96, "max_num_seqs": 6}):
        engine = served(serve, backend := Late(), **options)
        engine.core.drafting, engine.core.waits = Drafting(Direct(drafter(), 10), 4), AtRandom()
        assert answers(engine) == want
        assert engine.core.drafting.drafted.proposed and backend.ahead
        assert engine.core.waits.waited and engine.core.waits.ahead
        finish(engine)
