"""Small decoders of all kinds that one description makes, and steps of them."""

from __future__ import annotations

import dataclasses

import numpy as np

from hibachi import StepInputs
from hibachi.engine.scheduler.lower import lower
from hibachi.llm.model.arch import Arch, Experts, Layer, shapes
from hibachi.llm.model.decoder import Decoder
from hibachi.llm.model.rope import Rope

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
