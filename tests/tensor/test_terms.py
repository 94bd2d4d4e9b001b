"""A bias by distance and sinks in `attend`, against modules of transformers that have them; and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import BloomConfig, GptOssConfig, MptConfig, T5Config
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, eager_attention_forward
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

import hibachi
from hibachi import NumpyBackend, Paged, StepInputs
from hibachi.engine.scheduler.lower import lower
from hibachi_torch import TorchBackend

HEADS, DIM, LENGTH = 4, 8, 50
KINDS = {
    "numpy": lambda: NumpyBackend(native=False),
    "numpy, single rows": lambda: NumpyBackend(native=False).invariant(),
    "torch": lambda: TorchBackend("cpu", native=False),
    "torch, invariant": lambda: TorchBackend("cpu", native=False).invariant(),
    "here": lambda: hibachi.load_backend("torch", device="cpu"),
}


@pytest.fixture(params=KINDS)
def kernels(request):
    made = KINDS[request.param]()
    with made.guard():
        yield made


@pytest.fixture
def hidden():
    torch.manual_seed(0)
    return torch.randn(1, LENGTH, HEADS * DIM)


def causal(length=LENGTH):
    """What to add to scores [length, length]."""
    return torch.full((length, length), torch.finfo(torch.float32).min).triu(1)


def step(backend, at, n, table):
    packed = lower(*(np.array([i], np.int32) for i in (0, at, n)), np.ones(1, bool), table, 16)
    fields = {f.name: backend.put(getattr(packed, f.name)) for f in dataclasses.fields(packed)}
    return StepInputs(tok=fields["pos"], **fields)


def paged(backend, q, k, v, *, bias=None, sinks=None, **special):
    """Attention of torch's [LENGTH, heads, dim] in a prompt, a chunk and single tokens: [LENGTH, heads * dim]."""
    table, at, out = np.array([[2, 4, 1, 3]], np.int32), 0, []
    cache = backend.make_cache(Paged(k.shape[1], DIM, DIM), blocks=5, block_size=16, rows=1, dtype="float32")
    given = {"bias": bias, "sinks": sinks}
    special |= {name: backend.put(t.detach().float().numpy()) for name, t in given.items() if t is not None}
    for n in (30, 1, 1, LENGTH - 32):
        new = (backend.put(t[at : at + n].detach().numpy().copy()) for t in (q, k, v))
        y, cache = backend.attend(*new, cache, step(backend, at, n, table), **special)
        out.append(backend.get(y).reshape(n, -1))
        at += n
    return torch.from_numpy(np.concatenate(out))


def near(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def by_head(x):
    return x.view(LENGTH, HEADS, DIM)


@torch.no_grad()
@pytest.mark.parametrize("reach", [16, 128])
def test_t5_has_its_relative_positions(kernels, hidden, reach):
    """Buckets of distances become distances; beyond `reach` all are in the last bucket, which the table ends with."""
    config = T5Config(
        d_model=HEADS * DIM, d_kv=DIM, num_heads=HEADS, is_decoder=True, dropout_rate=0.0, attn_implementation="eager"
    )
    config.relative_attention_max_distance, config.relative_attention_num_buckets = reach, 12
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0, is_causal=True).eval()
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.4)
    want = module(hidden, mask=causal()[None, None])[0][0]
    bias = module.compute_bias(reach + 2, reach + 2)[0, :, -1].flip(-1)  # of the last query, the nearest key first
    q, k, v = (by_head(f(hidden[0])) for f in (module.q, module.k, module.v))
    near(module.o(paged(kernels, q, k, v, bias=bias, scale=1.0)), want)


@torch.no_grad()
def test_bloom_has_its_alibi(kernels, hidden):
    module = BloomAttention(BloomConfig(hidden_size=HEADS * DIM, n_head=HEADS), layer_idx=0).eval()
    alibi = build_alibi_tensor(torch.ones(1, LENGTH), HEADS, torch.float32)
    want = module(hidden, torch.zeros_like(hidden), alibi, causal()[None, None])[0][0]
    slopes = alibi[:, 0, 1]
    q, k, v = module.query_key_value(hidden[0]).view(LENGTH, HEADS, 3, DIM).unbind(2)
    near(module.dense(paged(kernels, q, k, v, bias=torch.stack([0 * slopes, -slopes], 1))), want)


@torch.no_grad()
def test_mpt_has_its_alibi(kernels, hidden):
    module = MptAttention(MptConfig(d_model=HEADS * DIM, n_heads=HEADS), layer_idx=0).eval()
    alibi = build_mpt_alibi_tensor(HEADS, LENGTH)
    want = module(hidden, alibi, attention_mask=causal()[None, None] < 0)[0][0]
    q, k, v = (by_head(t) for t in module.Wqkv(hidden[0]).chunk(3, -1))
    near(module.out_proj(paged(kernels, q, k, v, bias=alibi[:, 0, -2:].flip(-1))), want)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 7])
