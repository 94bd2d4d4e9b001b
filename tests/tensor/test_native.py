"""hibachi's kernels on PyTorch's arrays, against float64 and against themselves in other batches; on NumPy's arrays
and for other processors they compute the same bits."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from ctypes import addressof

import numpy as np
import pytest

from hibachi import NumpyBackend, Paged, StepInputs
from hibachi.backend.native import _sizes
from hibachi.engine.runners.calls import CheckedStep
from hibachi.engine.sampling.draw import How, sample
from hibachi.engine.scheduler.lower import lower
from hibachi.errors import InvalidModelOutput

from .native import (
    DTYPES,
    far_off,
    parameters,
    skip_without,
)

torch = pytest.importorskip("torch")
skip_without()
from hibachi_torch import TorchBackend  # noqa: E402
from hibachi_torch.native import ApartTorchBackend, NativeTorchBackend  # noqa: E402

NEAR = {"float32": 2e-6, "bfloat16": 5e-3}  # of the largest number; bfloat16 has 8 bits


@pytest.fixture(scope="module")
def native():
    return NativeTorchBackend("cpu")


@pytest.fixture(scope="module", params=("none", "int8", "int4"))
def products(native, request):
    """The same with weights of each kind."""
    return native if request.param == "none" else TorchBackend("cpu", native=True).quantized(request.param)


def normal(*shape, seed=0, dtype="float32"):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(getattr(torch, dtype))


def near(got, want, dtype):
    off = (got.double() - want).abs().max().item()
    assert off <= NEAR[dtype] * max(1.0, want.abs().max().item()), f"off by {off:.3g}"


# ---- linear --------------------------------------------------------------------------------------------------------

SHAPES = [(1, 1, 1), (2, 47, 3), (7, 49, 33), (8, 48, 64), (9, 200, 31), (70, 130, 96), (3, 1, 577)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear_multiplies(native, threads, m, n, k, biased, dtype):
    x, w, b = normal(m, k, dtype=dtype), normal(n, k, seed=1, dtype=dtype), normal(n, seed=2, dtype=dtype)
    packed = native.put_weight(w.float().numpy(), dtype)
    got = native.linear(x, packed, b if biased else None)
    assert got.shape == (m, n) and got.dtype == x.dtype
    near(got, x.double() @ w.double().T + (b.double() if biased else 0), dtype)
    unrounded = native.logits(x, packed, b if biased else None)
    assert unrounded.dtype == torch.float32 and torch.equal(unrounded.to(x.dtype), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gives_a_row_the_same_bits_in_any_batch_and_place(products, threads, dtype):
    x, w = normal(40, 200, dtype=dtype), products.put_weight(normal(100, 200, seed=1).numpy(), dtype)
    want = torch.cat([products.linear(x[i : i + 1], w) for i in range(40)])
    for m in range(1, 40):
        assert torch.equal(products.linear(x[:m], w), want[:m]), m
        assert torch.equal(products.linear(x[m:], w), want[m:]), m
    wide = torch.cat([x, x], 1)[:, 37:237]  # rows apart, and not on a whole lane
    assert torch.equal(products.linear(wide, w), products.linear(wide.contiguous(), w))


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(products, dtype):
    x, w = normal(33, 300, dtype=dtype), products.put_weight(normal(500, 300, seed=1).numpy(), dtype)
    before, got = torch.get_num_threads(), []
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        got.append((products.linear(x, w), *Layer(products, dtype).run([(0, 30), (0, 5)])))
    torch.set_num_threads(before)
    for other in got[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got[0], other, strict=True))


def test_callers_at_the_same_time_change_no_bit(products, threads):
    """One of them has the team, the others compute alone."""
    x, w = normal(33, 300), products.put_weight(normal(500, 300, seed=1).numpy(), "float32")
    want, same = products.linear(x, w), []

    def call():
        same.append(all(torch.equal(products.linear(x, w), want) for _ in range(50)))

    some = [threading.Thread(target=call) for _ in range(4)]
    for thread in some:
        thread.start()
    for thread in some:
        thread.join()
    assert same == [True] * 4


def test_a_child_process_computes_too():
    """The team's threads are not there in a child."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.split() == ["True", "0", "True"], done.stdout + done.stderr


