"""What becomes of the rows of a run: which starts when, what happens when the engine is lost, how it is stopped."""

import pytest

from hibachi.errors import EngineFailed
from hibachi.offline import drive as module
from hibachi.offline.drive import GIVEN_UP, MOST_CONDEMNED, MOST_LOSSES, MOST_REFUSED, Drive, GivenUp, digest_of
from hibachi.offline.files.rows import InvalidInput, Row
from hibachi.offline.journal import Journal
from hibachi.offline.tasks.task import Full, Lost, Prepared, Result, RowError, Told


class Scripted:
    """A work in memory: each wait ends the row that was started first.

    poison: rows with which the engine is lost; bad: that cannot be computed; wrong: that are refused by `prepare`;
    unfit: by `start`. dies: the engine is lost whatever it has. full: starts that are refused before one is not.
    """

    fields, carries, compares = (), True, False

    def __init__(self, places=4, *, poison=(), bad=(), wrong=(), unfit=(), dies=False, key=None, size=1):
        self.places, self.poison, self.bad, self.wrong, self.unfit = places, set(poison), set(bad), set(wrong), unfit
        self.dies, self.key, self.size = dies, key or (lambda number: ((), 1)), size
        self.full = self.unopenable = self.opened = self.abandoned = self.woken = 0
        self.has, self.began, self.together, self.read = {}, [], [], 0
        self.after = lambda: None
        self.fails_to_start = set()

    def open(self):
        if self.unopenable:
            self.unopenable -= 1
            raise EngineFailed("no memory")
        self.opened += 1
        return Told("")

    def prepare(self, row):
        self.read += 1
        if row.number in self.wrong:
            raise RowError("wrong")
        key, longest = self.key(row.number)
        return Prepared(key, longest, self.size, row.number)

    def refused(self, row, message):
        return {"error": message, "refused": True}

    def lost(self, number, prepared, message):
        return RowError(message, {"error": message, "lost": True})

    def start(self, number, prepared):
        assert prepared.what == number and number not in self.has and len(self.has) < self.places
        if number in self.fails_to_start:
            self.fails_to_start.discard(number)
            raise Lost("at the start")
        if self.full:
            self.full -= 1
            raise Full("full")
        if number in self.unfit:
            raise RowError("unfit")
        self.has[number] = None
        self.began.append(number)

    def wait(self, timeout):
        self.after()
        if self.has:
            self.together.append(sorted(self.has))
        if self.dies or self.poison & set(self.has):
            if len(self.together) % 2:  # both ways in which one hears of it
                raise Lost("it died")
            return list(self.has)
        return list(self.has)[:1]

    def take(self, number):
        if self.dies or self.poison & set(self.has):
            raise Lost("it died")
        del self.has[number]
        if number in self.bad:
            raise RowError("bad")
        return Result({"n": number}, prompt_tokens=3, cached_tokens=1, new_tokens=2)

    def withdraw(self):
        found = list(self.has)[1:]  # the first runs, the others wait
        for number in found:
            del self.has[number]
        return found

    def wake(self):
        self.woken += 1

    def abandon(self):
        self.abandoned += 1
        self.has.clear()


@pytest.fixture(autouse=True)
def no_sleep(monkeypatch):
    slept = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    return slept


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.head({})
    yield journal
    journal.close()


def rows(numbers, error=None):
    for n in numbers if not isinstance(numbers, int) else range(numbers):
        yield Row(n, "in", n + 1, {"n": n}, error)


def drive(work, journal, numbers, **more):
    found = Drive(work, journal, numbers if not isinstance(numbers, int) else rows(numbers), **more)
    found.run()
    return found


def results(journal, n=100):
    """By row: its number, or the first word of its error."""
    found = {row: journal.result(row)[1] for row in range(n) if journal.has(row)}
    assert all(journal.failed(row) == ("error" in values) for row, values in found.items())
    return {row: values.get("n", values.get("error")) for row, values in found.items()}


def right(n, **errors):
    return dict.fromkeys(range(n)) | {row: row for row in range(n)} | {int(k[1:]): v for k, v in errors.items()}


GAVE_UP = f"The engine was lost {GIVEN_UP} times while it computed this row, the last time alone."


