"""Kernels of an invariant backend, row by row: `python sweep.py BACKEND DTYPE [single]`. Prints what differs.

Threads and the processor are set by the environment. single: NumPy as where it has no fast small products.
"""

import sys

import numpy as np

from hibachi import Paged, StepInputs, load_backend
from hibachi.engine.scheduler.lower import lower

COUNTS = [*range(1, 71), 96, 127, 129, 256, 400]
SIZES = [(64, 192), (100, 37), (256, 512), (640, 256), (1300, 48), (2048, 64)]
HEADS = [(4, 2, 64, 16), (3, 3, 32, 8), (7, 1, 80, 4), (8, 2, 128, 16), (2, 2, 6, 5), (2, 1, 256, 16), (1, 1, 32, 16)]
SCALE = 2.0**17  # of scores that are rounding alone


def random(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def cancelling(one, other):
    """Two arrays [..., n] made twice as long, so that all products of their rows are 0 but for the rounding of sums.

    The order in which a sum is made shows in its bits then, also where they are rounded to bfloat16.
    """
    order = np.random.default_rng(1).permutation(2 * one.shape[-1])
    pairs = np.concatenate([one, one], -1), np.concatenate([other, -other], -1)
    return tuple(np.take(pair, order, -1) for pair in pairs)


def linear(b, dtype):
    """Every number of rows, at several places, whole and cut out of wider rows."""
    for size, out in SIZES:
        x, w = cancelling(random(402, size // 2), random(out, size // 2))
        w, x = b.put_weight(w, dtype), np.concatenate([x, x], 1)
        alone = np.concatenate([b.get(b.linear(b.put(x[i : i + 1, :size].copy(), dtype), w)) for i in range(402)])
        wide = b.put(x, dtype)
        for n in COUNTS:
            for first in (0, 1, 2) if n < 71 else (0,):
                got = b.get(b.linear(wide[first : first + n, :size], w))
                if (got != alone[first : first + n]).any():
                    yield f"linear of {n} rows from {first}, {size} to {out}"


def attention(b, dtype):
    """Tables of every width and company of every size, a token at a time and in chunks, small heads and large."""
    for heads, kv_heads, dim, size, biased in [*((*h, False) for h in HEADS), (*HEADS[1], True), (*HEADS[3], True)]:
        special = {"bias": b.put(random(heads, 9)), "sinks": b.put(random(heads))} if biased else {}
        length = 600 if dim == 64 else 130
        width = -(-length // size)
        q, k = cancelling(random(length, heads, dim // 2), random(length, kv_heads, dim // 2))
        q, k, v = (b.put(a, dtype) for a in (q, k, random(length, kv_heads, dim)))

        def run(rows, starts, qs, table, cache, b=b, q=q, k=k, v=v, size=size, special=special):
            rows, starts, qs = (np.array(a, np.int32) for a in (rows, starts, qs))
            packed = lower(rows, starts, qs, np.ones(len(rows), bool), table, size, tiles=b.shapes.choices)
            fields = {name: b.put(getattr(packed, name)) for name in packed.__slots__}
            x = StepInputs(tok=fields["pos"], **fields)
            y, cache = b.attend(*(b.take(t, x.pos) for t in (q, k, v)), cache, x, scale=SCALE, **special)
            return b.get(b.float32(y)), cache

        def fresh(rows, b=b, kv_heads=kv_heads, dim=dim, size=size, width=width):
            spec = Paged(kv_heads, dim, dim, dtype=dtype)
            return b.make_cache(spec, blocks=rows * width + 1, block_size=size, rows=rows, dtype=dtype)

        blocks = np.random.default_rng(1).permutation(np.arange(1, 5 * width + 1)).reshape(5, width).astype(np.int32)
        whole, cache = run([2], [0], [length], blocks, fresh(5))
        for at in sorted({*range(0, length, 23), length - 1}):  # tables of every length
            one, cache = run([2], [at], [1], blocks, cache)
            if (one[0] != whole[at]).any():
                yield f"attention of token {at} alone, {heads} heads of {dim}"
        for chunk in (1, 7, 24, 33, 64):
            cache, at, done = fresh(5), np.zeros(5, np.int32), {i: [] for i in range(5)}
            while (at < length).any() and at[4] < min(length, 6 * chunk + 3):
                rows = np.flatnonzero(at < length)
                qs = np.minimum(np.where(rows % 2, 1, chunk), length - at[rows])
                rows = rows[np.argsort(qs != 1, kind="stable")]
                qs = np.minimum(np.where(rows % 2, 1, chunk), length - at[rows])
                y, cache = run(rows, at[rows], qs, blocks, cache)
                for row, part in zip(rows.tolist(), np.split(y, np.cumsum(qs)[:-1]), strict=True):
                    done[row].append(part)
                at[rows] += qs
            for row, parts in done.items():
                got = np.concatenate(parts)
                if (got != whole[: len(got)]).any():
                    yield f"attention of row {row} in chunks of {chunk}, {heads} heads of {dim}"


def layouts(b, dtype):
    """Rows that lie column by column in memory, as convolutions and `(w @ x.T).T` leave them."""
    for size, out in SIZES:
        some = random(80, size), b.put(random(size), dtype)
        (x, w), norm = cancelling(random(80, size // 2), random(out, size // 2)), some[1]
        w = b.put_weight(w, dtype)
        calls = {
            "linear": lambda t, w=w: b.linear(t, w),
            "rms_norm": lambda t, norm=norm: b.rms_norm(t, norm, 1e-5),
            "layer_norm": lambda t, norm=norm: b.layer_norm(t, norm, norm, 1e-5),
            **{name: getattr(b, name) for name in ("softmax", "silu", "gelu", "gelu_tanh")},
        }
        for name, call in calls.items():
            of = x if name == "linear" else some[0]
            alone = [b.get(b.float32(call(b.put(of[i : i + 1].copy(), dtype)))) for i in range(80)]
            for n in (2, 5, 17, 33, 80):
                columns = b.xp.matrix_transpose(b.put(np.ascontiguousarray(of[:n].T), dtype))
                if (b.get(b.float32(call(columns))) != np.concatenate(alone[:n])).any():
                    yield f"{name} of {n} rows of {size} that lie column by column"


if __name__ == "__main__":
    name, dtype, *plain = sys.argv[1:]
    b = (load_backend(name).plain() if plain else load_backend(name)).invariant()
    with b.guard():
        found = [*linear(b, dtype), *attention(b, dtype), *layouts(b, dtype)]
    print(b.fingerprint(), *found[:20], sep="\n")
    sys.exit(bool(found))
