"""A drafter in a thread of its own: late, raising and wrong ones are done without, and off after three times."""

import logging
import threading

import numpy as np
import pytest

from hibachi.engine.speculation.drafter_thread import PATIENCE, DrafterThread

SOON = 30.0  # seconds in which what comes has come
ROWS = [np.array([1, 2, 3], np.int32), np.array([4], np.int32)]


class Again:
    """Proposes each row's last token once more."""

    def propose(self, keys, tokens, most):
        return [row[-1:].repeat(n) for row, n in zip(tokens, most, strict=True)]


class Does:
    """Does what it is told: returns a value, raises an exception, or waits for an event first."""

    def __init__(self, *what):
        self.what = list(what)
        self.asked = []

    def propose(self, keys, tokens, most):
        self.asked.append(keys)
        what = self.what.pop(0)
        if isinstance(what, threading.Event):
            assert what.wait(SOON)
            what = [[7], [7]]
        if isinstance(what, BaseException):
            raise what
        return what


@pytest.fixture
def aside():
    made = []

    def make(drafter):
        made.append(DrafterThread(drafter, 100, "mine"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def asked(aside, wait=SOON, keys=("a", "b")):
    aside.ask(keys, ROWS, [2, 1])
    found = aside.take(wait)
    return None if found is None else [row.tolist() for row in found]


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_proposals_come_in_the_order_of_rows(aside):
    mine = aside(Again())
    assert asked(mine) == [[3, 3], [4]]
    assert asked(mine) == [[3, 3], [4]]
    for _ in range(PATIENCE):
        assert mine.take() is None  # nothing was asked since, so nothing is late
    assert not mine.off


def test_it_is_asked_in_one_thread_of_its_own_with_copies(aside):
    seen = []

    class Looks:
        def propose(self, keys, tokens, most):
            seen.append((threading.current_thread(), keys, most))
            for row in tokens:
                row[:] = 0
            return [[], []]

    mine = aside(Looks())
    asked(mine)
    asked(mine)
    assert len({thread for thread, _, _ in seen}) == 1
    assert seen[0][0] is not threading.current_thread() and seen[0][0].daemon
    assert seen[0][1:] == (["a", "b"], [2, 1])
    assert ROWS[0].tolist() == [1, 2, 3]


def test_no_rows_are_no_question(aside):
    drafter = Does()
    mine = aside(drafter)
    mine.ask([], [], [])
    assert mine.take(SOON) is None and not drafter.asked


def test_what_is_late_is_not_used_and_does_not_come_for_a_later_step(aside):
    gate = threading.Event()
    drafter = Does(gate, [[1], [2]])
    mine = aside(drafter)
    assert asked(mine, wait=0.0) is None
    assert asked(mine, wait=SOON) is None  # still busy: not asked, and not waited for
    gate.set()
    while mine._answers.empty():
        pass
    assert asked(mine) == [[1], [2]]
    assert len(drafter.asked) == 2 and not mine.off


def test_three_times_late_is_off_and_said_once(aside, caplog):
    gate = threading.Event()
    drafter = Does(gate)
    mine = aside(drafter)
    for n in range(1, 6):
        assert asked(mine, wait=0.001) is None
        assert mine.off == (n >= PATIENCE)
    gate.set()
    assert warnings_of(caplog) == [
        "The drafter 'mine' is off, as it failed 3 times in a row; the last time: no answer within 1 ms. Requests go "
        "on without its proposals."
    ]
    assert len(drafter.asked) == 1


@pytest.mark.parametrize(
    "what, said",
    [
        (ValueError("no idea"), "ValueError: no idea"),
        (SystemExit(), "SystemExit"),
        ([[1]], "expected 2 arrays, one for each row, got 1"),
        ([[1.5], [1]], "row 0: expected an array of integers, got the dtype float64"),
    ],
)
def test_three_failures_are_off_and_said_once(aside, caplog, what, said):
    mine = aside(Does(what, what, what))
    for _ in range(5):
        found = asked(mine)
        assert not found or found[0] == []
    assert mine.off
    assert len(warnings_of(caplog)) == 1 and f"the last time: {said}. Requests" in warnings_of(caplog)[0]


def test_failures_with_good_answers_between_are_forgiven(aside, caplog):
    bad, good = ValueError(), [[1], [2]]
    mine = aside(Does(bad, bad, good, bad, bad, good))
    assert [asked(mine) for _ in range(6)] == [[[], []], [[], []], good] * 2
    assert not mine.off and not warnings_of(caplog)


def test_the_good_rows_of_a_bad_answer_are_used(aside):
    assert asked(aside(Does([None, [5]]))) == [[], [5]]


def test_a_drafter_is_told_which_requests_are_over(aside):
    over, told = [], threading.Event()

    class Keeps(Again):
        def forget(self, key):
            over.append((key, threading.current_thread().name))
            told.set()

    mine = aside(Keeps())
    mine.forget("a")  # it has never been asked: nothing is kept
    asked(mine)
    mine.forget("b")
    assert told.wait(SOON) and over == [("b", "hibachi-drafter")]
    plain = aside(Again())
    asked(plain)
    plain.forget("a")
    assert asked(plain) == [[3, 3], [4]]


def test_forgetting_that_raises_is_a_failure_of_the_next_answer(aside, caplog):
    class Fails(Again):
        def forget(self, key):
            raise KeyError(key)

    mine = aside(Fails())
    asked(mine)
    for _ in range(PATIENCE):
        mine.forget("a")
        assert asked(mine) == [[3, 3], [4]]
    assert mine.off and "KeyError: 'a'" in warnings_of(caplog)[0]


def test_closing_ends_the_thread_and_its_questions(aside, caplog):
    drafter, before = Does([[1], [2]]), set(threading.enumerate())
    mine = aside(drafter)
    asked(mine)
    [thread] = {*threading.enumerate()} - before
    mine.close()
    thread.join(SOON)
    assert not thread.is_alive()
    assert asked(mine) is None and len(drafter.asked) == 1
    mine.close()
    aside(Again()).close()  # which has no thread yet
    assert not warnings_of(caplog)
