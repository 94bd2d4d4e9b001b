"""What the engine and a decoder need besides the nine operations: movement, arithmetic, caches, execution."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from hibachi import Paged, State, UnsupportedOperation

from .cases import expect, sample, samples

pytestmark = pytest.mark.promise("arrays and arithmetic")

NEAR = 1e-5
ABOUT = 0.02  # for products: libraries may multiply float32 with the precision of bfloat16


def silu(x):
    return x / (1 + np.exp(-x))


def normal(*shape):
    return np.random.default_rng(shape).normal(size=shape).astype("float32")


def matches(backend, got, want):
    """`got` is `want`, an array, with the dtype that the backend keeps such an array in."""
    got = backend.get(got)
    assert got.dtype == backend.get(backend.put(want)).dtype
    np.testing.assert_array_equal(got, want)


# movement


def test_put_and_get_are_inverse(backend):
    """Of every rank; int64 may come back narrower, where a library has none."""
    for x in samples():
        got = backend.get(backend.put(x))
        assert isinstance(got, np.ndarray)
        assert got.dtype == x.dtype or (x.dtype == np.int64 and got.dtype == np.int32)
        np.testing.assert_array_equal(got, x, strict=x.dtype != np.int64)


def test_put_takes_host_arrays_of_any_memory_layout(backend):
    x = sample((4, 6))
    read_only = x.copy()
    read_only.setflags(write=False)
    for view in (x.T, x[::2, 1::2], x[::-1], np.flip(x[:1], 0), np.asfortranarray(x), read_only, x[1:1]):
        np.testing.assert_array_equal(backend.get(backend.put(view)), view, strict=True)


def written(backend, array):
    """Can arrays of this library be written to? Then this one is full of nines now."""
    try:
        array[...] = backend.put(np.array(9, "int32"))
    except Exception:  # each library has an error of its own for it
        return False
    return True


def test_the_inputs_of_a_step_share_no_memory(backend):
    """A model may write into what it is given: nobody else has it."""
    x, y = sample((4,)), sample((3, 2))
    want = [x.copy(), x.copy(), x[:2].copy(), y.copy()]
    arrays = backend.put_all([x, x, x[:2], y])
    x[:], y[:] = 7, 7
    for i, array in enumerate(arrays):
        matches(backend, array, want[i])
        if written(backend, array):
            want[i][...] = 9
    for i, array in enumerate(arrays):
        matches(backend, array, want[i])


def test_a_copy_shares_no_memory(backend):
    for dtype in ("int32", "float32", "bool"):
        x = sample((3, 2), dtype)
        want = x.copy()
        array = backend.put(x)
        copy = backend.copy(array)
        x[...] = 0  # `put` may share the memory of the host
        matches(backend, copy, want)
    copy = backend.copy(array := backend.put(sample((3, 2))))
    written(backend, array)
    matches(backend, copy, sample((3, 2)))


def test_put_casts_to_the_dtype_asked_for(backend):
    matches(backend, backend.put(np.array([0, 1, 2]), "float32"), np.array([0, 1, 2], "float32"))
    matches(backend, backend.put(np.array([0.0, 1.0, 2.0]), "int32"), np.array([0, 1, 2], "int32"))
    matches(backend, backend.put(np.array([0, 1, 2]), "bool"), np.array([False, True, True]))


def test_zeros_has_the_shape_and_dtype_asked_for(backend):
    for dtype in ("float32", "int32", "bool"):
        for shape in ((), (3,), (2, 0), (2, 3, 4)):
            matches(backend, backend.zeros(shape, dtype), np.zeros(shape, dtype))


def test_a_backend_owns_its_arrays_and_nothing_else(backend):
    assert backend.owns(backend.put(sample((2, 3))))
    assert backend.owns(backend.zeros((2,), "float32"))
    assert not any(backend.owns(x) for x in ([1, 2], (1,), 1, 1.0, None, "x"))


# rows


def test_take_gives_rows_at_indices_of_any_shape(backend):
    for x in (sample((5,)), sample((5, 3), "float32"), sample((5, 2, 2), "bool")):
        for idx in (np.array([4, 0, 0]), np.array([[1, 2], [3, 4]]), np.array(2), np.array([], int)):
            matches(backend, backend.take(backend.put(x), backend.put(idx.astype("int32"))), np.asarray(x[idx]))


def scattered(backend, x, idx, rows):
    """The rows of x after the call; the array passed in may be gone then, so only the answer counts."""
    idx = np.array(idx, "int32")
    return backend.scatter_rows(backend.put(x.copy()), backend.put(idx), backend.put(rows))


def test_scatter_rows_replaces_the_named_rows_and_no_other(backend):
    for x in (sample((5,)), sample((5, 3), "float32"), sample((5, 2, 2), "bool")):
        rows = np.flip(x, 0)[:2].copy()
        want = x.copy()
        want[[4, 1]] = rows
        matches(backend, scattered(backend, x, [4, 1], rows), want)


def test_scatter_rows_of_no_rows_changes_nothing(backend):
    x = sample((5, 3), "float32")
    matches(backend, scattered(backend, x, [], x[:0]), x)


def test_scatter_rows_named_twice_leaves_the_others_alone(backend):
    """Padding writes to one place many times; what stays there is nobody's business."""
    x = sample((5, 3), "float32")
    got = backend.get(scattered(backend, x, [0, 3, 0], -x[:3]))
    np.testing.assert_array_equal(got[1:], [x[1], x[2], -x[1], x[4]])


