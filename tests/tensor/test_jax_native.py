"""hibachi's kernels on JAX, against float64 and against themselves in other batches."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hibachi import LLM, Paged, SamplingParams, StepInputs
from hibachi.backend.kernels.library import library
from hibachi.engine.scheduler.lower import lower

from ..lib.inside import core
from .native import (
    DTYPES,
    skip_without,
)

jax = pytest.importorskip("jax")
skip_without()
import jax.numpy as jnp  # noqa: E402

from hibachi_jax import JaxBackend  # noqa: E402
from hibachi_jax.native import HANDLERS, NativeJaxBackend, target  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def native():
    return NativeJaxBackend()


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


# ---- linear --------------------------------------------------------------------------------------------------------


def test_weights_are_not_copied_into_jax(native):
    """They lie in large pages, one after another, each on a cache line."""
    some = [native.put_weight(np.zeros((96, 33), "float32"), "float32").panels for _ in range(3)]
    places = [a.unsafe_buffer_pointer() for a in some]
    assert [b - a for a, b in itertools.pairwise(places)] == [2 * 48 * 33 * 4] * 2
    assert all(p % 64 == 0 for p in places)


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

        step = jax.jit(partial(self.backend.attend, **special), donate_argnums=3)
        out, self.cache = step(new(self.q), new(self.k), new(self.v), self.cache, x)
        return jnp.split(out, np.cumsum(q)[:-1])


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


# ---- between the products ------------------------------------------------------------------------------------------


def test_float16_is_computed_in_float32(native):
    x, w = normal(4, 34, dtype="float16"), normal(7, 34, seed=1, dtype="float16")
    narrow, wide = (native.put_weight(np.asarray(w, dtype), dtype) for dtype in ("float16", "float32"))
    for operation in (
        lambda x, w: native.rms_norm(x, x[0], 1e-5),
        lambda x, w: native.softmax(x),
        lambda x, w: native.gated(x, "silu"),
        lambda x, w: native.linear(x, w),
    ):
        got = operation(x, narrow)
        assert got.dtype == jnp.float16
        same(got, operation(x.astype("float32"), wide).astype("float16"))
    same(native.weight_rows(narrow, jnp.arange(7)), w)
    assert native.kept_rows(x, np.array([2], np.int32))[0].dtype == jnp.float32
    layers = Layer(native, "float16"), Layer(native, "float32")
    layers[1].q, layers[1].k, layers[1].v = (t.astype("float32") for t in (layers[0].q, layers[0].k, layers[0].v))
    got, want = (layer.run([(0, 50)])[0] for layer in layers)
    assert got.dtype == jnp.float16
    same(got, want.astype("float16"))


def test_norms_take_weights_of_another_dtype(native):
    x, w = normal(3, 20, dtype="bfloat16"), normal(20, seed=1)
    near = partial(np.testing.assert_allclose, rtol=0.01, atol=0.02)
    for operation in (lambda b: b.rms_norm(x, w, 1e-5), lambda b: b.layer_norm(x, w, w, 1e-5)):
        near(*(np.asarray(operation(b), np.float32) for b in (native, JaxBackend(native=False))))


# ---- the backend that users ask for --------------------------------------------------------------------------------


def test_float64_goes_without_them():
    with jax.enable_x64(True):
        assert type(JaxBackend("cpu")) is JaxBackend
        assert "JAX computes in float64 here" in JaxBackend("cpu").remarks()[1]


# ---- other libraries and processors --------------------------------------------------------------------------------


def test_programs_name_the_library_that_they_were_made_for():
    assert {target(name) for name in HANDLERS} == {f"hibachi_{name}.{library().path.stem}" for name in HANDLERS}


def test_no_step_copies_a_cache(native):
    with LLM("tiny", backend=native, max_model_len=64) as llm:
        list(llm.engine.run([5, 6, 7], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
        runner = core(llm.engine).runner
        x = runner.inputs.packed(*(np.array([n], np.int32) for n in (0, 3, 1)), np.ones(1, bool))
        text = runner.main.step.lower(llm.model.params, runner.memory.cache, x).compile().as_text()
    assert target("attend") in text and target("linear") in text
    halves = {",".join(map(str, half.shape)) for half in jax.tree.leaves(runner.memory.cache)}
    assert not [line for line in text.splitlines() if " copy(" in line and any(h in line for h in halves)]
