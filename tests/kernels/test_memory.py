"""Memory that is used again."""

import gc
import threading

import numpy as np
import pytest

from hibachi.backend.kernels.memory import Reused

from ..lib.leaks import kept


def place(t):
    return t.__array_interface__["data"][0]


def test_an_array_gets_the_memory_of_one_that_is_gone():
    reused = Reused()
    first = reused.empty((800, 100), np.float32)
    assert first.shape == (800, 100) and first.dtype == np.float32 and place(first) % 64 == 0
    first[...] = 1
    at = place(first)
    del first
    smaller = reused.empty((300, 133), np.float32)
    assert place(smaller) == at and smaller.flags.c_contiguous and smaller.flags.writeable
    del smaller
    larger = reused.empty((800, 1000), np.float64)
    larger[...] = 2  # is all there
    at = place(larger)
    del larger
    assert place(reused.empty((800, 100), np.float32)) == at


@pytest.mark.parametrize("rows", [1, 327, 328])  # of 400 bytes: up to 128 KB nothing is looked after
def test_whatever_the_size_arrays_begin_on_a_cache_line_and_are_apart(rows):
    reused = Reused()
    first, second = (reused.empty((rows, 100), np.float32) for _ in range(2))
    first[...], second[...] = 1, 2
    assert (first == 1).all() and place(first) % 64 == place(second) % 64 == 0
    del first
    assert kept(reused) == (rows * 400 >= 2**17)


def test_what_somebody_has_a_part_of_is_left_alone():
    reused = Reused()
    whole = reused.empty((800, 100), np.float32)
    whole[...] = np.arange(800)[:, None]
    row = whole[3].reshape(10, 10)[2:].T
    del whole
    gc.collect()
    for _ in range(3):
        other = reused.empty((800, 100), np.float32)
        other[...] = -1
    assert (row == 3).all()


def test_what_is_kept_is_one_piece_however_many_there_were():
    reused = Reused()
    some = [reused.empty((100_000,), np.float32) for _ in range(5)]
    assert len({place(t) for t in some}) == 5
    some.clear()
    assert kept(reused) == 1


def test_threads_get_memory_of_their_own():
    reused, wrong = Reused(), []

    def use(mine):
        for _ in range(300):
            t = reused.empty((20_000,), np.int64)
            t[...] = mine
            if not (t == mine).all():
                wrong.append(mine)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