# ---- in good order ---------------------------------------------------------------------------------------------------


def test_all_rows_are_computed_and_counted(journal):
    told = []
    done = drive(Scripted(), journal, 10, told=lambda counts: told.append(counts.rows))
    assert results(journal) == right(10) and not done.stopping
    assert (done.counts.rows, done.counts.failed, done.counts.losses) == (10, 0, 0)
    assert (done.counts.prompt_tokens, done.counts.cached_tokens, done.counts.new_tokens) == (30, 10, 20)
    assert told == sorted(told) and told[-1] == 10 and journal.result(3)[0] == digest_of(Row(3, "x", 9, {"n": 3}))


def test_no_row_at_all_needs_no_engine(journal):
    class Unopened(Scripted):
        places = property(lambda self: pytest.fail("it was not opened"), lambda self, value: None)

    assert drive(Unopened(), journal, 0).counts.rows == 0


def test_rows_that_share_a_beginning_go_together_and_the_longest_first(journal):
    work = Scripted(1, key=lambda n: ((("a", "b")[n % 2],) if n < 6 else (), n))
    drive(work, journal, 8)
    assert work.began == [7, 6, 5, 3, 1, 4, 2, 0]


def test_all_places_are_taken_and_no_more(journal):
    work = Scripted(3)
    drive(work, journal, 10)
    assert max(map(len, work.together)) == 3 and all(len(t) == 3 for t in work.together[:8])


@pytest.mark.parametrize(("row_limit", "byte_limit", "size", "most"), [(8, 1 << 20, 1, 8), (4096, 100, 10, 10)])
def test_the_window_is_bounded_and_rolls(journal, monkeypatch, row_limit, byte_limit, size, most):
    monkeypatch.setattr(module, "WINDOW_ROWS", row_limit)
    monkeypatch.setattr(module, "WINDOW_BYTES", byte_limit)
    work, ahead = Scripted(4, size=size), []
    work.after = lambda: ahead.append(work.read - len(work.began))
    drive(work, journal, 50)
    assert results(journal) == right(50) and max(ahead) <= most and ahead[0] >= most - 4


def test_a_row_larger_than_the_window_is_computed(journal, monkeypatch):
    monkeypatch.setattr(module, "WINDOW_BYTES", 5)
    drive(Scripted(size=100), journal, 3)
    assert results(journal) == right(3)


# ---- errors of rows --------------------------------------------------------------------------------------------------


def test_what_is_wrong_with_a_row_becomes_its_result(journal):
    given = [*rows([0]), *rows([1], "no JSON"), *rows(range(2, 6))]
    done = drive(Scripted(wrong={2}, unfit={3}, bad={4}), journal, iter(given))
    assert results(journal) == right(6, _1="no JSON", _2="wrong", _3="unfit", _4="bad")
    assert journal.result(1)[1]["refused"] and done.counts.failed == 4 and done.counts.rows == 6


def test_a_row_that_was_unreadable_and_one_that_is_empty_are_told_apart():
    assert digest_of(Row(0, "a", 1, {}, "no JSON")) != digest_of(Row(0, "a", 1, {}))
    assert digest_of(Row(0, "a", 1, {"x": "\ud800"})) == digest_of(Row(5, "b", 2, {"x": "\ud800"}))


def test_with_fail_fast_the_first_error_ends_the_run_after_what_runs(journal):
    work = Scripted(2, bad={1})
    done = drive(work, journal, 10, fail_fast=True)
    assert done.stopping and str(done.failed) == "bad" and results(journal) == {0: 0, 1: "bad", 2: 2}
    assert not work.has


def test_with_fail_fast_a_row_that_cannot_be_read_starts_none(journal):
    work = Scripted(wrong={2})
    done = drive(work, journal, 10, fail_fast=True)
    assert work.began == [] and results(journal) == {2: "wrong"} and done.counts.failed == 1


def test_when_the_input_breaks_off_what_was_read_is_computed_first(journal):
    def broken():
        yield from rows(5)
        raise InvalidInput("in, after line 5: truncated")

    with pytest.raises(InvalidInput, match="truncated"):
        drive(Scripted(2), journal, broken())
    assert results(journal) == right(5)


# ---- an engine that is full, or lost ---------------------------------------------------------------------------------


