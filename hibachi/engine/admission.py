"""Request checks that need to know the model, and the check for room in the queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_args

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.engine.batchengine import Facts
from hibachi.engine.conversions import to_host
from hibachi.engine.external_kv import check_paged, checked_begun
from hibachi.engine.forms import Forms
from hibachi.engine.runners.extra_inputs import fits
from hibachi.engine.scheduler.links import check_fits
from hibachi.engine.scheduler.sequence import Seq, linked
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.trie import Trie
from hibachi.errors import InvalidRequest, QueueFull, UnsupportedOperation, shown, text_of
from hibachi.request import MOST_INT, OF_CODEBOOKS, Beams, Pooling, Request, SamplingParams, as_params, as_terms

MOST_NAMES = 20  # in an error
_PLAIN = SamplingParams()
_SEEDED = ("seed", "max_tokens", "include_stop")  # parameters of a request to a model that draws itself
_OF_ONE_ID = (  # parameters that name ids, or count them
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "logits_processors",
    "stop_token_ids",
    "prompt_logprobs",
    "structured_outputs",
)


def check_ids(prompt: HostArray, vocab: int, sizes: Sequence[int] = ()) -> None:
    """Raise InvalidRequest for ids [n] outside the vocabulary, and in frames [n, codebooks] beyond these sizes."""
    least, most = int(prompt.min()), int(prompt.max())
    if least < 0 or most >= vocab:
        raise InvalidRequest(
            f"Token ids must be from 0 to {vocab - 1} (the model's vocabulary); got {least} to {most}. Is this the "
            f"tokenizer of this model?"
        )
    if sizes and (wrong := np.argwhere(prompt >= np.array(sizes))).size:
        at, k = wrong[0].tolist()
        raise InvalidRequest(
            f"Ids of codebook {k} must be from 0 to {sizes[k] - 1} (the model's vocab_sizes); got {prompt[at, k]} in "
            f"frame {at}."
        )


def checked(request: Request, prompt: Any, n: int, facts: Facts, forms: Forms | None = None) -> Request:
    """The request with its prompt, parameters and limit of new tokens in the form that the engine takes.

    prompt: [n, *token], as its runner wants it; zeros where embeddings are given. forms: check the form of its output;
    None means it can have none. Raises InvalidRequest, PromptTooLong or UnsupportedOperation, and MissingExtra
    without the library that guides.
    """
    params, limit, vocab = request.params, request.max_tokens, facts.vocab_size
    if request.pooling is not None:
        check_pooling(request.pooling, facts.has_hidden)
        params, limit = (None if vocab is None else _PLAIN), 1
    if vocab is None:
        params = _seeded(params, facts.seeded)
        limit = params.max_tokens if limit is None and params is not None else limit
    else:
        params = as_params(params, _PLAIN)
        if facts.eos_ids and not params.ignore_eos:  # ignore_eos, so that nothing adds them once more
            params = params.with_(stop_token_ids=(*params.stop_token_ids, *facts.eos_ids), ignore_eos=True)
        if request.embeds is not None and params.prompt_logprobs is not None:
            raise InvalidRequest.at(
                ("prompt_logprobs",), " needs a prompt of tokens; got prompt_embeds. Leave one of them out."
            )
        limit = params.max_tokens if limit is None else limit
    if not isinstance(request.fed, bool):
        raise InvalidRequest.at(("fed",), f" must be True or False; got {shown(request.fed)}.")
    if request.fed and vocab is not None and params is not None:  # what comes next, nobody can guess
        params = params.with_(num_speculative_tokens=0)
    if limit is not None and (not isinstance(limit, (int, np.integer)) or isinstance(limit, bool) or limit < 1):
        raise InvalidRequest.at(("max_tokens",), f" must be an integer >= 1 (or None: no limit); got {shown(limit)}.")
    shows = request.include_stop
    if shows is None:
        shows = None if params is None else params.include_stop
    elif not isinstance(shows, (bool, np.bool_)):
        raise InvalidRequest.at(("include_stop",), f" must be True, False or None; got {type(shows).__qualname__}.")
    if params is not None and vocab is not None:
        _check_params(params, limit, vocab=vocab, cached=facts.cached)
        _check_codebooks(params, facts)
    limit = None if limit is None else int(limit)
    if request.allowed is not None:
        _check_allowed(request.allowed, params, facts)
        limit = min(request.allowed.depth, limit or MOST_INT)
    given = _inputs(request, facts)
    limit = _covered(given, facts, n, limit)
    end = facts.limits.fit(n, limit)
    if params is not None and params.beams is not None:
        _check_beams(params, limit, n, facts, fed=request.fed)
    terms, begun = as_terms(request.terms), request.begun
    if request.kept is not None:
        check_paged(facts, "Keys and values cannot be returned")
    if begun is not None:
        begun = checked_begun(begun, request, params, n, end, facts)
    grammar = request.grammar  # checked on the other side of the pipe
    if grammar is None and params is not None and params.structured_outputs is not None:
        grammar = (forms or Forms()).check(params)
    return replace(
        request,
        prompt=prompt,
        params=params,
        max_tokens=limit,
        include_stop=shows is not False,
        terms=terms,
        begun=begun,
        inputs=given,
        grammar=grammar,
        prediction=None if request.prediction is None else _predicted(request.prediction, facts),
    )


def _check_allowed(given: Any, params: SamplingParams | None, facts: Facts) -> None:
    """Raise InvalidRequest for what is no catalogue of this model's ids, UnsupportedOperation without single ids."""
    if not isinstance(given, Trie):
        raise InvalidRequest.at(("allowed",), f" must be a hibachi.Trie (or None); got {shown(given)}. Make one.")
    if facts.vocab_size is None or facts.codebooks is not None:
        raise UnsupportedOperation(
            "allowed needs a model that returns logits of single ids; this one returns something else. Leave it out."
        )
    if given.most >= facts.vocab_size:
        raise InvalidRequest.at(
            ("allowed",),
            f" must have token ids from 0 to {facts.vocab_size - 1} (the model's vocabulary); got {given.most}. Is it "
            f"a catalogue for this model?",
        )
    if params is not None and params.structured_outputs is not None:
        raise InvalidRequest.at(("allowed",), " is a form of its own; got structured_outputs too. Leave one out.")


