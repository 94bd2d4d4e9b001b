"""hibachi's kernels on JAX, against float64 and against themselves in other batches."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hibachi import LLM, NumpyBackend, Paged, SamplingParams, State, StepInputs, UnsupportedOperation
from hibachi.backend.candidates import OPERATIONS, compose
from hibachi.backend.kernels.library import NUMERICS, SWITCH, library
from hibachi.engine.sampling.draw import How, sample
from hibachi.engine.scheduler.lower import lower

from .native import (
    DTYPES,
    biased,
    computed,
    digest,
    far_off,
    other_variants,
    parameters,
    same_arrays,
    skip_without,
    without_compiler,
)

jax = pytest.importorskip("jax")
skip_without()
import jax.numpy as jnp  # noqa: E402

from hibachi_jax import JaxBackend  # noqa: E402
from hibachi_jax.native import HANDLERS, NativeJaxBackend, PackedWeight, target  # noqa: E402

ROOT = Path(__file__).parents[2]
NEAR = {"float32": 2e-6, "bfloat16": 5e-3, "float16": 6e-4}  # of the largest number


@pytest.fixture(scope="module")
def native():
    return NativeJaxBackend()


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def double(x):
    return np.asarray(x, np.float64)


def near(got, want, dtype):
    off = np.abs(double(got) - want).max()
    assert off <= NEAR[dtype] * max(1.0, np.abs(want).max()), f"off by {off:.3g}"


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


# ---- linear --------------------------------------------------------------------------------------------------------

SHAPES = [(1, 1, 1), (2, 47, 3), (9, 200, 31), (70, 130, 96), (3, 1, 577)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear_multiplies(native, m, n, k, dtype):
    x, w, b = normal(m, k, dtype=dtype), normal(n, k, seed=1, dtype=dtype), normal(n, seed=2, dtype=dtype)
    packed = native.put_weight(np.asarray(w, np.float32), dtype)
    for bias in (None, b):
        want = double(x) @ double(w).T + (0 if bias is None else double(b))
        got = native.linear(x, packed, bias)
        assert got.shape == (m, n) and got.dtype == x.dtype
        near(got, want, dtype)
        unrounded = native.logits(x, packed, bias)
        assert unrounded.dtype == jnp.float32
        near(unrounded, want, "float32")
        same(unrounded.astype(x.dtype), got)
    for idx in ([[0, n - 1]], [n // 2]):
        same(native.weight_rows(packed, jnp.asarray(idx)), w[jnp.asarray(idx)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gives_a_row_the_same_bits_in_any_batch_and_place(native, dtype):
    x, w = normal(20, 200, dtype=dtype), native.put_weight(double(normal(100, 200, seed=1)), dtype)
    want = jnp.concatenate([native.linear(x[i : i + 1], w) for i in range(20)])
    for m in (1, 3, 8, 9, 16, 19, 20):
        same(native.linear(x[:m], w), want[:m])
        same(native.linear(x[20 - m :], w), want[20 - m :])


def test_linear_refuses_what_does_not_fit(native):
    w = native.put_weight(np.zeros((4, 6), "float32"), "float32")
    for x, b in (
        (normal(2, 5), None),
        (normal(2, 6, dtype="bfloat16"), None),
        (normal(2, 6), normal(3)),
        (normal(2, 6), normal(4, dtype="bfloat16")),
    ):
        with pytest.raises(ValueError, match=r"expected x \[\.\.\., 6\]"):
            native.linear(x, w, b)
    for wrong in (4, -1):
        with pytest.raises(jax.errors.JaxRuntimeError, match="A place lies outside"):
            native.weight_rows(w, jnp.asarray([wrong])).block_until_ready()
    with pytest.raises(UnsupportedOperation, match="float32 and bfloat16"):
        native.put_weight(np.zeros((4, 6)), "float64")


def test_linear_of_nothing_is_empty(native):
    w = native.put_weight(np.zeros((4, 6), "float32"), "float32")
    assert native.linear(jnp.zeros((0, 6)), w).shape == (0, 4)
    assert native.linear(jnp.zeros((2, 0, 6)), w).shape == (2, 0, 4)


def test_weights_are_not_copied_into_jax(native):
    """They lie in large pages, one after another, each on a cache line."""
    some = [native.put_weight(np.zeros((96, 33), "float32"), "float32").panels for _ in range(3)]
    places = [a.unsafe_buffer_pointer() for a in some]
    assert [b - a for a, b in itertools.pairwise(places)] == [2 * 48 * 33 * 4] * 2
    assert all(p % 64 == 0 for p in places)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_in_its_row(native, dtype):
    x, w = normal(9, 20, dtype=dtype), native.put_weight(double(normal(50, 20, seed=1)), dtype)
    want, got = native.linear(x, w), native.linear(x.at[4, 7].set(jnp.nan), w)
    assert jnp.isnan(got[4]).all()
    same(got[:4], want[:4])
    same(got[5:], want[5:])


# ---- attention -----------------------------------------------------------------------------------------------------


class Layer:
    """One layer's cache, and queries, keys and values of long sequences."""

    def __init__(self, backend, dtype, *, heads=6, kv_heads=2, k_dim=16, v_dim=16, block_size=16, rows=4, length=150):
        self.backend, self.block_size = backend, block_size
        each = -(-length // block_size)
        self.table = np.arange(1, 1 + rows * each, dtype=np.int32).reshape(rows, each)
        spec = Paged(kv_heads, k_dim, v_dim)
        self.cache = backend.make_cache(spec, blocks=1 + rows * each, block_size=block_size, rows=rows, dtype=dtype)
        shapes = ((heads, k_dim), (kv_heads, k_dim), (kv_heads, v_dim))
        self.q, self.k, self.v = (normal(rows, length, *s, seed=i, dtype=dtype) for i, s in enumerate(shapes))

    def run(self, pieces, **special):
        """Attention of (start, tokens) of each row in one call: an array for each row."""
        live = [i for i, (_, q) in enumerate(pieces) if q]
        start, q = (np.array([pieces[i][j] for i in live], np.int32) for j in (0, 1))
        packed = lower(np.array(live), start, q, np.ones(len(live), bool), self.table, self.block_size)
        fields = (f.name for f in dataclasses.fields(packed))
        x = StepInputs(tok=None, **{name: self.backend.put(getattr(packed, name)) for name in fields})

        def new(t):
            return jnp.concatenate([t[i, s : s + n] for i, s, n in zip(live, start, q, strict=True)])

        special = {name: jnp.asarray(t) if name in BIASED else t for name, t in special.items()}
        step = jax.jit(partial(self.backend.attend, **special), donate_argnums=3)
        out, self.cache = step(new(self.q), new(self.k), new(self.v), self.cache, x)
        return jnp.split(out, np.cumsum(q)[:-1])

    def expected(self, row, length, *, scale=None, window=None, softcap=None, bias=None, sinks=None):
        """The same in float64, for a row's first positions."""
        q, k, v = (double(t[row, :length]) for t in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        k, v = (np.repeat(t, group, 1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = np.tanh(scores / softcap) * softcap
        at = np.arange(length)
        if bias is not None:
            scores += far_off(bias, at[:, None] - at)
        hidden = at[None] > at[:, None]
        if window is not None:
            hidden |= at[None] <= at[:, None] - window
        weights = np.exp(np.where(hidden, -np.inf, scores))
        total = weights.sum(-1, keepdims=True)
        total = total if sinks is None else total + np.exp(np.asarray(sinks, np.float64))[:, None, None]
        return np.einsum("hqk,khd->qhd", weights / total, v)


LAYERS = {
    "grouped": {},
    "odd sizes": dict(k_dim=7, v_dim=19),
    "odd blocks": dict(block_size=5),
}
BIASED = {"bias": np.float32([[1, 0, -0.5], [0, -0.1, -0.2]] * 3), "sinks": np.float32([3, -2, 0, 1, 2, -1])}
SPECIAL = (
    *({}, dict(scale=0.5), dict(window=70), dict(softcap=3.0, window=9)),
    *(BIASED, dict(bias=BIASED["bias"], softcap=3.0), dict(sinks=BIASED["sinks"], window=9)),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_attention_is_that_of_the_formula(native, name, dtype):
    for special in SPECIAL if name == "grouped" else SPECIAL[:1]:
        layer = Layer(native, dtype, **LAYERS[name])
        lengths = (1, 17, 64, 150)
        for row, got in enumerate(layer.run([(0, n) for n in lengths], **special)):
            near(got, layer.expected(row, lengths[row], **special), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_gives_a_token_the_same_bits_in_any_company(native, dtype):
    """Whole prompts, chunks of odd sizes beside other rows, token by token alone."""
    want = Layer(native, dtype).run([(0, 150), (0, 150), (0, 0), (0, 31)])
    chunks, got = Layer(native, dtype), [[], []]
    for start, n in ((0, 1), (1, 2), (3, 61), (64, 5), (69, 80), (149, 1)):
        for row, part in enumerate(chunks.run([(start, n), (start, n)])):
            got[row].append(part)
    for row in (0, 1):
        same(jnp.concatenate(got[row]), want[row])
    single = Layer(native, dtype)
    alone = [single.run([(0, 0), (0, 0), (0, 0), (i, 1)])[0] for i in range(20)]
    same(jnp.concatenate(alone), want[2][:20])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_cache_held_changes_nothing_and_one_that_was_given_is_written_in_place(native, dtype):
    layer = Layer(native, dtype)
    kept, layer.v = layer.v, jnp.full_like(layer.v, jnp.nan)
    assert jnp.isnan(layer.run([(0, 40)])[0]).all()
    layer.v = kept
    places = [half.unsafe_buffer_pointer() for half in jax.tree.leaves(layer.cache)]
    assert jnp.isfinite(layer.run([(0, 29)])[0]).all()
    assert [half.unsafe_buffer_pointer() for half in jax.tree.leaves(layer.cache)] == places


def test_a_cache_that_was_not_given_is_left_as_it_was(native):
    layer = Layer(native, "float32")
    before, kept = np.asarray(layer.cache.keys), layer.cache
    zero = jnp.zeros(1, jnp.int32)
    step = StepInputs(*[zero] * len([f for f in dataclasses.fields(StepInputs) if f.default is dataclasses.MISSING]))
    step = dataclasses.replace(step, slot=zero + 16, cu_q=jnp.arange(2), block_table=jnp.ones((1, 1), jnp.int32))
    _, after = native.attend(layer.q[0, :1], layer.k[0, :1], layer.v[0, :1], kept, step)
    same(kept.keys, before)
    assert not np.array_equal(np.asarray(after.keys), before)


def test_a_state_is_kept_as_in_the_class_above(native):
    assert native.make_cache(State((3, 2)), blocks=0, block_size=0, rows=5, dtype="float32").shape == (5, 3, 2)


# ---- between the products ------------------------------------------------------------------------------------------


def _layer_norm(x, w, b):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w + b


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _rope(x, cos, sin):
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _silu(x):
    return x / (1 + np.exp(-x))


def _gated(f, x):
    return f(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


OPERATIONS_OF_ROWS = {
    "rms_norm": (
        lambda b, x: b.rms_norm(x, x[0], 1e-5),
        lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * x[0],
    ),
    "layer_norm": (lambda b, x: b.layer_norm(x, x[0], x[1], 1e-5), lambda x: _layer_norm(x, x[0], x[1])),
    "layer_norm, no bias": (lambda b, x: b.layer_norm(x, x[0], None, 1e-5), lambda x: _layer_norm(x, x[0], 0)),
    "softmax": (lambda b, x: b.softmax(x), _softmax),
    "silu": (lambda b, x: b.silu(x), _silu),
    "gelu_tanh": (lambda b, x: b.gelu_tanh(x), _gelu_tanh),
    "gated silu": (lambda b, x: b.gated(x, "silu"), lambda x: _gated(_silu, x)),
    "gated gelu_tanh": (lambda b, x: b.gated(x, "gelu_tanh"), lambda x: _gated(_gelu_tanh, x)),
}


@pytest.mark.parametrize("dim", (2, 34, 576))
@pytest.mark.parametrize("name", OPERATIONS_OF_ROWS)
def test_rows_are_those_of_the_formula_and_each_by_itself(native, name, dim):
    ours, formula = OPERATIONS_OF_ROWS[name]
    dtype = "bfloat16" if dim == 34 else "float32"
    x = normal(40, dim, dtype=dtype)
    got = ours(native, x)
    assert got.dtype == x.dtype
    near(got, formula(double(x)), dtype)
    same(ours(native, x[jnp.asarray([0, 1, 29])])[2], got[29])
    spoiled = ours(native, x.at[5, 1].set(jnp.nan))
    assert jnp.isnan(spoiled[5]).any()
    same(spoiled[6:], got[6:])


def test_float16_is_computed_in_float32(native):
    for ours, formula in (OPERATIONS_OF_ROWS[name] for name in ("rms_norm", "softmax", "gated silu")):
        x = normal(3, 20, dtype="float16")
        assert ours(native, x).dtype == x.dtype
        near(ours(native, x), formula(double(x)), "float16")
    x, w = normal(4, 33, dtype="float16"), normal(7, 33, seed=1, dtype="float16")
    packed = native.put_weight(np.asarray(w), "float16")
    assert native.linear(x, packed).dtype == x.dtype
    near(native.linear(x, packed), double(x) @ double(w).T, "float16")
    same(native.weight_rows(packed, jnp.arange(7)), w)
    layer = Layer(native, "float16")
    got = layer.run([(0, 50)])[0]
    assert got.dtype == x.dtype
    near(got, layer.expected(0, 50), "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (2, 64, 70))
def test_rope_turns_pairs(native, dim, dtype):
    x, angle = normal(9, 3, dim, dtype=dtype), normal(9, 1, dim // 2, seed=1)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    got = native.rope(x, cos, sin)
    near(got, _rope(*map(double, (x, cos, sin))), dtype)
    same(native.rope(x[4:5], cos[4:5], sin[4:5])[0], got[4])


def test_norms_take_weights_of_another_dtype(native):
    x, w = normal(3, 20, dtype="bfloat16"), normal(20, seed=1)
    near(native.rms_norm(x, w, 1e-5), double(JaxBackend(native=False).rms_norm(x, w, 1e-5)), "bfloat16")
    near(native.layer_norm(x, w, w, 1e-5), double(JaxBackend(native=False).layer_norm(x, w, w, 1e-5)), "bfloat16")


def test_the_largest_of_a_row_is_the_first_one_and_a_nan_is_seen(native):
    x = normal(5, 1000).at[1, jnp.asarray([7, 900])].set(9).at[2, 990].set(jnp.nan)
    place, most = native.best(x)
    assert int(place[1]) == 7 and float(most[1]) == 9 and jnp.isnan(most[2])
    keep = np.array([0, 1, 3, 4])
    np.testing.assert_array_equal(np.asarray(place)[keep], np.asarray(x).argmax(1)[keep])


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_kept_rows_are_the_rows_in_float32_with_minus_infinity(native, dtype):
    x = normal(6, 75, dtype=dtype).at[1, 74].set(jnp.nan).at[2, 3].set(jnp.inf).at[3].set(-jnp.inf)
    at, random = np.array([3, 0, 1, 5, 2], np.int32), np.random.default_rng(0)
    bits = random.integers(0, 2**32, (5, 3), dtype=np.uint32)
    may = np.unpackbits(bits.astype("<u4").view(np.uint8), axis=1, bitorder="little", count=75).astype(bool)
    want = np.asarray(x, np.float32)[at]
    for given, rows in ((None, want), (bits, np.where(may, want, np.float32(-np.inf)))):
        got, finite = native.kept_rows(x, at, given)
        np.testing.assert_array_equal(np.asarray(got), rows, strict=True)
        assert finite.dtype == jnp.bool and finite.tolist() == [False, True, False, True, False]
    with pytest.raises(ValueError, match=r"expected bits uint32 \[5, 3\]"):
        native.kept_rows(x, at, bits[:, :2])


# ---- the backend that users ask for --------------------------------------------------------------------------------


def test_the_backend_is_native_unless_somebody_goes_without(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    for native in (None, True):
        found = JaxBackend("cpu", native=native)
        assert type(found) is NativeJaxBackend and found.native and found.deterministic
        assert found.invariant() is found and f"numerics {NUMERICS}" in found.fingerprint()
        assert found.remarks()[1].startswith(f"hibachi's kernels: {library()}; ")
    assert type(JaxBackend("cpu", native=False)) is type(found.plain()) is JaxBackend
    assert "not in use here; " in JaxBackend("cpu", native=False).remarks()[1]
    monkeypatch.setenv(SWITCH, "none")
    assert type(JaxBackend("cpu")) is JaxBackend
    assert "not in use here; not used, as HIBACHI_VARIANT=none is set" in JaxBackend("cpu").remarks()[1]


def test_without_a_compiler_the_backend_goes_without_and_says_so_once(monkeypatch, tmp_path, caplog):
    without_compiler(monkeypatch, tmp_path)
    for _ in range(2):
        assert type(JaxBackend("cpu")) is JaxBackend
    why = "no C++ compiler was found. Install g++ or clang++, or set CXX."
    said = [r.getMessage() for r in caplog.records if r.name.startswith("hibachi")]
    assert said == [f"There are no kernels for this machine: {why} Models compute the same, many times slower."]


def test_the_kernels_are_candidates_where_they_can_be_had(monkeypatch, tmp_path):
    monkeypatch.setenv(SWITCH, "none")
    plain = JaxBackend("cpu")
    assert {c.why_not for c in plain.candidates() if c.name == "native"} == {"HIBACHI_VARIANT=none is set"}
    monkeypatch.delenv(SWITCH)
    found = [c for c in plain.candidates() if c.name == "native"]
    assert {c.operation for c in found} == set(OPERATIONS) and all(c.invariant and not c.why_not for c in found)
    assert {c.bits for c in found} == {NUMERICS}
    whole = compose(plain, {c.operation: c for c in found})
    assert type(whole) is NativeJaxBackend and whole.deterministic
    mixed = compose(plain, {c.operation: c for c in found if c.operation != "linear"})
    assert not isinstance(mixed.put_weight(np.zeros((4, 6), "float32"), "float32"), PackedWeight) or mixed.deterministic
    assert not JaxBackend("cpu", native=False).candidates() and not whole.candidates()
    without_compiler(monkeypatch, tmp_path)
    assert all("no C++ compiler" in c.why_not for c in plain.candidates() if c.name == "native")


def test_float64_goes_without_them():
    with jax.enable_x64(True):
        assert type(JaxBackend("cpu")) is JaxBackend
        assert "JAX computes in float64 here" in JaxBackend("cpu").remarks()[1]


# ---- other libraries and processors --------------------------------------------------------------------------------


def test_programs_name_the_library_that_they_were_made_for():
    assert {target(name) for name in HANDLERS} == {f"hibachi_{name}.{library().path.stem}" for name in HANDLERS}


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_has_the_bits_of_numpy(native, dtype):
    same_arrays(computed(native, dtype), computed(NumpyBackend(native=True), dtype))
    same_arrays(biased(native, dtype), biased(NumpyBackend(native=True), dtype))


@pytest.mark.slow
def test_all_variants_compute_the_same_bits():
    """Each in a process of its own, as JAX knows one library."""
    if not (others := other_variants()):
        pytest.skip("this processor has one variant")
    want = {dtype: digest(computed(NumpyBackend(native=True), dtype)) for dtype in DTYPES}
    command = [sys.executable, "-m", "tests.tensor.native", "jax"]
    for name in others:
        env = os.environ | {SWITCH: name}
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == want


def test_tokens_are_drawn_as_in_the_definition(native):
    x = (3 * np.random.default_rng(2).normal(size=(200, 700))).astype(np.float32)
    how = parameters(200)
    draw = jax.jit(native.draw)
    token, most = draw(jnp.asarray(x), tuple(map(jnp.asarray, how)))
    same(most, x.max(1))
    assert (np.asarray(token) == sample(NumpyBackend(native=False), x, How(*how))).mean() >= 0.99
    some = slice(50, 57)
    same(draw(jnp.asarray(x[some]), tuple(jnp.asarray(t[some]) for t in how))[0], token[some])


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_language_model_says_the_same_with_native_kernels(dtype):
    """Text of the shipped model: in float32 the tokens of the plain backend; in any batch the same, and on NumPy."""
    prompts = ["The", "A little", "Once upon a time there was"]
    params = [SamplingParams(temperature=t, seed=5, max_tokens=12, logprobs=2) for t in (0, 0.9, 0)]
    said = []
    for native in (False, True) if dtype == "float32" else (True,):
        with LLM("tiny", backend=JaxBackend("cpu", native=native), dtype=dtype, max_model_len=64) as llm:
            done = llm.generate(prompts, params)
            said.append([c.token_ids for c in done])
            if native:
                alone = [llm.generate([p], each)[0] for p, each in zip(prompts, params, strict=True)]
                assert [repr(c.choices[0].logprobs) for c in alone] == [repr(c.choices[0].logprobs) for c in done]
                assert [c.token_ids for c in alone] == said[-1] and llm.engine.deterministic
    assert said[0] == said[-1]
    with LLM("tiny", backend=NumpyBackend(native=True), dtype=dtype, max_model_len=64) as llm:
        on_numpy = llm.generate(prompts, params)
        assert [repr(c.choices[0].logprobs) for c in on_numpy] == [repr(c.choices[0].logprobs) for c in done]


def test_a_load_like_one_that_came_before_compiles_nothing():
    """In a second run of a varied load there is no program that the first did not make."""
    random = np.random.default_rng(0)
    backend = JaxBackend("cpu", native=True)
    with LLM("tiny", backend=backend, enable_prefix_caching=False, max_model_len=64, max_num_seqs=2) as llm:

        def load(lengths):
            for some in [*([n] for n in lengths), lengths]:
                streams = [
                    llm.engine.run(
                        random.integers(3, 200, n).tolist(),
                        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
                    )
                    for n in some
                ]
                assert [len(list(s)) for s in streams] == [5] * len(some)
            return backend.compilations

        first = load([3, 40])
        assert load([5, 33]) == first


def test_no_step_copies_a_cache(native):
    with LLM("tiny", backend=native, max_model_len=64) as llm:
        list(llm.engine.run([5, 6, 7], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
        runner = llm.engine._worker.engine.runner
        x = runner.inputs.packed(*(np.array([n], np.int32) for n in (0, 3, 1)), np.ones(1, bool))
        text = runner.main.step.lower(llm.model.params, runner.memory.cache, x).compile().as_text()
    assert target("attend") in text and target("linear") in text
    halves = {",".join(map(str, half.shape)) for half in jax.tree.leaves(runner.memory.cache)}
    assert not [line for line in text.splitlines() if " copy(" in line and any(h in line for h in halves)]


START = """
import json
from hibachi import LLM, SamplingParams
import jax
found = []
jax.monitoring.register_event_listener(lambda event, **about: found.append(event))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
with LLM("tiny", backend="jax", max_model_len=64) as llm:
    text = llm.generate("She was", SamplingParams(temperature=0, max_tokens=8))
misses = sum(e == "/jax/compilation_cache/cache_misses" for e in found)
print(json.dumps([text[0].choices[0].text, misses, llm.backend.native]))
"""


@pytest.mark.slow
def test_a_second_process_reads_the_programs_of_the_first(tmp_path):
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "HIBACHI_"))}
    settings |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    said = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", START], env=settings, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout.splitlines()[-1]))
    assert said[0][1] >= 2 and said[1] == [said[0][0], 0, True]
