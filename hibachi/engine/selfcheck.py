"""Does who shares the batch change a bit? Asked of the loaded model, with random tokens, in steps of the engine's kind.

A few prompts are computed alone, each in one piece; then beside others, in chunks, in other rows. All outputs must
agree in every bit.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np

from hibachi.engine.cached import CachedRunner
from hibachi.engine.job import Job
from hibachi.engine.meters import Tally
from hibachi.engine.runner import Part, check_output
from hibachi.engine.tokentable import TokenTable
from hibachi.errors import NotDeterministic
from hibachi.plan.scheduler import Limits, Scheduler, StepPlan
from hibachi.plan.sequence import Seq
from hibachi.streams.channel import Channel
from hibachi.tensor.array_backend import Array, HostArray
from hibachi.tensor.cache import StepInputs

LENGTHS = 37, 2, 18  # of the prompts that are compared
COMPANY = 6  # others beside them
NEW = 3  # tokens after each prompt
CHUNK = 7  # tokens of a prompt at once, beside others


def selfcheck(runner: CachedRunner, *, unused: bool = False) -> int:
    """Raises NotDeterministic with the first output that depends on the batch; returns how many were compared.

    unused: nobody has used the runner yet, so its cache may be taken; otherwise one more is made for the check. 0: a
    model that returns tokens, not logits, is not checked, as we do not know which to give it; nor is one whose cache
    has no room for the prompts. What the model raises is raised.
    """
    if runner.sampler is None:
        return 0
    texts = _texts(runner.limits, runner.sampler.vocab_size)
    probe = _Probe(runner, runner.sampler.vocab_size, take_cache=unused)
    try:
        alone: dict[tuple[int, int], HostArray] = {}
        for i in list(texts)[: len(LENGTHS)]:
            alone |= probe.outputs({i: texts[i]}, runner.limits.budget)
        together = probe.outputs(dict(reversed(texts.items())), CHUNK)
    finally:
        if unused:
            runner.rebuild(keep=False)
    for (i, at), want in alone.items():
        got = together[i, at]
        if not np.array_equal(got, want, equal_nan=True):
            off = np.abs(got.astype(np.float64) - want.astype(np.float64)).max()
            raise NotDeterministic(
                f"{runner.name} does not compute the same bits whoever shares the batch: the output after {at} random "
                f"tokens differs by up to {off:.2g} between a run alone and one beside {len(texts) - 1} others in "
                f"chunks of {CHUNK}. Pass deterministic=False, or let the model multiply and attend with the `linear` "
                f"and `attend` of {runner.backend!r}."
            )
    return len(alone)


def _texts(limits: Limits, vocab_size: int) -> dict[int, tuple[int, HostArray]]:
    """Random prompts by number, each with its length and the tokens that follow; as many as there is room for."""
    random = np.random.default_rng(0)
    texts, blocks = {}, 0
    for i, n in enumerate([*LENGTHS, *random.integers(1, LENGTHS[0], COMPANY).tolist()]):
        n = min(n, limits.max_len - 1)
        end = min(n + NEW, limits.max_len)
        blocks += -(-end // limits.block_size)
        if limits.blocks and blocks >= limits.blocks:
            break
        texts[i] = n, random.integers(0, vocab_size, end).astype(np.int32)
    return texts


class _Probe:
    """A runner like another, to which the tokens that it would sample are given, and whose outputs are kept."""

    def __init__(self, runner: CachedRunner, vocab_size: int, *, take_cache: bool) -> None:
        limits, self._vocab = runner.limits, vocab_size
        if not (take_cache or runner.backend.static_shapes):  # who compiles for the shape of the cache needs the same
            most = 1 + (len(LENGTHS) + COMPANY) * -(-(max(LENGTHS) + NEW) // limits.block_size)
            limits = replace(limits, blocks=min(limits.blocks, most))
        self._limits = replace(limits, checkpoints=0, max_waiting=None, prefill=None)
        self._runner: Any = copy.copy(runner)
        self._runner.tally = Tally()
        self._runner.limits, self._runner.sampler, self._runner._part = limits, None, self._part
        self._runner._embeds, self._runner._unscored = {}, np.zeros(limits.rows, np.int32)
        self._runner.table = TokenTable(limits.rows, (), np.int32)
        if not take_cache:
            self._runner._make_cache()

    def outputs(self, texts: dict[int, tuple[int, HostArray]], chunk: int) -> dict[tuple[int, int], HostArray]:
        """{(number, tokens before it): output} of texts that are stepped together, chunks of their prompts at once."""
        runner, scheduler = self._runner, Scheduler(replace(self._limits, chunk=chunk))
        runner.block_table = scheduler.block_table
        self._kept: dict[tuple[int, int], HostArray] = {}
        for i, (n, text) in texts.items():
            job = Job(Seq(n, len(text) - n, tenant=i), Channel(), text[:n])
            job.seq.owner = job
            scheduler.add(job.seq)
        self._texts = texts
        while (plan := scheduler.schedule()) is not None:
            for seq in plan.fresh:
                runner.admit(seq)
            outcome = runner.run(plan)
            for fault in outcome.faults.values():
                raise fault
            for part in outcome.parts:
                runner.table.write(plan.rows[part.idx], plan.end[part.idx], part.tokens)
            scheduler.commit(plan, np.zeros(int(plan.emit.sum()), bool))
        return self._kept

    def _part(self, plan: StepPlan, idx: Any, out: Array, x: StepInputs[Array], call: Any = None) -> Part:
        runner = self._runner
        check_output(out, runner.backend, (x.last.shape[0], self._vocab), runner.name, kind="logits")
        host, tokens = self._runner.backend.get(out), np.zeros(len(idx), np.int32)
        for place, i in enumerate(idx.tolist()):
            number, at = plan.seqs[i].tenant, int(plan.end[i])
            self._kept[number, at] = host[place].copy()
            tokens[place] = self._texts[number][1][at]
        return Part(idx, tokens, None, np.zeros(len(idx), bool))
