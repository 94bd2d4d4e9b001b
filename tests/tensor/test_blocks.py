"""Weights in blocks of four and eight bits: the bits that the kernels' definition gives, and those of gguf-py."""

from __future__ import annotations

import numpy as np
import pytest

from hibachi import UnsupportedOperation
from hibachi.backend.host_arrays import PackedWeight
from hibachi.backend.kernels.library import SWITCH
from hibachi.backend.kernels.memory import Slabs
from hibachi.backend.numpy_backend import Int4NumpyBackend
from hibachi.backend.packing import pack
from hibachi.llm.model.gguf.file import Blocks

from .native import DTYPES, SHAPES, every_variant, other_variants, skip_without

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
skip_without()
from hibachi_torch import TorchBackend  # noqa: E402
from hibachi_torch.native import NativeTorchBackend  # noqa: E402

GROUP, BLOCK = 64, 32  # as in int8.h
KINDS = ("q4_0", "q8_0")


@pytest.fixture(scope="module")
def native():
    return NativeTorchBackend()


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def library_blocks(w, kind):
    """The blocks of gguf-py, [n, bytes]; w [n, k] with zeros up to a whole block."""
    w = np.pad(w, ((0, 0), (0, -w.shape[1] % BLOCK)))
    return gguf.quants.quantize(w, gguf.GGMLQuantizationType[kind.upper()])


def library_numbers(w, kind):
    return gguf.quants.dequantize(library_blocks(w, kind), gguf.GGMLQuantizationType[kind.upper()])[:, : w.shape[1]]


def put(backend, w, kind, dtype="float32"):
    """A matrix that the kernels round to blocks."""
    return PackedWeight(w.shape, backend.dtype(dtype), kind, *pack([w], kind, backend.library.kernels, Slabs()))


# ---- the definition, in NumPy ----------------------------------------------------------------------------------------