def test_write_cache_sets_the_named_positions_and_no_other(backend):
    """Where a paged cache is laid out as by default: [blocks, block_size, kv_heads, dim]."""
    for at in ([0], [11, 4, 7], [5, 6, 7, 8]):
        halves = backend.make_cache(Paged(2, 5, 6), blocks=3, block_size=4, rows=1, dtype="float32")
        if not isinstance(halves, tuple) or [tuple(half.shape) for half in halves] != [(3, 4, 2, 5), (3, 4, 2, 6)]:
            return  # the backend's own layout, in which nobody else looks
        for half, dim in zip(halves, (5, 6), strict=True):
            rows, want = sample((len(at), 2, dim), "float32"), np.zeros((12, 2, dim), "float32")
            want[at] = rows
            got = backend.write_cache(half, backend.put(np.array(at, "int32")), backend.put(rows))
            matches(backend, got, want.reshape(3, 4, 2, dim))


# arithmetic


def test_linear_multiplies_by_the_transposed_weight_and_adds_the_bias(backend):
    w, b = normal(6, 4), normal(6)
    weight = backend.put_weight(w, "float32")
    for shape in ((4,), (3, 4), (2, 3, 4), (0, 4)):
        x = normal(*shape)
        for bias in (None, b):
            got = backend.get(backend.linear(backend.put(x), weight, None if bias is None else backend.put(bias)))
            want = x @ w.T + (0 if bias is None else bias)
            np.testing.assert_allclose(got, want, rtol=ABOUT, atol=ABOUT)
            assert got.dtype == np.float32


class Two:
    """Two ranks, one after the other: rank 0 gets what rank 1 has left."""

    size = 2

    def __init__(self, rank, left):
        self.rank, self.left, self.place = rank, left, SimpleNamespace(tp_size=2)

    def sum(self, x):
        if self.rank:
            self.left.append(x)
        return x + self.left[0] if self.rank == 0 else x


def sum_of_two(backend, compute):
    """compute(backend, slice of 256 columns) of four leaves, in one process and in two."""
    try:
        whole = backend.in_leaves(4)
    except UnsupportedOperation:
        pytest.skip("it computes in one process")
    left = list[object]()
    alone = whole.get(compute(whole, slice(0, 256)))
    _, together = (
        backend.get(compute(backend.in_leaves(4, Two(r, left)), slice(r * 128, r * 128 + 128))) for r in (1, 0)
    )
    np.testing.assert_allclose(together, alone, rtol=ABOUT, atol=ABOUT)
    if backend.numerics is not None:
        np.testing.assert_array_equal(together, alone)
    return alone


