"""The layers of a decoder in one call of the kernels: bit for bit what its operations give one by one."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hibachi import NumpyBackend, StepInputs, UnsupportedOperation
from hibachi.model.arch import Arch, Experts, Layer, shapes
from hibachi.model.decoder import Decoder
from hibachi.model.rope import Rope
from hibachi.plan.lower import lower

from .native import every_variant, other_variants, skip_without

torch = pytest.importorskip("torch")
skip_without()
from hibachi.tensor.numpy_backend import Int8NumpyBackend, NativeNumpyBackend  # noqa: E402
from hibachi.tensor.program import whole  # noqa: E402
from hibachi_torch.native import Int4TorchBackend, Int8TorchBackend, NativeTorchBackend  # noqa: E402

PLAIN = Arch(
    hidden_size=48,
    heads=6,
    kv_heads=2,
    head_dim=16,
    layers=(Layer(),) * 2,
    intermediate=70,
    vocab_size=130,
    max_positions=128,
    norm_eps=1e-5,
    ropes=(Rope(theta=1e4, dims=16),),
)
FUSED = {
    "plain": {},
    "tied": dict(tied=True),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "norms of heads": dict(qk_norm="head"),
    "norms of queries": dict(qk_norm="all"),
    "norms on both sides": dict(norms="both", norm_plus_one=True, embed_scale=6.9),
    "norms after": dict(norms="after"),
    "residual scale": dict(residual_scale=0.22, logit_divisor=8.0),
    "window, softcap, scale": dict(
        layers=(Layer(window=7), Layer()), attention_softcap=20.0, attention_scale=0.3, activation="gelu_tanh"
    ),
    "two sets of frequencies": dict(
        ropes=(Rope(theta=1e4, dims=16), Rope(theta=1e6, dims=16)), layers=(Layer(rope=1), Layer(), Layer(rope=None))
    ),
    "partly turned": dict(ropes=(Rope(theta=1e4, dims=6),)),
    "learned positions": dict(ropes=(), layers=(Layer(rope=None),), learned_positions=True),
    "not gated": dict(gated=False, activation="gelu_tanh"),
    "layer norm": dict(norm="layer"),
    "layer norms everywhere": dict(norm="layer", norms="both", qk_norm="head"),
    "exact gelu": dict(activation="gelu"),
    "parallel": dict(parallel=True),
    "as GPT-NeoX": dict(
        norm="layer",
        parallel=True,
        gated=False,
        activation="gelu",
        attention_bias=True,
        mlp_bias=True,
        ropes=(Rope(theta=1e4, dims=4),),
    ),
    "as GPT-2": dict(
        norm="layer",
        gated=False,
        activation="gelu_tanh",
        attention_bias=True,
        mlp_bias=True,
        kv_heads=6,
        ropes=(),
        layers=(Layer(rope=None),) * 2,
        learned_positions=True,
    ),
}
FUSED |= {
    "experts": dict(layers=(Layer(experts=True), Layer(), Layer(experts=True)), experts=Experts(5, 2, 18, True)),
    "one of many experts": dict(layers=(Layer(experts=True),), experts=Experts(40, 1, 16, False)),
    "experts, norms on both sides": dict(layers=(Layer(experts=True),), experts=Experts(3, 3, 16, False), norms="both"),
    "experts, residual scale": dict(layers=(Layer(experts=True),), experts=Experts(4, 2, 16, True), residual_scale=0.2),
}
APART = {
    "parallel, norms after": dict(parallel=True, norms="both"),
    "odd width": dict(intermediate=71),
    "experts of odd width": dict(layers=(Layer(experts=True),), experts=Experts(4, 2, 17, True)),
    "experts, parallel": dict(layers=(Layer(experts=True),), experts=Experts(4, 2, 16, True), parallel=True),
}


def made(backend, dtype, **changes):
    arch = dataclasses.replace(PLAIN, **changes)
    random = np.random.default_rng(0)
    required, optional = shapes(arch)
    wanted = required | (optional if arch.attention_bias else {})
    tensors = {name: random.normal(scale=0.3, size=shape).astype(np.float32) for name, shape in wanted.items()}
    return Decoder.build(arch, tensors, backend, dtype=dtype)


def inputs(backend, starts, each, emit):
    n, size = len(starts), 8
    width = -(-max(s + q for s, q in zip(starts, each, strict=True)) // size)
    table = np.arange(1, 1 + n * width, dtype=np.int32).reshape(n, width)
    tiles = backend.shapes.choices
    packed = lower(np.arange(n), np.int32(starts), np.int32(each), np.array(emit), table, size, tiles=tiles)
    tokens = np.random.default_rng(3).integers(0, PLAIN.vocab_size, sum(each)).astype(np.int32)
    return StepInputs(
        tok=backend.put(tokens), **{f.name: backend.put(getattr(packed, f.name)) for f in dataclasses.fields(packed)}
    )


def stepped(model, fused, steps):
    """What some steps return, and what they leave in the cache."""
    model.fused, outputs = fused, []
    cache = [
        model.backend.make_cache(s, blocks=64, block_size=8, rows=5, dtype=model.dtype) for s in model.cache_spec()
    ]
    for x in steps:
        out, cache = model.step(model.params, cache, x)
        outputs.append(out)
    return [*outputs, *(half for layer in cache for half in (layer.keys, layer.values))]


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("make", (NativeTorchBackend, Int8TorchBackend, Int4TorchBackend))
def test_one_call_gives_the_bits_of_the_operations(make, kind, dtype):
    backend = make("cpu")
    model = made(backend, dtype, **FUSED[kind])
    fused = model.fused
    assert fused is not None
    steps = [
        inputs(backend, [0, 0, 0], [1, 17, 30], [True, True, False]),
        inputs(backend, [1, 17, 30], [1, 1, 5], [True, True, True]),
        inputs(backend, [2, 18, 35], [1, 1, 1], [True, True, True]),
        inputs(backend, [0], [9], [False]),
    ]
    one, many = stepped(model, fused, steps), stepped(model, None, steps)
    assert one[0].shape == (2, 130) and one[3].shape == (0, 130)
    assert all(torch.isfinite(t).all() for t in one)
    for i, (got, want) in enumerate(zip(one, many, strict=True)):
        assert torch.equal(got, want), i
    before = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            assert all(torch.equal(a, b) for a, b in zip(stepped(model, fused, steps), many, strict=True)), n
    finally:
        torch.set_num_threads(before)


ON_NUMPY = {NativeTorchBackend: NativeNumpyBackend, Int8TorchBackend: Int8NumpyBackend}


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("make", ON_NUMPY)
def test_numpy_has_the_bits_of_pytorch(make, kind, dtype):
    """Layers and all around them; a model of which NumPy would have to compute a part in bfloat16 is refused."""
    found = []
    for backend in (make("cpu"), ON_NUMPY[make]()):
        arch = dataclasses.replace(PLAIN, **FUSED[kind])
        if isinstance(backend, NumpyBackend) and dtype == "bfloat16" and not whole(arch):
            assert not backend.suits(dtype, arch)
            with pytest.raises(UnsupportedOperation, match="NumPy has no arithmetic in bfloat16"):
                made(backend, dtype, **FUSED[kind])
            return
        model = made(backend, dtype, **FUSED[kind])
        assert model.fused is not None and backend.suits(dtype, arch)
        steps = [
            inputs(backend, [0, 0, 0], [1, 17, 30], [True, True, False]),
            inputs(backend, [1, 17, 30], [1, 1, 5], [True, True, True]),
        ]
        found.append([backend.get(t) for t in stepped(model, model.fused, steps)])
    for got, want in zip(*found, strict=True):
        np.testing.assert_array_equal(got, want, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("make", (NativeTorchBackend, Int8TorchBackend))
def test_all_variants_compute_the_same_bits(make, dtype, monkeypatch):
    if not other_variants():
        pytest.skip("this processor has one variant")
    for kind in FUSED:
        found = []
        for backend in every_variant(make, monkeypatch):
            model = made(backend, dtype, **FUSED[kind])
            steps = [
                inputs(backend, [0, 0, 0], [1, 17, 30], [True, True, False]),
                inputs(backend, [1, 17, 30], [1, 1, 5], [True, True, True]),
            ]
            found.append(stepped(model, model.fused, steps))
        for other in found[1:]:
            assert all(torch.equal(got, want) for got, want in zip(other, found[0], strict=True)), kind


@pytest.mark.parametrize("kind", APART)
def test_what_has_no_kernel_stays_operation_by_operation(kind):
    model = made(NativeTorchBackend("cpu"), "bfloat16", **APART[kind])
    assert model.fused is None
    steps = [inputs(model.backend, [0, 0], [3, 17], [True, True])]
    assert all(torch.isfinite(t).all() for t in stepped(model, None, steps))


@pytest.mark.parametrize("kind", ["odd width", "experts of odd width"])
@pytest.mark.parametrize("make, dtype", [(NativeTorchBackend, "float32"), (Int8TorchBackend, "float32")])
def test_rows_of_odd_width_are_no_pairs_in_float32(make, dtype, kind):
    model = made(make("cpu"), dtype, **APART[kind])
    steps = [inputs(model.backend, [0, 0], [3, 17], [True, True])]
    one, many = stepped(model, model.fused, steps), stepped(model, None, steps)
    assert model.fused is None and all(torch.equal(a, b) for a, b in zip(one, many, strict=True))
    assert made(make("cpu"), dtype, **APART[kind]).fused is not None


def test_other_params_than_the_models_own_are_used():
    backend = NativeTorchBackend("cpu")
    model, x = made(backend, "float32"), inputs(backend, [0], [9], [True])
    cache = [backend.make_cache(s, blocks=9, block_size=8, rows=1, dtype="float32") for s in model.cache_spec()]
    other = model.params | {"norm": model.params["norm"] * 2}
    first, _ = model.step(model.params, cache, x)
    second, _ = model.step(other, cache, x)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("kind", ("tied", "norms on both sides", "learned positions"))
@pytest.mark.parametrize("make", ON_NUMPY)
def test_what_numpy_holds_may_stay_there(make, kind):
    """Index arrays of the host, also read-only ones and integers of 64 bits, give what the backend's own give."""
    backend = make("cpu")
    model, x = made(backend, "float32", **FUSED[kind]), inputs(backend, [0, 0], [3, 17], [True, True])
    host = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    host = {name: None if t is None else backend.get(t).astype(np.int64) for name, t in host.items()}
    for t in host.values():
        if t is not None:
            t.flags.writeable = False
    assert model.takes_host
    wanted, found = (stepped(model, model.fused, [each]) for each in (x, StepInputs(**host)))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert torch.equal(stepped(model, None, [StepInputs(**host)])[0], wanted[0]) and not model.takes_host


