"""From a plan to packed arrays, against loops that nobody can get wrong."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hibachi.common.shapes import CallShapes, fixed
from hibachi.engine.scheduler.lower import Packed, lower, lower_one, pad

BLOCK = 4
TABLE = np.array([[3, 5, 1], [2, 7, 8], [4, 6, 9]], np.int32)  # of three rows


def pack(rows, *, tile=4, table=TABLE, block_size=BLOCK):
    """rows: (row, start, q, emits) of each."""
    row, start, q, emit = map(list, zip(*rows, strict=True))
    ints = [np.array(a, np.int32) for a in (row, start, q)]
    return lower(*ints, np.array(emit, bool), table, block_size, tiles=(1, tile))


def slowly(rows, *, tile, table, block_size):
    """The same, element by element."""
    out = {f.name: [] for f in fields(Packed)}
    out["cu_q"] = [0]
    width = min(max(-(-(start + q) // block_size) for _, start, q, _ in rows), table.shape[1])
    tile = 1 if all(q == 1 for _, _, q, _ in rows) else tile
    for i, (row, start, q, emits) in enumerate(rows):
        out["row"].append(row)
        out["start"].append(start)
        out["kv_len"].append(start + q)
        out["block_table"].append(table[row, :width].tolist())
        for k in range(q):
            if k % tile == 0:
                out["tile_q"].append([0] * tile)
                out["tile_row"].append(i)
            out["tile_q"][-1][k % tile] = len(out["pos"])
            out["tile_of"].append((len(out["tile_q"]) - 1) * tile + k % tile)
            pos = start + k
            block = table[row, pos // block_size] if width else 0
            out["slot"].append(int(block) * block_size + pos % block_size if width else 0)
            out["pos"].append(pos)
            out["seg"].append(i)
        out["cu_q"].append(len(out["pos"]))
        if emits:
            out["last"].append(len(out["pos"]) - 1)
    return out


def as_lists(packed):
    return {f.name: getattr(packed, f.name).tolist() for f in fields(Packed)}


def test_decode_and_a_chunk_that_crosses_a_block():
    p = pack([(1, 8, 1, True), (0, 2, 6, False)])
    assert p.pos.tolist() == [8, 2, 3, 4, 5, 6, 7]
    assert p.slot.tolist() == [8 * 4, 3 * 4 + 2, 3 * 4 + 3, 5 * 4, 5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3]
    assert p.seg.tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert p.cu_q.tolist() == [0, 1, 7]
    assert p.last.tolist() == [0]
    assert p.tile_q.tolist() == [[0, 0, 0, 0], [1, 2, 3, 4], [5, 6, 0, 0]]
    assert p.tile_row.tolist() == [0, 1, 1]
    assert p.tile_of.tolist() == [0, 4, 5, 6, 7, 8, 9]


@st.composite
def steps(draw):
    """A step: decode rows first, then chunks, over shuffled blocks."""
    block_size, width = draw(st.sampled_from([1, 2, 4, 16])), draw(st.integers(1, 5))
    longest = block_size * width
    n = draw(st.integers(1, 6))
    rows = draw(st.permutations(range(n)))
    cells = []
    for row in rows:
        q = draw(st.integers(1, longest))
        cells.append((row, draw(st.integers(0, longest - q)), q, draw(st.booleans())))
    cells.sort(key=lambda c: c[2] != 1)
    if draw(st.booleans()):
        cells = [(row, start, 1, emit) for row, start, _, emit in cells]
    blocks = draw(st.permutations(range(1, n * width + 1)))
    table = np.array(blocks, np.int32).reshape(n, width)
    return cells, dict(tile=draw(st.sampled_from([2, 4, 32])), table=table, block_size=block_size)


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(steps())
def test_lower_equals_the_slow_one(step):
    rows, how = step
    assert as_lists(pack(rows, **how)) == slowly(rows, **how)


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(steps(), st.data())
def test_a_single_row_is_packed_alike(step, data):
    [(row, start, q, emit), *_], how = step
    table, size, tail = how["table"], how["block_size"], data.draw(st.integers(0, q))
    if data.draw(st.booleans()):
        table = table[:, :0]  # no paged layer
    tiles = data.draw(st.sampled_from([(1, how["tile"]), (how["tile"],) * 2, CallShapes().choices]))
    given = (np.array(a, np.int32)[None] for a in (row, start, q))
    slow = lower(*given, np.array([emit]), table, size, tiles=tiles, tail=np.array([tail]))
    found = lower_one(row, start, q, min(q, 1 + tail) if emit else 0, table, size, tiles=tiles)
    assert as_lists(found) == as_lists(slow)
    assert all(a.dtype == np.int32 and a.shape == b.shape for a, b in zip(found.arrays(), slow.arrays(), strict=True))


@pytest.mark.parametrize(
    ("lengths", "tile"),
    [([1] * 64, 1), ([1] * 63 + [16], 2), ([8] * 8, 8), ([16], 8), ([128], 32), ([1, 512], 32)],
)
def test_query_tiles_suit_what_each_row_brings(lengths, tile):
    """Rows that decode are not filled up to 32 tokens because one of them brings a piece of a prompt."""
    n, wide = len(lengths), -(-max(lengths) // BLOCK)
    table = np.arange(1, n * wide + 1, dtype=np.int32).reshape(n, wide)
    zeros, emit = np.zeros(n, np.int32), np.ones(n, bool)
    packed = lower(np.arange(n), zeros, np.array(lengths), emit, table, BLOCK, tiles=CallShapes().choices)
    assert packed.tile_q.shape[1] == tile


def test_compiled_steps_have_two_sizes_of_query_tiles():
    assert CallShapes().choices == (1, 2, 8, 32)
    assert CallShapes(few="all").choices == CallShapes(few="decode").choices == (1, 32)
    assert CallShapes(few="all", sizes=(4,), tiles=(1, 1)).choices == (1, 1)


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(steps(), st.integers(0, 9), st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_padding_changes_nothing_that_is_there(step, more_tokens, more_rows, more_blocks, mixed):
    """The true part of every array stays, and the rest is harmless: block 0, the trash row, token 0."""
    rows, how = step
    p = pack(rows, **how)
    decode = p.tile_q.shape[1] == 1
    tile = 1 if decode and not mixed else how["tile"]
    n, tokens = len(p.row), len(p.pos)
    shape = fixed(tokens + more_tokens, n + more_rows, p.block_table.shape[1] + more_blocks, tile)
    big = pad(p, shape, trash_row=99)
    assert big.shape == shape
    for name in ("pos", "slot", "seg"):
        a, b = getattr(p, name), getattr(big, name)
        assert b[:tokens].tolist() == a.tolist() and not b[tokens:].any(), name
    for name, fill in ("row", 99), ("start", 0), ("kv_len", 0):
        a, b = getattr(p, name), getattr(big, name)
        assert b[:n].tolist() == a.tolist() and (b[n:] == fill).all(), name
    assert big.cu_q.tolist() == p.cu_q.tolist() + [tokens] * more_rows
    assert big.last[: len(p.last)].tolist() == p.last.tolist() and not big.last[len(p.last) :].any()
    assert len(big.last) == n + more_rows
    assert big.block_table[:n, : p.block_table.shape[1]].tolist() == p.block_table.tolist()
    assert not big.block_table[n:].any() and not big.block_table[:, p.block_table.shape[1] :].any()

    # Attention reads a query from its tile and writes its output back: the way there and back is the identity.
    for t in range(tokens):
        assert big.tile_q.reshape(-1)[big.tile_of[t]] == t
        assert big.tile_row[big.tile_of[t] // tile] == p.seg[t]
    most = max(tokens + more_tokens, n + more_rows)
    assert big.tile_q.shape == (most if tile == 1 else (tokens + more_tokens) // tile + n + more_rows, tile)