def test_a_row_for_which_there_is_no_room_starts_later(journal, no_sleep):
    work = Scripted()
    work.full = 3
    drive(work, journal, 6)
    assert results(journal) == right(6) and work.began == list(range(6)) and len(no_sleep) == 3


def test_after_a_loss_all_that_ran_begins_again(journal):
    work, lost = Scripted(), iter([True])
    work.after = lambda: setattr(work, "dies", next(lost, False))
    done = drive(work, journal, 10)
    assert results(journal) == right(10) and done.counts.losses == work.opened == work.abandoned == 1
    assert work.began == [0, 1, 2, 3, *range(10)]


def test_a_row_with_which_the_engine_is_lost_runs_alone_and_is_then_given_up(journal):
    work = Scripted(poison={2})
    done = drive(work, journal, 10)
    assert results(journal) == right(10, _2=GAVE_UP) and journal.result(2)[1]["lost"]
    together = [t for t in work.together if 2 in t]
    assert together == [[0, 1, 2, 3], [0, 1, 2, 3], [2]]
    assert done.counts.losses == 3 and done.counts.given_up == done.counts.failed == 1 and done.counts.rows == 10
    assert [t for t in work.together if t in ([0], [1], [3])], "those that ran beside it twice run alone as well"
    assert work.together.index([4, 5, 6, 7]) < work.together.index([2]), "the others do not wait for it"


@pytest.mark.parametrize("guilty", [{0}, {9}, {0, 1}, {0, 3, 5, 9}, {4, 5, 6, 7}, set(range(1, 9))])
def test_of_several_guilty_rows_each_is_found(journal, guilty):
    work = Scripted(3, poison=guilty)
    drive(work, journal, 10)
    assert results(journal) == right(10, **{f"_{n}": GAVE_UP for n in guilty})


def test_many_guilty_rows_one_after_the_other_are_found(journal):
    drive(Scripted(16, poison=range(1, 20)), journal, 40)
    assert results(journal) == right(40, **{f"_{n}": GAVE_UP for n in range(1, 20)})


@pytest.mark.parametrize("n", [MOST_CONDEMNED + 1, 20, 100])
def test_an_engine_that_always_dies_condemns_nobody(journal, n):
    with pytest.raises(GivenUp, match="no row was computed"):
        drive(Scripted(dies=True), journal, n)
    assert results(journal) == {}


def test_guilty_rows_that_are_all_that_is_left_are_given_up_as_others_were_computed_before(journal):
    journal.row(0, 0, {"n": 0})
    drive(Scripted(poison=range(1, 20)), journal, rows(range(1, 20)))
    assert results(journal) == right(20, **{f"_{n}": GAVE_UP for n in range(1, 20)})


def test_an_engine_that_dies_for_good_later_condemns_nobody(journal):
    work = Scripted()
    work.after = lambda: setattr(work, "dies", len(work.began) > 20)
    with pytest.raises(GivenUp):
        drive(work, journal, 100)
    assert sorted(results(journal).values()) == list(results(journal)) and len(results(journal)) >= 17


def test_a_row_that_is_guilty_is_recorded_once_another_has_fared_better(journal):
    recorded = []
    work = Scripted(3, poison={0})
    work.after = lambda: recorded.append(([*work.has], journal.has(0)))
    drive(work, journal, 3)
    assert recorded == [([0, 1, 2], False)] * 2 + [([0], False), ([1], False), ([2], True)]
    assert results(journal) == {0: GAVE_UP, 1: 1, 2: 2}


def test_losses_may_be_many_as_long_as_rows_are_computed_in_between(journal):
    done = drive(Scripted(2, poison=range(0, 200, 5)), journal, 200)
    assert results(journal, 200) == right(200, **{f"_{n}": GAVE_UP for n in range(0, 200, 5)})
    assert done.counts.losses > MOST_LOSSES


def test_after_many_losses_rows_run_alone_before_others_start_and_nothing_joins_them(journal):
    work, refused = Scripted(4, poison=range(8)), []

    def start(number, prepared):
        if number == 3 and work.abandoned >= 4 and not refused:
            refused.append(number)
            raise Full("full")
        Scripted.start(work, number, prepared)

    work.start = start
    drive(work, journal, 12)
    assert work.together[:4] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2 and refused
    assert work.together[4:12] == [[n] for n in (4, 5, 6, 7, 0, 1, 2, 3)] and work.together[12] == [8, 9, 10, 11]
    assert results(journal) == right(12, **{f"_{n}": GAVE_UP for n in range(8)})