class Looking(Decoder):
    """Looks at its inputs, as a class of a user's may."""

    def step(self, params, cache, x):
        assert isinstance(x.pos, torch.Tensor)
        return super().step(params, cache, x)


def test_a_class_of_ones_own_gets_arrays_of_its_backend():
    model = made(NativeTorchBackend("cpu"), "float32")
    own = Looking(model.arch, model.params, model.backend, dtype="float32", max_model_len=128)
    assert model.takes_host and own.fused is not None and not own.takes_host


@pytest.mark.parametrize("name, wrong", [("tok", 130), ("tok", -1), ("pos", 128), ("last", 9), ("slot", 1 << 20)])
def test_places_outside_are_refused(name, wrong):
    backend = NativeTorchBackend("cpu")
    model, x = made(backend, "float32"), inputs(backend, [0], [9], [True])
    t = getattr(x, name).clone()
    t[-1] = wrong
    with pytest.raises(IndexError, match="A place lies outside"):
        stepped(model, model.fused, [dataclasses.replace(x, **{name: t})])


def test_threads_that_share_a_model_share_no_memory():
    """Each has its own cache, numbers of tokens and outputs; what a call works in is taken again by the next one."""
    backend = NativeTorchBackend("cpu")
    model = made(backend, "float32")
    works = [[inputs(backend, [at] * rows, [1] * rows, [True] * rows) for at in range(40)] for rows in (1, 1, 2, 3, 5)]
    wanted = [stepped(model, model.fused, steps) for steps in works]
    with ThreadPoolExecutor(len(works)) as pool:
        for _ in range(5):
            found = list(pool.map(lambda steps: stepped(model, model.fused, steps), works))
            for got, want in zip(found, wanted, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_seconds_of_each_operation_are_told():
    backend = NativeTorchBackend("cpu")
    model = made(backend, "float32")
    model.fused.seconds = np.zeros(len(model.fused.parts))
    stepped(model, model.fused, [inputs(backend, [0], [9], [True])])
    assert (model.fused.seconds > 0).all() and set(model.fused.parts) == {"linear", "attention", "norms", "model"}


QUICK = "experts", "residual scale"


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in FUSED])
def test_jax_has_these_bits_wherever_they_have_the_name(kind):
    """XLA rounds once what is scaled and then added, so models that scale have no name there."""
    jax = pytest.importorskip("hibachi_jax").JaxBackend("cpu", native=True)
    found = []
    for backend in (jax, NativeNumpyBackend()):
        model = made(backend, "float32", **FUSED[kind])
        x = inputs(backend, [0, 0, 0], [1, 17, 30], [True, True, False])
        cache = [backend.make_cache(s, blocks=64, block_size=8, rows=5, dtype="float32") for s in model.cache_spec()]
        found.append(backend.get(backend.compile(model.step)(model.params, cache, x)[0]))
        if backend is jax:
            scales = dataclasses.replace(PLAIN, **FUSED[kind])
            assert model.portable is ((scales.residual_scale, scales.embed_scale) == (1.0, 1.0))
    np.testing.assert_allclose(*found, atol=1e-4)
    if model.portable and (scales.residual_scale, scales.embed_scale) == (1.0, 1.0):
        np.testing.assert_array_equal(*found)
