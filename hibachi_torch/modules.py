"""PyTorch's own modules, swapped for ones whose rows do not depend on the batch: `invariant`.

A swapped module keeps its Parameters, its hooks and its names in state_dict; only its class changes. Weights are packed
for oneDNN when first used, and again when they have changed; the packed copies are in no state_dict, pickle or copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from hibachi.errors import ConfigError
from hibachi_torch.invariant_backend import (
    FEW,
    PADDED,
    PIECE,
    SPAN,
    InvariantTorchBackend,
    Weight,
    padded,
    weight_of,
)

_BACKEND = InvariantTorchBackend("cpu")
_DTYPES = (torch.float32, torch.bfloat16)
_KEPT = "_hibachi_packed"


def invariant(module: nn.Module) -> nn.Module:
    """Change `module` in place so that no row's bits depend on other rows in the batch; returns it. For inference on
    the CPU.

    Swapped are nn.Linear, LSTM, GRU, MultiheadAttention, TransformerEncoderLayer, GELU, SiLU and Sigmoid, and F.gelu as
    the activation of a Transformer's layer. What else multiplies (convolutions, nn.RNN, single cells, `@` in a forward
    of your own) stays as it is. Results carry no gradient.

    Raises ConfigError, before anything is changed, for parameters that are not on the CPU, or neither float32 nor
    bfloat16, for proj_size, for quantized and scripted modules, and for subclasses of what would be swapped.
    """
    found = [(name or "the module itself", m) for name, m in module.named_modules()]
    for name, m in found:
        _check(name, m)
    for _, m in found:
        if type(m) in _SWAPS:
            m.__class__ = _SWAPS[type(m)]
        if isinstance(m, nn.TransformerEncoder):
            m.use_nested_tensor = False  # else it may give its layers nested tensors
        if isinstance(m, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) and m.activation is F.gelu:
            m.activation = _gelu
    return module


def _check(name: str, m: nn.Module) -> None:
    kind = type(m)
    if isinstance(m, torch.jit.ScriptModule) or kind.__module__.startswith(("torch.ao.nn", "torch.nn.quantized")):
        raise ConfigError(
            f"Expected plain modules of torch.nn; {name} is a quantized or scripted {kind.__name__}. "
            "Pass the model as it was before."
        )
    swapped = kind in _SWAPS or kind in _SWAPS.values()
    if isinstance(m, _KINDS) and not swapped:
        raise ConfigError(
            f"Expected plain modules of torch.nn; {name} is a {kind.__name__}, a subclass of one, and what its forward "
            "computes is not known. Make it a plain module, or compute with one inside of it."
        )
    for of, p in m.named_parameters(recurse=False):
        if p.device.type != "cpu":
            raise ConfigError(
                f"Expected parameters on the CPU; {of} of {name} is on {p.device}. Load the weights, "
                "and call module.cpu() first."
            )
        if swapped and p.dtype not in _DTYPES:
            raise ConfigError(
                f"Expected parameters in float32 or bfloat16; {of} of {name} is {p.dtype}. Call module.float() first."
            )
    if isinstance(m, nn.LSTM) and m.proj_size:
        raise ConfigError(
            f"Expected an LSTM without projection; {name} has proj_size={m.proj_size}. "
            "Make it with proj_size=0, and an nn.Linear behind it."
        )


def _same(what: str, got: object, expected: object, mend: str) -> None:
    if got != expected:
        raise ConfigError(f"{what}: expected {expected}, got {got}. {mend}")


def _version(p: Tensor) -> int:
    return 0 if p.is_inference() else p._version


class _Packs:
    """Keeps what is made of parameters until they change. In front of a class of torch.nn."""

    def _packed(self, name: str, sources: list[Tensor], make: Callable[[list[Tensor]], Any]) -> Any:
        """make(sources), or what it returned when these tensors had the same memory and version."""
        kept = self.__dict__.setdefault(_KEPT, {})
        now = [(p.data_ptr(), _version(p)) for p in sources]
        entry = kept.get(name)
        if entry is not None and entry[0] == now:
            return entry[1]
        for p in sources:
            if p.device.type != "cpu" or p.dtype not in _DTYPES:
                raise ConfigError(
                    f"Expected parameters on the CPU, in float32 or bfloat16; got {p.dtype} on {p.device}. "
                    "Call module.cpu().float() first."
                )
        plain = [p.detach().contiguous() for p in sources]
        value = make(plain)
        kept[name] = now, value, [p.detach() for p in sources]  # alive, so that no other tensor gets their address
        return value

    @override
    def __getstate__(self) -> dict[str, Any]:
        kept: Any = super().__getstate__()
        return {name: value for name, value in kept.items() if name != _KEPT}


def _weight(sources: list[Tensor]) -> Any:
    return weight_of(sources[0])


class InvariantLinear(_Packs, nn.Linear):
    """nn.Linear: [..., in_features] to [..., out_features]."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        w = self.weight
        _same("The last dimension", input.shape[-1:], w.shape[1:], "Pass rows of that length.")
        _same("The input's dtype", input.dtype, w.dtype, "Cast the input, or the module.")
        with torch.no_grad():
            y: Tensor = _BACKEND.linear(input, self._packed("weight", [w], _weight), self.bias)
            return y