def test_linear_reduce_adds_the_leaves_of_all_processes(backend):
    w, x = normal(6, 256), normal(3, 256)
    for bias in (None, normal(6)):

        def compute(one, at, bias=bias):
            weight = one.put_columns([w], "float32", at.start, at.stop)
            part = one.put(np.ascontiguousarray(x[:, at]))
            return one.linear_reduce(part, weight, None if bias is None else one.put(bias))

        want = x @ w.T + (0 if bias is None else bias)
        np.testing.assert_allclose(sum_of_two(backend, compute), want, rtol=ABOUT, atol=ABOUT)


def test_rms_norm_reduce_adds_the_squares_of_all_processes(backend):
    x, w = normal(3, 256), normal(256)

    def compute(one, at):
        [found] = one.rms_norm_reduce([one.put(np.ascontiguousarray(x[:, at]))], [one.put(w[at].copy())], 1e-5)
        return found[:, :128]

    want = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(sum_of_two(backend, compute), want[:, :128], rtol=ABOUT, atol=ABOUT)


def test_experts_reduce_adds_the_leaves_of_all_processes(backend):
    x, into, out = normal(3, 6), normal(3, 256, 6), normal(3, 6, 256)
    chosen, weights = np.array([[0, 1], [1, 0], [0, 1]], "int32"), np.array([[1, 0.5], [0.3, 2], [1, 1]], "float32")

    def compute(one, at):
        inside = [one.put_weight(np.ascontiguousarray(w[at]), "float32") for w in into]
        outside = [one.put_columns([w], "float32", at.start, at.stop) for w in out]
        return one.experts_reduce(*map(one.put, (x, chosen, weights)), inside, outside, "silu", gated=False)

    share = np.zeros((3, 3), np.float32)
    np.put_along_axis(share, chosen, weights, axis=1)
    want = np.einsum("te,tedi->td", share, silu(np.einsum("td,eid->tei", x, into))[:, :, None, :] * out)
    np.testing.assert_allclose(sum_of_two(backend, compute), want, rtol=ABOUT, atol=ABOUT)


def test_weight_rows_are_those_of_the_matrix(backend):
    for size in (4, 64, 128):  # as large as a layout in tiles needs
        w = normal(size, 6)
        weight = backend.put_weight(w, "float32")
        for idx in (np.array([3, 0, 3], "int32"), np.array([[1, 2], [size - 1, 0]], "int32")):
            got = backend.get(backend.weight_rows(weight, backend.put(idx)))
            np.testing.assert_array_equal(got, w[idx])


def test_rms_norm_divides_by_the_root_mean_square_and_multiplies_by_the_weight(backend):
    x, w = normal(3, 2, 8) * 5, normal(8)
    for eps in (1e-6, 0.5):
        want = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * w
        expect(backend, want, "rms_norm", x, w, eps, atol=NEAR)
    expect(backend, np.zeros((1, 8), "float32"), "rms_norm", np.zeros((1, 8), "float32"), w, 1e-6)


def test_layer_norm_subtracts_the_mean_and_divides_by_the_deviation(backend):
    x, w, b = normal(3, 2, 8) * 5 + 2, normal(8), normal(8)
    off = x - x.mean(-1, keepdims=True)
    for eps in (1e-6, 0.5):
        want = off / np.sqrt((off * off).mean(-1, keepdims=True) + np.float32(eps)) * w
        expect(backend, want + b, "layer_norm", x, w, b, eps, atol=NEAR)
        got = backend.get(backend.layer_norm(backend.put(x), backend.put(w), None, eps))
        np.testing.assert_allclose(got, want, atol=NEAR)


ACTIVATED = np.array([[-1000, -6, -2.5, -1, -0.1, -0.0, 0, 0.3, 1, 2, 6, 1000]], "float32")