def fma(a, b, c):
    """a * b + c of float32, rounded once: float64 rounded to odd has what the second rounding needs."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)  # exact
    total = product + c
    back = total - product
    off = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    nearer = np.where((off > 0) == (total > 0), 1, -1)
    return np.where((off != 0) & (bits % 2 == 0), bits + nearer, bits).view(np.float64).astype(np.float32)


def product(x, w, kind):
    """x [m, k] times w [n, k], both float32, as blocks.h says."""
    (m, k), n = x.shape, len(w)
    raw = library_blocks(w, kind).reshape(n, -(-k // BLOCK), -1)
    scale = np.ascontiguousarray(raw[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    if kind == "q4_0":
        whole = np.concatenate([raw[..., 2:] & 15, raw[..., 2:] >> 4], -1).astype(np.int64) - 8
    else:
        whole = raw[..., 2:].view(np.int8).astype(np.int64)
    x = np.pad(x, ((0, 0), (0, -k % GROUP))).reshape(m, -1, GROUP)
    most = np.abs(x).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(most > 0, np.rint(x * (np.float32(127) / most)), 0).astype(np.int64).reshape(m, -1, BLOCK)
    of_x = (most / np.float32(127))[..., 0]
    sums = np.zeros((m, n), np.float32)
    for b in range(raw.shape[1]):
        exact = (q[:, b] @ whole[:, b].T).astype(np.float32)
        sums = fma(exact * scale[:, b], np.broadcast_to(of_x[:, b * BLOCK // GROUP, None], exact.shape), sums)
    return sums


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_the_product_has_the_bits_of_its_definition(native, m, n, k, kind, threads):
    x, w, b = normal(m, k), normal(n, k, seed=1), normal(n, seed=2)
    x[:, k // 2 :] *= 100
    weight, want = put(native, w, kind), product(x, w, kind)
    native.follow_threads()
    for bias, expected in ((None, want), (torch.from_numpy(b), want + b)):
        np.testing.assert_array_equal(native.linear(torch.from_numpy(x), weight, bias).numpy(), expected)
    with_narrow = torch.from_numpy(x).bfloat16()
    want = torch.from_numpy(product(with_narrow.float().numpy(), w, kind))
    weight = put(native, w, kind, "bfloat16")
    assert torch.equal(native.linear(with_narrow, weight), want.bfloat16())
    assert torch.equal(native.logits(with_narrow, weight), want)


# ---- rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_the_library(native, kind):
    w = normal(130, 192) * np.exp(3 * normal(130, 1, seed=1))
    w[0], w[1, :40], w[2] = 0, 0, np.where(normal(192) > 0, 1, -1)  # no scale; a tie of largest numbers
    w[3] = np.arange(192) % 33 - 16  # ties of rounding
    w[4], w[5, 0], w[6] = 1e-9, 5e5, 3e-6  # scales that are 0, near the largest and denormal in float16
    rows = native.weight_rows(put(native, w, kind), torch.arange(130)).numpy()
    np.testing.assert_array_equal(rows, library_numbers(w, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_a_file_stay_as_they_are(native, tmp_path, kind, dtype):
    w = normal(100, 96)
    path = tmp_path / "blocks"
    library_blocks(w, kind).tofile(path)
    order = np.random.default_rng(0).permutation(60).astype(np.int32)
    size = library_blocks(w[:1], kind).size
    first, second = (Blocks(path, kind.upper(), (n, 96), at * size, o) for n, at, o in ((60, 0, order), (40, 60, None)))
    weight = native.put_rows([first, second], dtype)
    assert weight.kind == kind and weight.shape == (100, 96)
    want = library_numbers(w, kind)
    want[:60] = want[order]
    rows = native.weight_rows(weight, torch.arange(100))
    assert torch.equal(rows, native.put(want, dtype))
    other = native.put_rows([first, want[60:]], dtype)  # kinds that are not the same are unpacked
    assert other.kind == dtype and torch.equal(native.weight_rows(other, torch.arange(100)), rows)


def test_int4_takes_blocks_and_rounds_all_else(tmp_path):
    w, backend = normal(50, 64), Int4NumpyBackend()
    library_blocks(w, "q4_0").tofile(tmp_path / "blocks")
    stored = Blocks(tmp_path / "blocks", "Q4_0", (50, 64), 0)
    for given in ([stored], [w], [w[:20], w[20:]]):
        weight = backend.put_rows(given, "float32")
        assert weight.kind == "q4_0" and weight.data.nbytes == 2 * 48 * 64 * 18 // 32
        np.testing.assert_array_equal(backend.weight_rows(weight, np.arange(50)), library_numbers(w, "q4_0"))
    assert backend.put_precise(w, "float32").kind == "float32"
    with pytest.raises(UnsupportedOperation, match="in int4 go with activations in float32 or bfloat16; got float64"):
        backend.put_weight(w, "float64")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
def test_what_is_not_finite_stays_in_its_row(native, kind, value):
    x, w = normal(9, 100), normal(50, 100, seed=1)
    weight = put(native, w, kind)
    want = native.linear(torch.from_numpy(x), weight)
    x[4, 7] = value
    got = native.linear(torch.from_numpy(x), weight)
    assert not got[4].isfinite().any()
    assert torch.equal(got[:4], want[:4]) and torch.equal(got[5:], want[5:])
    w[3, 70] = value
    rows = native.weight_rows(put(native, w, kind), torch.arange(50))
    assert rows[3, 64:96].isnan().all() and rows.isfinite().all(-1).sum() == 49


# ---- other libraries and processors ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_has_the_same_bits(dtype, kind, monkeypatch):
    if not other_variants():
        pytest.skip("this processor has one variant")
    ours, *others = every_variant(NativeTorchBackend, monkeypatch)
    for m, n, k in SHAPES:
        x, w = torch.from_numpy(normal(m, k)).to(getattr(torch, dtype)), normal(n, k, seed=1)
        w[0, 0], idx = 1e-6, torch.tensor([0, n - 1])
        weight = put(ours, w, kind, dtype)
        want, rows = ours.linear(x, weight), ours.weight_rows(weight, idx)
        for other in others:
            weight = put(other, w, kind, dtype)
            assert torch.equal(other.linear(x, weight), want)
            assert torch.equal(other.weight_rows(weight, idx), rows)


def test_who_has_no_kernels_for_four_bits_says_so(monkeypatch):
    with pytest.raises(UnsupportedOperation, match=r"no kernels for weights in int4"):
        pytest.importorskip("hibachi_jax").JaxBackend(native=False).quantized("int4")
    with pytest.raises(UnsupportedOperation, match="expected int8 or int4 on the CPU"):
        TorchBackend("meta").quantized("int4")
    monkeypatch.setenv(SWITCH, "none")
    with pytest.raises(UnsupportedOperation, match="Weights in int4 take hibachi's kernels"):
        TorchBackend("cpu").quantized("int4")