def _predicted(given: Any, facts: Facts) -> HostArray | None:
    """What the output may be, int32 [m], m at most the context; None where nothing would be made of it. Raises
    InvalidRequest.
    """
    vocab = facts.vocab_size
    if vocab is None or facts.codebooks is not None:
        raise InvalidRequest("prediction is for models that return logits of single ids. Leave it out.")
    try:
        ids = np.asarray(given[: facts.limits.max_model_len])
    except Exception as e:  # no list, or an array of another library
        raise InvalidRequest(f"prediction must be token ids in a list or an array [m]; got {shown(given)}.") from e
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InvalidRequest(f"prediction must be token ids in a list or an array [m]; got {shown(given)}.")
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab):
        raise InvalidRequest(
            f"prediction must hold token ids from 0 to {vocab - 1} (the model's vocabulary); got {ids.min()} to "
            f"{ids.max()}. Is this the tokenizer of this model?"
        )
    return ids.astype(np.int32) if len(ids) and facts.speculates else None


def _seeded(given: Any, seeded: bool) -> SamplingParams | None:
    """The parameters of a request to a model that returns tokens: a seed, where it draws itself. Raises
    InvalidRequest.
    """
    if given is None or not seeded:
        if given is not None:
            raise InvalidRequest(
                f"This model returns tokens, not logits, so it samples by itself; got params={given!r}. Leave params "
                f"out and pass max_tokens= or stop_rule=. (A model that declares `draws` takes a seed.)"
            )
        return None
    params = as_params(given, _PLAIN)
    if others := [
        f.name for f in fields(_PLAIN) if f.name not in _SEEDED and getattr(params, f.name) != getattr(_PLAIN, f.name)
    ]:
        raise InvalidRequest(
            f"This model returns tokens, not logits: of SamplingParams it takes {', '.join(_SEEDED)}; got "
            f"{', '.join(others)}. Leave these out; the model draws with its own random numbers."
        )
    return params


def _check_codebooks(params: SamplingParams, facts: Facts) -> None:
    """Check parameters for tokens of several codebooks, or of one. Raises InvalidRequest."""
    if (codebooks := facts.codebooks) is None:
        if params.codebooks:
            raise InvalidRequest.at(
                ("codebooks",),
                f" is for models whose tokens have several; got {len(params.codebooks)} mappings for a model "
                f"whose tokens are single ids. Leave it out.",
            )
        return
    if params.codebooks and len(params.codebooks) != codebooks:
        raise InvalidRequest.at(
            ("codebooks",),
            f" must be one mapping for each of {codebooks} codebooks; got {len(params.codebooks)}. {{}} is "
            f"one that changes nothing.",
        )
    for k in range(len(params.codebooks)):
        try:
            _check_ids_of(params.of_codebook(k), facts.vocab_sizes[k], "the codebook's ids", "")
        except InvalidRequest as e:
            raise InvalidRequest.at(("codebooks",), f" number {k}: ", *e.words) from None
    for name in _OF_ONE_ID:
        if (got := getattr(params, name)) != getattr(_PLAIN, name):
            mend = "Leave it out."
            if name == "stop_token_ids":
                mend = "Pass stop_rule=, which sees whole tokens."
            elif name in OF_CODEBOOKS:
                mend = "Give it to the codebooks that it is for: codebooks=."
            raise InvalidRequest.at(
                (name,),
                f" is for tokens that are single ids; got {shown(got)} for a model whose tokens have "
                f"{codebooks} codebooks. {mend}",
            )


