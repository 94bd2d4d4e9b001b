"""Prefix sharing by hand: find and group common beginnings, compute them once, and go on from keys and values of
another engine.

Names and meanings are those of kvboost's batch module; results are those of a run without sharing. The engine finds
shared beginnings itself, block by block, among everything that it has computed. So nothing here is needed for sharing:
`generate_many` only puts the prompts into the best order. Reuse of keys and values that are not the model's own (at
another position, after other tokens) is refused.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.discover import backend_for, resolve
from hibachi.backend.infer import backend_of
from hibachi.common.options import spelled
from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.batchengine import BatchEngine, Facts
from hibachi.engine.external_kv import as_layers, check_paged, layers_of
from hibachi.engine.kinds import kind_of
from hibachi.engine.streams.stream import ItemStream
from hibachi.errors import InvalidRequest, UnsupportedOperation, shown, text_of
from hibachi.llm.remote.engine import RemoteEngine
from hibachi.llm.texts import Texts
from hibachi.llm.textstream import Completion
from hibachi.request import Begun, Prompt, Request, SamplingParams, Terms, as_params, as_terms

KV: TypeAlias = "Sequence[tuple[Array, Array]]"  # (keys, values) of each layer, [B, kv_heads, S, dim]
GREEDY = SamplingParams(temperature=0, max_tokens=16)
ID_BYTES = 4  # of an id, in what is hashed


# ---- chunks, groups, padding -----------------------------------------------------------------------------------------


def find_common_chunk_prefix(all_token_ids: Sequence[Iterable[int]], chunk_size: int) -> int:
    """Number of tokens that all prompts begin with, in whole chunks. 0 means none; for a single prompt it is its
    length.

    Raises InvalidRequest for a chunk_size below 1.
    """
    _check_least("chunk_size", chunk_size)
    prompts = [_ids(ids) for ids in all_token_ids]
    if len(prompts) < 2:
        return len(prompts[0]) if prompts else 0
    first, shortest = prompts[0], min(map(len, prompts))
    common = 0
    while (end := common + chunk_size) <= shortest and all(p[common:end] == first[common:end] for p in prompts):
        common = end
    return common


def group_by_prefix(
    prompts: Sequence[Prompt], token_ids_list: Sequence[Iterable[int]], chunk_size: int, n_prefix_chunks: int = 3
) -> dict[str, list[int]]:
    """Group prompts that agree in their first `n_prefix_chunks` chunks: {hash of these tokens: indices of the prompts}.

    Groups come in the order of their first prompts, and prompts in the order given. Prompts without tokens form the
    group "empty". Prompts of different groups may still have a prefix in common, and the engine shares it. Raises
    InvalidRequest.
    """
    _check_least("chunk_size", chunk_size)
    _check_least("n_prefix_chunks", n_prefix_chunks)
    if len(prompts) != len(token_ids_list):
        raise InvalidRequest(f"Expected token ids for each of {len(prompts)} prompts; got {len(token_ids_list)} lists.")
    groups: dict[str, list[int]] = {}
    for i, ids in enumerate(token_ids_list):
        prefix = _ids(ids)[: n_prefix_chunks * chunk_size]
        groups.setdefault(content_hash_from_tokens(prefix) if prefix else "empty", []).append(i)
    return groups


def pad_and_mask(
    suffix_ids_list: Sequence[Iterable[int]], pad_token_id: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Pad the lists on the right to the longest, and make masks: 1 for a token, 0 for padding.

    The padding id is 0, which is also an ordinary id. The engine needs neither padding nor masks, as it packs rows of
    any length. Raises InvalidRequest for an empty list of lists, or for an element that is not a token id.
    """
    rows = [_ids(ids) for ids in suffix_ids_list]
    if not rows:
        raise InvalidRequest("pad_and_mask takes at least one list of token ids; got none.")
    (pad,) = _ids([pad_token_id])
    longest = max(map(len, rows))
    padded = [row + [pad] * (longest - len(row)) for row in rows]
    return padded, [[1] * len(row) + [0] * (longest - len(row)) for row in rows]


def content_hash_from_tokens(token_ids: Iterable[int]) -> str:
    """SHA-256 of token ids, each as four bytes, little-endian. Raises InvalidRequest for an id outside 0 to 2^32 -
    1.
    """
    return sha256(_hashed(token_ids)).hexdigest()


