"""Whether other requests never change a bit of one: what was decided, and a trial of the loaded model on random tokens,
in steps of the engine's kind.

A few prompts are computed alone, each in one piece; then beside others, in chunks, in other rows; and once more so,
where tokens are proposed, right ones and wrong ones. All outputs must agree in every bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from typing_extensions import override

from hibachi.backend.array_backend import Array, HostArray
from hibachi.backend.infer import leaves
from hibachi.common.phases import phase
from hibachi.common.shapes import CallShapes
from hibachi.engine.batchengine import Facts
from hibachi.engine.runners.cached import CachedRunner
from hibachi.engine.runners.depth import DepthCalls
from hibachi.engine.runners.extra_inputs import ExtraInputs, declared_by
from hibachi.engine.runners.frames import FrameSampler
from hibachi.engine.runners.groups import telling
from hibachi.engine.runners.heads import Sampled
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.meters import Tally
from hibachi.engine.runners.runner import ModelRows
from hibachi.engine.runners.sampler import Drawn, RowSampler
from hibachi.engine.runners.tokentable import IDS, Tables, TokenHistory, TokenKind, within
from hibachi.engine.sampling.draw import How
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.speculation.config import SpeculativeConfig
from hibachi.engine.streams.channel import Channel
from hibachi.errors import NotDeterministic
from hibachi.request import Request, SamplingParams

log: logging.Logger = logging.getLogger("hibachi.engine")

R = TypeVar("R")
LENGTHS = 37, 2, 18  # of the prompts that are compared
COMPANY = 6  # others beside them
# Where several processes add up what they have, a library may do so in an order that depends on the place in the batch,
# and rounding hides that in most outputs: more others, longer ones, and all are compared, each in two places.
COMPANY_OF_RANKS, LONGEST_OF_RANKS = 24, 150
IN_PIECES = 37, 32, 20, 16, 4, 2, 1, 48, 36  # of the prompts of a trial, some of which end with the larger pieces
NEW = 3  # tokens after each prompt
CHUNK = 7  # tokens of a prompt at once, beside others
SPECULATED = 10  # tokens after each prompt, where some are proposed
# Right proposals and wrong ones behind them, step by step. After wrong ones, a step without any reads what they left.
PROPOSALS = (0, 3), (0, 0), (2, 2), (0, 0), (4, 0), (1, 1), (0, 0)


class ProposalsDiffer(NotDeterministic):
    """Only where tokens are proposed, outputs differ."""


def selfcheck(runner: CachedRunner, *, unused: bool = False, speculated: bool = False) -> int:
    """Raise NotDeterministic with the first output that depends on the batch; returns how many outputs were compared.

    unused: the runner is new, so its cache may be used; otherwise a second one is made for the check. speculated:
    compare also with steps in which tokens are proposed; if only there outputs differ, ProposalsDiffer is raised. 0
    means nothing was compared: the model returns tokens, not logits (it is unknown which tokens to give it), or its
    cache has no room for the prompts. Errors of the model are raised.
    """
    with phase("checking that requests do not change each other", len(LENGTHS) + 1 + speculated, "batches") as p:
        return _ended(steps(runner, unused=unused, speculated=speculated), p.update)


def _ended(steps: Generator[int, None, R], told: Callable[[int], object] = lambda done: None) -> R:
    """What these return after the last step. told: called with what they yield."""
    while True:
        try:
            told(next(steps))
        except StopIteration as e:
            found: R = e.value
            return found


def steps(runner: CachedRunner, *, unused: bool = False, speculated: bool = False) -> Generator[int, None, int]:
    """`selfcheck`, of which each turn is one step of the model: yields how many of its batches are done."""
    if (drawn := _sampled(runner)) is None:
        return 0
    several = runner.backend.place.tp_size > 1
    texts = _texts(runner.limits, drawn, new=SPECULATED if speculated else NEW, several=several)
    probe, others = _Probe(runner, drawn, take_cache=unused), f"beside {len(texts) - 1} others in chunks of {CHUNK}"
    try:
        alone: dict[tuple[int, int], HostArray] = {}
        if several:
            alone |= yield from probe.outputs(texts, runner.limits.budget)
        for i in list(texts)[: len(LENGTHS)]:
            alone |= yield from probe.outputs({i: texts[i]}, runner.limits.budget)
        backwards = dict(reversed(texts.items()))
        if (off := _difference(alone, (yield from probe.outputs(backwards, CHUNK)))) is not None:
            how = f"let the model multiply and attend with the `linear` and `attend` of {runner.backend!r}"
            if runner.backend.name == "torch":
                how += ", or pass its network through hibachi_torch.invariant(...)"
            raise NotDeterministic(
                f"{runner.name} does not compute the same bits whatever shares the batch: {off} between a run "
                f"alone and one {others}. Pass deterministic=False, or {how}."
            )
        if not speculated:
            return len(alone)
        if (off := _difference(alone, (yield from probe.outputs(backwards, CHUNK, speculated=True)))) is not None:
            raise ProposalsDiffer(
                f"{runner.name} does not compute the same bits where tokens are proposed (speculated): {off} "
                f"between a run alone, a token a step, and one with proposals, {others}. Leave speculative_config "
                f"out."
            )
        return len(alone)
    finally:
        if unused:
            runner.rebuild(keep=False)


def _difference(alone: dict[tuple[int, int], HostArray], other: dict[tuple[int, int], HostArray]) -> str | None:
    """The first output that is not the same, in words."""
    for key, want in alone.items():
        got = other[key]
        if not np.array_equal(got, want, equal_nan=True):
            apart = got != want  # not those that are -inf in both, whose difference is no number
            off = np.abs(got[apart].astype(np.float64) - want[apart]).max()
            return f"the output after {key[1]} random tokens differs by up to {off:.2g}"
    return None


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What is known of tokens that the engine samples. logits: the shape of those of one token. sizes: ids that there
    are, or of each codebook. depth: of the sampler.
    """

    kind: TokenKind
    logits: tuple[int, ...]
    sizes: Any
    depth: DepthCalls | None

    def tokens(self, random: np.random.Generator, n: int) -> HostArray:
        found: HostArray = random.integers(0, self.sizes, (n, *self.kind.shape)).astype(np.int32)
        return found

    def compared(self, out: Any, frames: HostArray) -> Array:
        """Logits [m, ...] of outputs, for these tokens [n, *tok], n <= m."""
        if self.depth is None:
            return out
        more = leaves(out)[0].shape[0] - len(frames)
        return self.depth.forced(out, np.pad(frames, ((0, more), (0, 0)), mode="edge"))


