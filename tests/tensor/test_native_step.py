"""The layers of a decoder in one call of the kernels: bit for bit what its operations give one by one."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hibachi import NumpyBackend, StepInputs, UnsupportedOperation
from hibachi.llm.model.decoder import Decoder

from .arches import APART, FUSED, PLAIN, inputs, made
from .native import skip_without

torch = pytest.importorskip("torch")
skip_without()
from hibachi.backend.numpy_backend import Int4NumpyBackend, Int8NumpyBackend, NativeNumpyBackend  # noqa: E402
from hibachi.backend.program import whole  # noqa: E402
from hibachi_torch.native import Int4TorchBackend, Int8TorchBackend, NativeTorchBackend  # noqa: E402


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


ON_NUMPY = {
    NativeTorchBackend: NativeNumpyBackend,
    Int8TorchBackend: Int8NumpyBackend,
    Int4TorchBackend: Int4NumpyBackend,
}


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


@pytest.mark.parametrize("kind", ["experts", "one of many experts"])
def test_metrics_know_the_experts_of_the_last_layer_and_the_time_of_the_parts(kind, monkeypatch):
    backend = NativeNumpyBackend()
    model, chosen = made(backend, "float32", **FUSED[kind]), []
    steps = [
        inputs(backend, [0, 0, 0], [1, 17, 30], [True, True, False]),
        inputs(backend, [1, 17, 30], [1, 1, 5], [True, True, True]),
    ]
    fused = model.fused
    stepped(model, fused, steps)
    seconds, experts = fused.told()
    assert set(seconds) == {"model", "norms", "linear", "attention"} and min(seconds.values()) > 0
    own = backend.experts

    def spied(x, of, *args, **options):
        chosen.append(np.array(of))
        return own(x, of, *args, **options)

    monkeypatch.setattr(model.backend, "experts", spied)
    stepped(model, None, steps)
    layers = sum(layer.experts for layer in model.arch.layers)
    last = np.concatenate([each.reshape(-1) for each in chosen[layers - 1 :: layers]])
    assert experts == np.bincount(last, minlength=model.arch.experts.count).tolist()