def chained_hash(token_ids: Iterable[int], parent: str | None = None, *, fingerprint: str = "") -> str:
    """SHA-256 of `parent` (None means "root") and of a chunk's token ids: names the chunk together with all chunks
    before it.

    fingerprint: identifies the model, adapter and dtype of the keys and values; a different fingerprint gives different
    names. Without one the name says nothing about the model. Raises InvalidRequest as `content_hash_from_tokens` does.
    """
    salt = sha256(fingerprint.encode()).digest() if fingerprint else b""
    return sha256(salt + (parent or "root").encode() + _hashed(token_ids)).hexdigest()


def broadcast_kv(kv: KV, batch_size: int) -> tuple[tuple[Array, Array], ...]:
    """Expand [1, heads, S, dim] of each layer to [batch_size, heads, S, dim]: a view on NumPy and PyTorch (stride 0,
    the same memory), a copy where a library has no views (JAX).

    The engine never does this: rows that share a prefix read the same blocks. Raises InvalidRequest.
    """
    _check_least("batch_size", batch_size)

    def wide(half: Array, name: str) -> Array:
        backend = backend_for(half)
        shape = tuple(half.shape)
        if len(shape) != 4 or shape[0] != 1:
            raise InvalidRequest(f"{name} must have shape (1, heads, tokens, size); got {shape}. Take one row of them.")
        try:
            return backend.xp.broadcast_to(half, (batch_size, *shape[1:]))
        except Exception as e:  # each library has errors of its own for an array that is too large
            raise InvalidRequest(f"{name} cannot be had for batch_size={shown(batch_size)}: {text_of(e)}.") from e

    return tuple((wide(k, "Keys"), wide(v, "Values")) for k, v in as_layers(kv))


# ---- many prompts ----------------------------------------------------------------------------------------------------


def generate_many(
    llm: Texts,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    terms: Terms | Sequence[Terms] | None = None,
    mode: str = "prefix_cache",
    recompute_strategy: str | None = None,
) -> list[Completion]:
    """`llm.generate` with prompts that begin alike placed together in the queue, so that each prefix is computed once,
    even where the cache cannot hold all prefixes. Results come in the order of `prompts`; each prompt has its own
    parameters.

    mode: "prefix_cache", or "baseline", which computes every prompt on its own. Approximate reuse (kvboost's
    "chunk_kv_reuse" and recompute_strategy "selective" and "cacheblend") raises UnsupportedOperation. Raises what
    `llm.generate` raises.
    """
    alone = _alone(mode, recompute_strategy)
    ids = [llm.prompts.given(prompt) for prompt in prompts]
    each, served = _for_each(params, len(ids), "SamplingParams"), _for_each(terms, len(ids), "Terms")
    if alone:
        served = [_unshared(t) for t in served]
    order = sorted(range(len(ids)), key=ids.__getitem__)
    given = [prompts[i] if isinstance(prompts[i], Mapping) else ids[i] for i in order]
    outs = llm.generate(given, [each[i] for i in order], terms=[served[i] for i in order]) if order else []
    back = dict(zip(order, outs, strict=True))
    return [replace(back[i], prompt=prompt) for i, prompt in enumerate(prompts)]


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of `verify_correctness`.

    differing: indices of prompts whose tokens differed with the cache. difference: the largest difference of a
    log-probability. reused: for each prompt, tokens found in the cache the second time.
    """

    differing: list[int]
    difference: float
    tolerance: float
    reused: list[int]

    @property
    def correct(self) -> bool:
        return not self.differing and self.difference <= self.tolerance


def verify_correctness(
    llm: Texts, prompts: Sequence[Prompt], params: SamplingParams | None = None, *, tolerance: float | None = None
) -> Verified:
    """Answer prompts without the prefix cache, then twice with it, and compare tokens and log-probabilities.

    params: None means greedy, 16 tokens; the seed is 0 unless given. tolerance: None means 0 where the engine is
    deterministic, else 1e-3.
    """
    p = as_params(params, GREEDY)
    p = p.with_(logprobs=p.logprobs or 0, seed=p.seed or 0)
    wanted = _answers(llm, prompts, p, [_unshared(None) for _ in prompts])
    _answers(llm, prompts, p, None)
    cached = _answers(llm, prompts, p, None)
    differing, difference = [], 0.0
    for i, ((want, _), (got, _)) in enumerate(zip(wanted, cached, strict=True)):
        if [c.token_ids for c in want.choices] != [c.token_ids for c in got.choices]:
            differing.append(i)
        else:
            difference = max(difference, _farthest(want, got))
    if tolerance is None:
        tolerance = 0.0 if llm.engine.facts.deterministic else 1e-3
    return Verified(differing, difference, tolerance, [reused for _, reused in cached])


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of the prefix cache. A block holds `block_size` tokens; counters run from the start of the engine."""

    blocks: int
    free_blocks: int  # available blocks, including `cached_blocks`
    cached_blocks: int  # blocks that no request holds, whose contents may be found again
    block_size: int
    tokens_asked: int  # prompt tokens of started requests that were allowed to share
    tokens_found: int  # of these, tokens found in the cache
    evictions: int  # cached blocks that were reused for other contents

    @property
    def hit_rate(self) -> float:
        return self.tokens_found / self.tokens_asked if self.tokens_asked else 0.0


