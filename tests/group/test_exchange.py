"""Memory that the ranks of one host share: threads as ranks, which map the same memory."""

import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from hibachi.backend.group import GroupLost, place_of, tree
from hibachi.backend.kernels.library import library, why_missing

torch = pytest.importorskip("torch")
exchange = pytest.importorskip("hibachi_torch.exchange")
pytestmark = pytest.mark.skipif(why_missing() is not None, reason=f"no kernels: {why_missing()}")
SLOT = 1 << 18


def ranks_of(size, stages=1, patience=20.0):
    kernels = library().kernels
    memory = mmap.mmap(-1, kernels.exchange_bytes(size))
    return [exchange.HostExchange(kernels, memory, r, place_of(r, size, stages), patience) for r in range(size)]


def at_once(calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_any_number_of_ranks_adds_up_the_tree_and_gathers_what_each_has(size):
    ranks, rng = ranks_of(size), np.random.default_rng(size)
    for epoch in range(3):
        for n in (1, 17, 4096, SLOT // 4, 5 * SLOT // 4 + 3):  # of less than a lane, and of several pieces
            parts = [torch.from_numpy(rng.standard_normal(n, np.float32) * np.float32(10**r)) for r in range(size)]
            want = tree(parts)
            sums = [part.clone() for part in parts]
            at_once([partial(r.sum, x) for r, x in zip(ranks, sums, strict=True)])
            assert all(torch.equal(found.view(torch.int32), want.view(torch.int32)) for found in sums)
        for rows, each, less, dtype in ((0, 3, 0, "f4"), (1, 1, 0, "f4"), (7, 40000, 3, "f4"), (300, 500, 1, "i2")):
            parts = [torch.from_numpy(rng.integers(0, 999, (rows, each)).astype(dtype)) for _ in ranks]
            columns = each * size - less  # what is left of the last one has no place
            found = at_once([partial(r.gather, x, columns) for r, x in zip(ranks, parts, strict=True)])
            assert torch.equal(found[0], torch.cat(parts, 1)[:, :columns])
            assert all(f is part for f, part in zip(found[1:], parts[1:], strict=True))
        ranks[epoch % size].cancel()  # what is left of this epoch is over for all of them
        with pytest.raises(GroupLost, match="a rank has ended, or could not go on"):
            ranks[(epoch + 1) % size].sum(torch.zeros(3))
        for rank in ranks:
            rank.renew(epoch + 1)


def test_stages_do_not_wait_for_each_other():
    ranks = ranks_of(4, stages=2)
    x = [torch.full((3,), float(2**r)) for r in range(4)]
    for stage in ((2, 3), (0, 1)):
        at_once([partial(ranks[r].sum, x[r]) for r in stage])
    assert [int(t[0]) for t in x] == [3, 3, 12, 12]


def test_who_waits_is_told_of_the_end_and_of_one_that_is_late():
    one, other, third = ranks_of(3, patience=0.2)
    with pytest.raises(GroupLost, match=r"a rank did not come within 0\.2 s"):
        one.sum(torch.zeros(3))
    one, other, third = ranks_of(3)
    threading.Timer(0.2, third.cancel).start()
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(rank.sum, torch.zeros(3)) for rank in (one, other)]
    assert [type(future.exception()) for future in waiting] == [GroupLost] * 2
    assert time.monotonic() - began < 10
