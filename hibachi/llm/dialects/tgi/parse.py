"""TGI's rules, in its order and with its words: from a body to what the engine is asked."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET

from hibachi.errors import InvalidRequest, shown
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.forms import made, of_format
from hibachi.llm.dialects.openai.bodies import Bounds
from hibachi.llm.dialects.openai.parse import ParsedRequest
from hibachi.llm.dialects.tgi.bodies import GenerateBody, Parameters
from hibachi.llm.dialects.tgi.limits import TgiLimits
from hibachi.request import SamplingParams, Terms

MOST_CHECKED = 1024  # new tokens: no more need fit than these, as TGI asks for the others later
SEEDS = 2**53  # as many as any reader of JSON tells apart
REFUSED = {
    "watermark": "Texts are not watermarked",
    "adapter_id": "Adapters are not served",
}


@dataclass(slots=True)
class TgiRequest:
    """A request of TGI's. asked: as for any dialect; how many tokens are new is known once `fit` has been called.

    inputs: the text. said: what is said besides. full_text: the answer tells the prompt. seed: what tokens are drawn
    by; None means they are not.
    """

    asked: ParsedRequest
    inputs: str
    said: Parameters
    full_text: bool
    seed: int | None

    @property
    def prefill(self) -> bool:
        """Whether the answer tells of the tokens of the prompt."""
        return bool(self.said.decoder_input_details)

    @property
    def details(self) -> bool:
        """Whether it tells of its tokens."""
        return bool(self.said.details) or self.prefill

    @property
    def top(self) -> int:
        """How many of the likeliest tokens it tells beside each."""
        return self.said.top_n_tokens or 0


def generation(
    body: GenerateBody, limits: TgiLimits, bounds: Bounds, context: int, *, stream: bool, full_text: bool = False
) -> TgiRequest:
    """What can be checked before the text is cut into tokens. full_text: begin with the prompt if nothing is said.

    Raises Refused.
    """
    p = Parameters(do_sample=True) if body.parameters is None else body.parameters
    for name, why in REFUSED.items():
        value = getattr(p, name)
        if value not in (UNSET, None) and value is not False:
            raise Refused(f"`{name}` is not supported: {why}.", param=name, code="unsupported_parameter")
    runs = 1 if p.best_of is None else p.best_of
    if stream and runs != 1:
        raise _no("best_of", "!= 1 is not supported when streaming tokens")
    if stream and p.decoder_input_details:
        raise _no("decoder_input_details", "== true is not supported when streaming tokens")
    if not 1 <= runs <= limits.max_best_of:
        raise _no("best_of", f"must be > 0 and <= {limits.max_best_of}. Given: {shown(runs)}")
    seed = _check(p, runs, limits, bounds)
    top = p.top_n_tokens or 0
    if not 0 <= top <= limits.max_top_n_tokens:
        raise _no("top_n_tokens", f"must be >= 0 and <= {limits.max_top_n_tokens}. Given: {shown(top)}")
    if not body.inputs:
        raise _no("inputs", "cannot be empty")
    most = limits.input(context)
    if p.truncate is not None and not 0 < p.truncate <= most:
        raise _no("truncate", f"must be strictly positive and less than {most}. Given: {shown(p.truncate)}")
    told = bool(p.details or p.decoder_input_details)
    params = _params(p, runs, seed, scored=stream or told or runs > 1, top=top)
    asked = ParsedRequest(params, Terms(), stream=stream, usage=False, usage_always=False, token_ids=False)
    asked.prompts = [body.inputs]
    if p.grammar is not None and (form := of_format(p.grammar, "grammar")):
        asked.form, asked.params = form[0], params.with_(structured_outputs=made(*form))
    full = full_text if p.return_full_text is None else p.return_full_text
    return TgiRequest(asked, body.inputs, p, full, seed)


def fit(given: TgiRequest, ids: list[int], limits: TgiLimits, bounds: Bounds, context: int) -> list[int]:
    """The tokens of the prompt, of which the last are kept if it is to be truncated, and the number of new ones in
    `given`. Raises Refused."""
    truncate, wanted = given.said.truncate, given.said.max_new_tokens
    if truncate is not None:
        ids = ids[-truncate:]
    if not ids:
        raise _no("inputs", "cannot be empty")
    total, n = limits.total(context), len(ids)
    room = max(0, total - n)
    new = room if wanted is None else wanted
    if n + (least := min(new, MOST_CHECKED)) > total:
        raise Refused(
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. Given: {n} `inputs` tokens and {least} "
            f"`max_new_tokens`",
            param="max_new_tokens",
            code="context_length_exceeded",
        )
    if n > (most := limits.input(context)):
        raise Refused(
            f"`inputs` must have less than {most} tokens. Given: {n}", param="inputs", code="context_length_exceeded"
        )
    new = min(new, room, new if bounds.new is None else bounds.new)
    given.asked.params = given.asked.params.with_(max_tokens=new)
    return ids


def _check(p: Parameters, runs: int, limits: TgiLimits, bounds: Bounds) -> int | None:
    """The rules for drawing and for the end. Returns the seed; None means the likeliest tokens are taken."""
    filtered = any(x is not None for x in (p.top_k, p.top_p, p.typical_p))
    if runs > 1 and not (p.do_sample or filtered or p.temperature is not None):
        raise Refused("you must use sampling when `best_of` is > 1", param="best_of", code="invalid_value")
    for name in ("temperature", "repetition_penalty"):
        if (given := getattr(p, name)) is not None and not given > 0:
            raise _no(name, "must be strictly positive")
    if p.frequency_penalty is not None and not -2 <= p.frequency_penalty <= 2:
        raise _no("frequency_penalty", "must be >= -2.0 and <= 2.0")
    for name in ("top_p", "typical_p"):
        if (given := getattr(p, name)) is not None and not 0 < given < 1:
            raise _no(name, "must be > 0.0 and < 1.0")
    if p.top_k is not None and p.top_k <= 0:
        raise _no("top_k", "must be strictly positive")
    if p.max_new_tokens is not None and p.max_new_tokens <= 0:
        raise _no("max_new_tokens", "must be strictly positive")
    _check_stop(p.stop or (), limits.max_stop_sequences, bounds.stop_length)
    if p.seed is not None and not 0 <= p.seed < 2**64:
        raise _no("seed", f"must be >= 0 and < 2^64. Given: {shown(p.seed)}")
    if p.seed is not None and runs > 1:
        raise _no("seed", "must not be set when `best_of` > 1")
    # As TGI's shards decide it: a temperature of 1 is none.
    drawn = p.do_sample or filtered or p.temperature not in (None, 1.0)
    return None if not drawn else secrets.randbelow(SEEDS) if p.seed is None else p.seed


def _check_stop(stop: Sequence[str], most: int, length: int) -> None:
    if len(stop) > most:
        raise _no("stop", f"supports up to {most} stop sequences. Given: {len(stop)}")
    for text in stop:
        if not 0 < len(text) <= length:
            raise _no("stop", f"sequences must have 1 to {length} characters. Given: {len(text)}")


def _params(p: Parameters, runs: int, seed: int | None, *, scored: bool, top: int) -> SamplingParams:
    """scored: log-probabilities are told, or chosen by."""
    try:
        return SamplingParams(
            temperature=0.0 if seed is None else 1.0 if p.temperature is None else p.temperature,
            top_k=p.top_k or 0,
            top_p=1.0 if p.top_p is None else p.top_p,
            typical_p=1.0 if p.typical_p is None else p.typical_p,
            repetition_penalty=1.0 if p.repetition_penalty is None else p.repetition_penalty,
            frequency_penalty=p.frequency_penalty or 0.0,
            seed=seed,
            stop=p.stop or (),
            include_stop=True,
            n=runs,
            logprobs=top if scored else None,
            prompt_logprobs=0 if p.decoder_input_details else None,
        )
    except InvalidRequest as e:
        raise Refused.of(e) from None


def _no(name: str, why: str) -> Refused:
    return Refused(f"`{name}` {why}", param=name, code="invalid_value")