FORKED = """
import os
import numpy as np
from hibachi import NumpyBackend
b, random = NumpyBackend(native=True), np.random.default_rng(0)
b.library.kernels.set_threads(2)
x, w = random.normal(size=(33, 300)).astype("f"), b.put_weight(random.normal(size=(500, 300)), "float32")
want = b.linear(x, w)
if not (child := os.fork()):
    print((b.linear(x, w) == want).all(), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1], (b.linear(x, w) == want).all())
"""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", (1, 5, 48, 63))
def test_rows_of_a_packed_weight_are_those_of_the_matrix(native, k, dtype):
    w = normal(101, k, dtype=dtype)
    idx = torch.tensor([[0, 47, 48], [100, 99, 0]], dtype=torch.int32)
    packed = native.put_weight(w.float().numpy(), dtype)
    assert torch.equal(native.weight_rows(packed, idx), w[idx])
    for wrong in (101, -1):
        with pytest.raises(IndexError, match="A place lies outside"):
            native.weight_rows(packed, torch.tensor([wrong]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", (torch.nan, torch.inf, -torch.inf))
def test_what_is_not_finite_stays_in_its_row(products, value, dtype):
    x, w = normal(9, 100, dtype=dtype), products.put_weight(normal(50, 100, seed=1).numpy(), dtype)
    want = products.linear(x, w)
    x[4, 7] = value
    got = products.linear(x, w)
    assert not got[4].isfinite().any()
    assert torch.equal(got[:4], want[:4]) and torch.equal(got[5:], want[5:])


# ---- attention -----------------------------------------------------------------------------------------------------


class Layer:
    """One layer's cache, and queries, keys and values of long sequences."""

    def __init__(self, backend, dtype, *, heads=6, kv_heads=2, k_dim=16, v_dim=16, block_size=16, rows=4, length=320):
        self.backend, self.dtype, self.block_size = backend, dtype, block_size
        each = -(-length // block_size)
        self.table = np.arange(1, 1 + rows * each, dtype=np.int32).reshape(rows, each)
        spec = Paged(kv_heads, k_dim, v_dim)
        self.cache = backend.make_cache(spec, blocks=1 + rows * each, block_size=block_size, rows=rows, dtype=dtype)
        shapes = ((heads, k_dim), (kv_heads, k_dim), (kv_heads, v_dim))
        self.q, self.k, self.v = (normal(rows, length, *s, seed=i, dtype=dtype) for i, s in enumerate(shapes))

    def run(self, pieces, **special):
        """Attention of (start, tokens) of each row in one call: a tensor for each row."""
        live = [i for i, (_, q) in enumerate(pieces) if q]
        start, q = (np.array([pieces[i][j] for i in live], np.int32) for j in (0, 1))
        packed = lower(np.array(live), start, q, np.ones(len(live), bool), self.table, self.block_size)
        fields = (f.name for f in dataclasses.fields(packed))
        x = StepInputs(tok=None, **{name: self.backend.put(getattr(packed, name)) for name in fields})

        def new(t):
            return torch.cat([t[i, s : s + n] for i, s, n in zip(live, start, q, strict=True)])

        special |= {name: special[name][: self.q.shape[2]].clone() for name in ("bias", "sinks") if name in special}
        out, self.cache = self.backend.attend(new(self.q), new(self.k), new(self.v), self.cache, x, **special)
        return list(out.split(q.tolist()))

    def expected(self, row, length, *, scale=None, window=None, softcap=None, bias=None, sinks=None):
        """The same in float64, for a row's first positions."""
        q, k, v = (t[row, :length].double() for t in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        at, heads = torch.arange(length), q.shape[1]
        if bias is not None:
            scores += torch.tensor(far_off(bias[:heads].numpy(), (at[:, None] - at).numpy()))
        hidden = at[None] > at[:, None]
        if window is not None:
            hidden |= at[None] <= at[:, None] - window
        scores = scores.masked_fill(hidden, -np.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:heads, None, None].double().expand(-1, length, 1)], -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v)


LAYERS = {
    "grouped": {},
    "one head each": dict(heads=3, kv_heads=3),
    "large groups": dict(heads=14, kv_heads=2),
    "one key head": dict(heads=5, kv_heads=1),
    "odd sizes": dict(k_dim=7, v_dim=19),
    "wide": dict(heads=2, kv_heads=1, k_dim=128, v_dim=80),
    "small blocks": dict(block_size=4),
    "odd blocks": dict(block_size=5),
    "large blocks": dict(block_size=64),
    "blocks of some spans": dict(block_size=40),
}
BIAS, SLOPES, SINKS = normal(14, 40, seed=5), -normal(14, 2, seed=6).abs().cumsum(1) / 9, normal(14, seed=7)
"""A bias of 40 distances that goes on slowly, one that is a line from its second number on, and sinks: of as many heads
as a layer has at most."""
BIAS[:, -1] = BIAS[:, -2] - normal(14, seed=8) / 30
SPECIAL = (
    *({}, dict(scale=0.5), dict(window=1), dict(window=70), dict(softcap=3.0, window=9)),
    *(dict(bias=BIAS), dict(bias=SLOPES, window=70), dict(sinks=SINKS), dict(sinks=SINKS, window=1)),
    dict(bias=BIAS, sinks=SINKS, softcap=3.0, window=100),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_attention_is_that_of_the_formula(native, name, dtype):
    for special in SPECIAL:
        layer = Layer(native, dtype, **LAYERS[name], length=150)
        lengths = (1, 17, 64, 150)
        for row, got in enumerate(layer.run([(0, n) for n in lengths], **special)):
            near(got, layer.expected(row, lengths[row], **special), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_beyond_a_piece_is_that_of_the_formula(native, dtype):
    layer = Layer(native, dtype, heads=2, kv_heads=1, v_dim=40, rows=1, length=1100)
    want = layer.expected(0, 1100)
    near(layer.run([(0, 1100)])[0], want, dtype)
    near(layer.run([(1090, 10)])[0], want[1090:], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_attention_gives_a_token_the_same_bits_in_any_company(native, name, dtype):
    """Whole prompts, chunks of odd sizes beside other rows, token by token alone."""
    for special in ({}, dict(window=70), dict(bias=BIAS, sinks=SINKS), dict(bias=SLOPES, sinks=SINKS, window=70)):
        whole = Layer(native, dtype, **LAYERS[name], length=150)
        want = whole.run([(0, 150), (0, 150), (0, 0), (0, 31)], **special)
        chunks, got = Layer(native, dtype, **LAYERS[name], length=150), [[], []]
        for start, n in ((0, 1), (1, 2), (3, 61), (64, 5), (69, 80), (149, 1)):
            for row, part in enumerate(chunks.run([(start, n), (start, n)], **special)):
                got[row].append(part)
        for row in (0, 1):
            assert torch.equal(torch.cat(got[row]), want[row])
        single = Layer(native, dtype, **LAYERS[name], length=150)
        alone = [single.run([(0, 0), (0, 0), (0, 0), (i, 1)], **special)[0] for i in range(31)]
        assert torch.equal(torch.cat(alone), want[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_an_earlier_owner_left_in_a_block_is_not_seen(native, dtype):
    layer, used = Layer(native, dtype), Layer(native, dtype)
    for half in (used.cache.keys, used.cache.values):
        half.fill_(1e4)
    for pieces in ([(0, 33), (0, 70)], [(33, 1), (70, 100)]):
        assert all(torch.equal(a, b) for a, b in zip(layer.run(pieces), used.run(pieces), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", (torch.nan, torch.inf, -torch.inf))
def test_numbers_that_are_not_finite_reach_the_output_of_their_row_only(native, value, dtype):
    layer, spoiled = Layer(native, dtype), Layer(native, dtype)
    spoiled.v[0, 3] = value
    spoiled.q[2, 9] = value
    want, got = (each.run([(0, 20), (0, 20), (0, 20)]) for each in (layer, spoiled))
    assert not got[0][3:].isfinite().any()
    assert torch.equal(got[1], want[1])
    assert not got[2][9].isfinite().any() and torch.equal(got[2][:9], want[2][:9])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_what_lies_behind_the_end_of_a_row_changes_no_bit(native, name, dtype):
    clean, used = Layer(native, dtype, **LAYERS[name]), Layer(native, dtype, **LAYERS[name])
    kept = used.k, used.v
    used.k, used.v = (torch.full_like(t, torch.nan) for t in kept)
    used.run([(0, 160)] * 3)
    used.k, used.v = kept
    for pieces in (
        [(0, 1), (0, 17), (0, 64)],
        [(1, 1), (17, 1), (64, 1)],
        [(2, 9), (18, 2), (65, 20)],
        [(11, 1), (20, 1), (85, 1)],
    ):
        assert all(torch.equal(a, b) for a, b in zip(clean.run(pieces), used.run(pieces), strict=True))


def test_large_scores_do_not_overflow(native):
    layer = Layer(native, "float32")
    layer.q *= 1e3
    off = layer.run([(0, 90)])[0] - layer.expected(0, 90)
    assert off.abs().max() < 2e-3  # scores near 4000 are rounded to 1 / 4096


# ---- between the products ------------------------------------------------------------------------------------------


def normed(f, w):
    return f / (f.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()


def centred(x):
    return x.double() - x.double().mean(-1, keepdim=True)


OF_ROWS = {  # (what a backend computes of rows, a weight and a bias, and the formula in float64)
    "rms_norm": (lambda n, x, w, b: n.rms_norm(x, w, 1e-5), lambda x, w, b: normed(x.double(), w)),
    "layer_norm": (lambda n, x, w, b: n.layer_norm(x, w, b, 1e-5), lambda x, w, b: normed(centred(x), w) + b.double()),
    "layer_norm, no bias": (lambda n, x, w, b: n.layer_norm(x, w, None, 1e-5), lambda x, w, b: normed(centred(x), w)),
    "softmax": (lambda n, x, w, b: n.softmax(x), lambda x, w, b: x.double().softmax(-1)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("dim", (1, 16, 33, 576))
def test_rows_are_those_of_the_formula_and_each_by_itself(native, threads, dim, name, dtype):
    w, b = normal(dim, seed=1, dtype=dtype), normal(dim, seed=2, dtype=dtype)
    ours, formula = OF_ROWS[name]
    for x in (
        normal(5, dim, dtype=dtype) * 3 + 7,
        normal(40, 3 * dim, dtype=dtype)[:, dim : 2 * dim],
        normal(2, 3, dim, dtype=dtype),
    ):
        got = ours(native, x, w, b)
        near(got, formula(x, w, b), dtype)
        assert torch.equal(torch.cat([ours(native, row[None], w, b) for row in x]), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (2, 16, 64, 70))
def test_rope_turns_pairs(native, threads, dim, dtype):
    x, angle = normal(9, 7, dim, dtype=dtype)[:, 1:4], normal(9, 1, dim // 2, seed=1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., : dim // 2].double(), x[..., dim // 2 :].double()
    want = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    near(native.rope(x, cos, sin), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("silu", "gelu_tanh", "gelu"))
def test_activations_are_those_of_torch(native, threads, name, dtype):
    x = torch.cat([normal(6, 2 * 33, dtype=dtype) * 4, torch.full((1, 66), -1e4, dtype=getattr(torch, dtype))])
    gelu = torch.nn.functional.gelu
    torchs = {"silu": torch.nn.functional.silu, "gelu": gelu, "gelu_tanh": lambda t: gelu(t, approximate="tanh")}
    want = torchs[name](x.double())
    near(getattr(native, name)(x), want, dtype)
    near(getattr(native, name)(x[:, 33:]), want[:, 33:], dtype)
    spoiled = x.clone()
    spoiled[2, 3] = torch.nan
    assert getattr(native, name)(spoiled).isnan().sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("silu", "gelu_tanh", "gelu"))
def test_gated_multiplies_the_second_half_by_the_activated_first(native, name, dtype):
    x = normal(5, 66, dtype=dtype)
    want = getattr(native, name)(x[:, :33].contiguous()).double() * x[:, 33:].double()
    near(native.gated(x, name), want, dtype)
    assert native.gated(x[:0], name).shape == (0, 33)


# ---- the backend that users ask for --------------------------------------------------------------------------------


# ---- other libraries and processors --------------------------------------------------------------------------------


# ---- the most likely token -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", (1, 15, 16, 17, 100, 4099))
def test_the_largest_of_a_row_is_found_at_its_first_place(native, threads, columns):
    x = torch.from_numpy(np.random.default_rng(4).integers(-3, 4, (50, columns)).astype(np.float32))
    place, most = native.best(x)
    assert place.dtype == torch.int32
    assert place.tolist() == x.numpy().argmax(1).tolist() and torch.equal(most, x.max(1).values)


def test_rows_without_an_answer_are_told(native):
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, nan, 2.0] * 11, [-inf] * 33, [0.0] * 32 + [inf], [0.0] * 32 + [nan], [-inf] * 32 + [-5.0]]
    place, most = native.best(torch.tensor(rows))
    assert torch.isfinite(most).tolist() == [False, False, False, False, True] and place[4] == 32


# ---- masks of tokens -----------------------------------------------------------------------------------------------


def masked(rows, size, seed=0):
    """Bits uint32 [rows, words] of which many words are all zeros or all ones, and the mask that they are."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 2**32, (rows, -(-size // 32)), dtype=np.uint32)
    bits[random.random(bits.shape) < 0.3] = 0
    bits[random.random(bits.shape) < 0.3] = 0xFFFFFFFF
    may = np.unpackbits(bits.astype("<u4").view(np.uint8), axis=1, bitorder="little", count=size).astype(bool)
    return bits, torch.from_numpy(may)


def same_bits(got, want):
    """Those of NaN as well."""
    assert got.dtype == want.dtype and torch.equal(got.view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("size", (1, 15, 31, 32, 33, 63, 64, 4099, 40_000))
def test_tokens_that_may_not_come_have_minus_infinity_and_others_what_they_had(native, threads, size):
    x = normal(7, size)
    x[::2, size // 2], x[1, -1] = float("nan"), float("inf")
    bits, may = masked(7, size)
    want = torch.where(may, x, torch.tensor(-float("inf")))
    mine = x.clone()
    got = native.keep_bits(mine, bits)
    same_bits(got, want)
    assert got is mine  # in its own memory
    same_bits(native.keep_bits(x.T.contiguous().T, bits), want)
    rows = torch.from_numpy(NumpyBackend(native=True).keep_bits(x.numpy().copy(), bits))
    same_bits(rows, want)


@pytest.mark.parametrize("dtype", (*DTYPES, "float16"))
@pytest.mark.parametrize("size", (1, 31, 33, 64, 4099, 40_000))
def test_kept_rows_are_the_rows_in_float32(native, threads, size, dtype):
    x = normal(9, size, dtype=dtype)
    x[1, size // 2], x[3, -1], x[4], x[5, : size - 1] = float("nan"), float("inf"), -float("inf"), -float("inf")
    at = np.array([4, 0, 8, 1, 3, 1, 5], np.int32)
    bits, may = masked(7, size)
    there, want = x.clone(), x[at.tolist()].float()
    for given in (None, bits):
        rows, finite = native.kept_rows(x, at, given)
        same_bits(rows, want if given is None else torch.where(may, want, torch.tensor(-float("inf"))))
        assert finite.dtype == torch.bool
        assert finite.tolist() == [False, True, True, False, False, False, True]
    assert torch.equal(x.view(torch.int16), there.view(torch.int16))
    flat = native.kept_rows(x.T.contiguous().T, at, bits)[0]
    same_bits(flat, rows)


def test_kept_rows_that_somebody_has_are_not_written_to(native):
    x, at = normal(4, 50), np.arange(4, dtype=np.int32)
    row = native.kept_rows(x, at)[0][2][5:]
    rows = native.kept_rows(-x, at)[0]
    assert torch.equal(row, x[2, 5:]) and torch.equal(rows, -x)


def test_masks_of_wrong_sizes_and_places_are_refused(native):
    at = np.arange(3, dtype=np.int32)
    for backend, x in ((native, normal(3, 70)), (NumpyBackend(native=True), normal(3, 70).numpy())):
        for bits in (np.zeros((3, 2), np.uint32), np.zeros((2, 3), np.uint32), np.zeros((3, 3), np.int64)):
            with pytest.raises(ValueError, match=r"expected bits uint32 \[3, 3\]"):
                backend.keep_bits(x, bits)
            with pytest.raises(ValueError, match=r"expected bits uint32 \[3, 3\]"):
                backend.kept_rows(x, at, bits)
        for place in (3, -1):
            with pytest.raises(IndexError, match="A place lies outside"):
                backend.kept_rows(x, np.array([0, place], np.int32))


# ---- drawing tokens ------------------------------------------------------------------------------------------------


def drawn(backend, x, how):
    return tuple(backend.draw(backend.put(x), [backend.put(t) for t in how]))


@pytest.mark.parametrize("columns", (1, 7, 100, 5000))
def test_tokens_are_drawn_as_in_the_definition(native, threads, columns):
    """The same token, but for a number that falls between two of them, which sums in another order may decide."""
    x = (3 * np.random.default_rng(2).normal(size=(400, columns))).astype(np.float32)
    how = parameters(400)
    token, most = drawn(native, x, how)
    assert token.dtype == torch.int32 and torch.equal(most, torch.from_numpy(x.max(1)))
    want = sample(NumpyBackend(native=False), x, How(*how))
    greedy = how[0] == 0
    assert (token.numpy() == want).mean() >= 0.99 and (token.numpy() == want)[greedy].all()


def test_a_draw_depends_on_its_row_only(native, threads):
    x = (3 * np.random.default_rng(2).normal(size=(60, 700))).astype(np.float32)
    how = parameters(60)
    token, most = drawn(native, x, how)
    mass = native.mass(torch.from_numpy(x))
    for i in range(0, 60, 7):
        some = slice(i, i + 1 + i % 5)
        for got, want in zip(drawn(native, x[some], [t[some] for t in how]), (token, most), strict=True):
            assert torch.equal(got, want[some])
        for got, want in zip(native.mass(torch.from_numpy(x[some])), mass, strict=True):
            assert torch.equal(got, want[some])


def test_what_cannot_be_drawn_from_is_told_and_what_cannot_come_does_not(native):
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, nan, 2.0] * 11, [-inf] * 33, [0.0] * 32 + [inf], [-inf] * 32 + [-5.0], [-inf, 1.0, -inf] * 11]
    how = parameters(5, names=())
    token, most = drawn(native, np.float32(rows), (np.ones(5, np.float32), *how[1:-1], np.full(5, 0.999, np.float32)))
    assert torch.isfinite(most).tolist() == [False, False, False, True, True]
    assert token[3] == 32 and token[4] == 31
    assert all(0 <= t < 33 for t in token.tolist())


def test_a_draw_of_fewer_parameters_than_rows_is_refused(native):
    with pytest.raises(ValueError, match=r"draw: expected parameter \[3\] as x is \[3, 9\]; got parameter \[2\]"):
        drawn(native, np.zeros((3, 9), np.float32), parameters(2))


def test_no_rows_give_no_answers(native):
    for backend in (native, NumpyBackend(native=True)):
        x = backend.put(np.zeros((0, 9), np.float32))
        for found in (backend.best(x), backend.mass(x), drawn(backend, np.zeros((0, 9), np.float32), parameters(0))):
            assert [tuple(t.shape) for t in found] == [(0,), (0,)]
        kept = backend.kept_rows(x, np.zeros(0, np.int32), np.zeros((0, 1), np.uint32))
        assert [tuple(t.shape) for t in kept] == [(0, 9), (0,)]
        assert tuple(backend.softmax(x).shape) == (0, 9)


@pytest.mark.parametrize("columns", (1, 16, 33, 5000))
def test_the_mass_of_a_row_is_that_of_the_formula(native, threads, columns):
    x = normal(9, columns) * 5
    most, mass = native.mass(x)
    assert torch.equal(most, x.max(1).values)
    near(mass, (x.double() - most.double()[:, None]).exp().sum(1), "float32")


# ---- what several tokens see alike ---------------------------------------------------------------------------------


class Shared:
    """A cache of random keys and values, and rows whose tables begin with blocks of others.

    prefixes: for each row (which prefix, blocks of it that the row's table begins with, positions cached, new tokens).
    """

    def __init__(self, rows, *, block_size, dtype, heads=6, kv_heads=2, dim=16):
        self.rows, self.block_size, self.dtype = rows, block_size, dtype
        self.sizes = heads, kv_heads, dim
        random = np.random.default_rng(5)
        width = max(-(-(start + q) // block_size) for _, _, start, q in rows)
        most = max(shared for _, shared, _, _ in rows)
        prefixes = 1 + max(which for which, *_ in rows)
        free = iter(random.permutation(np.arange(1, 1 + prefixes * most + len(rows) * width)).tolist())
        common = [[next(free) for _ in range(most)] for _ in range(prefixes)]
        table = [common[which][:shared] + [next(free) for _ in range(width - shared)] for which, shared, *_ in rows]
        self.table = np.array(table, np.int32)
        self.blocks = 1 + int(self.table.max())
        shape = (self.blocks, block_size)
        self.k, self.v = (normal(*shape, kv_heads, dim, seed=i, dtype=dtype) for i in (1, 2))

    def inputs(self, backend, table):
        start, q = (np.array([row[i] for row in self.rows], np.int32) for i in (2, 3))
        n = len(self.rows)
        packed = lower(np.arange(n), start, q, np.ones(n, bool), table, self.block_size)
        return StepInputs(
            tok=None, **{f.name: backend.put(getattr(packed, f.name)) for f in dataclasses.fields(packed)}
        )

    def run(self, backend, table, **special):
        """Attention where the tokens of the cache lie in the blocks of `table`."""
        heads, kv_heads, dim = self.sizes
        blocks = 1 + int(table.max())
        spec = Paged(kv_heads, dim, dim)
        cache = backend.make_cache(spec, blocks=blocks, block_size=self.block_size, rows=1, dtype=self.dtype)
        # Filled by a row that writes every block.
        every = np.arange(blocks, dtype=np.int32)[None]
        fill = lower(
            np.zeros(1, int),
            np.zeros(1, np.int32),
            np.int32([blocks * self.block_size]),
            np.ones(1, bool),
            every,
            self.block_size,
        )
        x = StepInputs(tok=None, **{f.name: backend.put(getattr(fill, f.name)) for f in dataclasses.fields(fill)})
        source = np.zeros(blocks, int)
        source[table] = self.table  # which of the original blocks each one is a copy of
        k, v = (t[source].flatten(0, 1) for t in (self.k, self.v))
        _, cache = backend.attend(k[:, :1].repeat(1, heads, 1), k, v, cache, x, window=1)
        x = self.inputs(backend, table)
        at = [
            (self.table[row, p // self.block_size], p % self.block_size)
            for row, p in zip(x.seg.tolist(), x.pos.tolist(), strict=True)
        ]
        new = tuple(torch.tensor(at).T)
        q = normal(len(at), heads, dim, seed=3, dtype=self.dtype)
        return backend.attend(q, self.k[new], self.v[new], cache, x, **special)[0]

    def sets(self, backend, table):
        """How many sets of tiles there are for two threads."""
        heads, kv_heads, dim = self.sizes
        x = self.inputs(backend, table)
        sizes = _sizes(
            len(x.pos), len(self.rows), heads, kv_heads, dim, dim, table.shape[1], self.block_size, *[0] * 5, 1.0, 0.0
        )
        arrays = (x.cu_q, x.pos, x.block_table)
        return backend.library.kernels.sets(addressof(sizes), *(t.data_ptr() for t in arrays), 2)

    def apart(self):
        """The same tokens with no block in two tables."""
        return np.arange(1, 1 + self.table.size, dtype=np.int32).reshape(self.table.shape)


def companies(size):
    """Rows (which prefix, blocks shared, positions cached, new tokens) for blocks of `size` positions."""
    return {
        "one prefix": [(0, 9, 9 * size + 3 * i, 1) for i in range(20)],
        "three prefixes": [(i % 3, 5 + i % 3 * 2, 9 * size + i, 1) for i in range(21)],
        "rows that leave early": [(0, (9, 2, 5, 0)[i % 4], 9 * size + i, 1) for i in range(20)],
        "short rows": [(0, min(9, i), i * size, 1) for i in range(1, 20)],
        "prompts beside": [(0, 6, 6 * size, 1)] * 9
        + [(0, 6, 6 * size, 33), (1, 4, 4 * size + 1, 40), (1, 4, 5 * size, 7)],
        "a prompt": [(0, 0, 0, 150)],
        "beyond a piece": [(0, 1100 // size, 1100, 1), (0, 700 // size, 2300, 1), (1, 3, 3 * size, 1150)],
    }


@pytest.mark.parametrize("company", companies(1))
@pytest.mark.parametrize(
    ("size", "dtype"), [(16, "float32"), (16, "bfloat16"), (4, "bfloat16"), (5, "float32"), (40, "bfloat16")]
)
def test_a_shared_prefix_changes_no_bit(native, size, company, dtype):
    """Rows that share blocks against the same rows with copies of them, each by itself."""
    shared = Shared(companies(size)[company], block_size=size, dtype=dtype)
    apart = shared.apart()
    biased = dict(bias=BIAS[: shared.sizes[0]], sinks=SINKS[: shared.sizes[0]])
    for special in ({}, dict(window=70), dict(window=3 * size + 1, softcap=3.0), biased):
        want = shared.run(ApartTorchBackend("cpu"), apart, **special)
        for table in (shared.table, apart):
            assert torch.equal(shared.run(native, table, **special), want)
        assert torch.equal(shared.run(ApartTorchBackend("cpu"), shared.table, **special), want)


@pytest.mark.parametrize("heads", ((4, 4), (14, 1), (8, 2)), ids=str)
def test_a_shared_prefix_changes_no_bit_whatever_the_heads(native, threads, heads):
    shared = Shared(companies(16)["three prefixes"], block_size=16, dtype="bfloat16", heads=heads[0], kv_heads=heads[1])
    want = shared.run(ApartTorchBackend("cpu"), shared.apart())
    assert torch.equal(shared.run(native, shared.table), want)


@pytest.mark.parametrize("value", (torch.nan, torch.inf))
def test_numbers_of_a_row_that_are_not_finite_do_not_reach_those_that_share_its_prefix(native, value):
    rows = [(0, 9, 150 + i, 1) for i in range(20)]
    shared = Shared(rows, block_size=16, dtype="bfloat16")
    want = shared.run(native, shared.table)
    shared.v[shared.table[3, 9]] = value  # of the row's own
    got = shared.run(native, shared.table)
    others = torch.arange(20) != 3
    assert not got[3].isfinite().any() and torch.equal(got[others], want[others])


def test_rows_that_share_a_prefix_are_found(native):
    """Sets hold up to 48 queries, here 24 tokens of 2 heads for each key head; without a prefix each has its own."""
    shared = Shared(companies(16)["one prefix"] * 3, block_size=16, dtype="bfloat16", heads=4)
    assert shared.sets(native, shared.apart()) == 2 * 60
    assert shared.sets(native, shared.table) == 2 * 4
    three = Shared(companies(16)["three prefixes"] * 3, block_size=16, dtype="bfloat16", heads=4)
    assert 2 * 6 <= three.sets(native, three.table) <= 2 * 9
    few = Shared([(0, 9, 150, 1)] * 2, block_size=16, dtype="bfloat16", heads=4)
    assert few.sets(native, few.table) == 4  # as many as keep the threads busy


def test_a_model_that_reads_the_cache_itself_hears_how_it_may(native):
    cache = native.make_cache(Paged(2, 8, 8), blocks=3, block_size=4, rows=1, dtype="float32")
    with pytest.raises(TypeError, match=r"backend\.attend read them.*NumpyBackend\(native=False\)"):
        _keys, _values = cache


def test_a_model_that_gives_another_layer_back_is_refused(native):
    """Else all requests after it would find the wrong one."""
    spec = [Paged(2, 8, 8), Paged(2, 8, 24)]
    cache = [native.make_cache(s, blocks=3, block_size=4, rows=1, dtype="float32") for s in spec]
    with pytest.raises(InvalidModelOutput, match="as it was given"):
        CheckedStep(lambda params, cache, x: (None, cache[::-1]), native, "step")(None, cache, None)
