"""A decoder in numbers: the one description that every config.json is read into, and that the decoder is built from."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hibachi.llm.model.fields import read_json as read_json
from hibachi.llm.model.rope import Rope

Shapes: TypeAlias = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Layer:
    """What may differ from block to block."""

    window: int | None = None
    """A token sees this many of the last positions, its own included; None means all."""
    rope: int | None = 0
    """Which of the arch's rotary frequencies turn queries and keys; None means this block sees no positions."""
    experts: bool = False
    """The feed-forward part is a mixture of experts."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: a router picks some of many feed-forward parts for each token (Shazeer et al. 2017)."""

    count: int
    """How many there are."""
    per_token: int
    """How many the router picks: those with the largest probabilities."""
    intermediate: int
    """Width inside one expert."""
    normalised: bool
    """The probabilities of the picked ones are made to sum to one."""


@dataclass(frozen=True, slots=True)
class Arch:
    """A decoder in numbers."""

    hidden_size: int
    """Width of the residual stream."""
    heads: int
    """Query heads of a layer."""
    kv_heads: int
    """Heads of keys and values; a divisor of `heads`, each serves heads / kv_heads query heads."""
    head_dim: int
    """Width of one head; heads * head_dim need not be hidden_size."""
    layers: tuple[Layer, ...]
    """The blocks, from the first."""
    intermediate: int
    """Width inside the feed-forward part of a block without experts."""
    vocab_size: int
    """Number of token ids, which is the number of logits."""
    max_positions: int
    """The longest context that the model was trained for."""
    norm_eps: float
    """What normalisation adds to the mean square or the variance."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm with weight and bias."""
    norm_plus_one: bool = False
    """Weights of norms are stored minus one."""
    norms: Literal["before", "after", "both"] = "before"
    """Whether attention and feed-forward part have their norm before them, after them, or both."""
    parallel: bool = False
    """Attention and feed-forward part read the same input and are added to it together."""
    qk_norm: Literal["head", "all"] | None = None
    """Queries and keys are normalised before they turn: each head by itself, all heads together, or not."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    """The function inside the feed-forward part."""
    gated: bool = True
    """The feed-forward part has two projections in, one of which gates the other through the activation."""
    experts: Experts | None = None
    """The mixture of experts in the layers that have one."""
    ropes: tuple[Rope, ...] = ()
    """Sets of rotary frequencies that layers point to."""
    learned_positions: bool = False
    """An embedding of the position is added to that of the token."""
    attention_scale: float | None = None
    """What scores are multiplied by; None means head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    logit_softcap: float | None = None
    """The same for logits."""
    embed_scale: float = 1.0
    """Embeddings are multiplied by this."""
    residual_scale: float = 1.0
    """What attention and feed-forward part add to the residual stream is multiplied by this."""
    logit_divisor: float = 1.0
    """Logits are divided by this."""
    tied: bool = False
    """The output head is the embedding matrix."""
    attention_bias: bool | None = None
    """The attention projections have biases; None means the file does not say, so those in the weights count."""
    mlp_bias: bool | None = None
    """The feed-forward projections have biases; None means the file does not say, so those in the weights count."""
    head_bias: bool = False
    """The output head has a bias."""
    bos_ids: tuple[int, ...] = ()
    """Ids that begin a text, usually one; empty if the model has none."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end a text; empty if the model has none."""


def shapes(arch: Arch, fused: Container[str] = ()) -> tuple[Shapes, Shapes]:
    """Canonical names and shapes of the tensors that a model must hold, and of those that it may hold.

    Canonical names are those of the families, with "layers.3." before what belongs to a block. fused: "qkv" and
    "gate_up" where the file holds one matrix for several.
    """
    a, hidden = arch, (arch.hidden_size,)
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    required: Shapes = {"embed.weight": (a.vocab_size, a.hidden_size)}
    optional: Shapes = {}
    (optional if a.tied else required)["head.weight"] = (a.vocab_size, a.hidden_size)
    if a.head_bias:
        required["head.bias"] = (a.vocab_size,)
    if a.learned_positions:
        required["positions.weight"] = (a.max_positions, a.hidden_size)

    def norm(name: str, size: tuple[int, ...] = hidden) -> None:
        required[f"{name}.weight"] = size
        if a.norm == "layer":
            required[f"{name}.bias"] = size

    def linear(name: str, out: int, size: int, bias: bool | None) -> None:
        required[f"{name}.weight"] = (out, size)
        if bias is not False:
            (optional if bias is None else required)[f"{name}.bias"] = (out,)

    norm("norm")
    for i, layer in enumerate(a.layers):
        at = f"layers.{i}."
        if a.norms != "after":
            norm(f"{at}attn_norm")
            norm(f"{at}mlp_norm")
        if a.norms != "before":
            norm(f"{at}attn_post_norm")
            norm(f"{at}mlp_post_norm")
        if a.qk_norm:
            norm(f"{at}q_norm", (a.head_dim if a.qk_norm == "head" else q,))
            norm(f"{at}k_norm", (a.head_dim if a.qk_norm == "head" else kv,))
        if "qkv" in fused:
            linear(f"{at}qkv", q + 2 * kv, a.hidden_size, a.attention_bias)
        else:
            for name, out in (("q", q), ("k", kv), ("v", kv)):
                linear(f"{at}{name}", out, a.hidden_size, a.attention_bias)
        linear(f"{at}o", a.hidden_size, q, a.attention_bias)
        if layer.experts:
            assert a.experts is not None
            count, inner = a.experts.count, a.experts.intermediate
            required[f"{at}router.weight"] = (count, a.hidden_size)
            required |= dict.fromkeys(
                (f"{at}experts.gate.weight", f"{at}experts.up.weight"), (count, inner, a.hidden_size)
            )
            required[f"{at}experts.down.weight"] = (count, a.hidden_size, inner)
            continue
        if a.gated and "gate_up" in fused:
            linear(f"{at}gate_up", 2 * a.intermediate, a.hidden_size, a.mlp_bias)
        else:
            for name in ("gate", "up") if a.gated else ("up",):
                linear(f"{at}{name}", a.intermediate, a.hidden_size, a.mlp_bias)
        linear(f"{at}down", a.hidden_size, a.intermediate, a.mlp_bias)
    return required, optional
