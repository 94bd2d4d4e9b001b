"""From what a request for tokens says to what the engine is asked, by what its model can do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hibachi.backend.array_backend import HostArray
from hibachi.errors import InvalidRequest, shown
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.forms import OURS, made, of_structured
from hibachi.llm.dialects.openai.bodies import Bounds, same_fields
from hibachi.llm.dialects.openai.parse import request_id, terms_of
from hibachi.llm.dialects.tokens.bodies import OfCodebook, Parameters
from hibachi.request import Beams, Request, SamplingParams, StopRule

_CONVERTED = ("seed", "logit_bias", "codebooks", "structured_outputs")
_SAME = same_fields(Parameters, *_CONVERTED, "max_tokens", "stop", "include_stop", "n")
_SAMPLING = (*_CONVERTED, *_SAME, "use_beam_search", "length_penalty")
_GENERATION = ("n", "max_tokens", "atol", "include_stop", "inputs", *_SAMPLING)


@dataclass(frozen=True, slots=True)
class AskedModel:
    """defaults: where the model gives logits; None means it samples by itself. seeded: it draws itself, from a
    request's seed. codebooks: ids of a token; None means it is one.
    """

    bounds: Bounds
    feedforward: bool = False
    defaults: SamplingParams | None = None
    eos_ids: tuple[int, ...] = ()
    seeded: bool = False
    codebooks: int | None = None


def asked_of(said: Parameters, stop: HostArray | None, model: AskedModel) -> tuple[Request, tuple[int, ...]]:
    """What is asked for, without its prompt, and the ids of `stop`, where tokens are ids. stop: tokens [n, *token].
    Raises Refused, which names the field.
    """
    defaults, bounds, codebooks = model.defaults, model.bounds, model.codebooks
    if model.feedforward:
        _none(said, _GENERATION, "gives one output for each input")
        if stop is not None or said.stream:
            raise _no("stop" if stop is not None else "stream", "gives one output for each input")
    elif defaults is None:
        names = tuple(name for name in _SAMPLING if name != "seed" or not model.seeded)
        _none(said, names, "returns tokens, not logits, and samples by itself")
    elif said.atol:
        raise _no("atol", "has ids as tokens, which are equal or not")
    request_id(said.request_id)
    if said.n is not None and not 1 <= said.n <= min(bounds.n, bounds.rows):
        raise _invalid("n", f"must be an integer from 1 to {min(bounds.n, bounds.rows)}; got {shown(said.n)}")
    if said.stream and said.n not in (None, 1):
        raise Refused.at("n", " samples are in one answer, and no stream. Leave stream out.", code="invalid_value")
    limit = said.max_tokens
    if limit is not None and limit < 1:
        raise _invalid("max_tokens", f"must be an integer >= 1; got {shown(limit)}")
    if bounds.new is not None and not model.feedforward:
        limit = bounds.new if limit is None else min(limit, bounds.new)
    params, rule, ids = None, None, tuple[int, ...]()
    try:
        if defaults is not None:
            ids = () if codebooks else _ids(stop, bounds.token_ids)
            if said.codebooks and codebooks is None:
                raise _no("codebooks", "has tokens that are single ids")
            _at_most("codebooks", len(said.codebooks or ()), codebooks or 0, " in number")
            if said.use_beam_search and codebooks is not None:
                raise _no("use_beam_search", "has tokens of several codebooks")
            ends = () if said.ignore_eos or defaults.ignore_eos else model.eos_ids
            params = _sampling(said, defaults, limit, bounds).with_(stop_token_ids=(*ids, *ends))
            if codebooks and stop is not None:
                rule = _rule(stop, None, bounds)
        elif model.seeded and said.seed is not None:
            params = SamplingParams(seed=said.seed % 2**64, max_tokens=limit)
        if defaults is None and (stop is not None or said.atol is not None):
            rule = _rule(stop, said.atol, bounds)
    except InvalidRequest as e:
        raise Refused.of(e) from None
    request = Request(None, params, limit, rule, said.include_stop is not False, terms=terms_of(said))
    return request, ids


def _sampling(said: Parameters, defaults: SamplingParams, limit: int | None, bounds: Bounds) -> SamplingParams:
    _at_most("logprobs", said.logprobs, bounds.logprobs)
    _at_most("allowed_token_ids", len(said.allowed_token_ids or ()), bounds.token_ids, " in number")
    changes: dict[str, Any] = {name: got for name in _SAME if (got := getattr(said, name)) is not None}
    if said.codebooks is not None:
        changes["codebooks"] = [_of_codebook(each, bounds) for each in said.codebooks]
    if said.seed is not None:
        changes["seed"] = said.seed % 2**64
    if said.logit_bias is not None:
        changes["logit_bias"] = _biases("logit_bias", said.logit_bias, bounds)
    if said.structured_outputs is not None:
        changes["structured_outputs"] = made(OURS, of_structured(said.structured_outputs))
    if said.use_beam_search:
        changes["beams"] = Beams(said.n or 1, 1.0 if said.length_penalty is None else said.length_penalty)
    elif said.length_penalty not in (None, 1):
        raise Refused.at("length_penalty", " is of beam search: set use_beam_search, or leave it out.")
    return defaults.with_(**changes, max_tokens=limit)


def _biases(name: str, given: Mapping[str, float], bounds: Bounds) -> dict[int, float]:
    _at_most(name, len(given), bounds.bias, " biases" if name == "codebooks" else " in number")
    if not all(re.fullmatch(r"[0-9]{1,18}", token) for token in given):
        raise _invalid(name, "must map token ids to numbers")
    return {int(token): added for token, added in given.items()}


def _of_codebook(given: OfCodebook, bounds: Bounds) -> dict[str, Any]:
    found: dict[str, Any] = dict(given)
    if isinstance(ids := given.get("allowed_token_ids"), list):
        _at_most("codebooks", len(ids), bounds.token_ids, " allowed ids")
    if isinstance(bias := given.get("logit_bias"), dict):
        found["logit_bias"] = _biases("codebooks", bias, bounds)
    return found


def _ids(stop: HostArray | None, most: int) -> tuple[int, ...]:
    if stop is None:
        return ()
    if stop.ndim != 1 or (stop.size and stop.dtype.kind not in "iu"):
        raise _invalid("stop", f"must be a list of token ids; got shape {stop.shape} of {stop.dtype}")
    _at_most("stop", len(stop), most, " in number")
    return tuple(map(int, stop))


def _rule(stop: HostArray | None, atol: float | None, bounds: Bounds) -> StopRule:
    if stop is None:
        raise _invalid("atol", "says how near a token must be to one of stop, which is missing")
    if not stop.ndim:
        raise _invalid("stop", "must be a list of tokens; got one number")
    _at_most("stop", len(stop), bounds.token_ids if stop.ndim == 1 else bounds.stop, " in number")
    tokens = tuple(stop.tolist()) if stop.ndim == 1 else tuple(stop)  # numbers can be compared: equal rules are one
    return StopRule(tokens, atol=atol or 0.0)


def _none(said: Parameters, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(said, name) is not None:
            raise _no(name, why)


def _no(name: str, why: str) -> Refused:
    return Refused.at(name, f" is not supported: this model {why}. Leave it out.", code="unsupported_parameter")


def _invalid(name: str, why: str) -> Refused:
    return Refused.at(name, f" {why}.")


def _at_most(name: str, given: int | None, most: int, what: str = "") -> None:
    if given is not None and given > most:
        raise _invalid(name, f"must be at most {most}{what}; got {shown(given)}")
