"""The pool of cache blocks, and the checkpoints of recurrent states."""

import pytest

from hibachi.engine.scheduler.blocks import BlockPool


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