def _check_beams(params: SamplingParams, limit: int | None, n: int, facts: Facts, *, fed: bool) -> None:
    """Check that beams can be searched. n: tokens of the prompt. Raises InvalidRequest."""
    if facts.codebooks is not None:
        raise InvalidRequest.at(
            ("beams",), f" are of tokens that are single ids; those of this model have {facts.codebooks}. Leave it out."
        )
    if fed:
        raise InvalidRequest.at(
            ("fed",), " is of requests that draw; got beams, whose tokens come at the end. Leave one out."
        )
    assert isinstance(params.beams, Beams)
    seqs = [Seq(n, limit) for _ in range(params.beams.width or params.n)]
    for seq in seqs:
        seq.end = facts.limits.fit(n, limit)
    ticket = linked(seqs, alike=True, parts=False)
    assert ticket.link is not None
    check_fits(facts.limits, ticket.link)


def _inputs(request: Request, facts: Facts) -> dict[str, HostArray] | None:
    """The request's own inputs, checked and copied to the host. Raises InvalidRequest."""
    declared, given = facts.inputs, _by_name(request.inputs)
    if declared.keys() != given.keys():
        expected = ", ".join(declared) or "none, as the model declares no `inputs`"
        got = ", ".join(given) if len(given) < MOST_NAMES else f"{len(given)} names"
        raise InvalidRequest.at(("inputs",), f" must have the arrays {expected}; got {got or 'none'}.")
    found = {}
    for name, one in declared.items():
        host = host_of(given[name], name)
        if one.per == "position" and host.ndim:
            host = host[: facts.limits.max_model_len]  # no request has more positions
        try:
            found[name] = fits(host, one, f"inputs[{name!r}]", InvalidRequest)
        except InvalidRequest as e:
            raise InvalidRequest.about(("inputs", name), str(e)) from None
    return found or None


def _by_name(given: Any) -> dict[str, Any]:
    """What a caller's mapping holds. Raises InvalidRequest."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidRequest.at(("inputs",), f" must be a mapping, {{name: array}}; got {shown(given)}.")
    try:
        found = dict(given)
    except Exception as e:  # of a class of the caller's own
        raise InvalidRequest.at(("inputs",), f" must be a mapping that can be read; got {text_of(e)}.") from e
    if not all(isinstance(name, str) for name in found):
        raise InvalidRequest.at(("inputs",), f" must be a mapping, {{name: array}}; got {shown(given)}.")
    return {str.__str__(name): array for name, array in found.items()}


def host_of(given: Any, name: str) -> HostArray:
    """An array of any library on the host. Raises InvalidRequest."""
    try:
        host = to_host(given)
    except Exception as e:  # of a class of the caller's own, or an array without data
        raise InvalidRequest.about(
            ("inputs", name), f"inputs[{name!r}] must be an array of numbers; got {text_of(e)}."
        ) from e
    # Floats that NumPy lacks, such as bfloat16; libraries bring them.
    return host.astype(np.float32) if host.dtype.kind == "V" and "float" in host.dtype.name else host


def _covered(given: Mapping[str, HostArray] | None, facts: Facts, n: int, limit: int | None) -> int | None:
    """The limit of new tokens, where an input per position ends before. n: tokens of the prompt. Raises
    InvalidRequest.
    """
    for name, array in (given or {}).items():
        if facts.inputs[name].per == "position":
            most = len(array) + 1 - n  # the last token is never computed
            if most < 1 or (limit is not None and limit > most):
                raise InvalidRequest.about(
                    ("inputs", name),
                    f"inputs[{name!r}] must reach over the {n} tokens of the prompt and all new ones but the last: "
                    f"expected {n + (limit or 1) - 1} positions; got {len(array)}. Send more, or set max_tokens.",
                )
            limit = most if limit is None else limit
    return limit


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
    _check_ids_of(params, vocab, "the model's vocabulary", " Is this the tokenizer of this model?")
    if limit is not None and params.min_tokens > limit:
        raise InvalidRequest.at(("min_tokens",), f" must be at most max_tokens, {limit}; got {params.min_tokens}.")
    if params.prompt_logprobs is not None and not cached:
        raise InvalidRequest.at(
            ("prompt_logprobs",),
            f" needs a model with a cache (level 2), which sees each token once; got "
            f"prompt_logprobs={params.prompt_logprobs} for one without. Leave it out, or give the model `cache_spec` "
            f"and `step`.",
        )


def _check_ids_of(params: SamplingParams, size: int, what: str, mend: str) -> None:
    """Raise InvalidRequest for parameters that name ids beyond `size`."""
    for name, ids in (("allowed_token_ids", params.allowed_token_ids or ()), ("logit_bias", dict(params.logit_bias))):
        if ids and max(ids) >= size:
            raise InvalidRequest.at(
                (name,), f" must name token ids from 0 to {size - 1} ({what}); got {max(ids)}.{mend}"
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
