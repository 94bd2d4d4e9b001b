"""Do two sizes of a step give the same bits? Asked of the loaded model, before it serves anybody."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from hibachi.engine.tokentable import History
from hibachi.tensor.array_backend import HostArray

if TYPE_CHECKING:
    from hibachi.engine.cached import CachedRunner

log = logging.getLogger("hibachi.engine")


def same_bits(runner: CachedRunner, few: int, many: int) -> bool:
    """Does one call of `many` tokens come to what calls of `few` come to, in all outputs and all that is cached?

    If so, both programs are compiled now. No for a model with states, which cannot be padded, for one that returns
    tokens itself, as we do not know which to give it, and for one that fails. Overwrites row 0 and the cache.
    """
    limits = runner.limits
    room = min(limits.max_len - 1, (limits.blocks - 1) * limits.block_size)
    if runner.states or runner.sampler is None or many > min(limits.budget, room):
        return False
    try:
        one, other = (_results(runner, many, size) for size in (many, few))
    except Exception as e:  # the first request will fail likewise, and its caller be told
        log.info("%s failed when it was tried with %d tokens: %r", runner.name, many, e)
        return False
    finally:
        runner.rebuild(keep=False)
    if all(np.array_equal(a, b) for a, b in zip(one, other, strict=True)):
        return True
    log.info("%s: steps of %d tokens give other bits than steps of %d; only these are made", runner.name, many, few)
    return False


def _results(runner: CachedRunner, n: int, size: int) -> list[HostArray]:
    """The outputs of n random tokens, in calls of `size`, and what they left in the cache."""
    backend, row = runner.backend, np.zeros(1, np.int32)
    blocks = np.arange(1, 1 - (-n // runner.limits.block_size), dtype=np.int32)
    assert runner.sampler is not None
    tokens = History(np.random.default_rng(0).integers(0, runner.sampler.vocab_size, n).astype(np.int32))
    runner.table.fill(0, tokens)
    runner.block_table[0, : len(blocks)], runner._unscored[0] = blocks, n
    outputs = []
    try:
        with backend.guard():
            for start in range(0, n, size):
                x = runner._inputs(row, row + start, row + size, np.ones(1, bool))
                out, runner.cache = runner._step(runner.model.params, runner.cache, x)
                outputs.append(backend.get(out))
            at = backend.put(blocks)
            left = [backend.get(backend.take(half, at)) for layer in runner.cache for half in layer]
    finally:
        runner.block_table[0], runner._unscored[0] = 0, 0
    return [np.concatenate(outputs), *left]
