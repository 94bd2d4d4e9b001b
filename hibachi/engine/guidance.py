"""Several rows, one token: the logits of a request are mixed with those of rows beside it before each draw."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.engine.build import Built
from hibachi.engine.runners.frames import FrameSampler
from hibachi.engine.runners.job import Job, Linked
from hibachi.engine.runners.linked import Draws, LinkRows, firsts, for_all
from hibachi.engine.runners.runner import Part, Sampler, check_output, drawn_part
from hibachi.engine.scheduler.sequence import linked
from hibachi.engine.scheduler.step import StepPlan
from hibachi.errors import InvalidRequest, PromptTooLong, shown, text_of
from hibachi.request import Guidance, Request, SamplingParams


def as_guidance(given: Any) -> tuple[Guidance, ...]:
    """What `run(guidance=)` takes. Raises InvalidRequest."""
    found = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not found or not all(isinstance(each, Guidance) for each in found):
        raise InvalidRequest(f"guidance must be a hibachi.Guidance, or several; got {shown(given)}.")
    if len(found) > 1 and found[0].mix is None:
        raise InvalidRequest(
            f"Several rows are mixed by a function of yours: expected guidance[0].mix; got None for {len(found)} rows."
        )
    return found


def beside(request: Request, guidance: Guidance) -> Request:
    """The request for the row that guides another."""
    own = guidance.prompt is None and guidance.prompt_embeds is None
    params = None if request.params is None else SamplingParams(max_tokens=request.params.max_tokens)
    return replace(
        request,
        prompt=request.prompt if own else guidance.prompt,
        embeds=request.embeds if own else guidance.prompt_embeds,
        inputs=request.inputs if guidance.inputs is None else guidance.inputs,
        params=params,
        stop_rule=None,
        prediction=None,
        grammar=None,
        allowed=None,
        fed=False,
    )


def guide(job: Job, request: Request, given: Any, built: Built, check: Callable[[Request], Job]) -> None:
    """Link a request with the rows that guide it. given: see `as_guidance`. check: makes a job. Raises InvalidRequest,
    and what `check` raises.
    """
    guidance, backend = as_guidance(given), built.runner.backend
    if request.params is not None and request.params.beams is not None:
        raise InvalidRequest("guidance mixes logits before a draw; got beams, which draw nothing. Leave one out.")
    if built.runner.sampler is None or not isinstance(backend, ArrayBackend):
        raise InvalidRequest(
            f"guidance mixes logits, and {built.facts.model} returns tokens: expected a model with `logits`, or with a "
            f"`step` that returns logits."
        )
    try:
        others = [check(beside(request, each)) for each in guidance]
    except (InvalidRequest, PromptTooLong) as e:
        raise type(e)(f"The guidance of the request: {e}") from None
    for other in others:
        other.silent = True
    jobs = [job, *others]
    ticket = linked([each.seq for each in jobs], alike=False, parts=False)
    Linked(ticket, jobs, Mixed(guidance[0].mix, guidance[0].scale, backend)).check(built.facts.limits)


class Mixed(Draws):
    """mix: see `Guidance`; None means classifier-free guidance by `scale`."""

    kind: Hashable

    def __init__(self, mix: Callable[..., Any] | None, scale: float, backend: ArrayBackend) -> None:
        self.kind, self.mix, self.scale, self.backend = (Mixed, id(mix)), mix, scale, backend  # (it may have no hash)

    @override
    def draw(self, sampler: Sampler, plan: StepPlan, links: Sequence[LinkRows], out: Array) -> Part:
        (jobs, idx), at = firsts(links), np.array([link.at for link in links])
        rows, positions = plan.rows[idx], plan.end[idx]
        if isinstance(sampler, FrameSampler) and sampler.depth is not None:
            # The logits of each codebook are mixed, and all rows get the id that is drawn.
            whose = np.repeat(np.arange(len(links)), at.shape[1])
            mix = partial(self._mixed, sampler, links, at=np.arange(at.size).reshape(at.shape))
            drawn = sampler.draw(sampler.rows(out, at.reshape(-1)), jobs, rows, positions, mix, whose)
        else:
            drawn = sampler.draw(self._mixed(sampler, links, out, at), jobs, rows, positions)
        return for_all(drawn_part(idx, drawn, jobs, positions, self.backend), links, drawn.tokens)

    def _mixed(self, sampler: Sampler, links: Sequence[LinkRows], out: Array, at: HostArray) -> Array:
        """The logits of each link, of rows `at` [links, rows] of `out`."""
        if self.mix is not None:  # one by one: what others ask for changes no bit
            each = [self._asked(self.mix, [sampler.rows(out, row[k : k + 1]) for k in range(len(row))]) for row in at]
            return each[0] if len(each) == 1 else self.backend.xp.concat(each, axis=0)
        own, other = (sampler.rows(out, at[:, k]) for k in range(2))
        scale = np.ones(own.shape[0], np.float32)
        scale[: len(links)] = [link.linked.draws.scale for link in links]
        shape = (-1, *(1,) * (own.ndim - 1))
        return self.backend.program(_guided)(own, other, self.backend.put(scale.reshape(shape)))

    def _asked(self, mix: Callable[..., Any], rows: Sequence[Array]) -> Array:
        rows = [self.backend.float32(row[:1, ...]) for row in rows]
        try:
            found = mix(*rows)
        except BaseException as e:  # SystemExit and CancelledError as well: they are no signals in this thread
            raise InvalidRequest(f"The function `mix` of the request's guidance raised {text_of(e)}") from e
        shape = tuple(rows[0].shape)
        return check_output(found, self.backend, shape, "Guidance.mix", kind="logits")


def _guided(backend: ArrayBackend, own: Array, other: Array, scale: Array) -> Array:
    """Where one of the two forbids a token, the request's own logits say what is."""
    xp = backend.xp
    own, other = backend.float32(own), backend.float32(other)
    never = (own == -xp.inf) | (other == -xp.inf)
    zero = xp.zeros_like(own)
    a, b = xp.where(never, zero, own), xp.where(never, zero, other)
    return xp.where(never, own, b + scale * (a - b))
