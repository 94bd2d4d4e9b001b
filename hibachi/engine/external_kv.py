"""Keys and values that were computed elsewhere: checks of given ones, and of whether they can be returned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, HostArray
from hibachi.backend.discover import backend_for
from hibachi.backend.layout import Paged
from hibachi.engine.batchengine import Facts
from hibachi.errors import InvalidRequest, PromptTooLong, UnsupportedOperation, shown, text_of
from hibachi.request import Begun, Request, SamplingParams


def checked_begun(
    begun: Begun, request: Request, params: SamplingParams | None, n: int, end: int, facts: Facts
) -> Begun:
    """`begun` of a request, with keys and values as copies on the host.

    n: tokens of its prompt. end: the length at which it ends. Raises InvalidRequest, PromptTooLong or
    UnsupportedOperation.
    """
    check_paged(facts, "Keys and values cannot be taken from elsewhere")
    vocab = facts.vocab_size
    if vocab is None:
        raise UnsupportedOperation(
            f"Keys and values are taken for models whose tokens the engine samples; {facts.model} has vocab_size=None."
        )
    if request.embeds is not None or request.pooling is not None:
        raise InvalidRequest("Keys and values go with a prompt of token ids; got embeddings, or a wish for a vector.")
    assert params is not None
    if params.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs needs the prompt computed here; got its keys and values. Leave it out.")
    if params.repetition_penalty != 1 and not begun.known:
        raise InvalidRequest(
            f"repetition_penalty looks at the prompt's token ids, which are not known here; got "
            f"{params.repetition_penalty}. Give the ids that keys and values belong to, or leave it at 1."
        )
    token = begun.token
    if not isinstance(token, (int, np.integer)) or isinstance(token, bool) or not 0 <= token < vocab:
        raise InvalidRequest(f"The first new token must be an id from 0 to {vocab - 1}; got {shown(token)}.")
    if end < n + 2:
        raise PromptTooLong(
            f"A request that has its first token must have room for another: expected at least {n + 2} tokens; it may "
            f"have {end}. Ask for more new tokens, or raise max_model_len (now {facts.limits.max_model_len})."
        )
    copies = [(np.array(k, order="C"), np.array(v, order="C")) for k, v in layers_of(begun.kv, (), n, facts)]
    return replace(begun, kv=copies, token=int(token))


def check_paged(facts: Facts, what: str) -> None:
    """Raise UnsupportedOperation if a layer has no keys and values. what: the feature, for the message."""
    others = [i for i, layer in enumerate(facts.layers) if not isinstance(layer, Paged)]
    if not facts.layers:
        raise UnsupportedOperation(f"{what}: {facts.model} keeps no cache. Give it `cache_spec` and `step` (level 2).")
    if others:
        raise UnsupportedOperation(
            f"{what}: layer {others[0]} of {facts.model} keeps a recurrent state, which is no sum of its tokens' keys "
            f"and values. Pass the prompt's token ids, and let the engine compute it."
        )


def on_host(array: Any, what: str) -> HostArray:
    """Copy floats of any library to the host. Raises InvalidRequest."""
    try:
        host = array
        if not isinstance(array, (np.ndarray, list, tuple)):
            backend = backend_for(array)
            host = backend.get(array)
            if host.dtype.kind == "V":  # 16 bits of a kind that NumPy does not have
                host = backend.get(backend.float32(array))
        host = np.asarray(host)
    except Exception as e:
        raise InvalidRequest(f"{what} must be an array of floats; got {text_of(e)}.") from e
    if host.dtype.kind != "f":
        raise InvalidRequest(f"{what} must be an array of floats; got {host.dtype}. Convert it to the model's dtype.")
    return host


def as_layers(kv: Any) -> list[tuple[Array, ...]]:
    """(keys, values) of each layer, from a list of them or a cache of transformers. Raises InvalidRequest."""
    try:
        theirs = getattr(kv, "layers", None)
        return [tuple(layer) for layer in kv] if theirs is None else [(layer.keys, layer.values) for layer in theirs]
    except Exception as e:
        raise InvalidRequest(
            f"Keys and values must be a list with (keys, values) for each layer; got {shown(kv)}."
        ) from e


def layers_of(kv: Any, lead: tuple[int, ...], n: int, facts: Facts) -> list[tuple[HostArray, HostArray]]:
    """(keys, values) of each layer on the host, [*lead, kv_heads, n, dim]. lead: (rows,), or () for one. Raises
    InvalidRequest.
    """
    given = as_layers(kv)
    if len(given) != len(facts.layers) or any(len(layer) != 2 for layer in given):
        raise InvalidRequest(
            f"Expected (keys, values) for each of the {len(facts.layers)} layers of {facts.model}; got {len(given)} "
            f"layers with {sorted({len(layer) for layer in given})} arrays each."
        )
    out = []
    for i, (layer, spec) in enumerate(zip(given, facts.layers, strict=True)):
        assert isinstance(spec, Paged)
        pair = []
        for half, dim, name in zip(layer, (spec.k_dim, spec.v_dim), ("Keys", "Values"), strict=True):
            host, expected = on_host(half, f"{name} of layer {i}"), (*lead, spec.kv_heads, n, dim)
            if host.shape != expected:
                raise InvalidRequest(
                    f"{name} of layer {i} must have shape {expected}: {'rows, ' if lead else ''}heads, tokens, size; "
                    f"got {host.shape}. Each row has a first token, and every layer has every position."
                )
            if not np.isfinite(host).all():
                raise InvalidRequest(
                    f"{name} of layer {i} must be finite; got NaN or infinity. Look where they come from."
                )
            pair.append(host)
        out.append((pair[0], pair[1]))
    return out
