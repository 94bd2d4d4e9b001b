"""A backend's invariant kernels give a row the same bits alone and in every company.

For backends whose `invariant()` gives another backend. One that wants steps of a fixed number of tokens is shown no
more rows at once.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest

from hibachi import Paged, StepInputs

from .paged import Row, step_inputs

pytestmark = pytest.mark.promise("the same bits in every batch", parts=["arrays and arithmetic"])

COMPANY = (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 16, 17, 31, 33, 64, 70)
FEW = (1, 3, 8)  # where every number of rows is compiled


def rows_of(b):
    return [n for n in FEW if n <= b.shapes.sizes[0]] if b.shapes.sizes else COMPANY


def alike(b, f, *rows):
    """f, a function of arrays that have as many rows, gives every row the same bits whoever is there, and wherever."""
    f = b.compile(f)

    def call(first, n):
        with b.guard():
            return b.get(f(*(b.put(r[first : first + n], str(r.dtype)) for r in rows)))

    counts = rows_of(b)
    alone = np.concatenate([call(i, 1) for i in range(max(counts))])
    for n in counts:
        for first in {0, 1, 5, max(counts) - n}:
            if first + n <= max(counts):
                got, want = call(first, n), alone[first : first + n]
                bad = np.flatnonzero((got != want).reshape(n, -1).any(axis=1))
                assert not len(bad), f"row {bad[0]} of {n} differs from the same row alone, by {off(got, want):.2g}"


def off(got, want):
    return np.abs(got.astype("float64") - want).max()


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def test_linear_gives_a_row_the_same_bits_in_every_company(backend):
    b = backend.invariant()
    for size, out in ((24, 40), (64, 192), (100, 37), (700, 320)):
        w, bias = b.put_weight(random(out, size), "float32"), b.put(random(out))
        alike(b, lambda x, w=w: b.linear(x, w), random(max(COMPANY), size))
        alike(b, lambda x, w=w, bias=bias: b.linear(x, w, bias), random(max(COMPANY), size))


def test_norms_and_activations_give_a_row_the_same_bits_in_every_company(backend):
    b, size = backend.invariant(), 37
    w = b.put(random(size))

    def f(*both):
        for x in both:
            yield from (b.rms_norm(x, w, 1e-5), b.layer_norm(x, w, w, 1e-5), b.softmax(x))
            yield from (b.silu(x), b.gelu(x), b.gelu_tanh(x))

    def joined(x, wide):
        return b.xp.concat([*f(x, wide[:, :size])], axis=1)  # the second is not contiguous

    alike(b, joined, 3 * random(max(COMPANY), size), 3 * random(max(COMPANY), 2 * size))


def test_experts_give_a_row_the_same_bits_in_every_company(backend):
    b = backend.invariant()
    into = [b.put_weight(random(32, 24) * (e + 1), "float32") for e in range(3)]
    out = [b.put_weight(random(24, 32) / (e + 1), "float32") for e in range(3)]
    n = max(COMPANY)
    chosen = np.random.default_rng(1).permuted(np.tile(np.arange(3), (n, 1)), axis=1)[:, :2].astype("int32")
    weights = np.abs(random(n, 2))

    def f(x, chosen, weights):
        return b.experts(x, chosen, weights, into, out, "silu", gated=False)

    alike(b, f, random(n, 24), chosen, weights)


def test_route_gives_a_row_the_same_bits_in_every_company(backend):
    b = backend.invariant()
    alike(b, lambda x: b.xp.concat([b.route(x, 3, normalised=True)[0]], axis=1), random(max(COMPANY), 10))


def test_a_state_gets_the_same_bits_in_every_company_and_in_pieces(backend):
    """Rows beside others; and tokens in two calls, the second of which begins with what the first left."""
    b = backend.invariant()
    rows, tokens, dim, size = 6, 7, 21, 5
    x, dt, gate = (random(rows, tokens, dim) for _ in range(3))
    write, read, state, past = (random(rows, *s) for s in ((tokens, size), (tokens, size), (size, dim), (3, dim)))
    w, decay, skip = random(4, dim), -np.abs(random(size, dim)), random(dim)

    def run(some, begin, end, past, state):
        def put(t):
            return b.put(np.ascontiguousarray(t[some, begin:end]))

        u, past = b.convolve(past, put(x), b.put(w))
        given = u, put(dt), put(gate), put(write), put(read), b.put(decay), b.put(skip)
        y, state = b.selective_scan(state, *given)
        return b.get(y), past, state

    first = b.put(past), b.put(state)
    y, *after = run(slice(None), 0, tokens, *first)
    one, *between = run(slice(None), 0, 3, *first)
    two, *pieces = run(slice(None), 3, tokens, *between)
    np.testing.assert_array_equal(np.concatenate([one, two], axis=1), y)
    for whole, piece in zip(after, pieces, strict=True):
        np.testing.assert_array_equal(b.get(whole), b.get(piece))
    for row in range(rows):
        some = slice(row, row + 1)
        alone, *_ = run(some, 0, tokens, b.put(past[some]), b.put(state[some]))
        np.testing.assert_array_equal(alone, y[some])


def test_attend_gives_a_token_the_same_bits_in_every_step(backend):
    """A prompt of 40 tokens: computed token by token, alone; in chunks; beside others; in a far longer table."""
    b = backend.invariant()
    data = [random(8, 3 * 40, heads, 8)[i] for i, heads in enumerate((4, 2, 2))]
    blocks = tuple(range(1, 11)), tuple(range(11, 21)), tuple(range(21, 31))
    most = b.shapes.sizes[0] if b.shapes.sizes else 100
    bias, sinks = (b.put(np.array(a, "float32")) for a in ([[0, -0.3], [1, 2], [0, 0], [0.1, 0]], [1, -2, 0, 3]))
    for special in ({}, {"window": 20, "softcap": 3.0}, {"bias": bias, "sinks": sinks}, {"sinks": sinks, "window": 9}):
        want = attended(b, [(0, [1] * 40)], data, blocks, most, **special)[0]
        for chunks in ([40],) if b.shapes.sizes else ([40], [7, 24, 9], [39, 1]):
            got = attended(b, [(0, chunks)], data, blocks, most, **special)[0]
            assert np.array_equal(got, want), f"in chunks of {chunks[0]} it differs by {off(got, want):.2g}"
            company = [(1, [1] * 9), (0, chunks), (2, [33, 1, 6])]
            got = attended(b, company, data, blocks, most, wide=40, **special)[0]
            assert np.array_equal(got, want), (
                f"in chunks of {chunks[0]} beside others it differs by {off(got, want):.2g}"
            )


def attended(b, requests, data, blocks, most, wide=0, **special):
    """What each request, (number of its data, its chunks), comes to when they are stepped together.

    Steps hold at most `most` tokens, and exactly so many if the backend wants that.
    """
    cache = b.make_cache(Paged(2, 8, 8), blocks=40, block_size=4, rows=4, dtype="float32")
    attend = b.compile(partial(b.attend, **special))
    left = {number: [*chunks] for number, chunks in requests}
    done = dict.fromkeys(left, 0)
    out: dict[int, list[Any]] = {number: [] for number in left}
    while any(left.values()):
        rows, numbers, total = [], [], 0
        for number, chunks in left.items():
            q = min(chunks[0] if chunks else 0, most - total)
            if q:
                rows.append(Row(done[number], q, blocks[number]))
                numbers.append(number)
                total += q
        order = sorted(range(len(rows)), key=lambda i: rows[i].q > 1)  # single tokens first
        rows, numbers = [rows[i] for i in order], [numbers[i] for i in order]
        tile = b.shapes.tiles[any(row.q > 1 for row in rows)]
        pad = most - total if b.shapes.sizes else 0
        host = step_inputs(rows, 4, tile, pad)
        table = host["block_table"]
        if b.shapes.sizes:  # one shape for all steps
            host["block_table"] = np.zeros((most, 40), "int32")
            host["block_table"][: len(rows), : table.shape[1]] = table[: len(rows)]
            host |= {name: host[name][:most] for name in ("row", "start", "kv_len", "last")}
            host["cu_q"] = host["cu_q"][: most + 1]
        elif wide:
            host["block_table"] = np.pad(table, ((0, 0), (0, wide - table.shape[1])))
        else:
            host["block_table"] = table[:, : -(-max(row.start + row.q for row in rows) // 4)]
        at = np.concatenate(
            [40 * n + np.arange(row.start, row.start + row.q) for n, row in zip(numbers, rows, strict=True)]
        )
        x = StepInputs(**{name: b.put(a) for name, a in host.items()})
        with b.guard():
            qkv = (b.put(np.concatenate([d[at], np.zeros((pad, *d.shape[1:]), "float32")])) for d in data)
            y, cache = attend(*qkv, cache, x)
        y = b.get(y)
        first = 0
        for number, row in zip(numbers, rows, strict=True):
            out[number].append(y[first : first + row.q])
            first += row.q
            done[number] += row.q
            left[number][0] -= row.q
            if not left[number][0]:
                left[number].pop(0)
    return {number: np.concatenate(parts) for number, parts in out.items()}
