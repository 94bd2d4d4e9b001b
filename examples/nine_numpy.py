"""NumPy as a backend of nine operations, all that level 0 needs: `hibachi conformance --backend nine_numpy.py:Nine`"""

import numpy as np

import hibachi


def check(op, fine, expected, got, mend="Look at the arguments"):
    if not fine:
        raise hibachi.InvalidTensorOperation(op, expected=expected, got=repr(got), mend=mend)


def array(op, t, *dims):
    """t, if it is an array that has these dimensions."""
    check(op, isinstance(t, np.ndarray | np.generic), "an array of NumPy", t)
    for dim in dims:
        check(op, count(dim) and dim < t.ndim, f"0 <= dim < {t.ndim}", dim)
    return t


def count(n):
    return isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 0


class Nine:
    name = "nine_numpy"

    def shape(self, t):
        return array("shape", t).shape

    def cat(self, ts, dim):
        check("cat", isinstance(ts, list | tuple) and len(ts) > 0, "a list of arrays", ts)
        shapes = [array("cat", t, dim).shape for t in ts]
        rest = {(len(shape), *shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        check("cat", len(rest) == 1, f"shapes that differ in dimension {dim} only", shapes)
        check("cat", len({t.dtype for t in ts}) == 1, "one dtype", [t.dtype for t in ts])
        return np.concatenate(ts, axis=dim)

    def eq(self, a, b):
        check("eq", array("eq", a).shape == array("eq", b).shape, f"two arrays of shape {a.shape}", b.shape)
        check("eq", a.dtype == b.dtype, f"two arrays of {a.dtype}", b.dtype)
        return np.asarray(a == b)

    def vectorize_dim(self, t, dim):
        return list(np.moveaxis(array("vectorize_dim", t, dim), dim, 0))

    def slice(self, t, dim, start, length):
        inside = count(start) and count(length) and start + length <= array("slice", t, dim).shape[dim]
        check("slice", inside, f"start and length inside dimension {dim} of {t.shape}", (start, length))
        return t[(slice(None),) * dim + (slice(start, start + length),)]

    def idx_where_all_true(self, t, dim):
        check("idx_where_all_true", array("idx_where_all_true", t, dim).dtype == bool, "an array of bool", t.dtype)
        return np.flatnonzero(t.all(axis=tuple(d for d in range(t.ndim) if d != dim))).tolist()

    def pop(self, t, dim, index):
        size = array("pop", t, dim).shape[dim]
        mend = f"Index {index} is out of bounds for dimension {dim} with size {size}"
        check("pop", count(index) and index < size, f"0 <= index < {size}", index, mend)
        return np.delete(t, index, axis=dim)

    def repeat(self, t, dim, times):
        check("repeat", count(times), "times >= 0", times)
        return np.tile(array("repeat", t, dim), [times if d == dim else 1 for d in range(t.ndim)])  # always a copy

    def unsqueeze(self, t, dim):
        check("unsqueeze", count(dim) and dim <= array("unsqueeze", t).ndim, "0 <= dim <= rank", dim)
        return np.expand_dims(t, dim)


class Next:
    def forward(self, tokens):  # one more than the last
        return tokens[:, -1] + 1


if __name__ == "__main__":
    with hibachi.AutoregressiveBatchInference(Next(), backend=Nine(), stop_token=np.array(9)) as engine:
        streams = [engine.run(np.array(prompt)) for prompt in ([1, 2, 5], [1, 2, 6])]
        print([[int(token) for token in stream] for stream in streams])
