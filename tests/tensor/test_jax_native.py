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

from ..lib.inside import core
from .native import (
    DTYPES,
    parameters,
    skip_without,
    without_compiler,
)

jax = pytest.importorskip("jax")
skip_without()
import jax.numpy as jnp  # noqa: E402

from hibachi_jax import JaxBackend  # noqa: E402
from hibachi_jax.native import HANDLERS, JaxPackedWeight, NativeJaxBackend, target  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def native():
    return NativeJaxBackend()


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def same(got, want):
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


# ---- linear --------------------------------------------------------------------------------------------------------


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


def test_a_state_is_kept_as_in_the_class_above(native):
    assert native.make_cache(State((3, 2)), blocks=0, block_size=0, rows=5, dtype="float32").shape == (5, 3, 2)


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


def test_the_largest_of_a_row_is_the_first_one_and_a_nan_is_seen(native):
    x = normal(5, 1000).at[1, jnp.asarray([7, 900])].set(9).at[2, 990].set(jnp.nan)
    place, most = native.best(x)
    assert int(place[1]) == 7 and float(most[1]) == 9 and jnp.isnan(most[2])
    keep = np.array([0, 1, 3, 4])
    np.testing.assert_array_equal(np.asarray(place)[keep], np.asarray(x).argmax(1)[keep])


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
    assert (
        not isinstance(mixed.put_weight(np.zeros((4, 6), "float32"), "float32"), JaxPackedWeight) or mixed.deterministic
    )
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


def test_tokens_are_drawn_as_in_the_definition(native):
    x = (3 * np.random.default_rng(2).normal(size=(200, 700))).astype(np.float32)
    how = parameters(200)
    draw = jax.jit(native.draw)
    token, most = draw(jnp.asarray(x), tuple(map(jnp.asarray, how)))
    same(most, x.max(1))
    assert (np.asarray(token) == sample(NumpyBackend(native=False), x, How(*how))).mean() >= 0.99
    some = slice(50, 57)
    same(draw(jnp.asarray(x[some]), tuple(jnp.asarray(t[some]) for t in how))[0], token[some])


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
        runner = core(llm.engine).runner
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
