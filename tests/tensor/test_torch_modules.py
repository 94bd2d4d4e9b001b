"""PyTorch's own modules, swapped by `hibachi_torch.invariant`: as before up to rounding, and alike in any company."""

import copy
import io
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import hibachi_torch  # noqa: E402
from hibachi import ConfigError  # noqa: E402

ROWS = (*range(1, 18), 33)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def both(module):
    """A module, and a swapped copy of it."""
    module = module.eval().requires_grad_(False)
    return module, hibachi_torch.invariant(copy.deepcopy(module))


def attention(mask=None, **options):
    return lambda m: lambda x: m(x, x, x, attn_mask=mask, **options)


def recurrent(m):
    def call(x, state=None):
        out, state = m(x, state)
        return [out, *(s.transpose(0, 1) for s in (state if isinstance(state, tuple) else (state,)))]

    return call


CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
# name: a module, and a function of it whose first argument and results have rows in dimension 0
KINDS = {
    "linear": lambda: (nn.Linear(48, 100), None),
    "linear long": lambda: (nn.Linear(1100, 33, bias=False), None),
    "mlp": lambda: (nn.Sequential(nn.Linear(48, 37), nn.GELU(), nn.Linear(37, 5), nn.SiLU(), nn.Sigmoid()), None),
    "lstm": lambda: (nn.LSTM(48, 40, 2, batch_first=True), recurrent),
    "lstm both ways": lambda: (nn.LSTM(48, 24, 2, batch_first=True, bidirectional=True), recurrent),
    "lstm time first": lambda: (
        nn.LSTM(48, 24, bias=False),
        lambda m: lambda x: m(x.transpose(0, 1))[0].transpose(0, 1),
    ),
    "gru": lambda: (nn.GRU(48, 40, 2, batch_first=True), recurrent),
    "gru both ways": lambda: (nn.GRU(48, 24, batch_first=True, bidirectional=True, bias=False), recurrent),
    "attention": lambda: (nn.MultiheadAttention(48, 4, batch_first=True), attention()),
    "attention causal": lambda: (
        nn.MultiheadAttention(48, 3, batch_first=True, bias=False),
        attention(CAUSAL, is_causal=True, need_weights=False),
    ),
    "attention heads": lambda: (
        nn.MultiheadAttention(48, 1, batch_first=True, add_bias_kv=True, add_zero_attn=True),
        attention(CAUSAL.float(), average_attn_weights=False),
    ),
    "encoder layer": lambda: (nn.TransformerEncoderLayer(48, 4, 64, batch_first=True, activation="gelu"), None),
    "encoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(48, 2, 64, batch_first=True), 2),
        lambda m: lambda x: m(x, src_key_padding_mask=padding(x)).masked_fill(padding(x)[..., None], 0),
    ),
    "decoder layer": lambda: (
        nn.TransformerDecoderLayer(48, 4, 64, batch_first=True, activation="gelu"),
        lambda m: lambda x: m(x, x.flip(1)),
    ),
}


def padding(x):
    """Which of the last positions are hidden: as a row's own first number says, so the company does not matter."""
    return torch.arange(x.shape[1]) >= 2 + x[:, 0, :1].abs().mul(7).long() % (x.shape[1] - 1)


def made(name):
    module, call = KINDS[name]()
    first = next(module.parameters()).shape[1] if name.startswith("linear") else 48
    return module, call or (lambda m: m), torch.randn(33, 5, first) * torch.randn(33, 1, 1).exp()


def flat(result):
    """All tensors of a result, with rows first."""
    return [result] if isinstance(result, torch.Tensor) else [t for t in result if t is not None]


