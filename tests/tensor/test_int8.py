"""Weights of eight bits: what hibachi's kernels and JAX multiply, against float64 and against other batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hibachi
from hibachi import ConfigError, NumpyBackend, UnsupportedOperation
from hibachi.backend.host_arrays import PackedWeight
from hibachi.backend.kernels.library import SWITCH, why_missing
from hibachi.backend.numpy_backend import Int8NumpyBackend
from hibachi.cli.main import main
from hibachi.llm.model.arch import Arch, Experts, Layer, shapes
from hibachi.llm.model.decoder import Decoder
from hibachi.llm.model.rope import Rope

from .native import DTYPES, SHAPES, without_compiler

torch = pytest.importorskip("torch")
from hibachi_torch import TorchBackend  # noqa: E402
from hibachi_torch.native import faster  # noqa: E402

GROUP = 64  # as in int8.h
native = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))


@pytest.fixture(scope="module")
def int8():
    if why_missing():
        pytest.skip(str(why_missing()))
    return TorchBackend("cpu", native=True).quantized("int8")


def normal(*shape, seed=0, dtype="float32"):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(getattr(torch, dtype))


def rounded(x, group):
    """x [rows, k] as integers, rounded in float32 as in the kernels, times a scale for each `group` of a row."""
    rows, k = x.shape
    x = torch.nn.functional.pad(x.float(), (0, -k % group)).view(rows, -1, group)
    most = x.abs().amax(-1, keepdim=True)
    factor = torch.full_like(most, 127) / most  # 127 / most would be its reciprocal, rounded, times 127
    whole = torch.where(most > 0, x * factor, 0).round()
    return (whole.double() * (most / 127).double()).view(rows, -1)[:, :k]


def expected(x, w, b=None):
    y = rounded(x, GROUP) @ rounded(w, w.shape[1]).T
    return y if b is None else y + b.double()


def near(got, want, dtype):
    off = (got.double() - want).abs().max().item()
    assert off <= {"float32": 2e-6, "bfloat16": 5e-3}[dtype] * max(1.0, want.abs().max().item()), f"off by {off:.3g}"


# ---- the product ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_the_product_is_that_of_the_rounded_numbers(int8, threads, m, n, k, biased, dtype):
    x, w, b = normal(m, k, dtype=dtype), normal(n, k, seed=1), normal(n, seed=2, dtype=dtype)
    packed = int8.put_weight(w.numpy(), dtype)
    got = int8.linear(x, packed, b if biased else None)
    assert got.shape == (m, n) and got.dtype == x.dtype
    near(got, expected(x, w, b if biased else None), dtype)
    unrounded = int8.logits(x, packed, b if biased else None)
    assert unrounded.dtype == torch.float32 and torch.equal(unrounded.to(x.dtype), got)
    near(unrounded, expected(x, w, b if biased else None), "float32")


def test_sums_of_the_largest_numbers_are_exact(int8):
    """All products are 127 * 127, of either sign: int32 has room, and what is added to make bytes unsigned cancels."""
    x, w = torch.ones(3, 4096), torch.ones(2, 4096)
    x[1], w[1] = -1, -1
    got = int8.linear(x, int8.put_weight(w.numpy(), "float32"))
    near(got / 4096, torch.tensor([[1, -1], [-1, 1], [1, -1]]).double(), "float32")


def test_a_large_number_spoils_its_group_only(int8):
    x, w = normal(1, 256), normal(64, 256, seed=1)
    x[0, 70] = 1e4
    w[:, 64:128] = 0
    got = int8.linear(x, int8.put_weight(w.numpy(), "float32")).double()
    want = x.double() @ w.double().T
    assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", (1, 5, 48, 63))
def test_rows_of_a_weight_are_those_of_the_rounded_matrix(int8, k, dtype):
    w = normal(101, k)
    idx = torch.tensor([[0, 47, 48], [100, 99, 0]], dtype=torch.int32)
    packed = int8.put_weight(w.numpy(), dtype)
    got = int8.weight_rows(packed, idx)
    assert got.dtype == getattr(torch, dtype)
    near(got, rounded(w, k)[idx], dtype)
    for wrong in (101, -1):
        with pytest.raises(IndexError, match="A place lies outside"):
            int8.weight_rows(packed, torch.tensor([wrong]))


def test_zeros_and_tiny_numbers_come_to_zero(int8):
    x, w = normal(2, 64), normal(5, 64, seed=1)
    x[0], w[3] = 0, 1e-40
    got = int8.linear(x, int8.put_weight(w.numpy(), "float32"))
    assert got[0].tolist() == [0] * 5 and got[1, 3] == 0 and got[1].isfinite().all()
    assert int8.linear(x[:0], int8.put_weight(w.numpy(), "float32")).shape == (0, 5)


def test_a_weight_takes_a_byte_for_each_number(int8):
    w = int8.put_weight(np.ones((480, 640), "float32"), "bfloat16")
    assert w.data.nbytes == 480 * 640 and w.scales.nbytes == 480 * 4


# ---- a model -------------------------------------------------------------------------------------------------------

PROMPTS = ["The", "A little", "Once upon a time there was", "It is a truth universally acknowledged, that a single man"]
GREEDY = hibachi.SamplingParams(temperature=0, max_tokens=12)
TEXT = (
    "It was a fine morning, and she walked out to see whether the letter had come. Nobody was at home but her sister."
)


def tiny(backend, dtype="float32", quantization: str | None = "int8", **options):
    return hibachi.LLM("tiny", backend=backend, dtype=dtype, quantization=quantization, **options)


@pytest.mark.parametrize(
    "where",
    [
        "hibachi_torch.native:Int8TorchBackend",
        "hibachi.backend.numpy_backend:Int8NumpyBackend",
        "hibachi_torch.native:Int4TorchBackend",
        pytest.param("hibachi_jax.native:Int8NativeJaxBackend", marks=pytest.mark.slow),
    ],
)
@native
@pytest.mark.slow
def test_the_invariance_of_the_conformance_suite_holds_for_bytes(where):
    suite = Path(__file__).parents[2] / "conformance" / "test_deterministic.py"
    command = [sys.executable, "-m", "pytest", suite, "-q", "-p", "no:cacheprovider", "-p", "hibachi.testing.plugin"]
    command += ["--backend", where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=suite.parents[1])
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout + done.stderr


def likelihood(llm):
    return llm.score([TEXT[:2]], [TEXT[2:]])[0].logprob


@native
@pytest.mark.parametrize("dtype", DTYPES)
def test_texts_are_nearly_as_likely(dtype):
    native = TorchBackend("cpu", native=True)
    with tiny(native, dtype, None) as plain, tiny(native, dtype) as bytes_:
        assert likelihood(bytes_) != likelihood(plain)
        assert likelihood(bytes_) == pytest.approx(likelihood(plain), rel=0.01)
        with tiny("numpy", dtype) as on_numpy:
            assert type(on_numpy.backend) is Int8NumpyBackend
            assert likelihood(on_numpy) == likelihood(bytes_)  # the same bits


@native
def test_a_router_keeps_its_numbers(int8):
    arch = Arch(
        hidden_size=48, heads=6, kv_heads=2, head_dim=16, layers=(Layer(experts=True),), intermediate=70,
        vocab_size=130, max_positions=128, norm_eps=1e-5, ropes=(Rope(theta=1e4, dims=16),),
        experts=Experts(4, 2, 16, True),
    )  # fmt: skip
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes(arch)[0].items()}
    layer = Decoder.build(arch, tensors, int8, dtype="float32").params["layers"][0]
    assert type(layer["router"]) is PackedWeight and layer["router"].scales is None
    matrices = (layer["qkv"], layer["o"], *layer["gate_up"], *layer["down"])
    assert all(type(w) is PackedWeight and w.scales is not None for w in matrices)


# ---- JAX -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_jax():
    """Without hibachi's kernels."""
    return pytest.importorskip("hibachi_jax").JaxBackend(native=False).quantized("int8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 49, 65), (70, 130, 96), (3, 1, 577)])
def test_jax_multiplies_the_rounded_matrix(on_jax, m, n, k, dtype):
    x, w, b = (normal(*shape, seed=i).numpy() for i, shape in enumerate(((m, k), (n, k), (n,))))
    weight, x = on_jax.put_weight(w, dtype), on_jax.put(x, dtype)
    got = on_jax.linear(x, weight, on_jax.put(b, dtype))
    assert got.dtype == on_jax.dtype(dtype) and got.shape == (m, n) and weight.values.dtype == np.int8
    exact = np.asarray(x, np.float64) @ rounded(torch.from_numpy(w), k).numpy().T + np.asarray(on_jax.put(b, dtype))
    off = np.abs(np.asarray(got, np.float64) - exact).max()
    assert off <= {"float32": 1e-4, "bfloat16": 5e-3}[dtype] * max(1, np.abs(exact).max())
    rows = on_jax.weight_rows(weight, on_jax.put(np.array([[0, n - 1]], np.int32)))
    near(
        torch.from_numpy(np.asarray(rows, np.float64)),
        rounded(torch.from_numpy(w), k)[torch.tensor([[0, n - 1]])],
        dtype,
    )


def test_jax_keeps_what_is_not_finite_in_its_row(on_jax):
    x, w = normal(8, 100).numpy(), on_jax.put_weight(normal(50, 100, seed=1).numpy(), "float32")
    want = np.asarray(on_jax.linear(on_jax.put(x), w))
    for value in (np.nan, np.inf):
        spoiled = x.copy()
        spoiled[4, 7], spoiled[5] = value, 0
        got = np.asarray(on_jax.linear(on_jax.put(spoiled), w))
        assert not np.isfinite(got[4]).any() and not got[5].any()
        assert np.array_equal(got[[0, 1, 2, 3, 6, 7]], want[[0, 1, 2, 3, 6, 7]])


def test_jax_finds_texts_nearly_as_likely():
    jax = pytest.importorskip("hibachi_jax").JaxBackend(native=False)
    with tiny("torch", "float32", None) as plain, tiny(jax) as bytes_:
        assert bytes_.backend.quantization == "int8" and not bytes_.deterministic
        assert likelihood(bytes_) != likelihood(plain)
        assert likelihood(bytes_) == pytest.approx(likelihood(plain), rel=0.01)
    with pytest.raises(UnsupportedOperation, match="int8 with the promise takes hibachi's kernels on JAX"):
        tiny(jax, deterministic=True)


# ---- what users ask for --------------------------------------------------------------------------------------------


@native
def test_numpy_multiplies_by_hibachis_kernels():
    assert type(NumpyBackend().quantized("int8")) is Int8NumpyBackend
    with tiny("numpy") as llm:
        assert type(llm.backend) is Int8NumpyBackend and llm.deterministic and llm.selfcheck() > 0
    with pytest.raises(UnsupportedOperation, match="expected int8 or int4, with hibachi's kernels; got int5"):
        NumpyBackend().quantized("int5")


def test_numpy_says_why_not(monkeypatch):
    monkeypatch.setenv(SWITCH, "none")
    with pytest.raises(UnsupportedOperation, match=r"NumPy itself has no fast product of integers.*=none is set"):
        tiny("numpy")
    with tiny("numpy", quantization="auto") as llm, tiny("numpy", quantization="none") as other:
        assert type(llm.backend) is type(other.backend) and llm.backend.quantization == "none"


@pytest.mark.parametrize("why", ("no compiler", "not wanted"))
def test_without_native_kernels_torch_says_why_not(why, monkeypatch, tmp_path):
    if why == "no compiler":
        without_compiler(monkeypatch, tmp_path)
        assert not TorchBackend("cpu").prefers("int8", "bfloat16")
    else:
        monkeypatch.setenv(SWITCH, "none")
    with pytest.raises(UnsupportedOperation, match=r"Weights in int8 take hibachi's kernels: .*Pass quantization=None"):
        tiny("torch", "bfloat16")
    with tiny("torch", "bfloat16", quantization="auto") as llm:
        assert llm.backend.quantization == "none"


@native
def test_dtypes_without_kernels_are_refused():
    with pytest.raises(UnsupportedOperation, match="float32 or bfloat16; got float64"):
        tiny("torch", "float64")


@native
def test_auto_takes_what_was_measured(monkeypatch):
    asked = []
    for answer in (True, False):
        monkeypatch.setattr("hibachi_torch.variants.faster", lambda *a, answer=answer: asked.append(a) or answer)
        with tiny("torch", "bfloat16", "auto") as llm:
            assert (llm.backend.quantization == "int8") is answer
    assert [dtype for _, dtype in asked] == ["bfloat16"] * 2


@native
def test_what_is_measured_is_both_kinds_of_products():
    assert isinstance(faster(TorchBackend("cpu").invariant(), "float32"), bool)
    assert not faster(TorchBackend("cpu"), "float64")


@native
def test_the_command_line_takes_it(capsys, monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    assert main(["generate", "--backend", "torch", "--quantization", "int8", "--prompt", "The", "--max-tokens", "4",
                 "--temperature", "0"]) == 0  # fmt: skip
    said = capsys.readouterr().out
    with tiny("torch") as llm:
        assert said == llm.generate("The", GREEDY.with_(max_tokens=4))[0].text + "\n"


def test_a_model_that_runs_through_transformers_is_refused(monkeypatch):
    from hibachi.llm.model import registry

    backend = TorchBackend("cpu")
    backend.quantization = "int8"
    monkeypatch.setattr(backend, "foreign_model", lambda *a, **k: object(), raising=False)

    def unknown(config):
        raise hibachi.UnknownArchitecture("nobody knows it")

    monkeypatch.setattr(registry, "find", unknown)
    with pytest.raises(ConfigError, match="quantization='int8' is for architectures that are registered"):
        registry.load_model("tiny", backend)


# ---- other processors ----------------------------------------------------------------------------------------------
