"""What of a request only those can know to be wrong who know the model, and whether there is room for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from hibachi.errors import InvalidRequest, QueueFull
from hibachi.plan.scheduler import Limits
from hibachi.request import SamplingParams
from hibachi.tensor.array_backend import HostArray


def check_ids(prompt: HostArray, vocab: int) -> None:
    """Raises InvalidRequest for ids [n] outside the vocabulary."""
    least, most = int(prompt.min()), int(prompt.max())
    if least < 0 or most >= vocab:
        raise InvalidRequest(
            f"Token ids must be from 0 to {vocab - 1} (the model's vocabulary); got {least} to {most}. Is this the "
            f"tokenizer of this model?"
        )


def check_params(params: SamplingParams, limit: Any, *, vocab: int, cached: bool) -> None:
    """limit: of new tokens, or None. cached: the model is of level 2. Raises InvalidRequest."""
    bias = [token for token, _ in params.logit_bias]  # type: ignore[misc]
    for name, ids in (("allowed_token_ids", params.allowed_token_ids or ()), ("logit_bias", bias)):
        if ids and max(ids) >= vocab:  # type: ignore[type-var]
            raise InvalidRequest(
                f"{name} must name token ids from 0 to {vocab - 1} (the model's vocabulary); got "
                f"{max(ids)}. Is this the tokenizer of this model?"  # type: ignore[type-var]
            )
    if limit is not None and params.min_tokens > limit:
        raise InvalidRequest(f"min_tokens must be at most max_new_tokens, {limit}; got {params.min_tokens}.")
    if params.prompt_logprobs is not None and not cached:
        raise InvalidRequest(
            f"prompt_logprobs needs a model with a cache (level 2), which sees each token once; got "
            f"prompt_logprobs={params.prompt_logprobs} for one without. Leave it out, or give the model `cache_spec` "
            f"and `step`."
        )


MOST_TIMES = 4  # all tenants together may hold so many times what one may that is alone


def check_room(
    tenant: Hashable,
    new: int,
    here: int,
    limits: Limits,
    max_waiting: int | None,
    tenants: Callable[[], Iterable[Hashable]],
) -> None:
    """Is there room for so many requests more? Raises QueueFull.

    A tenant alone may have `limits.rows + max_waiting` here. With others, it is not refused for what they have: each
    may have its part of that, also where the queue is full already. here: requests of all; tenants: whose they are, one
    entry for each, asked for only where it matters. max_waiting: None: any number.
    """
    if max_waiting is None or here + new <= (most := limits.rows + max_waiting):
        return
    held = Counter(tenants())
    share = most // len({*held, tenant})
    if held[tenant] + new <= share < most and here + new <= MOST_TIMES * most:
        return
    of_it = f" ({held[tenant]} of them of this tenant, whose part is {share})" if share < most else ""
    raise QueueFull(
        f"The queue is full: expected at most {most} requests here ({limits.rows} that run at once and "
        f"max_waiting={max_waiting} that wait); got {here}{of_it} and {new} more. Try again later, or raise "
        f"max_waiting."
    )
