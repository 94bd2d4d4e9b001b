"""The order in which rows of a batch start: against a list searched from end to end, and property by property."""

import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hibachi.engine.scheduler import compose
from hibachi.engine.scheduler.compose import RUN, Composer, blocks_of


def common(a, b):
    """Items that two keys begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Listed:
    """What `Composer` promises, by looking at every row."""

    def __init__(self, patience):
        self.patience, self.rows, self.last = patience, {}, ()
        self.taken, self.joined, self.left = 0, -compose.RUN, -compose.RUN

    def add(self, number, key, longest):
        self.rows[number] = key, longest, self.taken + len(self.rows)
        self.patience = max(self.patience, len(self.rows))
        self.joined = self.taken or -compose.RUN

    def take(self):
        alike = {n: common(self.last, key) for n, (key, _, _) in self.rows.items()}
        near = [n for n in self.rows if alike[n] == max(alike.values())]
        depth = max(alike.values()) and min(common(self.rows[near[0]][0], self.rows[n][0]) for n in near)
        children = [self.rows[n][0][: depth + 1] for n in near if len(self.rows[n][0]) > depth]
        oldest = min(self.rows, key=lambda n: self.rows[n][2])
        overdue = self.taken - self.rows[oldest][2] >= self.patience
        gathers = len(set(children)) < len(children) and self.taken - self.joined < compose.RUN
        if overdue and self.taken - self.left >= compose.RUN:
            row, self.left = oldest, self.taken
        elif (overdue or gathers) and oldest in near:
            row = oldest
        else:
            row = min(near, key=lambda n: (-self.rows[n][1], n))
        self.taken += 1
        self.last = self.rows.pop(row)[0]
        return row


def take_all(composer):
    return [composer.take() for _ in range(len(composer))]


def composed(rows, **options):
    """The order of (key, longest) that are all there at the start."""
    composer = Composer(**options)
    for number, (key, longest) in enumerate(rows):
        composer.add(number, key, longest)
    return take_all(composer)


keys = st.lists(st.integers(0, 2), max_size=6).map(tuple)
row = st.tuples(keys, st.integers(1, 9))


@settings(max_examples=200)
@given(rows=st.lists(row, max_size=60), window=st.integers(1, 20), patience=st.sampled_from([1, 5, 1000]))
def test_as_a_list_that_is_searched(rows, window, patience):
    """A rolling window, filled at once and then refilled with one row for each that is taken."""
    composer, listed, out = Composer(patience=patience), Listed(patience), []
    for number, (key, longest) in enumerate(rows):
        if len(composer) == window:
            out.append(composer.take())
            assert out[-1] == listed.take()
        composer.add(number, key, longest)
        listed.add(number, key, longest)
    while composer:
        out.append(composer.take())
        assert out[-1] == listed.take()
    assert sorted(out) == list(range(len(rows)))


@pytest.mark.parametrize("seed, run, many", [(0, RUN, 90), (1, RUN, 90), (2, 1, 30), (3, 1, 30), (4, 3, 10)])
def test_as_a_list_that_is_searched_for_long(monkeypatch, seed, run, many):
    """Bursts of rows and of takes, long enough for rows to be overdue and for joining to count as over."""
    monkeypatch.setattr(compose, "RUN", run)
    rng = random.Random(seed)
    composer, listed, number = Composer(patience=20), Listed(20), 0
    for _ in range(1500 // many):
        for _ in range(rng.choice([1, 3, many])):
            key = tuple(rng.choice([0, 0, 1, 2]) for _ in range(rng.choice([0, 3, 9])))
            longest = rng.randint(1, 50)
            composer.add(number, key, longest)
            listed.add(number, key, longest)
            number += 1
        for _ in range(min(len(composer), rng.choice([1, 5, many]))):
            assert composer.take() == listed.take()


@pytest.mark.parametrize("head", [(), ("bos",), ("bos", "be brief")])
def test_where_nothing_more_is_shared_the_longest_goes_first(head):
    lengths = random.Random(0).choices(range(1, 100), k=500)
    order = composed([((*head, f"own {n}"), length) for n, length in enumerate(lengths)])
    assert order == sorted(range(500), key=lambda n: (-lengths[n], n))


def test_nobody_waits_for_ever_beside_a_group_without_end():
    composer, window, patience = Composer(patience=40), 20, 40
    for number in range(10):
        composer.add(number, (number, "own"), 1)
    for number in range(10, window):
        composer.add(number, ("all", number), 9)
    alone = []
    for takes in range(1, 5000):
        number = composer.take()
        if number < 10:
            alone.append(takes)
        composer.add(window + takes, ("all", takes), 9)
    assert alone == list(range(patience + 1, patience + 11))  # the group is left once for all of them


def test_empty_and_numbers():
    composer = Composer()
    with pytest.raises(IndexError, match="No row is left to take"):
        composer.take()
    composer.add(7, (), 1)
    with pytest.raises(ValueError, match="Row 7 is here already: expected each number once"):
        composer.add(7, (1, 2), 3)
    assert len(composer) == 1 and composer.take() == 7 and len(composer) == 0
    composer.add(7, (), 1)  # it has left
    assert composer.take() == 7
    for wrong in ({"block": 0}, {"patience": 0}):
        with pytest.raises(ValueError, match="block and patience must be at least 1"):
            Composer(**wrong)


@pytest.mark.parametrize("block, turn", [(1, list), (1, bytes), (2, tuple), (3, bytes)])
def test_keys_of_several_kinds(block, turn):
    """Whole blocks count, what follows them does not."""
    rng = random.Random(block)
    rows = [([rng.choice([0, 1]) for _ in range(rng.randint(0, 9))], rng.randint(1, 5)) for _ in range(60)]
    whole = [tuple(tuple(key[at : at + block]) for at in range(0, len(key) - block + 1, block)) for key, _ in rows]
    found = composed([(turn(key), longest) for key, longest in rows], block=block)
    assert found == composed(list(zip(whole, (longest for _, longest in rows), strict=True)))


@pytest.mark.parametrize("turn", [list, tuple, np.array, lambda ids: np.array(ids, np.int32)])
def test_blocks_of_a_prompt(turn):
    ids = [random.Random(0).randrange(100_000) for _ in range(70)]
    blocks = blocks_of(turn(ids), 16)
    assert len(blocks) == 4 and [np.frombuffer(b, np.int32).tolist() for b in blocks] == [
        ids[at : at + 16] for at in range(0, 64, 16)
    ]
    assert blocks_of(turn(ids[:15]), 16) == () and blocks_of(turn([]), 16) == ()


def test_long_keys_take_two_nodes_a_row():
    """A node for each block would take 60 MB."""
    own = [(n // 2, *range(1000), n) for n in range(300)]
    tracemalloc.start()
    try:
        composer = Composer()
        for number, key in enumerate(own):
            composer.add(number, key, len(key))
        assert tracemalloc.get_traced_memory()[0] < 1500 * len(own)
    finally:
        tracemalloc.stop()
    assert take_all(composer) == list(range(300))


def test_prompts_that_go_on_and_on():
    """Each continues the one before it: a tree deeper than Python's calls may be."""
    text = bytes(1010)
    assert composed([(text[:n], n) for n in range(1010, 0, -1)]) == list(range(1010))


def test_memory_stays_as_it_is_while_rows_come_and_go():
    tracemalloc.start()
    try:
        composer, held = Composer(), []
        for number in range(6000):
            composer.add(number, (number % 2, number % 3, number), number % 7)
            if len(composer) > 50:
                composer.take()
            if number % 2000 == 1999:
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[-1] < held[0] + 20_000