def cache_stats(llm: Texts | BatchEngine[Any]) -> CacheStats:
    engine = _own_engine(llm)
    s, size = engine.stats(), engine.facts.limits.block_size
    return CacheStats(s.blocks, s.free_blocks, s.cached_blocks, size, s.prefix_queries, s.prefix_hits, s.evictions)


def reset_cache(llm: Texts | BatchEngine[Any]) -> None:
    """Forget all prefixes: later requests share nothing that was computed before. Running requests are not disturbed.

    Returns when it is done. Raises EngineClosed or EngineFailed.
    """
    _own_engine(llm).reset_cache()


@dataclass(frozen=True, slots=True)
class WarmResult:
    """What `warm` did. A chunk is a block of the cache."""

    token_count: int
    chunk_size: int
    chunks_stored: int  # that were not there
    chunk_boundary_aligned: bool
    partial_tail_tokens: int
    alignment_warning: str | None


def warmed(tokens: int, reused: int, block: int) -> WarmResult:
    """Of a prompt of so many tokens, of which some were found in the cache. block: tokens of one."""
    tail = tokens % block
    warning = f"The last {tail} tokens fill no block of {block}, so each request computes them again." if tail else None
    return WarmResult(tokens, block, max(0, tokens // block - reused // block), not tail, tail, warning)


def warm(
    llm: Texts | BatchEngine[Any],
    prompt: Prompt,
    *,
    terms: Terms | None = None,
    pin: bool = False,
    importance: float | None = None,
) -> WarmResult:
    """Compute a prompt, so that later requests which begin with it find all of its whole blocks in the cache.

    prompt: a text or token ids for an `LLM`, token ids for an engine. terms: of the request; prompts share with those
    of the same cache salt. pin: keep these blocks in host memory until `unpin`, whatever else comes. importance: of
    these blocks, where host memory keeps the most important. Both take `kv_tiers`. Raises UnsupportedOperation where no
    prefixes are kept, and what the engine raises.
    """
    engine = _own_engine(llm)
    ids = llm.prompts.given(prompt) if isinstance(llm, Texts) else _ids(prompt)
    asked = engine.stats().prefix_queries
    request = Request(np.array(ids), GREEDY.with_(max_tokens=1), terms=as_terms(terms))
    if pin or importance is not None:
        engine.keep(engine.check(request), pin=pin or None, importance=importance)
    stream = engine.submit(engine.check(request))
    stream.collect()
    if engine.stats().prefix_queries == asked:
        raise UnsupportedOperation(f"{engine.facts.model} keeps no prefixes here, so there is nothing to warm.")
    return warmed(len(ids), stream.reused, engine.facts.limits.block_size)


def unpin(llm: Texts | BatchEngine[Any], prompt: Prompt, *, terms: Terms | None = None) -> int:
    """What `warm` has pinned of a prompt may make way again; returns how many tokens that are. Raises as it does."""
    engine = _own_engine(llm)
    ids = llm.prompts.given(prompt) if isinstance(llm, Texts) else _ids(prompt)
    request = Request(np.array(ids), GREEDY.with_(max_tokens=1), terms=as_terms(terms))
    return engine.keep(engine.check(request), pin=False)


# ---- keys and values from elsewhere ----------------------------------------------------------------------------------


class Prefilled(NamedTuple):
    """Keys, values and first tokens that `prefill` computed.

    kv: (keys, values) of each layer, NumPy float32 [B, kv_heads, S, dim], zeros behind the end of a row. first_tokens:
    one for each row. lengths: tokens of each prompt.
    """

    kv: list[tuple[HostArray, HostArray]]
    first_tokens: list[int]
    lengths: list[int]


def prefill(
    model: Any,
    token_ids: Sequence[Iterable[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    backend: str | ArrayBackend | None = None,
) -> Prefilled:
    """Compute prompts and return their keys, values and first tokens: the input of `batched_decode`.

    model, backend: as for `batched_decode`. params: None means greedy. Raises what `batched_decode` raises.
    """
    prompts = [_ids(ids) for ids in token_ids]
    each = [as_params(p, GREEDY) for p in _for_each(params, len(prompts), "SamplingParams")]
    with _engine(model, backend, (), len(prompts), max(map(len, prompts), default=1) + 1) as (engine, _):
        kept: list[list[Any]] = [[] for _ in prompts]
        requests = [
            Request(np.array(ids), _of_ids(p).with_(max_tokens=1, min_tokens=0), kept=own)
            for ids, p, own in zip(prompts, each, kept, strict=True)
        ]
        firsts = [tokens[0] for tokens in _collected(engine, requests)]
    return Prefilled(_side_by_side(kept), firsts, [len(ids) for ids in prompts])


@spelled
def batched_decode(
    model: Any,
    past_kv: KV,
    first_tokens: Any,
    start_pos: int | None = None,
    max_new_tokens: int | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    temperature: float = 1.0,
    do_sample: bool = False,
    device: Any = None,
    *,
    lengths: int | Iterable[int] | None = None,
    token_ids: Sequence[Iterable[int]] | None = None,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    max_tokens: int | None = None,
    return_kv: bool | None = None,
    backend: str | ArrayBackend | None = None,
) -> tuple[list[list[int]], list[tuple[Array, Array]] | None]:
    """Decode from keys and values that were computed elsewhere. Returns (the new token ids of each row, keys and
    values).

    model: an `LLM` or `RemoteLLM`, an engine, or a model that gets an engine for this call: one of level 2, or a causal
    model of transformers that the paged engine can run (docs/transformers.md), which nobody else may use meanwhile.
    past_kv: (keys, values) of each layer, floats [B, kv_heads, S, dim] of any library, as the model's `step` gives them
    to `attend` (keys with their positions in them, for our decoders and for transformers' Llama), or transformers'
    cache; position i of a row is its token i. They are rounded to the dtype of the model's cache.
    first_tokens: [B], already drawn from the last logits of each row. They come first in the result and count as
    generated.
    start_pos: the position of the next token, as kvboost asks for it: S. None means the same.
    max_new_tokens: another name of max_tokens.
    temperature, do_sample: in place of `params`; without do_sample, greedily. hibachi draws, anew in each call: the
    seed is that of `params`, not of the library.
    device: where the model is, if it is one of transformers; None means there.
    lengths: real positions of each row, from 1 to S; None means as many as token_ids, else all S.
    token_ids: the token ids of these positions, which must be right. Without them no other request can find these
    blocks in the prefix cache.
    params: for all rows, or one for each; None means greedy.
    max_tokens: used in place of `params.max_tokens`; it counts the first token.
    eos_token_id: one or several, in place of the model's own (None); [] means that none ends a row. A stop token is
    part of the result. Each row ends by its own stop tokens, limit and parameters, and gets the tokens that it would
    get alone.
    return_kv: also return (keys, values) of each layer, [B, kv_heads, S_total, dim], in the library and dtype of
    past_kv, for all tokens but the last of each row, with zeros behind them. Otherwise None is returned in their place.
    None means that they are returned if start_pos is given, as kvboost does.

    Raises InvalidRequest, PromptTooLong, UnsupportedOperation for a model without a cache or with recurrent states, and
    what the engine raises.
    """
    firsts = _ids(first_tokens)
    if params is not None and do_sample:
        raise InvalidRequest("Expected params, or do_sample and temperature; got both. Leave one out.")
    default = GREEDY.with_(temperature=temperature) if do_sample else GREEDY
    each = [as_params(p, default) for p in _for_each(params, len(firsts), "SamplingParams")]
    for name, limit in (("max_tokens", max_tokens), ("max_new_tokens", max_new_tokens)):
        if limit is not None:
            _check_least(name, limit)
            each = [p.with_(max_tokens=limit, min_tokens=min(p.min_tokens, limit)) for p in each]
    if device is not None and str(device).split(":")[0] != str(on := getattr(model, "device", device)).split(":")[0]:
        raise InvalidRequest(f"device must be where the model is, {on}; got {shown(device)}. Move the model.")
    return_kv = start_pos is not None if return_kv is None else return_kv
    layers = as_layers(past_kv)
    limits = [n for p in each if (n := p.max_tokens) is not None]
    longest = _tokens_of(layers) + max(limits, default=0) if len(limits) == len(each) else None
    with _engine(model, backend, layers, len(firsts), longest) as (engine, own_eos):
        check_paged(engine.facts, "Keys and values cannot be taken from elsewhere")
        host = layers_of(layers, (len(firsts),), tokens := _tokens_of(layers), engine.facts)
        if start_pos not in (None, tokens):
            raise InvalidRequest(
                f"start_pos must be {tokens}, the positions in past_kv; got {shown(start_pos)}. Say by `lengths` how "
                f"many of them each row has."
            )
        ids = _prompts(token_ids, lengths, len(firsts), tokens)
        eos = own_eos if eos_token_id is None else _ids_or_one(eos_token_id)
        kept: list[list[Any]] = [[] for _ in firsts]
        requests: dict[int, Request] = {}
        for b, (p, first, own) in enumerate(zip(each, firsts, ids, strict=True)):
            p = _of_ids(p, eos)
            mine = [(k[b, :, : len(own)], v[b, :, : len(own)]) for k, v in host]
            if _is_over(p, first, len(own), engine.facts):
                kept[b] += mine
                continue
            begun = Begun(mine, first, known=token_ids is not None)
            requests[b] = Request(np.array(own), p, begun=begun, kept=kept[b] if return_kv else None)
        more = dict(zip(requests, _collected(engine, list(requests.values())), strict=True))
    out = [[first, *more.get(b, ())] for b, first in enumerate(firsts)]
    return out, _as_given(_side_by_side(kept), layers) if return_kv else None


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _check_least(name: str, value: Any) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"{name} must be an integer >= 1; got {shown(value)}.")


def _integers(given: Any, what: str) -> list[int]:
    """Integers from a list, or from an array [n] or [n, 1] of any library. Raises InvalidRequest."""
    try:
        found = given
        if not isinstance(given, (list, tuple)) and hasattr(given, "dtype"):
            found = backend_for(given).get(given)
        found = found.reshape(-1) if isinstance(found, np.ndarray) and found.shape[1:] == (1,) else found
        return [operator.index(i) for i in found]
    except Exception as e:
        raise InvalidRequest(f"{what} must be integers in a list or an array [n]; got {shown(given)}.") from e


def _ids(ids: Any) -> list[int]:
    """Token ids. Raises InvalidRequest."""
    out = _integers(ids, "Token ids")
    if wrong := [i for i in out if not 0 <= i < 1 << 8 * ID_BYTES]:
        raise InvalidRequest(f"Token ids must be from 0 to 2^32 - 1; got {wrong[0]}.")
    return out


def _ids_or_one(ids: Any) -> tuple[int, ...]:
    return tuple(_ids([ids] if isinstance(ids, (int, np.integer)) else ids))


def _hashed(token_ids: Iterable[int]) -> bytes:
    return b"".join(i.to_bytes(ID_BYTES, "little") for i in _ids(token_ids))


def _for_each(given: Any, n: int, what: str) -> list[Any]:
    """A list with one value for each of n rows, from one value for all or one for each. Raises InvalidRequest."""
    each = list(given) if isinstance(given, Sequence) else [given] * n
    if len(each) != n:
        raise InvalidRequest(f"Expected one {what}, or one for each of {n} rows; got {len(each)}.")
    return each


APPROXIMATE: Mapping[str, tuple[str, ...]] = {
    "recompute_strategy": ("selective", "cacheblend"),
    "mode": ("chunk_kv_reuse",),
}


def _alone(mode: str, recompute_strategy: str | None) -> bool:
    """Whether the mode computes every prompt on its own. Raises UnsupportedOperation or InvalidRequest."""
    strategy = "none" if recompute_strategy is None else recompute_strategy
    for name, value, exact in (
        ("recompute_strategy", strategy, ("none",)),
        ("mode", mode, ("prefix_cache", "baseline")),
    ):
        word = value.lower() if isinstance(value, str) else value
        if word in APPROXIMATE[name]:
            raise UnsupportedOperation(
                f"{name}={value!r} reuses keys and values that are not those of the prompt, so answers would differ "
                f"from those without a cache, which is never done here: expected {' or '.join(map(repr, exact))}."
            )
        if word not in exact:
            raise InvalidRequest(f"{name} must be {' or '.join(map(repr, exact))}; got {shown(value)}.")
    return mode.lower() == "baseline"


def _unshared(terms: Any) -> Terms:
    """The same parameters under a cache salt that no other request has."""
    return replace(as_terms(terms), cache_salt=secrets.token_hex(16))


def _answers(llm: Texts, prompts: Sequence[Prompt], params: SamplingParams, terms: Any) -> list[tuple[Completion, int]]:
    """The answer to each prompt, and how many of its tokens were found in the cache."""
    streams = llm.submit(prompts, params, terms=terms)
    try:
        for stream in streams:
            for _ in stream:
                pass
        return [(stream.completion(), stream.reused(params.runs)) for stream in streams]
    finally:
        for stream in streams:
            stream.close()


def _farthest(a: Completion, b: Completion) -> float:
    """The largest difference of a log-probability between two answers with the same tokens."""
    pairs = [
        (x[i], y[i])
        for one, other in zip(a.choices, b.choices, strict=True)
        for i, x, y in zip(one.token_ids, one.logprobs or (), other.logprobs or (), strict=True)
        if x is not None and y is not None
    ]
    return max((abs(x - y) for x, y in pairs), default=0.0)


def _own_engine(llm: Any) -> BatchEngine[Any]:
    """The engine of an LLM, or the engine itself. Raises InvalidRequest for what keeps no cache between calls."""
    if not isinstance(llm, (Texts, AutoregressiveBatchInference, RemoteEngine)):
        raise InvalidRequest(
            f"Expected an LLM or an engine, which keeps what it has computed; got {type(llm).__name__}. Make an engine "
            f"of it: AutoregressiveBatchInference(model)."
        )
    return llm.engine if isinstance(llm, Texts) else llm


@contextmanager
def _engine(
    model: Any, backend: Any, layers: Sequence[Any], rows: int, longest: int | None, deterministic: bool | None = None
) -> Iterator[tuple[BatchEngine[Any], tuple[int, ...]]]:
    """The engine of a model and its stop tokens; a model without an engine gets a temporary one. Raises InvalidRequest
    or UnsupportedOperation.
    """
    if not rows:
        raise InvalidRequest("Expected at least one row; got none.")
    if isinstance(model, (Texts, AutoregressiveBatchInference, RemoteEngine)):
        if backend is not None:
            raise InvalidRequest(f"{type(model).__name__} has its backend; got backend={backend!r}. Leave it out.")
        yield _own_engine(model), model.eos_ids if isinstance(model, Texts) else model.facts.eos_ids
        return
    arrays = [half for layer in layers for half in layer if not isinstance(half, np.ndarray)]
    library: Any = backend_of(backend, model, *arrays) or resolve("numpy")
    if isinstance(library, ArrayBackend) and (lent := library.lent_model(model, max(longest or 2, 2))):
        with lent as model, _engine(model, library, layers, rows, longest, False) as found:
            yield found
        return
    level, name = kind_of(model).level, type(model).__name__
    if level < 2:
        raise UnsupportedOperation(
            f"Keys and values need a model with a cache (level 2); {name} is of level {level}. Give it `cache_spec` "
            f"and `step`."
        )
    own = getattr(model, "max_model_len", None)
    if own is None and longest is None:
        raise InvalidRequest(
            f"{name} has no max_model_len, so each row needs a limit: expected max_tokens=N; got None."
        )
    engine = AutoregressiveBatchInference(
        model,
        backend=library,
        max_model_len=own or max(longest or 2, 2),
        max_num_seqs=min(rows, 64),
        deterministic=deterministic,
    )
    with engine:
        yield engine, engine.facts.eos_ids


def _of_ids(p: SamplingParams, eos: Iterable[int] = ()) -> SamplingParams:
    """Parameters of one row of ids, with the tokens that end it. Raises InvalidRequest for options that need a
    tokenizer.
    """
    for name in ("stop", "bad_words"):
        if got := getattr(p, name):
            raise InvalidRequest(
                f"{name} takes texts, and here are token ids only; got {shown(got)}. Use stop_token_ids or logit_bias."
            )
    if p.runs > 1:
        raise InvalidRequest(f"A row is one sequence, so n and best_of must be 1; got n={p.n}, best_of={p.best_of}.")
    return p.with_(stop_token_ids=(*p.stop_token_ids, *(() if p.ignore_eos else eos)), ignore_eos=True)


def _is_over(p: SamplingParams, first: int, n: int, facts: Facts) -> bool:
    """Whether the first token already ends its row. Raises PromptTooLong."""
    return (first in p.stop_token_ids and p.min_tokens <= 1) or facts.limits.fit(n, p.max_tokens) == n + 1


def _collected(engine: BatchEngine[Any], requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of all rows. All are checked before the first is queued, and no request outlives the call."""
    engine.check_room("", len(requests))
    ready = [engine.check(request) for request in requests]
    streams: list[ItemStream[int]] = []
    try:
        for each in ready:
            streams.append(engine.submit(each))
        return [stream.collect() for stream in streams]
    finally:
        for stream in streams:
            stream.close()


def _tokens_of(layers: Sequence[Any]) -> int:
    shape: Any = getattr(layers[0][0], "shape", ()) if layers and layers[0] else ()
    return int(shape[2]) if len(shape) == 4 else 1


def _prompts(token_ids: Any, lengths: Any, rows: int, tokens: int) -> list[list[int]]:
    """Token ids of the real positions of each row, zeros where they are unknown. Raises InvalidRequest."""
    if not tokens:
        raise InvalidRequest("past_kv must have at least one position; got none. Compute the prompts first.")
    given = None if token_ids is None else [_ids(ids) for ids in token_ids]
    if lengths is None:
        real = [tokens] * rows if given is None else [len(ids) for ids in given]
    else:
        real = [int(lengths)] * rows if isinstance(lengths, (int, np.integer)) else _integers(lengths, "lengths")
    for name, found in (("lengths", real), ("token_ids", real if given is None else given)):
        if len(found) != rows:
            raise InvalidRequest(f"{name} must have one entry for each of {rows} rows; got {len(found)}.")
    if wrong := [n for n in real if not 1 <= n <= tokens]:
        raise InvalidRequest(f"lengths must be from 1 to {tokens}, the positions in past_kv; got {wrong[0]}.")
    if given is not None and real != [len(ids) for ids in given]:
        raise InvalidRequest(
            f"token_ids must be of the real positions of each row: expected {real} ids; got {[*map(len, given)]}."
        )
    return [[0] * n for n in real] if given is None else given


def _side_by_side(kept: Sequence[Sequence[Any]]) -> list[tuple[HostArray, HostArray]]:
    """Stack rows of layers of [heads, n, dim] into layers of [B, heads, longest, dim]."""
    longest = max(row[0][0].shape[1] for row in kept)

    def joined(halves: Sequence[HostArray]) -> HostArray:
        heads, _, dim = halves[0].shape
        out = np.zeros((len(halves), heads, longest, dim), np.float32)
        for whole, half in zip(out, halves, strict=True):
            whole[:, : half.shape[1]] = half
        return out

    each = list(zip(*kept, strict=True))  # by layer
    return [(joined([k for k, _ in layer]), joined([v for _, v in layer])) for layer in each]


def _as_given(kv: list[tuple[HostArray, HostArray]], layers: Sequence[Any]) -> list[tuple[Array, Array]]:
    """Convert to the library and dtype of the layers that the caller gave."""

    def like(half: HostArray, given: Array) -> Array:
        if isinstance(given, (np.ndarray, list, tuple)):
            return half.astype(getattr(given, "dtype", np.float32))
        backend = backend_for(given)
        return backend.xp.astype(backend.put(half), given.dtype)

    return [(like(k, given[0]), like(v, given[1])) for (k, v), given in zip(kv, layers, strict=True)]
