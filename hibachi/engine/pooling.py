"""Embeddings: one vector for a whole text, pooled from the model's last hidden states."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from hibachi.engine.cached import CachedRunner
from hibachi.engine.job import Job
from hibachi.engine.runner import Outcome, Part, StepFailed, check_output, jobs_of, writers_first
from hibachi.plan.scheduler import StepPlan
from hibachi.plan.sequence import Seq
from hibachi.tensor.array_backend import Array, HostArray
from hibachi.tensor.cache import StepInputs


def has_hidden(model: Any) -> bool:
    """Does it tell its hidden states?"""
    return all(callable(getattr(model, name, None)) for name in ("hidden", "step", "cache_spec"))


class MixedRunner(CachedRunner):
    """A `CachedRunner` for a batch in which some want a vector: those are run beside the others, on the same cache."""

    _vectors: PoolingRunner | None = None  # made when first needed, and after each `rebuild`

    def admit(self, seq: Seq) -> None:
        if seq.owner.pooling is None:
            super().admit(seq)
            return
        if self._vectors is None:
            self._vectors = PoolingRunner(self)
        self._unscored[seq.row] = 0
        self._vectors.admit(seq)

    def run(self, plan: StepPlan) -> Outcome:
        if self._vectors is None or not (mine := [seq.owner.pooling is not None for seq in plan.seqs]).count(True):
            return super().run(plan)
        idx = writers_first(plan)
        vectors = np.array(mine)[idx]
        outcome = Outcome([], {})
        if not vectors.all():
            outcome += self.run_rows(plan, idx[~vectors])
        try:
            outcome += self._vectors.run_rows(plan, idx[vectors])
        except StepFailed as e:
            e.cache_lost |= self.advanced and not vectors.all()
            raise
        return outcome

    def can_launch(self, plan: StepPlan) -> bool:
        if self._vectors is not None and any(seq.owner.pooling is not None for seq in plan.seqs):
            return False
        return super().can_launch(plan)

    def rebuild(self, *, keep: bool) -> None:
        self._vectors = None
        super().rebuild(keep=keep)


class PoolingRunner(CachedRunner):
    """Runs the rows of a plan that want a vector, on the cache of the runner that samples tokens for the others."""

    def __init__(self, texts: CachedRunner) -> None:
        self._texts = texts
        shared = vars(texts).copy()
        del shared["cache"], shared["kept"]
        vars(self).update(shared)
        self.model, self.sampler, self.sizes = _Hidden(texts.model), None, texts.sizes[:1]
        self.name = f"{type(texts.model).__name__}.hidden"
        self._embeds, self._unscored = WeakValueDictionary(), np.zeros_like(texts._unscored)
        self._compile(donate=texts._donating)
        self._sums: WeakKeyDictionary[Job, dict[int, Any]] = WeakKeyDictionary()
        """{position: sum over the tokens from there, float64 [hidden]} of each request."""

    @property
    def cache(self) -> list[Any]:
        return self._texts.cache

    @cache.setter
    def cache(self, cache: list[Any]) -> None:
        self._texts.cache = cache

    def admit(self, seq: Seq) -> None:
        super().admit(seq)
        pooling, before_last = seq.owner.pooling, seq.prompt_len - 1
        self._unscored[seq.row] = {"mean": before_last, "cls": min(1, before_last), "last": 0}[pooling]
        self._sums[seq.owner] = {}

    def _room(self) -> int:
        return self.limits.budget

    def _part(self, plan: StepPlan, idx: Any, out: Array, x: StepInputs[Array], call: Any = None) -> Part:
        check_output(out, self.backend, (x.last.shape[0], None), self.name, kind="f")
        host = self.backend.get(out).astype(np.float64, order="C")
        if call is not None:
            host = self._sum(plan, *call, host)
        vectors = host[: len(idx)]
        for i, job in enumerate(jobs_of(plan, idx)):
            vectors[i] = self._pooled(job, vectors[i])
        bad = ~np.isfinite(vectors).all(axis=1)
        rounded = vectors.astype(np.float32)
        for i, job in enumerate(jobs_of(plan, idx)):
            if job.unit:
                rounded[i] = unit(rounded[i])
        batch = self.backend.put(rounded)
        return Part(idx, np.zeros(len(idx), np.int32), batch, np.ones(len(idx), bool), bad)

    def _sum(self, plan: StepPlan, idx: Any, start: Any, q: Any, emit: Any, host: Any) -> Any:
        """Keep the sums of the tokens before the last; returns the outputs of the last tokens."""
        rows = plan.rows[idx]
        counts = np.clip(self._unscored[rows] - start, 0, q)
        ends = np.cumsum(counts + emit)
        places = zip(*(a.tolist() for a in (start, counts, ends, emit)), strict=True)
        for job, (at, n, end, last) in zip(jobs_of(plan, idx), places, strict=True):
            sums = self._sums[job]
            for position in [p for p in sums if p >= at]:  # of a step that failed half-way and is run again
                del sums[position]
            if n:
                sums[at] = host[end - last - n : end - last].sum(axis=0)
        return host[ends[emit] - 1]

    def _pooled(self, job: Job, last: Any) -> Any:
        sums = self._sums[job]
        if job.pooling == "mean":
            return sum(sums.values(), last) / job.seq.prompt_len
        return sums[0] if sums else last


class _Hidden:
    """A model whose steps end before its head."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def params(self) -> Any:
        return self.model.params

    def step(self, params: Any, cache: list[Any], x: StepInputs[Array]) -> tuple[Array, list[Any]]:
        out: tuple[Array, list[Any]] = self.model.hidden(params, cache, x)
        return out


def unit(vector: HostArray) -> HostArray:
    """Of length 1, unless it is zero."""
    out: HostArray = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return out
