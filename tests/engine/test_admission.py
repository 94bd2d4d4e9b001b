"""Who is let in where only so many may be: tenants have their parts of the queue."""

from collections import Counter

import pytest

from hibachi.engine.admission import check_room
from hibachi.engine.scheduler.step import Limits
from hibachi.errors import QueueFull

LIMITS = Limits(4, 16, 16, 64)


class Hall:
    """Room for 4 that run and 8 that wait."""

    def __init__(self, **here):
        self.here = Counter(here)

    def lets_in(self, tenant, new=1):
        try:
            check_room(tenant, new, self.here.total(), LIMITS, 8, self.here.elements)
        except QueueFull:
            return False
        self.here[tenant] += new
        return True

    def fill(self, tenant):
        while self.lets_in(tenant):
            pass
        return self.here[tenant]


def test_a_tenant_alone_has_it_all():
    assert Hall().fill("a") == 12


def test_many_at_once_count_as_many():
    assert Hall().lets_in("a", 12) and not Hall().lets_in("a", 13) and not Hall(a=11).lets_in("a", 2)


def test_one_that_comes_late_has_its_part_nevertheless():
    hall = Hall(a=12)
    assert hall.fill("b") == 6 and hall.fill("c") == 4 and not hall.lets_in("a")


def test_who_holds_its_part_waits_until_the_others_have_less():
    hall = Hall(a=12, b=6)
    hall.here["a"] = 6
    assert not hall.lets_in("a") and not hall.lets_in("b")
    hall.here["a"] = 5
    assert hall.lets_in("a") and not hall.lets_in("b")


def test_names_without_end_let_nobody_in_without_end():
    hall = Hall()
    for n in range(1000):
        hall.lets_in(f"tenant {n}")
    assert hall.here.total() == 12, "a part of less than one is none"
    hall = Hall()
    for n in range(1000):
        hall.fill(f"tenant {n}")
    assert hall.here.total() <= 48


def test_without_a_limit_nobody_is_counted():
    check_room("a", 10**9, 10**9, LIMITS, None, None)


def test_it_says_who_has_how_many():
    with pytest.raises(QueueFull, match=r"at most 12 requests here .4 that run .* got 12 and 1 more"):
        check_room("a", 1, 12, LIMITS, 8, lambda: ["a"] * 12)
    with pytest.raises(QueueFull, match=r"got 14 .6 of them of this tenant, whose part is 6. and 2 more"):
        check_room("a", 2, 14, LIMITS, 8, lambda: ["a"] * 6 + ["b"] * 8)