class InvariantGELU(nn.GELU):
    @override
    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = (_BACKEND.gelu if self.approximate == "none" else _BACKEND.gelu_tanh)(input)
        return y


class InvariantSiLU(nn.SiLU):
    @override
    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = _BACKEND.silu(input)
        return input.copy_(y) if self.inplace else y


class InvariantSigmoid(nn.Sigmoid):
    @override
    def forward(self, input: Tensor) -> Tensor:
        return torch.neg(input.float()).exp_().add_(1).reciprocal_().to(input.dtype)


def _gelu(x: Tensor) -> Tensor:
    y: Tensor = _BACKEND.gelu(x)
    return y


def _no_dropout(m: nn.Module, p: float) -> None:
    if m.training and p > 0:
        raise ConfigError(
            f"Expected inference; this {type(m).__name__} is in training mode with dropout={p}. "
            "Call module.eval() first."
        )


class _Layer:
    """One layer and direction of an LSTM or GRU, packed. sigmoid(x) is (1 + tanh(x / 2)) / 2, so the weights of gates
    with a sigmoid are halved (which is exact), and come first."""

    def __init__(self, lstm: bool, w: list[Tensor]) -> None:
        hidden = w[1].shape[1]
        self.lstm, self.hidden = lstm, hidden
        gates = [4 if lstm else 3, hidden]
        order = [0, 1, 3, 2] if lstm else [0, 1, 2]  # i, f, o, g; r, z, n

        def arranged(p: Tensor) -> Tensor:
            apart = p.view(*gates, *p.shape[1:])[order]
            apart[: 3 if lstm else 2] *= 0.5
            return apart.view(p.shape).contiguous()

        arranged_all = [arranged(p) for p in w]
        self.w_in, self.w_state = weight_of(arranged_all[0]), weight_of(arranged_all[1])
        self.b_in: Tensor | None = arranged_all[2] if len(w) > 2 else None
        self.b_state: Tensor | None = arranged_all[3] if len(w) > 2 else None
        self.shift = torch.full((4 * hidden,), 0.5, dtype=torch.float32, device=w[0].device)
        self.shift[3 * hidden :] = 0
        self.scale = 1 - self.shift

    def run(self, x: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [T, B, in], h and c [B, hidden] with B >= 2 to the outputs [T, B, hidden] and the last h and c."""
        dtype, out = x.dtype, []
        narrow = dtype != torch.float32
        xs = _BACKEND.linear(x, self.w_in, self.b_in).float()
        w, b = self.w_state, self.b_state
        packed = w.packed() if isinstance(w, Weight) and dtype == torch.float32 else None
        product = None if packed is None else torch.ops.mkldnn._linear_pointwise.default
        if c is not None:
            c, scale, shift = c.float(), self.scale, self.shift
            for at in xs.unbind(0):
                y = _BACKEND.linear(h, w, b).float() if product is None else product(h, packed, b, "none", [], "")
                i, f, o, g = y.add_(at).tanh_().mul_(scale).add_(shift).chunk(4, 1)
                c = (f * c).add_(i * g)
                if narrow:
                    c = c.to(dtype).float()
                h = torch.tanh(c).mul_(o)
                h = h.to(dtype) if narrow else h
                out.append(h)
            c = c.to(dtype)
        else:
            n = self.hidden
            for gates, new in zip(*(part.unbind(0) for part in xs.split((2 * n, n), 2)), strict=True):
                y = _BACKEND.linear(h, w, b).float() if product is None else product(h, packed, b, "none", [], "")
                first, last = y.split((2 * n, n), 1)
                r, z = (first + gates).tanh_().add_(1).mul_(0.5).chunk(2, 1)
                fresh = (r * last).add_(new).tanh_()
                h = (h - fresh).mul_(z).add_(fresh)
                h = h.to(dtype) if narrow else h
                out.append(h)
        return torch.stack(out) if len(out) > 1 else h[None], h, c


class _Recurrent(_Packs, nn.RNNBase):
    def _layers(self) -> list[_Layer]:
        p = self._parameters
        names = self._flat_weights_names
        sources = [w if (w := p.get(n)) is not None else getattr(self, n) for n in names]
        each = 4 if self.bias else 2
        lstm = self.mode == "LSTM"
        layers: list[_Layer] = self._packed(
            "layers", sources, lambda ws: [_Layer(lstm, ws[i : i + each]) for i in range(0, len(ws), each)]
        )
        return layers

    def _run(self, x: Any, states: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [T, B, in] (or batch first, or unbatched), states [layers, B, hidden] each, to outputs and last states."""
        if not isinstance(x, Tensor):
            raise ConfigError(
                f"Expected a tensor, got {type(x).__name__}. Pad the sequences "
                "(torch.nn.utils.rnn.pad_packed_sequence), or call with one length at a time."
            )
        _no_dropout(self, self.dropout)
        if x.dim() not in (2, 3) or x.shape[-1] != self.input_size or 0 in x.shape[:-1]:
            raise ConfigError(
                f"Expected an input of 2 or 3 dimensions, none of them 0, the last one {self.input_size}; "
                f"got {list(x.shape)}. Reshape it."
            )
        layers = self._layers()
        _same("The input's dtype", x.dtype, self._flat_dtype(), "Cast the input, or the module.")
        batched = x.dim() == 3
        x = x.unsqueeze(1) if not batched else x.transpose(0, 1) if self.batch_first else x
        rows = x.shape[1]
        shape = (len(layers), rows, self.hidden_size)
        if states is None:
            states = (x.new_zeros(shape),) * (2 if self.mode == "LSTM" else 1)
        else:
            states = states if batched else tuple(s.unsqueeze(1) if s.dim() == 2 else s for s in states)
            for s in states:
                _same("The state's shape", tuple(s.shape), shape, "Pass a state of as many rows as the input.")
                _same("The state's dtype", s.dtype, x.dtype, "Cast the state.")
        if rows == 1:
            x, states = x.expand(-1, 2, -1), tuple(s.expand(-1, 2, -1) for s in states)
        per = 2 if self.bidirectional else 1
        ends: list[tuple[Tensor, ...]] = []
        for i in range(0, len(layers), per):
            outs = []
            for j in range(i, i + per):
                h, c = states[0][j].contiguous(), states[1][j] if len(states) == 2 else None
                y, h, c = layers[j].run(x if j == i else x.flip(0), h, c)
                outs.append(y if j == i else y.flip(0))
                ends.append((h,) if c is None else (h, c))
            x = outs[0] if per == 1 else torch.cat(outs, 2)
        last = tuple(torch.stack([e[:rows] for e in s]) for s in zip(*ends, strict=True))
        x = x[:, :1].contiguous() if rows == 1 else x
        if not batched:
            return x.squeeze(1), tuple(s.squeeze(1) for s in last)
        return x.transpose(0, 1) if self.batch_first else x, last

    def _flat_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(self, self._flat_weights_names[0]).dtype
        return dtype


class InvariantLSTM(_Recurrent, nn.LSTM):
    """nn.LSTM, without packed sequences and projections."""

    @override
    def forward(  # type: ignore[override]  # packed sequences are refused
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.no_grad():
            return self._run(input, None if hx is None else tuple(hx))


class InvariantGRU(_Recurrent, nn.GRU):
    """nn.GRU, without packed sequences."""

    @override
    def forward(  # type: ignore[override]  # packed sequences are refused
        self, input: Tensor, hx: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out, (h,) = self._run(input, None if hx is None else (hx,))
            return out, h


def _additive(mask: Tensor | None, name: str) -> Tensor | None:
    """A mask that is added to scores: -inf where a mask of bool is True."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(mask, -math.inf)
    if not mask.is_floating_point():
        raise ConfigError(f"{name}: expected bool or floats, got {mask.dtype}. Cast it.")
    return mask.float()


class InvariantMultiheadAttention(_Packs, nn.MultiheadAttention):
    """nn.MultiheadAttention. Scores, weights and their products are computed in float32."""

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        _no_dropout(self, self.dropout)
        if query.is_nested or query.dim() not in (2, 3):
            raise ConfigError("Expected a query [L, E] or of 3 dimensions that is not nested. Pad the sequences.")
        if is_causal and attn_mask is None:
            raise ConfigError("is_causal=True is a hint about attn_mask, and there is none. Pass the mask as well.")
        with torch.no_grad():
            batched = query.dim() == 3
            same = query is key and key is value
            three = [
                t[None] if not batched else t if self.batch_first else t.transpose(0, 1) for t in (query, key, value)
            ]
            q, k, v = self._project(three, same)
            if self.bias_k is not None and self.bias_v is not None:
                k = torch.cat([k, self.bias_k.expand(len(k), 1, -1)], 1)
                v = torch.cat([v, self.bias_v.expand(len(v), 1, -1)], 1)
            if self.add_zero_attn:
                k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            mask = self._mask(q, k, three[1].shape[1], attn_mask, key_padding_mask)
            heads = [t.float().unflatten(2, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v)]
            out, weights = _attend(heads, mask, zeros=not need_weights)
            y = self.out_proj(out.transpose(1, 2).reshape(q.shape).to(q.dtype))
            y = y[0] if not batched else y if self.batch_first else y.transpose(0, 1)
            if not need_weights:
                return y, None
            if average_attn_weights:
                total = weights[:, 0].clone()
                for i in range(1, self.num_heads):
                    total += weights[:, i]
                weights = total / self.num_heads
            weights = weights.to(q.dtype)
            return y, weights if batched else weights[0]

    def _project(self, three: list[Tensor], same: bool) -> list[Tensor]:
        """query, key and value [N, L or S, *] through the projections: each [N, L or S, E]."""
        packed: Tensor | None = self.in_proj_weight
        w = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight] if packed is None else [packed] * 3
        b = [None] * 3 if self.in_proj_bias is None else list(self.in_proj_bias.chunk(3))
        for t, of in zip(three, w, strict=True):
            _same("The last dimension", t.shape[2:], of.shape[1:], "Pass rows of that length.")
            _same("The input's dtype", t.dtype, of.dtype, "Cast the input, or the module.")
        if packed is not None and same:
            y = _BACKEND.linear(three[0], self._packed("in", [packed], _weight), self.in_proj_bias)
            return list(y.chunk(3, 2))

        def third(i: int) -> Any:
            if packed is None:
                return self._packed("qkv"[i], [w[i]], _weight)
            return self._packed("qkv"[i], [packed], lambda ws: weight_of(ws[0].chunk(3)[i].clone()))

        return [_BACKEND.linear(t, third(i), b[i]) for i, t in enumerate(three)]

    def _mask(
        self, q: Tensor, k: Tensor, given: int, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor | None:
        """What is added to scores [N, heads, L, S]. given: positions of the keys before any were added to them."""
        n, length = q.shape[:2]
        mask, hidden = _additive(attn_mask, "attn_mask"), _additive(key_padding_mask, "key_padding_mask")
        if mask is not None:
            shape = (length, given) if mask.dim() == 2 else (n * self.num_heads, length, given)
            _same("The shape of attn_mask", tuple(mask.shape), shape, "Pass a mask of that shape.")
            mask = mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (n, self.num_heads))
        if hidden is not None:
            hidden = hidden[None] if hidden.dim() == 1 else hidden
            _same("The shape of key_padding_mask", tuple(hidden.shape), (n, given), "Pass a mask of that shape.")
            hidden = hidden[:, None, None]
        both = hidden if mask is None else mask if hidden is None else mask + hidden
        return both if both is None else F.pad(both, (0, k.shape[1] - given))


def _attend(heads: list[Tensor], mask: Tensor | None, zeros: bool) -> tuple[Tensor, Tensor]:
    """q [N, heads, L, d], k and v [N, heads, S, d] to the result [N, heads, L, d] and the weights [N, heads, L, S].

    In the shapes of `InvariantTorchBackend.attend`. zeros: a query that sees nothing gets zeros, not NaN.
    """
    q, k, v = heads
    span, dim = k.shape[2], q.shape[3]
    fill = -span % SPAN
    kt = F.pad(k, (0, 0, 0, fill)).transpose(2, 3)
    vt = F.pad(v, (0, -dim % SPAN, 0, fill))
    scores = padded(q, FEW if dim <= PIECE else PADDED, lambda rows: rows @ kt) * dim**-0.5
    scores = scores if mask is None else scores + F.pad(mask, (0, fill))
    if fill:
        scores[..., span:] = -math.inf
    weights = torch.softmax(scores, -1)
    if zeros and mask is not None:
        weights = weights.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0)

    def multiply(rows: Tensor) -> Tensor:
        out = rows[..., :PIECE] @ vt[..., :PIECE, :]
        for i in range(PIECE, span + fill, PIECE):
            out = out + rows[..., i : i + PIECE] @ vt[..., i : i + PIECE, :]
        return out

    return padded(weights, FEW, multiply)[..., :dim], weights[..., :span]


class InvariantTransformerEncoderLayer(nn.TransformerEncoderLayer):
    """nn.TransformerEncoderLayer by its submodules, never by PyTorch's fast path."""

    @override
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        for m in (self.dropout, self.dropout1, self.dropout2):
            _no_dropout(self, m.p if m.training else 0)
        with torch.no_grad():
            x, masks = src, (src_mask, src_key_padding_mask)
            if self.norm_first:
                x = x + self._sa_block(self.norm1(x), *masks, is_causal=is_causal)
                return x + self._ff_block(self.norm2(x))
            x = self.norm1(x + self._sa_block(x, *masks, is_causal=is_causal))
            y: Tensor = self.norm2(x + self._ff_block(x))
            return y


_SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: InvariantLinear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: InvariantLinear,
    nn.LSTM: InvariantLSTM,
    nn.GRU: InvariantGRU,
    nn.MultiheadAttention: InvariantMultiheadAttention,
    nn.TransformerEncoderLayer: InvariantTransformerEncoderLayer,
    nn.GELU: InvariantGELU,
    nn.SiLU: InvariantSiLU,
    nn.Sigmoid: InvariantSigmoid,
}
_KINDS = (nn.Linear, nn.LSTM, nn.GRU, nn.MultiheadAttention, nn.TransformerEncoderLayer)