def test_an_engine_that_is_lost_at_the_start_of_a_row(journal):
    work = Scripted()
    work.fails_to_start = {2}
    done = drive(work, journal, 6)
    assert results(journal) == right(6) and done.counts.losses == 1


def test_a_row_that_runs_alone_stays_alone_when_there_is_no_room_at_first(journal):
    work = Scripted(2, poison={0})

    def once():
        if work.abandoned == 2 and len(work.has) == 1 and not work.full:
            work.full, work.after = 1, lambda: None

    work.after = once
    drive(work, journal, 4)
    alone = [t for t in work.together[work.together.index([2, 3]) :] if 0 in t or 1 in t]
    assert alone and all(len(t) == 1 for t in alone) and results(journal) == right(4, _0=GAVE_UP)


def test_an_engine_that_cannot_be_opened_for_a_while(journal, no_sleep):
    work = Scripted(poison={0})
    work.unopenable = 3
    drive(work, journal, 4)
    assert results(journal) == right(4, _0=GAVE_UP) and no_sleep == [1, 2, 3]


def test_an_engine_that_cannot_be_opened_again_ends_the_run(journal):
    work = Scripted(poison={0})
    work.unopenable = 1000
    with pytest.raises(GivenUp, match="could not be started again: no memory"):
        drive(work, journal, 4)
    assert results(journal) == {}


def test_a_row_for_which_there_is_never_room_becomes_an_error(journal, no_sleep):
    work, tried = Scripted(2), []

    def start(number, prepared):
        if number == 2:
            tried.append(list(work.has))
            raise Full("too large")
        Scripted.start(work, number, prepared)

    work.start = start
    done = drive(work, journal, 6)
    assert results(journal) == right(6, _2="too large") and journal.result(2)[1]["lost"]
    assert len([has for has in tried if not has]) == MOST_REFUSED == len(no_sleep) + 1 and done.counts.failed == 1


# ---- stopped ---------------------------------------------------------------------------------------------------------


def stopped_after(work, journal, n, count=20):
    found = Drive(work, journal, rows(count))
    work.after = lambda: found.stop() if len(work.together) == n else None
    found.run()
    return found


def test_stopped_what_waits_is_withdrawn_and_what_runs_is_finished(journal):
    work = Scripted()
    done = stopped_after(work, journal, 3)
    assert results(journal) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4} or results(journal) == right(5)
    assert done.stopping and not work.has and work.woken == 1 and done.counts.rows == len(results(journal))


def test_stopped_and_then_lost_nothing_is_opened_again(journal):
    work = Scripted()
    found = Drive(work, journal, rows(20))

    def stop_and_die():
        found.stop()
        work.dies = True

    work.after = stop_and_die
    found.run()
    assert work.opened == 0 and work.abandoned == 1 and results(journal) == {}


def test_stopped_while_the_engine_cannot_be_opened(journal, monkeypatch):
    work = Scripted(poison={0})
    work.unopenable = 1000
    found = Drive(work, journal, rows(4))
    monkeypatch.setattr(module.time, "sleep", lambda seconds: found.stop())
    found.run()
    assert found.stopping and results(journal) == {}


def test_a_row_that_was_condemned_when_the_run_was_stopped_is_not_recorded(journal):
    work = Scripted(2, poison={0, 1})
    found = Drive(work, journal, rows(2))
    work.after = lambda: found.stop() if len(work.together) == 2 else None
    found.run()
    assert results(journal) == {} and work.together[-1] == [0] and found.counts.losses == 3


def test_stopped_before_it_began(journal):
    found = Drive(Scripted(), journal, rows(5))
    found.stop()
    found.run()
    assert results(journal) == {} and found.work.began == []


def test_a_journal_that_cannot_be_written_ends_the_run(journal, monkeypatch):
    work = Scripted()
    monkeypatch.setattr(journal, "flush", lambda: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        drive(work, journal, 5)