def test_gpt_oss_has_its_sinks(kernels, window):
    config = GptOssConfig(hidden_size=32, num_attention_heads=HEADS, num_key_value_heads=2, head_dim=DIM)
    module = GptOssAttention(config, 0).eval()
    torch.manual_seed(1)
    module.sinks.data.normal_(std=2.0)
    q, k, v = (torch.randn(1, heads, LENGTH, DIM) for heads in (HEADS, 2, 2))
    mask = causal()
    if window is not None:
        mask = mask + torch.full_like(mask, -1e30).tril(-window)
    want, _ = eager_attention_forward(module, q, k, v, mask[None, None], scaling=0.4)
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    near(paged(kernels, q, k, v, sinks=module.sinks, scale=0.4, window=window), want[0].flatten(1))


# ---- what is refused -------------------------------------------------------------------------------------------------

FITS = {"bias": np.zeros((HEADS, 3), np.float32), "sinks": np.zeros(HEADS, np.float32)}


@pytest.fixture(params=["numpy", "torch", "jax"])
def library(request):
    pytest.importorskip(f"hibachi_{request.param}" if request.param != "numpy" else "numpy")
    made = hibachi.load_backend(request.param)
    with made.guard():
        yield made


def call(backend, **terms):
    cache = backend.make_cache(Paged(2, DIM, DIM), blocks=2, block_size=16, rows=1, dtype="float32")
    q, k, v = (backend.put(np.ones((2, heads, DIM), np.float32)) for heads in (HEADS, 2, 2))
    return backend.attend(q, k, v, cache, step(backend, 0, 2, np.ones((1, 1), np.int32)), **terms)[0]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("bias", np.zeros((3, 5), np.float32), r"bias to be \[4, at least 2\].*; got \[3, 5\]"),
        ("bias", np.zeros((4, 1), np.float32), r"got \[4, 1\]. Repeat the last distance if it is to hold beyond"),
        ("bias", np.zeros(4, np.float32), r"got \[4\]"),
        ("bias", np.zeros((4, 2), np.int32), r"bias to be floating-point numbers .*; got dtype .*int32. Convert it"),
        ("bias", np.float32([[0, np.nan]] * 4), r"bias to be finite numbers; got nan at \[0, 1\]"),
        ("sinks", np.zeros(2, np.float32), r"sinks to be \[4\]: of each query head; got \[2\]"),
        ("sinks", np.zeros(4, bool), r"sinks to be floating-point numbers .*; got dtype .*bool"),
        ("sinks", np.float32([0, 1, -np.inf, 1]), r"sinks to be finite numbers; got -inf at \[2\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(library, name, value, why):
    with pytest.raises(ValueError, match=f"attend: expected .*{why}"):
        call(library, **{name: library.put(value)})


def test_an_array_of_another_library_is_refused(library):
    foreign = [[0.0]] if library.name == "numpy" else FITS["bias"]
    with pytest.raises(ValueError, match=r"bias to be an array of .*; got .*Make it with backend.put"):
        call(library, bias=foreign)


def test_any_floating_dtype_is_as_good_as_float32(library):
    halves = {name: np.random.default_rng(0).normal(size=a.shape).astype(np.float16) for name, a in FITS.items()}
    want = library.get(call(library, **{name: library.put(a.astype(np.float32)) for name, a in halves.items()}))
    np.testing.assert_array_equal(
        library.get(call(library, **{name: library.put(a) for name, a in halves.items()})), want
    )


def test_terms_may_be_cut_out_of_wider_arrays(library):
    wide = np.random.default_rng(0).normal(size=(2 * HEADS, 7)).astype(np.float32)
    t = library.put(wide)
    got = library.get(call(library, bias=t[::2, 1:4], sinks=t[:HEADS, 5]))
    want = call(library, bias=library.put(wide[::2, 1:4].copy()), sinks=library.put(wide[:HEADS, 5].copy()))
    np.testing.assert_array_equal(got, library.get(want))


def test_a_program_looks_at_no_numbers_but_those_that_it_was_made_with():
    jax = pytest.importorskip("jax")
    backend = hibachi.load_backend("jax")
    nan = {name: backend.put(np.full_like(a, np.nan)) for name, a in FITS.items()}
    for name, value in nan.items():
        assert np.isnan(jax.jit(lambda t, name=name: call(backend, **{name: t}))(value)).all()
        with pytest.raises(ValueError, match=f"{name} to be finite"):
            jax.jit(lambda name=name, value=value: call(backend, **{name: value}))()