def differing(f, x):
    """(number of rows, place) of all companies in which a row has other bits than among all."""
    whole, found = flat(f(x)), []
    for n in ROWS:
        for at in {0, 5, 33 - n}:
            rows = [(at + i) % 33 for i in range(n)]
            if not all(torch.equal(a, b[rows]) for a, b in zip(flat(f(x[rows])), whole, strict=True)):
                found.append((n, at))
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # which the plain encoder uses
@pytest.mark.parametrize("name", KINDS)
def test_a_swapped_module_computes_what_it_did(name):
    module, call, x = made(name)
    plain, ours = both(module)
    for a, b in zip(flat(call(plain)(x)), flat(call(ours)(x)), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5) and a.dtype == b.dtype and not b.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_no_company_changes_a_row(name, dtype, threads):
    module, call, x = made(name)
    assert differing(call(both(module.to(dtype))[1]), x.to(dtype)) == []


def test_the_check_fails_for_modules_that_are_not_swapped():
    found = {}
    for name in ("linear long", "lstm", "gru", "encoder layer"):
        module, call, x = made(name)
        found[name] = differing(call(both(module)[0]), x)
    assert any(found.values()), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_no_cut_changes_a_sequence(kind, dtype, threads):
    plain, ours = both(kind(24, 40, 2, batch_first=True).to(dtype))
    for n in (1, 2, 5):
        x = torch.randn(n, 11, 24, dtype=dtype)
        whole, state = ours(x)
        for size in range(1, 6):
            h, outs = None, []
            for part in x.split(size, 1):
                out, h = ours(part, h)
                outs.append(out)
            assert torch.equal(torch.cat(outs, 1), whole), (n, size)
            assert all(torch.equal(a, b) for a, b in zip(flat_all((out, h)), flat_all((out, state)), strict=True))
        close = {torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
        again = plain(x, state)[0]
        assert torch.allclose(ours(x, state)[0].float(), again.float(), atol=close)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("way", [{}, {"batch_first": True}, {"bidirectional": True, "num_layers": 2}], ids=str)
def test_unbatched_sequences_and_their_states(kind, way):
    plain, ours = both(kind(24, 16, **way))
    x = torch.randn(5, 24)
    for state in (None, plain(x)[1]):
        for a, b in zip(flat_all(plain(x, state)), flat_all(ours(x, state)), strict=True):
            assert a.shape == b.shape and torch.allclose(a, b, atol=1e-5)


def flat_all(result):
    out, state = result
    return [out, *(state if isinstance(state, tuple) else (state,))]


@pytest.mark.parametrize("weights", [False, True])
def test_attention_with_masks_of_all_kinds(weights):
    hidden = torch.zeros(3, 7, dtype=torch.bool)
    hidden[0, 5:] = hidden[2, 0] = True
    by_head, pairs = torch.randn(12, 5, 7), torch.rand(5, 7) > 0.9
    for options in ({}, {"kdim": 20, "vdim": 30}, {"batch_first": True}):
        plain, ours = both(nn.MultiheadAttention(32, 4, **options))
        q, k, v = (torch.randn(3, n, d) for n, d in ((5, 32), (7, plain.kdim), (7, plain.vdim)))
        q, k, v = (q, k, v) if plain.batch_first else (t.transpose(0, 1) for t in (q, k, v))
        for attn in (None, pairs, by_head):
            for padded in (None, hidden, hidden.float()):
                if attn is by_head and padded is hidden:
                    continue  # PyTorch warns that one is of bool and the other is not
                if attn is pairs and padded is not None and padded is not hidden:
                    continue
                a, b = (m(q, k, v, padded, weights, attn) for m in (plain, ours))
                assert torch.allclose(a[0], b[0], atol=1e-5, equal_nan=True) and (a[1] is None) == (b[1] is None)
                assert a[1] is None or torch.allclose(a[1], b[1], atol=1e-5, equal_nan=True)
    plain, ours = both(nn.MultiheadAttention(32, 4))
    x = torch.randn(5, 32)
    for a, b in zip(plain(x, x, x), ours(x, x, x), strict=True):
        assert a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
    nothing = torch.ones(5, 5, dtype=torch.bool)
    a, b = (m(x, x, x, need_weights=weights, attn_mask=nothing)[0] for m in (plain, ours))
    assert torch.allclose(a, b, equal_nan=True)


@pytest.mark.parametrize("name", KINDS)
def test_parameters_copies_and_pickles(name):
    module, call, x = made(name)
    before, tensors = module.eval().state_dict(), dict(module.named_parameters())
    ours = hibachi_torch.invariant(module)
    assert ours is module and hibachi_torch.invariant(ours) is ours
    assert all(tensors[n] is p for n, p in ours.named_parameters())
    expected = flat(call(ours)(x))
    after = ours.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[n], before[n]) for n in before)
    written = io.BytesIO()
    torch.save(ours, written)
    written.seek(0)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(written, weights_only=False)):
        assert all(torch.equal(a, b) for a, b in zip(flat(call(other)(x)), expected, strict=True))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["linear", "lstm", "gru", "attention", "encoder"])
