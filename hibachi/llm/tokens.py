"""Models that generate tokens of any kind, without text; the engine may be in any process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.backend.infer import mapped
from hibachi.engine.batchengine import BatchEngine
from hibachi.engine.conversions import to_host
from hibachi.engine.streams.stream import ItemStream
from hibachi.errors import HibachiError, InvalidRequest, ModelError, text_of
from hibachi.llm.holding import Holding
from hibachi.request import Request, SamplingParams, Terms, as_params, as_terms

MOST_BYTES = 2**28  # of a prompt or an input


class Tokens(Holding):
    """A model on any level: arrays in, a stream of arrays out; for a feed-forward model, a stream of one output.

    model: its name. default_params: for requests that bring none, where the engine samples.
    """

    model: str
    default_params: SamplingParams

    def __init__(self, engine: BatchEngine[Any], model: str, default_params: SamplingParams | None = None) -> None:
        super().__init__(engine)
        self.model, self.default_params = model, default_params or SamplingParams()

    def submit(
        self,
        prompt: HostArray,
        *,
        params: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop_rule: Any = None,
        include_stop: bool | None = None,
        inputs: Mapping[str, Any] | None = None,
        terms: Terms | None = None,
    ) -> ItemStream[Any]:
        """Queue a prompt [n, *token], or one input of any shape; returns its stream at once.

        params: how to sample, where the engine does; a seed, where the model gets random numbers to draw with.
        max_tokens: takes precedence over params.max_tokens. None with a model that samples by itself means up to the
        end of the context.
        stop_rule: a `StopRule`, a predicate, a token or a list of them, in addition to the model's own.
        include_stop: deliver the token that ends it (None means yes).
        inputs: {name: array} that the model declares.
        terms: priority, tenant, deadlines, cache salt.

        Items: `host` converts them to arrays. Raises InvalidRequest, PromptTooLong, QueueFull, EngineClosed or
        EngineFailed. An engine in another process may refuse a request later: then its stream raises InvalidRequest,
        before any item.
        """
        terms = as_terms(terms)
        return self.queue(Request(prompt, params, max_tokens, stop_rule, include_stop, inputs=inputs, terms=terms))

    def queue(self, request: Request) -> ItemStream[Any]:
        """`submit` for a request."""
        return self.queue_many(request, 1)[0]

    def queue_many(self, request: Request, n: int) -> list[ItemStream[Any]]:
        """`submit` for n samples of a request."""
        facts = self.engine.facts
        given = asked(request.prompt, MOST_BYTES)
        if not facts.feedforward and given.ndim:
            facts.limits.fit(len(given), None)  # before anything of such a length is copied
        params = request.params
        if facts.vocab_size is not None:
            params = as_params(params, self.default_params)
        return self.engine.submit_many(self.engine.check(replace(request, prompt=given, params=params)), n)

    def host(self, item: Any) -> Any:
        """An item of a stream as an array on the host: [*token], or an output, which may be several. Raises ModelError
        if it is no array.
        """
        try:
            return mapped(lambda _, array: to_host(array), item)
        except HibachiError as e:
            raise ModelError(f"What {self.model} returned is no array: {text_of(e)}.") from e


def asked(prompt: Any, most: int) -> HostArray:
    """A prompt or an input on the host, not copied. Raises InvalidRequest if it has more than this many bytes."""
    try:
        found = prompt if isinstance(prompt, np.ndarray) else to_host(prompt)
    except (HibachiError, ValueError, TypeError, OverflowError) as e:
        raise InvalidRequest(f"Expected an array of numbers, or lists of equal length; got {text_of(e)}.") from e
    if found.nbytes > most:
        raise InvalidRequest(
            f"Expected at most {most} bytes of numbers; got shape {found.shape} of {found.dtype}, {found.nbytes} bytes."
        )
    return found
