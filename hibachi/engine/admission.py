"""Request checks that need to know the model, and the check for room in the queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from hibachi.engine.batchengine import Facts
from hibachi.engine.given import checked_begun, checked_kept
from hibachi.errors import InvalidRequest, QueueFull, UnsupportedOperation, shown
from hibachi.plan.limits import Limits
from hibachi.request import Pooling, Request, SamplingParams, as_params, as_terms
from hibachi.tensor.array_backend import HostArray

_PLAIN = SamplingParams()


def check_ids(prompt: HostArray, vocab: int) -> None:
    """Raise InvalidRequest for ids [n] outside the vocabulary."""
    least, most = int(prompt.min()), int(prompt.max())
    if least < 0 or most >= vocab:
        raise InvalidRequest(
            f"Token ids must be from 0 to {vocab - 1} (the model's vocabulary); got {least} to {most}. Is this the "
            f"tokenizer of this model?"
        )


def checked(request: Request, prompt: Any, n: int, facts: Facts) -> Request:
    """The request with its prompt, parameters and limit of new tokens in the form that the engine takes.

    prompt: [n, *token], as its runner wants it; zeros where embeddings are given. Raises InvalidRequest, PromptTooLong
    or UnsupportedOperation.
    """
    params, limit, vocab = request.params, request.max_tokens, facts.vocab_size
    if request.pooling is not None:
        check_pooling(request.pooling, facts.has_hidden)
        params, limit = (None if vocab is None else _PLAIN), 1
    if vocab is None:
        if params is not None:
            raise InvalidRequest(
                f"This model returns tokens, not logits, so it samples by itself; got params={params!r}. Leave params "
                f"out and pass max_tokens= or stop_rule=."
            )
    else:
        params = as_params(params, _PLAIN)
        if facts.eos_ids and not params.ignore_eos:  # ignore_eos, so that nothing adds them once more
            params = params.with_(stop_token_ids=(*params.stop_token_ids, *facts.eos_ids), ignore_eos=True)
        if request.embeds is not None and params.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs needs a prompt of tokens; got prompt_embeds. Leave one of them out.")
        limit = params.max_tokens if limit is None else limit
    if limit is not None and (not isinstance(limit, (int, np.integer)) or isinstance(limit, bool) or limit < 1):
        raise InvalidRequest(f"max_tokens must be an integer >= 1 (or None: no limit); got {shown(limit)}.")
    shows = request.include_stop
    if shows is None:
        shows = None if params is None else params.include_stop
    elif not isinstance(shows, (bool, np.bool_)):
        raise InvalidRequest(f"include_stop must be True, False or None; got {type(shows).__qualname__}.")
    if params is not None and vocab is not None:
        _check_params(params, limit, vocab=vocab, cached=facts.cached)
    limit = None if limit is None else int(limit)
    end = facts.limits.fit(n, limit)
    checked_kept(request, facts)
    terms, begun = as_terms(request.terms), checked_begun(request, params, n, end, facts)
    return replace(
        request,
        prompt=prompt,
        params=params,
        max_tokens=limit,
        include_stop=shows is not False,
        terms=terms,
        begun=begun,
    )


def embeddings(embeds: HostArray, prompt: Any, size: int | None, model: str) -> HostArray:
    """A float32 copy of embeddings given in place of a prompt. size: the model's, or None. Raises InvalidRequest."""
    if size is None:
        raise InvalidRequest(
            f"prompt_embeds takes a model with an attribute `embed_size` that looks at `x.embeds`; {model} has "
            f"none. Pass token ids."
        )
    fine = prompt is None and embeds.ndim == 2 and embeds.shape[1] == size and len(embeds) and embeds.dtype.kind == "f"
    if not fine:
        raise InvalidRequest(
            f"prompt_embeds must be floats of shape (sequence, {size}), and the prompt None; got shape "
            f"{embeds.shape} of {embeds.dtype}, and a prompt of type {type(prompt).__name__}."
        )
    if not np.isfinite(embeds).all():
        raise InvalidRequest("prompt_embeds must be finite; got NaN or infinity. Look where they were made.")
    return embeds.astype(np.float32)  # a copy: the caller's may change


def _check_params(params: SamplingParams, limit: Any, *, vocab: int, cached: bool) -> None:
    """Check sampling parameters against the model. limit: of new tokens, or None. cached: the model is of level 2.
    Raises InvalidRequest.
    """
    bias = dict(params.logit_bias)
    for name, ids in (("allowed_token_ids", params.allowed_token_ids or ()), ("logit_bias", bias)):
        if ids and max(ids) >= vocab:
            raise InvalidRequest(
                f"{name} must name token ids from 0 to {vocab - 1} (the model's vocabulary); got "
                f"{max(ids)}. Is this the tokenizer of this model?"
            )
    if limit is not None and params.min_tokens > limit:
        raise InvalidRequest(f"min_tokens must be at most max_tokens, {limit}; got {params.min_tokens}.")
    if params.prompt_logprobs is not None and not cached:
        raise InvalidRequest(
            f"prompt_logprobs needs a model with a cache (level 2), which sees each token once; got "
            f"prompt_logprobs={params.prompt_logprobs} for one without. Leave it out, or give the model `cache_spec` "
            f"and `step`."
        )


MOST_TIMES = 4  # all tenants together may hold this many times what a single tenant may


def check_room(
    tenant: Hashable,
    new: int,
    here: int,
    limits: Limits,
    max_num_queued_reqs: int | None,
    tenants: Callable[[], Iterable[Hashable]],
) -> None:
    """Check that there is room for this many more requests. Raises QueueFull.

    A tenant alone may have `limits.rows + max_num_queued_reqs` requests here. With other tenants, each may have its
    part of that number, even where the others fill the queue. here: requests of all tenants; tenants: the tenant of
    each of them, asked for only where it matters. max_num_queued_reqs: None means any number.
    """
    if max_num_queued_reqs is None or here + new <= (most := limits.rows + max_num_queued_reqs):
        return
    held = Counter(tenants())
    share = most // len({*held, tenant})
    if held[tenant] + new <= share < most and here + new <= MOST_TIMES * most:
        return
    of_it = f" ({held[tenant]} of them of this tenant, whose part is {share})" if share < most else ""
    raise QueueFull(
        f"The queue is full: expected at most {most} requests here ({limits.rows} that run at once and "
        f"max_num_queued_reqs={max_num_queued_reqs} that wait); got {here}{of_it} and {new} more. Try again later, or "
        f"raise max_num_queued_reqs."
    )


def check_pooling(pooling: Any, has_hidden: bool) -> None:
    """Raise InvalidRequest for an unknown pooling, UnsupportedOperation for a model without hidden states."""
    if not isinstance(pooling, str) or pooling not in get_args(Pooling):
        raise InvalidRequest(f"pooling must be 'mean', 'last' or 'cls'; got {shown(pooling)}.")
    if not has_hidden:
        raise UnsupportedOperation(
            "Embeddings need the model's hidden states: expected a method `hidden(params, cache, x)` beside "
            "`cache_spec`; this model has none. Give it one, or use a model that our decoder runs."
        )