def _others(several: bool) -> tuple[int, int]:
    """How many stand beside the prompts that are compared, and how long they are at most."""
    return (COMPANY_OF_RANKS, LONGEST_OF_RANKS) if several else (COMPANY, max(LENGTHS))


def _texts(
    limits: Limits, drawn: _Sampled, lengths: Sequence[int] = (), new: int = NEW, *, several: bool = False
) -> dict[int, tuple[int, HostArray]]:
    """Random prompts by number, each with its length and the tokens that follow; as many as there is room for."""
    random = np.random.default_rng(0)
    texts, blocks = {}, 0
    others, longest = _others(several)
    for i, n in enumerate(lengths or [*LENGTHS, *random.integers(1, longest, others).tolist()]):
        n = min(n, limits.max_model_len - 1)
        end = min(n + new, limits.max_model_len)
        blocks += -(-end // limits.block_size)
        if limits.blocks and blocks >= limits.blocks:
            break
        texts[i] = n, drawn.tokens(random, end)
    return texts


class _Told(RowSampler):
    """Draws what the texts say, and keeps the outputs. proposed: the proposals of a step, by text: the number of tokens
    before them, and themselves.
    """

    def __init__(self, sampler: RowSampler | FrameSampler, drawn: _Sampled, texts: dict[int, tuple[int, HostArray]]):
        self.backend, self.vocab_size, self.shape = sampler.backend, sampler.vocab_size, sampler.shape
        self.depth, self._drawn, self._texts = sampler.depth, drawn, texts
        self.proposed: dict[int, tuple[int, HostArray]] = {}
        self.kept: dict[tuple[int, int], HostArray] = {}
        """{(number, tokens before it): output}"""

    @override
    def admit(self, job: Job, at: int | slice | None = None, seed: Any = None) -> None:
        pass

    @override
    def looks_back(self, rows: Any) -> Any:
        return np.zeros(len(rows), bool)

    @override
    def sure(self, jobs: Sequence[Job], rows: Any, positions: Any) -> Any:
        return np.zeros(len(jobs), np.int32)

    @override
    def draw(self, logits: Any, jobs: Sequence[Job], rows: Any, positions: Any, how: How | None = None) -> Drawn:
        texts = [(number, self._texts[number][1]) for job in jobs if isinstance(number := job.seq.tenant, int)]
        tokens = np.stack([text[at] for (_, text), at in zip(texts, positions.tolist(), strict=True)])
        host = self.backend.get(self._drawn.compared(logits, tokens))
        for i, ((number, text), at) in enumerate(zip(texts, positions.tolist(), strict=True)):
            first, draft = self.proposed.get(number, (at, text[:0]))
            if np.array_equal(draft[: at - first], text[first:at]):  # else what is before it is wrong
                self.kept[number, at] = host[i].copy()
        return Drawn(tokens, None, {})


class _Probe:
    """Steps texts with the model of a runner, and looks at the outputs."""

    def __init__(self, runner: CachedRunner, drawn: _Sampled, *, take_cache: bool) -> None:
        limits, self._drawn, self._runner = runner.limits, drawn, runner
        # a library that compiles for the shape of the cache needs the same
        if not (take_cache or runner.backend.shapes.compiled):
            others, longest = _others(runner.backend.place.tp_size > 1)
            most = 1 + (len(LENGTHS) + others) * -(-(longest + SPECULATED) // limits.block_size)
            limits = replace(limits, blocks=min(limits.blocks, most))
        self._limits = replace(limits, checkpoints=0, max_num_queued_reqs=None, prefill=None, stages=1)
        self._memory = runner.memory if take_cache else runner.memory.another(limits)
        self._batches = 0

    def outputs(
        self, texts: dict[int, tuple[int, HostArray]], chunk: int, *, speculated: bool = False
    ) -> Generator[int, None, dict[tuple[int, int], HostArray]]:
        """{(number, tokens before it): output} of texts that are stepped together, chunks of their prompts at once.

        speculated: tokens are proposed. After each step it yields how many batches of texts are done.
        """
        own, scheduler = self._runner, Scheduler(replace(self._limits, chunk=chunk))
        kind, tally = self._drawn.kind, Tally()
        tables, real = Tables(self._limits.rows, kind), own.main.head
        assert isinstance(real, Sampled)
        told = _Told(real.sampler, self._drawn, texts)
        head = Sampled(told, real.table, tally, f"{type(own.model).__name__}.step")
        of = ModelRows(own.model, own.backend, tables, ExtraInputs(declared_by(own.model), self._limits.rows))
        runner = CachedRunner(of, scheduler, head, "", tally, self._memory)
        runner.inputs.shapes = own.inputs.shapes
        for i, (n, text) in texts.items():
            job = Job(
                Seq(n, len(text) - n, tenant=i), Channel(), Request(text[:n], SamplingParams()), kind=kind, seed=i
            )
            job.seq.owner = job
            scheduler.add(job.seq)
        while True:
            if speculated:
                self._propose(scheduler, told, texts)
            if (plan := scheduler.schedule()) is None:
                self._batches += 1
                return told.kept
            for seq in plan.fresh:
                runner.admit(seq)
            outcome = runner.run(plan)
            for fault in outcome.faults.values():
                raise fault
            counts = np.ones(len(plan.rows), np.int32)
            for part in [part for part in outcome.parts if len(part.idx)]:
                assert part.tokens is not None
                got = np.ones(len(part.idx), np.int64) if part.counts is None else part.counts
                rows = np.repeat(part.idx, got)
                runner.written(plan.rows[rows], plan.end[rows] + within(got), part.tokens)
                counts[part.idx] = got
            scheduler.commit(plan, np.zeros(int(plan.emit.sum()), bool), counts[plan.emit])
            yield self._batches

    def _propose(self, scheduler: Scheduler, told: _Told, texts: dict[int, tuple[int, HostArray]]) -> None:
        """Propose tokens for the rows that decode."""
        told.proposed.clear()
        for seq in scheduler.order:
            if seq.row < 0 or scheduler.prefilling(seq):
                continue
            number, job = seq.tenant, seq.owner
            assert isinstance(number, int)
            right, wrong = PROPOSALS[(number + scheduler.steps) % len(PROPOSALS)]
            known = scheduler.known(seq)
            comes = texts[number][1][known:][: right + wrong].copy()
            comes[right:] = (comes[right:] + 1) % self._drawn.logits[-1]
            job.draft, seq.draft, told.proposed[number] = comes, len(comes), (known, comes)


def _sampled(runner: CachedRunner) -> _Sampled | None:
    """None means the model returns tokens, not logits."""
    head = runner.main.head
    if not isinstance(head, Sampled):
        return None
    sampler, shape = head.sampler, head.sampler.shape
    sizes = sampler.sizes if isinstance(sampler, FrameSampler) else shape[-1]
    return _Sampled(TokenKind(shape[:-1], IDS.dtype), shape, sizes, sampler.depth)


# ---- sizes of calls --------------------------------------------------------------------------------------------------


def same_bits(runner: CachedRunner, few: CallShapes, many: CallShapes) -> bool:
    """Whether calls of the largest size of `many` give the same bits as calls of the first size of `few`, in all
    outputs and in all that is cached.

    If so, both programs are compiled now. False for a model that returns tokens itself (it is unknown which tokens to
    give it), and for one that fails. With recurrent states, the kept state shows in the outputs of later tokens.
    Overwrites row 0 and the cache.
    """
    limits, drawn, inputs = runner.limits, _sampled(runner), runner.inputs
    room, size = min(limits.max_model_len - 1, (limits.blocks - 1) * limits.block_size), many.sizes[-1]
    if drawn is None or (not runner.memory.states and size > min(limits.budget, room)):
        return False
    before = inputs.shapes
    one: list[HostArray]
    other: list[HostArray]
    try:
        if runner.memory.states:
            one, other = (_stepped(runner, drawn, shapes) for shapes in (many, few))
        else:
            inputs.shapes = many
            one, other = (_results(runner, drawn, size, each) for each in (size, few.sizes[0]))
    except Exception as e:  # the first request will fail likewise, and its caller be told
        log.info("%s failed when it was tried with calls of %s: %r", runner.name, _said(many), e)
        return False
    finally:
        inputs.shapes = before
        runner.rebuild(keep=False)
    if all(np.array_equal(a, b) for a, b in zip(one, other, strict=True)):
        return True
    log.info(
        "%s: calls of %s give other bits than calls of %s; only these are made", runner.name, _said(many), _said(few)
    )
    return False


def _said(shapes: CallShapes) -> str:
    size, piece = shapes.sizes[-1], shapes.pieces[-1]
    return f"{size} rows of {piece} tokens" if piece > 1 else f"{size} tokens"


def _stepped(runner: CachedRunner, drawn: _Sampled, shapes: CallShapes) -> list[HostArray]:
    """The outputs of texts that are stepped together, in calls of one shape."""
    runner.inputs.shapes = shapes
    texts = _texts(runner.limits, drawn, IN_PIECES)
    found = _ended(_Probe(runner, drawn, take_cache=True).outputs(texts, runner.limits.budget))
    return [found[at] for at in sorted(found)]


def _results(runner: CachedRunner, drawn: _Sampled, n: int, size: int) -> list[HostArray]:
    """The outputs of n random tokens, in calls of `size`, and what they left in the cache."""
    backend, inputs, memory, row = runner.backend, runner.inputs, runner.memory, np.zeros(1, np.int32)
    blocks = np.arange(1, 1 - (-n // runner.limits.block_size), dtype=np.int32)
    tokens = TokenHistory(drawn.tokens(np.random.default_rng(0), n))
    inputs.tables.fill(0, drawn.kind, tokens)
    inputs.block_table[0, : len(blocks)] = blocks
    inputs.look(0, n)
    outputs = []
    try:
        with backend.guard():
            for start in range(0, n, size):
                x = inputs.packed(row, row + start, row + size, np.ones(1, bool))
                out, memory.cache = runner.main.step(runner.model.params, memory.cache, x)
                outputs.append(backend.get(drawn.compared(out, tokens.read(start, start + 1))))
            at = backend.put(blocks)
            left = [backend.get(backend.take(half, at)) for layer in memory.cache for half in layer]
    finally:
        inputs.block_table[0] = 0
        inputs.look(0, 0)
    return [np.concatenate(outputs), *left]


UNTRIED = "that other requests change no bit of one is being tried beside the first requests, and was not found false"


class Promise:
    """Of a model with a cache. deterministic: None means that something else decides, see `Built`.

    Where the bits have a name, they are those of kernels that were tested, and a trial is a matter of caution. There it
    runs beside the first requests, which need not wait for it: the thread that steps the engine takes one step of it
    after each of its own, and goes on where there is nothing else to do. So no call of the model runs beside another
    one, and requests are at most so much later as if they had waited.
    """

    def __init__(self, deterministic: bool | None, *, asked: bool, config: SpeculativeConfig | None) -> None:
        """asked: a difference is an error, and found before the first request. config: of proposals."""
        self.deterministic = deterministic
        self.differ: str | None = None  # how the bits of a step with proposals differ from those of others
        self._asked, self._config = asked, config
        self._trial: Generator[int, None, int] | None = None
        self.waits: bool = False
        """Whether the trial was left for later: only then an engine has to do with this."""
        self._why: str | None = None  # the promise is not kept
        self._runner: CachedRunner | None = None  # that was tried
        self._fingerprint = ""

    def check(self, runner: CachedRunner) -> bool:
        """Try a new runner if need be, now or by `step`; whether it is deterministic, as far as is known. Raises
        NotDeterministic, and what the model raises, if determinism was asked for.
        """
        self._runner, self._fingerprint = runner, runner.backend.fingerprint()
        if not self.deterministic:
            self._settle(None)
            return False
        speculated = self._config is not None and runner.cannot_speculate() is None
        named = runner.backend.numerics is not None and getattr(runner.model, "portable", False)
        # A trial of compiled programs compiles those that requests will need, and for a cache of the same size.
        if named and not self._asked and not runner.backend.shapes.compiled:
            self.waits, self._trial = True, steps(runner, speculated=speculated)
            return True
        try:
            with telling(runner.name):
                selfcheck(runner, unused=True, speculated=speculated)
        except Exception as e:
            self._settle(e)
        else:
            self._settle(None)
        return self.deterministic

    @property
    def tries(self) -> bool:
        """Whether there is a step of a trial to take."""
        return self._trial is not None

    def step(self) -> bool:
        """Take a step of a trial that was left for later; whether there was one to take. Only for the thread that steps
        the engine.
        """
        if self._trial is None:
            return False
        try:
            next(self._trial)
        except StopIteration:
            self._settle(None)
        except Exception as e:
            self._settle(e)
        return True

    def again(self) -> int:
        """Try it once more, see `selfcheck`; 0 means that there is nothing to try here. One that was left for later is
        not needed any more then. Raises NotDeterministic.
        """
        if self._runner is None:
            return 0
        compared = selfcheck(self._runner, speculated=self._runner.cannot_speculate() is None)
        if self._trial is not None:
            self._settle(None)
        return compared

    def close(self) -> None:
        """There will be no further step."""
        if self._trial is not None:
            self._trial.close()

    def _settle(self, error: Exception | None) -> None:
        self._trial = None
        if isinstance(error, ProposalsDiffer):
            self.differ = str(error)
            if self._config is not None and not self._config.auto:
                self.deterministic, self._why = False, self.differ
                log.warning("deterministic=False, as speculative_config may change bits: %s", error)
        elif error is not None:
            if self._asked:
                raise error
            self.deterministic, self._why = False, f"the check of the model failed: {error}"
            log.warning("deterministic=False, as %s", self._why)
        log.info("deterministic=%s; %s", bool(self.deterministic), self._fingerprint)
        if not self.proposes:
            log.info("speculative_config: off from now on, as proposals may change bits")

    @property
    def proposes(self) -> bool:
        """False: tokens were proposed where that paid, until it was found that they may change bits."""
        auto = self._config is not None and self._config.auto
        return not (self.waits and auto and (self.differ is not None or not self.deterministic))

    def told(self, facts: Facts) -> Facts:
        """An engine's facts from before the trial, as they are now."""
        if not self.waits:
            return facts
        remark = UNTRIED if self._trial is not None else self._why or self.differ
        if remark is None:
            return facts
        speculates, remarks = facts.speculates and self.proposes, (*facts.remarks, remark)
        return replace(facts, deterministic=bool(self.deterministic), speculates=speculates, remarks=remarks)
