"""The engine's record of a request, and which requests end with their new tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.engine.guide.protocol import Grammar, GuideMaker
from hibachi.engine.runners.guiding import Guided
from hibachi.engine.runners.stops import Stopper
from hibachi.engine.runners.tokentable import TokenHistory, TokenKind
from hibachi.engine.sampling.uniforms import fork
from hibachi.engine.scheduler.links import check_fits
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.streams.channel import Channel
from hibachi.errors import InvalidRequest, text_of
from hibachi.request import Request, SamplingParams


@dataclass(slots=True, eq=False, weakref_slot=True)
class Job:
    """What the engine adds to a request, beside the scheduler's `Seq`.

    request: as it was checked. Its prompt is a host array [n, *tok], or a feed-forward input.
    """

    seq: Seq
    channel: Channel[Any]
    request: Request
    stop: Any = None  # a `Stopper`, or the runner's own kind of stop rule
    seed: int = 0
    kind: TokenKind | None = None  # of its tokens; of feed-forward, of its input
    padding: Any = None  # the padding token of its kind: on the host [*tok], native [1, *tok]
    known: Any = None  # see `history`; of a runner that keeps tokens natively, where they are
    changes: Any = None  # to its logits: see `RowEdits`
    scores: list[dict[int, float] | None] | None = None  # log-probabilities of the prompt's tokens, if asked for
    prediction: Any = None  # of its output, a `hibachi.engine.speculation.ngram.Prediction`
    draft: Any = None  # tokens that are proposed to come next, int32 [at least seq.draft]
    sure: int = 0  # of these, how many at the beginning must come, as the form of the output allows nothing else
    grammar: tuple[GuideMaker, Grammar] | None = None  # of its output; it waits until `guided` is made of it
    guided: Guided | None = None
    linked: Linked | None = None
    member: int = 0  # which of the linked ones it is
    silent: bool = False  # nobody reads its tokens: it is there for others that it is linked with
    failures: tuple[int, int] = (0, 0)  # steps that failed as a whole with it, and the length that it has not come past

    def copy(self, channel: Channel[Any], i: int) -> Job:
        """The same request for another channel, as the i-th of several, with a seed derived from its own."""
        seq, channel.fed = self.seq, self.channel.fed
        keys = None if seq.keys is None else list(seq.keys)
        known = None if self.known is None else TokenHistory(self.history.read(0, self.history.length))
        prediction = None if self.prediction is None else type(self.prediction)(self.request.prediction)
        return replace(
            self,
            seq=replace(seq, keys=keys, names=[], blocks=[]),
            channel=channel,
            seed=fork(self.seed, i),
            known=known,
            scores=None,
            prediction=prediction,
        )

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of a request that is sampled."""
        assert self.request.params is not None
        return self.request.params

    @property
    def history(self) -> TokenHistory:
        """The tokens that its row of the table does not hold: when it gets a row, all of them."""
        if self.known is None:
            self.known = TokenHistory(self.request.prompt)
        assert isinstance(self.known, TokenHistory)
        return self.known

    @property
    def group(self) -> list[Job]:
        """The requests that it is linked with, itself among them."""
        return [self] if self.linked is None else self.linked.jobs

    @property
    def unscored(self) -> int:
        """Number of first tokens whose output must be looked at: all but the last of the prompt."""
        return 0 if self.scores is None else self.seq.prompt_len - 1


@dataclass(slots=True, eq=False)
class Linked:
    """Requests whose sequences are linked.

    ticket: of the sequences. jobs: those of a caller first. draws: what draws their tokens together; None means that
    each is drawn by itself.
    """

    ticket: Seq
    jobs: list[Job]
    draws: Any = None

    def __post_init__(self) -> None:
        for n, job in enumerate(self.jobs):
            job.linked, job.member = self, n

    def check(self, limits: Limits) -> None:
        """Check that all of them fit at once. Raises InvalidRequest and PromptTooLong."""
        for seq in (self.ticket, *(job.seq for job in self.jobs)):
            seq.end = limits.fit(seq.prompt_len, seq.max_new)
        assert self.ticket.link is not None
        check_fits(limits, self.ticket.link)


def stopped(jobs: Sequence[Job], tokens: HostArray, batch: Array, backend: ArrayBackend, positions: Any = None) -> Any:
    """Which requests end with their new token: bool [n]. tokens [n, *tok]: on the host; batch: native, or None.

    positions [n]: of the tokens, if they were sampled: no request ends before its min_tokens.
    """
    out = np.zeros(len(jobs), bool)
    groups: dict[Stopper, list[int]] = {}
    rules = [job.stop for job in jobs]
    if len(set(rules)) == 1:  # as nearly always
        if rules[0] is None:
            return out
        groups[rules[0]] = list(range(len(jobs)))
    else:
        for i, rule in enumerate(rules):
            if rule is not None:
                groups.setdefault(rule, []).append(i)
    for rule, members in groups.items():
        everyone = len(members) == len(jobs)
        mine: Any = slice(None) if everyone else np.array(members)
        out[mine] = rule.match(tokens[mine])
        if rule.where is not None:  # it gets arrays of its own, which it may write into
            if batch is None:
                native = backend.put(tokens[mine].copy())
            else:
                native = backend.copy(batch) if everyone else backend.take(batch, backend.put(mine))
            out[mine] |= _ask(rule.where, native, len(members), backend)
    if positions is not None and out.any():
        least = [job.seq.prompt_len + (job.request.params.min_tokens if job.request.params else 0) for job in jobs]
        out &= np.asarray(positions) + 1 >= np.array(least)
    return out


def _ask(where: Callable[[Any], Any], batch: Array, n: int, backend: ArrayBackend) -> Any:
    """The answer of a stop predicate for n rows, on the host: bool [n]."""
    try:
        hit = where(batch)
        hit = backend.get(hit) if backend.owns(hit) else np.asarray(hit)
    except BaseException as e:  # SystemExit and CancelledError as well: they are no signals in this thread
        raise InvalidRequest(f"The stop predicate raised {text_of(e)}") from e
    if hit.shape != (n,):
        raise InvalidRequest(
            f"The stop predicate must return one bool for each of {n} rows, shape ({n},); got shape {hit.shape}. "
            f"Reduce over the token's own dimensions."
        )
    return hit.astype(bool)