def test_gelu_is_x_times_the_normal_distribution(backend):
    want = [x * 0.5 * math.erfc(-x / math.sqrt(2)) for x in ACTIVATED[0].tolist()]
    expect(backend, np.array([want], "float32"), "gelu", ACTIVATED, atol=NEAR)


def test_gelu_tanh_is_the_approximation_by_a_tanh(backend):
    inner = [math.sqrt(2 / math.pi) * (x + 0.044715 * x**3) for x in ACTIVATED[0].tolist()]
    want = [0.5 * x * (1 + math.tanh(z)) for x, z in zip(ACTIVATED[0].tolist(), inner, strict=True)]
    expect(backend, np.array([want], "float32"), "gelu_tanh", ACTIVATED, atol=NEAR)


def test_silu_is_x_times_its_sigmoid(backend):
    x = np.array([[-1000, -20, -1, -0.0, 0, 0.5, 1, 20, 1000]], "float32")
    want = (x.astype("float64") / (1 + np.exp(-np.maximum(x, -100).astype("float64")))).astype("float32")
    expect(backend, want, "silu", x, atol=NEAR)


def test_softmax_sums_to_one_over_the_last_axis(backend):
    x = normal(3, 2, 5)
    e = np.exp(x)
    expect(backend, e / e.sum(-1, keepdims=True), "softmax", x, atol=NEAR)


def test_softmax_stays_finite_for_large_and_hidden_scores(backend):
    x = np.array([[1e4, 1e4, -1e4, -np.inf], [-np.inf, 3, -np.inf, -np.inf]], "float32")
    expect(backend, np.array([[0.5, 0.5, 0, 0], [0, 1, 0, 0]], "float32"), "softmax", x, atol=NEAR)


def test_softmax_leaves_its_argument_as_it_was(backend):
    x = normal(2, 3)
    there = backend.put(x.copy())
    backend.softmax(there)
    np.testing.assert_array_equal(backend.get(there), x)


def test_rope_rotates_the_two_halves_of_each_head(backend):
    x, angle = normal(3, 2, 8), normal(3, 1, 4)
    cos, sin = np.cos(angle), np.sin(angle)
    want = np.empty_like(x)
    for i in range(4):  # element i is paired with element i + 4
        a, b = x[..., i], x[..., i + 4]
        want[..., i] = a * cos[..., i] - b * sin[..., i]
        want[..., i + 4] = b * cos[..., i] + a * sin[..., i]
    expect(backend, want, "rope", x, cos, sin, atol=NEAR)


def test_top_gives_the_largest_of_a_row_and_where_they_are(backend):
    x = np.array([[3, 9, -1, 4, 8], [-5, -2, -9, -3, -7]], "float32")
    values, places = (backend.get(t) for t in backend.top(backend.put(x), 3))
    np.testing.assert_array_equal(-np.sort(-values, axis=-1), [[9, 8, 4], [-2, -3, -5]])
    np.testing.assert_array_equal(np.take_along_axis(x, places, axis=-1), values)


