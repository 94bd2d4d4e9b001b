"""Several continuations of one prompt: which of them are linked, so that the prompt is computed once."""

from __future__ import annotations

from collections.abc import Sequence

from hibachi.engine.beams import search
from hibachi.engine.runners.job import Job, Linked
from hibachi.engine.runners.runner import Runner
from hibachi.engine.scheduler.links import most_alike
from hibachi.engine.scheduler.sequence import linked
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.streams.channel import Channel
from hibachi.errors import InvalidRequest, shown
from hibachi.request import MOST_RUNS, Beams, SamplingParams


def counted(params: SamplingParams | None, n: int | None) -> tuple[SamplingParams | None, int]:
    """The parameters of n continuations, and n. n: None means params.n. Raises InvalidRequest."""
    if n is None:
        n = params.n if isinstance(params, SamplingParams) else 1
    elif isinstance(params, SamplingParams) and params.beams is not None:
        params = params.with_(n=n, beams=params.beams)  # raises if the beams are fewer
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_RUNS:
        raise InvalidRequest(f"n must be an integer from 1 to {MOST_RUNS}; got {shown(n)}.")
    return params, n


def together(jobs: Sequence[Job], runner: Runner, limits: Limits) -> list[Job]:
    """Link a request and its copies, as many at a time as rows and memory hold; returns those that are to be queued,
    each for all that it is linked with.
    """
    first, early = jobs[0], runner.sampler is None  # the model draws: each computes the last token by itself
    beams = None if first.request.params is None else first.request.params.beams
    if isinstance(beams, Beams):
        silent = [first.copy(Channel(), 0) for _ in range((beams.width or 1) - len(jobs))]
        search([*jobs], silent, beams, runner.backend)
        return [first]
    apart = first.request.pooling is not None or first.seq.begun or (early and first.seq.prompt_len < 2)
    if apart or not runner.forks:
        return [*jobs]
    size = most_alike(limits, first.seq.prompt_len, first.request.max_tokens, early=early)
    parts = [[*jobs[i : i + size]] for i in range(0, len(jobs), size)]
    for part in parts:
        if len(part) > 1:
            Linked(linked([job.seq for job in part], alike=True, parts=True, early=early), part)
    return [part[0] for part in parts]