def test_new_weights_are_seen(name, assign):
    module, call, x = made(name)
    ours = both(module)[1]
    call(ours)(x)
    new, expected = both(made(name)[0])
    ours.load_state_dict(new.state_dict(), assign=assign)
    assert all(torch.equal(a, b) for a, b in zip(flat(call(ours)(x)), flat(call(expected)(x)), strict=True))
    other = made(name)[0].eval()
    got = torch.func.functional_call(ours, dict(other.named_parameters()), x) if name in ("linear", "lstm") else None
    if got is not None:
        assert torch.allclose(flat(got)[0], flat(other(x))[0], atol=1e-5)


class Own(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: nn.LSTM(8, 8, proj_size=4), "proj_size=4"),
        (lambda: nn.Linear(8, 8, device="meta"), "meta"),
        (lambda: nn.Linear(8, 8, dtype=torch.float64), "float64"),
        (lambda: nn.GRU(8, 8, dtype=torch.float16), "float16"),
        (lambda: Own(8, 8), "Own"),
        (lambda: torch.ao.nn.quantized.FloatFunctional(), "quantized"),
    ],
)
def test_what_cannot_be_swapped_is_refused_and_nothing_is_changed(make, what):
    whole = nn.Sequential(nn.Linear(8, 8), make())
    with pytest.raises(ConfigError, match=what) as told:
        hibachi_torch.invariant(whole)
    assert str(told.value).startswith("Expected") and type(whole[0]) is nn.Linear


def test_calls_that_are_refused():
    lstm, mha = both(nn.LSTM(8, 8, 2, dropout=0.5))[1], both(nn.MultiheadAttention(8, 2, dropout=0.5))[1]
    layer, linear = both(nn.TransformerEncoderLayer(8, 2))[1], both(nn.Linear(8, 8))[1]
    x = torch.randn(3, 2, 8)
    packed = nn.utils.rnn.pack_sequence([x[:, 0]])
    for call, what in (
        (lambda: lstm(packed), "PackedSequence"),
        (lambda: lstm.train()(x), "eval"),
        (lambda: mha.train()(x, x, x), "eval"),
        (lambda: layer.train()(x), "eval"),
        (lambda: lstm.eval()(x, (x, x)), "state's shape"),
        (lambda: lstm(x.double()), "dtype"),
        (lambda: lstm(x[:0]), "none of them 0"),
        (lambda: linear(x[..., :7]), "last dimension"),
        (lambda: linear(x.double()), "dtype"),
        (lambda: mha.eval()(x, x, x, is_causal=True), "is_causal"),
        (lambda: mha(x, x, x, attn_mask=torch.zeros(3, 2)), "attn_mask"),
        (lambda: mha(x, x, x, key_padding_mask=torch.zeros(3, 2)), "key_padding_mask"),
        (lambda: linear.double()(x.double()), "float64"),
    ):
        with pytest.raises(ConfigError, match=what):
            call()
