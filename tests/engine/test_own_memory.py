"""How much memory the pasts of models with a cache of their own take: between steps, and at most within one.

The part of the engine only: what a model keeps while it computes is its own.
"""

import gc
import tracemalloc

import numpy as np
import pytest

import hibachi
from hibachi import NumpyBackend, OwnCache, SamplingParams
from hibachi.backend.array_backend import ArrayBackend
from hibachi.engine.runners.owncache.layout import Group, Layout, Leaf, Past, has_views

LAYERS = 6
ROWS, POSITIONS = 8, 160
SMALL = 2**17  # bytes of all the rest
LONG = SamplingParams(temperature=0, max_tokens=60)


class Heavy:
    """Keys and values of 6 layers [rows, 4, positions, 32]. The next token is the sum of all plus 1, modulo 10."""

    vocab_size, max_model_len, past = 10, 400, OwnCache()

    def __init__(self, backend, new_only):
        self.backend, self.new_only, self.enters, self.leaves = backend, new_only, None, None

    def step(self, tokens, lengths, past):
        if self.enters is not None:
            self.enters(past)
        b, xp = self.backend, self.backend.xp
        new = xp.broadcast_to(b.float32(tokens)[:, None, :, None], (tokens.shape[0], 4, tokens.shape[1], 32))
        layers, width = [], tokens.shape[1] + (0 if past is None else past[0][0].shape[2])
        for i in range(LAYERS):
            pair = [b.copy(new), b.copy(new)]
            if past is not None and not self.new_only:
                pair = [xp.concat([old, half], axis=2) for old, half in zip(past[i], pair, strict=True)]
            layers.append(tuple(pair))
        seen = b.float32(tokens)
        if past is not None:
            seen = xp.concat([past[0][0][:, 0, :, 0], seen], axis=1)
        place = xp.reshape(b.put(np.arange(width, dtype=np.int32)), (1, -1))
        real = place >= width - xp.reshape(lengths, (-1, 1))
        total = (xp.sum(xp.where(real, seen, xp.zeros_like(seen)), axis=1) + 1) % 10
        ids = b.float32(b.put(np.arange(10, dtype=np.int32)))
        found = -xp.abs(xp.reshape(total, (-1, 1)) - xp.reshape(ids, (1, -1))), layers
        if self.leaves is not None:
            self.leaves()
        return found


def arrays_of(tree):
    return [] if tree is None else [half for layer in tree for half in layer]


def pasts_of(engine, given):
    """Bytes of all pasts as they are, room left out. given: to the call."""
    pasts = {id(past): past for past in engine.core.runner.pasts.of.values()}
    return sum(a.nbytes for past in pasts.values() for a in past.arrays) + sum(a.nbytes for a in arrays_of(given))


def served(serve, backend, new_only, watch, **options):
    """Let requests come and go; `watch(engine, model)` is told of each call."""
    model = Heavy(backend, new_only)
    options = {"max_num_seqs": ROWS, "max_num_batched_tokens": 2048, "enable_prefix_caching": False} | options
    options = {"block_size": 16} | options
    engine = serve(model, backend=backend, max_model_len=400, **options)
    watch(engine, model)
    prompts = [[i % 10] * (POSITIONS - 3 * i) for i in range(12)]
    streams = [engine.run(prompt, LONG.with_(max_tokens=60 - 2 * i)) for i, prompt in enumerate(prompts)]
    tokens = [stream.collect() for stream in streams]
    model.enters = model.leaves = None
    return tokens


@pytest.mark.parametrize("new_only", [False, True])
def test_between_steps_there_is_little_more_than_the_pasts(serve, new_only):
    ratios = []

    def watch(engine, model):
        tracemalloc.start()

        def enters(past):
            have = tracemalloc.get_traced_memory()[0]
            ratios.append((have - SMALL) / max(pasts_of(engine, past), SMALL))

        model.enters = enters

    try:
        served(serve, NumpyBackend(), new_only, watch)
    finally:
        tracemalloc.stop()
    assert len(ratios) > 60 and max(ratios) <= 1.25


def test_in_a_step_there_are_two_layers_more_at_most(serve):
    """For a model that returns new positions only, all the rest is the engine's."""
    seen, over = [0], []

    def watch(engine, model):
        tracemalloc.start()

        def enters(past):
            now = pasts_of(engine, past)
            limit = max(seen[-1], now) * (1.25 + 2 / LAYERS) + SMALL
            over.append(tracemalloc.get_traced_memory()[1] / limit)
            seen.append(now)

        model.enters, model.leaves = enters, tracemalloc.reset_peak

    try:
        served(serve, NumpyBackend(), True, watch)
    finally:
        tracemalloc.stop()
    assert len(over) > 60 and max(over) <= 1


