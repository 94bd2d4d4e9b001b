"""Kept recurrent states: which slots there are, where states are kept, and which are found."""

import pytest

from hibachi.engine.scheduler.checkpoints import Checkpoints


@pytest.mark.parametrize("total", [1, 2, 5])
def test_every_slot_is_given_once(total):
    kept = Checkpoints(total, 1)
    slots = [kept.reserve() for _ in range(total)]
    assert sorted(slots) == list(range(total)) and kept.reserve() is None
    kept.check(slots)
    kept.release(slots[0])
    assert kept.reserve() == slots[0] and kept.evictions == 0


@pytest.mark.parametrize(
    "start, length, at",
    [
        (0, 4, None),  # the last token must be computed, so no full block could be shared
        (0, 5, 4),
        (0, 9, 8),
        (0, 40, 12),  # every third block of four
        (11, 40, 12),
        (12, 40, 24),
        (30, 40, 36),
        (36, 40, None),
        (36, 41, 40),
        (40, 41, None),
    ],
)
def test_where_the_next_one_is_made(start, length, at):
    assert Checkpoints(1, 3).mark(start, length, 4) == at


def kept(*prefixes, total=4):
    """Checkpoints of prefixes of the keys "abcdef", in slots 0, 1, ..."""
    out = Checkpoints(total, 1)
    for n in prefixes:
        out.publish(None, "abcdef", n, out.reserve())
    out.check([])
    return out


def test_the_longest_prefix_is_found():
    some = kept(1, 4, 2)
    assert some.find(None, "abcdef", 6) == (4, 1)
    assert some.find(None, "abcdef", 4) == (4, 1)
    assert some.find(None, "abcdef", 3) == (2, 2)
    assert some.find(None, "abc", 6) == (2, 2)
    assert some.find(None, "abxdef", 6) == (2, 2)
    assert some.find(None, "axcdef", 6) == (1, 0)
    assert some.find(None, "xbcdef", 6) is None
    assert some.find("salt", "abcdef", 6) is None
    assert some.find(None, "abcdef", 0) is None
    assert [n for n in range(7) if some.knows(None, "abcdef", n)] == [1, 2, 4]


def test_the_least_recently_used_gives_way():
    some = kept(1, 2, 3, total=3)
    assert some.find(None, "abcdef", 1) == (1, 0)
    assert some.reserve() == 1 and some.evictions == 1
    assert some.find(None, "abcdef", 2) == (1, 0)
    assert some.reserve() == 2 and some.reserve() == 0 and some.evictions == 3
    assert some.find(None, "abcdef", 6) is None and some.reserve() is None
    some.check([0, 1, 2])


def test_one_that_is_there_already_gives_its_slot_back():
    some = kept(2)
    slot = some.reserve()
    some.publish(None, "abcdef", 2, slot)
    some.check([])
    assert some.find(None, "abcdef", 2) == (2, 0)


def test_reset_forgets_what_can_be_found_and_keeps_what_is_being_written():
    some = kept(1, 3)
    slot = some.reserve()
    some.reset()
    some.check([slot])
    assert some.find(None, "abcdef", 6) is None and not some.knows(None, "abcdef", 1)
    assert sorted(some.reserve() for _ in range(3)) == sorted({0, 1, 2, 3} - {slot})