def bits_of(may):
    """A mask [m, V] as packed bits; what lies beyond the last token is set."""
    m, size = may.shape
    bits = np.full((m, -(-size // 32)), 0xFFFFFFFF, "uint32")
    for row, token in np.argwhere(~may):
        bits[row, token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
    return bits


def unusual(m, size):
    """Logits with all that there may be, and a mask with a row of nothing, one of all, and others."""
    x, may = normal(m, size), np.random.default_rng(size).random((m, size)) < 0.5
    for i, value in enumerate((np.nan, np.inf, -np.inf, np.nan)):
        x[:, 7 * i % size] = value
    may[1:2], may[2:3] = False, True
    return x, may


def test_keep_bits_gives_minus_infinity_to_all_tokens_whose_bit_is_not_set(backend):
    """NaN as well, which stays where it may come. Also where the tokens fill no word, and without rows."""
    for m, size in ((5, 96), (5, 75), (1, 75), (0, 75), (1, 1)):
        x, may = unusual(m, size)
        got = backend.keep_bits(backend.put(x.copy()), bits_of(may))
        matches(backend, got, np.where(may, x, np.float32(-np.inf)))


def test_keep_bits_refuses_bits_of_another_shape(backend):
    x = normal(3, 75)
    for shape in ((3, 2), (3, 4), (1, 3), (3, 75)):
        with pytest.raises(ValueError, match="keep_bits: expected bits uint32"):
            backend.keep_bits(backend.put(x.copy()), np.zeros(shape, "uint32"))


def test_kept_rows_are_copies_and_tell_which_of_them_were_finite(backend):
    """Before anything was taken from them; and the logits stay as they were."""
    x = normal(6, 75)
    x[1, 74], x[2, 3], x[3], x[4, 5:] = np.nan, np.inf, -np.inf, -np.inf
    at = np.array([3, 0, 1, 5, 2, 4, 0, 1], "int32")
    may = np.random.default_rng(0).random((8, 75)) < 0.5
    may[2, 74], may[3], may[6] = False, False, True
    for bits, want in ((None, x[at]), (bits_of(may), np.where(may, x[at], np.float32(-np.inf)))):
        logits = backend.put(x.copy())
        rows, finite = backend.kept_rows(logits, at, bits)
        matches(backend, rows, want)
        matches(backend, finite, np.array([False, True, False, True, False, True, True, False]))
        backend.keep_bits(rows, np.zeros((8, 3), "uint32"))  # which may write to them
        matches(backend, logits, x)


def test_experts_adds_what_the_chosen_ones_say_by_their_weights(backend):
    x, into, out = normal(5, 4), normal(3, 6, 4), normal(3, 4, 6)
    chosen = np.array([[0, 1], [1, 2], [2, 0], [1, 0], [0, 2]], "int32")  # expert 1 is chosen thrice, no row alike
    weights = np.array([[0.5, 0.5], [1, 0.25], [0.75, 0.1], [0.2, 0.8], [0.3, 0.3]], "float32")
    for gated, inner in ((False, 6), (True, 3)):
        want = np.zeros_like(x)
        for token in range(5):
            for e, share in zip(chosen[token], weights[token], strict=True):
                wide = into[e] @ x[token]
                hidden = silu(wide[:3]) * wide[3:] if gated else silu(wide)
                want[token] += share * (out[e][:, :inner] @ hidden)
        stacks = [[backend.put_weight(w, "float32") for w in stack] for stack in (into, out[:, :, :inner].copy())]
        got = backend.experts(*map(backend.put, (x, chosen, weights)), *stacks, "silu", gated=gated)
        np.testing.assert_allclose(backend.get(got), want, rtol=ABOUT, atol=ABOUT)


def test_route_gives_the_likeliest_experts_and_what_they_count(backend):
    x = np.array([[1, 3, 2, -5], [0, -1, 8, 7], [2, 2.5, -9, -9]], "float32")
    odds = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    for normalised in (False, True):
        weights, chosen = map(backend.get, backend.route(backend.put(x), 2, normalised=normalised))
        assert chosen.tolist() == [[1, 2], [2, 3], [1, 0]]
        want = np.take_along_axis(odds, chosen.astype(np.int64), axis=1)
        want = want / want.sum(axis=1, keepdims=True) if normalised else want
        np.testing.assert_allclose(weights, want, rtol=ABOUT)


def test_convolve_sees_the_last_tokens_of_each_channel(backend):
    """Also of rows whose tokens are fewer than it sees, and of numbers of channels that fill no vector."""
    for tokens, dim, bias in ((1, 5, True), (2, 19, False), (7, 16, True)):
        past, x, w, b = normal(2, 3, dim), normal(2, tokens, dim), normal(4, dim), normal(dim)
        seen = np.concatenate([past, x], axis=1)
        want = sum(seen[:, i : i + tokens] * w[i] for i in range(4)) + b * bias
        y, last = backend.convolve(*map(backend.put, (past, x, w)), backend.put(b) if bias else None)
        np.testing.assert_allclose(backend.get(y), silu(want), rtol=ABOUT, atol=ABOUT)
        np.testing.assert_array_equal(backend.get(last), seen[:, tokens:])


def test_selective_scan_goes_over_time_channel_by_channel(backend):
    for tokens, dim, size in ((1, 5, 3), (4, 19, 16), (3, 32, 17)):
        x, dt, gate = (normal(2, tokens, dim) for _ in range(3))
        write, read, state = normal(2, tokens, size), normal(2, tokens, size), normal(2, size, dim)
        decay, skip, want, y = -np.exp(normal(size, dim)), normal(dim), state.copy(), []
        for t in range(tokens):
            step = np.log1p(np.exp(dt[:, t]))[:, None]
            want = want * np.exp(step * decay) + step * x[:, t, None] * write[:, t, :, None]
            y.append((np.sum(want * read[:, t, :, None], axis=1) + x[:, t] * skip) * silu(gate[:, t]))
        given = map(backend.put, (state, x, dt, gate, write, read, decay, skip))
        got, last = backend.selective_scan(*given)
        np.testing.assert_allclose(backend.get(got), np.stack(y, axis=1), rtol=ABOUT, atol=ABOUT)
        np.testing.assert_allclose(backend.get(last), want, rtol=ABOUT, atol=ABOUT)


def test_scan_hands_each_row_the_state_after_the_row_before(backend):
    a, b = normal(5, 3), normal(5, 3)

    def step(state, now):
        state = state * 0.5 + now[0]
        return state, state * now[1]

    state, states = np.ones(3, "float32"), []
    for row in range(5):
        state = state * np.float32(0.5) + a[row]
        states.append(state * b[row])
    last, each = backend.scan(step, backend.put(np.ones(3, "float32")), (backend.put(a), backend.put(b)))
    np.testing.assert_allclose(backend.get(last), state, atol=NEAR)
    np.testing.assert_allclose(backend.get(each), states, atol=NEAR)


# memory and execution


def test_the_cache_of_a_state_is_zeros_for_every_row(backend):
    options = dict(blocks=8, block_size=4, rows=3)
    matches(backend, backend.make_cache(State((2, 5)), dtype="float32", **options), np.zeros((3, 2, 5), "float32"))
    matches(backend, backend.make_cache(State(()), dtype="float32", **options), np.zeros((3,), "float32"))
    matches(
        backend,
        backend.make_cache(State((2,), "int32"), dtype="float32", **options),
        np.zeros((3, 2), "int32"),
    )


def test_a_compiled_function_gives_what_the_function_gives(backend):
    def step(memory, x):
        return [backend.softmax(memory[0] + x)], x

    memory, x = normal(2, 3), normal(2, 3)
    compiled = backend.compile(step, donate=(0,))
    for _ in range(2):
        with backend.guard():
            got, same = compiled([backend.put(memory.copy())], backend.put(x))
        e = np.exp(memory + x)
        np.testing.assert_allclose(backend.get(got[0]), e / e.sum(-1, keepdims=True), rtol=NEAR, atol=NEAR)
        np.testing.assert_array_equal(backend.get(same), x)
        assert backend.usable(got)


def test_free_memory_is_unknown_or_part_of_the_total(backend):
    if (memory := backend.memory()) is not None:
        free, total = memory
        assert 0 <= free <= total


def test_a_backend_says_its_name_and_the_version_of_its_library(backend):
    assert isinstance(backend.name, str) and backend.name
    versions = backend.versions()
    for key in ("library", "device"):  # both stand in every fingerprint
        assert versions.get(key), f"versions() has no {key!r}: {versions}"
    assert all(isinstance(v, str) for v in versions.values())
    assert versions["library"] in backend.fingerprint()