@pytest.mark.parametrize("new_only", [False, True])
@pytest.mark.slow
def test_torch_keeps_no_copy_more(serve, new_only):
    torch = pytest.importorskip("torch")
    ratios = []

    def watch(engine, model):
        def enters(past):
            if len(ratios) % 8 == 0:  # to look at all objects takes long
                gc.collect()
                tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and t.dim() == 4]
                storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
                ratios.append(sum(storages.values()) / max(pasts_of(engine, past), SMALL))
            else:
                ratios.append(0.0)

        model.enters = enters

    tokens = served(serve, hibachi.load_backend("torch"), new_only, watch)
    assert len(ratios) > 60 and 0.9 < max(ratios) <= 1.25
    assert tokens == served(serve, NumpyBackend(), new_only, lambda engine, model: None)


def test_what_is_kept_for_others_takes_what_its_blocks_may(serve):
    """And is counted: rows and what is kept share one bound."""
    backend, position = NumpyBackend(), LAYERS * 2 * 4 * 32 * 4
    held = []

    def watch(engine, model):
        tracemalloc.start()

        def enters(past):
            arrays = [a for _, arrays in engine.core.runner.prefixes.kept.values() for a in arrays]
            kept = sum(a.nbytes for a in arrays)
            idle = engine.stats().cached_blocks
            more = tracemalloc.get_traced_memory()[0] - 1.25 * pasts_of(engine, past) - kept - 600 * len(arrays)
            held.append((kept, idle, more))

        model.enters = enters

    try:
        served(serve, backend, True, watch, enable_prefix_caching=True, cache_tokens=1600, max_num_seqs=4)
    finally:
        tracemalloc.stop()
    assert any(kept for kept, _, _ in held)
    assert all(kept <= idle * 16 * position for kept, idle, _ in held)
    assert max(more for _, _, more in held) < SMALL


# ---- taken apart -----------------------------------------------------------------------------------------------------


def layout(arrays):
    leaves = [Leaf(f"[{i}]", 0, 1, (0, 0, 64), np.float32) for i in range(arrays)]
    return Layout(leaves, NumpyBackend(), "Model.step")


def past(arrays, rows, width, seed=0):
    random = np.random.default_rng(seed)
    made = [random.random((len(rows), width, 64)).astype(np.float32) for _ in range(arrays)]
    return Past(list(made), list(made), rows, [width] * len(rows), width, len(rows))


def test_pasts_are_joined_array_by_array():
    one, other = past(16, [0, 1, 2], 300), past(16, [3], 200, 1)
    want = [
        np.concatenate([a[[2, 0]], np.pad(b, ((0, 0), (100, 0), (0, 0)))])
        for a, b in zip(one.arrays, other.arrays, strict=True)
    ]
    rest = [a[1:2].copy() for a in one.arrays]
    group = Group([(one, 2), (one, 0), (other, 0)], [2, 0, 3], [300, 300, 200], 300)
    array = 300 * 64 * 4 * 4
    made = layout(16)
    gc.collect()
    tracemalloc.start()
    try:
        joined, left = made.arranged([group, Group([(one, 1)], [1], [300], 300)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Not traced are the arrays that there were before; all that is made, and no more than one of them twice.
    assert all(a is None for a in one.arrays + other.arrays) and one.tree is other.tree is None
    assert peak <= 16 * array + 2 * array
    assert all(np.array_equal(a, b) for a, b in zip(joined.arrays, want, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(left.arrays, rest, strict=True))
    assert joined.tree == joined.arrays and joined.rows == [2, 0, 3] and left.counts == [300]


def test_where_nothing_changes_arrays_are_the_same_ones():
    one = past(4, [0, 1], 20)
    arrays, tree = [*one.arrays], one.tree
    (same,) = layout(4).arranged([Group([(one, 0), (one, 1)], [0, 1], [20, 20], 20)])
    assert all(a is b for a, b in zip(arrays, same.arrays, strict=True)) and same.tree is tree


def test_new_positions_are_written_behind_the_others():
    """A position is not copied in each step: only where the room is used up."""
    made, now = layout(2), past(2, [0, 1], 40)
    want = [a.copy() for a in now.arrays]
    longer, room = 0, None
    for step in range(60):
        new = [np.full((2, 1, 64), step, np.float32) for _ in range(2)]
        width = now.width
        now = made.taken(list(new), now, [0, 1], [width + 1] * 2, 2, 1)
        want = [np.concatenate([a, b], 1) for a, b in zip(want, new, strict=True)]
        assert all(np.array_equal(a, b) for a, b in zip(now.arrays, want, strict=True))
        assert all(a is b for a, b in zip(now.tree, now.arrays, strict=True))
        longer, room = longer + (now.room[0] is not room), now.room[0]
        assert now.room[0].shape[1] <= 1.25 * now.width
    assert longer <= 7


def test_who_has_views():
    strict = pytest.importorskip("array_api_strict")
    assert has_views(NumpyBackend()) and has_views(ArrayBackend(strict, name="array_api_strict"))
    assert has_views(hibachi.load_backend("torch")) and not has_views(hibachi.load_backend("jax"))
