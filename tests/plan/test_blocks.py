"""The pool of cache blocks, and the checkpoints of recurrent states."""

import pytest

from hibachi.engine.scheduler.blocks import BlockPool
from hibachi.engine.scheduler.checkpoints import Checkpoints


def test_block_zero_belongs_to_nobody():
    pool = BlockPool(5, 16)
    assert pool.usable == pool.free == 4
    assert sorted(pool.alloc(4)) == [1, 2, 3, 4]
    assert pool.free == 0


def test_all_or_nothing():
    pool = BlockPool(4, 16)
    assert pool.alloc(4) is None
    assert pool.free == 3
    assert pool.alloc(0) == []


def test_last_in_first_out():
    pool = BlockPool(6, 16)
    a, b = pool.alloc(2), pool.alloc(2)
    assert (a, b) == ([1, 2], [3, 4])
    pool.release(a, sound=len(a))
    assert pool.alloc(3) == [1, 2, 5]


@pytest.mark.parametrize("positions, blocks", [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(positions, blocks):
    assert BlockPool(9, 4).blocks_for(positions) == blocks


@pytest.mark.parametrize("total", [0, 1])
def test_a_pool_may_be_empty(total):
    pool = BlockPool(total, 4)
    assert (pool.usable, pool.free, pool.alloc(1)) == (0, 0, None)


def test_check_finds_lost_shared_and_foreign_blocks():
    pool = BlockPool(4, 4)
    held = pool.alloc(2)
    pool.check(held)
    for wrong in (held[:1], [*held, held[0]], [*held, 0]):
        with pytest.raises(AssertionError, match=r"lost|nobody knows"):
            pool.check(wrong)


def test_the_checkpoint_that_was_found_longest_ago_gives_way():
    kept = Checkpoints(2, every=16)
    for keys in ("a", "b"):
        slot = kept.reserve()
        assert slot is not None
        kept.publish(None, keys, 1, slot)
    found = kept.find(None, "a", 1)  # a was made first, but is used now
    assert found is not None
    slot = kept.reserve()
    assert slot is not None and kept.evictions == 1
    assert kept.find(None, "a", 1) == found and kept.find(None, "b", 1) is None
    kept.check([slot])
