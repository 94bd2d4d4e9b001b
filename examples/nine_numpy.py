"""NumPy as a backend of nine operations: all that level 0 and feed-forward need of an array library.

hibachi conformance --backend examples/nine_numpy.py:Nine
"""

import numpy as np

import hibachi


class Nine:
    name = "nine_numpy"

    def shape(self, t):
        return _array("shape", t).shape

    def cat(self, ts, dim):
        _check("cat", isinstance(ts, list | tuple) and len(ts) > 0, "a list of arrays", ts)
        shapes = [_array("cat", t).shape for t in ts]
        _dim("cat", shapes[0], dim)
        rest = {(len(shape), *shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        _check("cat", len(rest) == 1, f"shapes that differ in dimension {dim} only", shapes)
        _check("cat", len({t.dtype for t in ts}) == 1, "one dtype", [t.dtype for t in ts])
        return np.concatenate(ts, axis=dim)

    def eq(self, a, b):
        _check("eq", _array("eq", a).shape == _array("eq", b).shape, f"two arrays of shape {a.shape}", b.shape)
        _check("eq", a.dtype == b.dtype, f"two arrays of {a.dtype}", b.dtype)
        return np.asarray(a == b)

    def vectorize_dim(self, t, dim):
        _dim("vectorize_dim", _array("vectorize_dim", t).shape, dim)
        return list(np.moveaxis(t, dim, 0))

    def slice(self, t, dim, start, length):
        _dim("slice", _array("slice", t).shape, dim)
        inside = _count(start) and _count(length) and start + length <= t.shape[dim]
        _check("slice", inside, f"start and length inside dimension {dim} of {t.shape}", (start, length))
        return t[(slice(None),) * dim + (slice(start, start + length),)]

    def idx_where_all_true(self, t, dim):
        _dim("idx_where_all_true", _array("idx_where_all_true", t).shape, dim)
        _check("idx_where_all_true", t.dtype == bool, "an array of bool", t.dtype)
        return np.flatnonzero(t.all(axis=tuple(d for d in range(t.ndim) if d != dim))).tolist()

    def pop(self, t, dim, index):
        _dim("pop", _array("pop", t).shape, dim)
        mend = f"Index {index} is out of bounds for dimension {dim} with size {t.shape[dim]}"
        _check("pop", _count(index) and index < t.shape[dim], f"0 <= index < {t.shape[dim]}", index, mend)
        return np.delete(t, index, axis=dim)

    def repeat(self, t, dim, times):
        _dim("repeat", _array("repeat", t).shape, dim)
        _check("repeat", _count(times), "times >= 0", times)
        return np.tile(t, [times if d == dim else 1 for d in range(t.ndim)])  # always a copy

    def unsqueeze(self, t, dim):
        rank = len(_array("unsqueeze", t).shape)
        _check("unsqueeze", _count(dim) and dim <= rank, f"0 <= dim <= {rank}", dim)
        return np.expand_dims(t, dim)


def _array(op, t):
    _check(op, isinstance(t, np.ndarray | np.generic), "an array of NumPy", t)
    return t


def _count(n):
    return isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 0


def _dim(op, shape, dim):
    _check(op, _count(dim) and dim < len(shape), f"0 <= dim < {len(shape)}", dim)


def _check(op, fine, expected, got, mend="Look at the arguments"):
    if not fine:
        raise hibachi.InvalidTensorOperation(op, expected=expected, got=repr(got), mend=mend)


class Next:
    """One more than the last token."""

    def forward(self, tokens):
        return tokens[:, -1] + 1


if __name__ == "__main__":
    with hibachi.AutoregressiveBatchInference(Next(), backend=Nine(), stop_token=np.array(9)) as engine:
        streams = [engine.run(np.array(prompt)) for prompt in ([1, 2, 5], [1, 2, 6])]
        print([[int(token) for token in stream] for stream in streams])
