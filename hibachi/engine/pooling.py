"""Embeddings: one vector for a whole text, pooled from the model's last hidden states."""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.cached import CachedRunner
from hibachi.engine.job import Job
from hibachi.engine.runner import Part, check_output, jobs_of
from hibachi.engine.stream import Item, ItemStream, native_row
from hibachi.errors import ConfigError
from hibachi.model.pooling import Pooling
from hibachi.plan.scheduler import StepPlan
from hibachi.plan.sequence import Seq
from hibachi.tensor.array_backend import Array
from hibachi.tensor.cache import CacheSpec, StepInputs


class PoolingBatchInference(AutoregressiveBatchInference):
    """Batches prompts through the hidden states of a language model: each gives one vector, float32 [hidden].

    model: with `hidden(params, cache, x) -> ([n_out, hidden], cache)` beside `cache_spec`, as our decoders have it.
    pooling: "mean" over all tokens, the "last" token, or the first ("cls"). Long prompts are computed in chunks, beside
    others, as when text is generated.

    Raises ConfigError for a model without `hidden`, and what `AutoregressiveBatchInference` raises.
    """

    def __init__(self, model: Any, *, pooling: Pooling = "last", **options: Any) -> None:
        if not callable(getattr(model, "hidden", None)):
            raise ConfigError(
                f"Embeddings need the model's hidden states: {type(model).__name__} has no method "
                f"`hidden(params, cache, x)`. Give it one, or use a model that our decoder runs."
            )
        if pooling not in ("mean", "last", "cls"):
            raise ConfigError(f"pooling must be 'mean', 'last' or 'cls'; got {pooling!r}.")
        options["prefix_cache"] = False  # the outputs of all tokens are wanted
        super().__init__(_Hidden(model), **options)
        self._make_runner = partial(_PoolingRunner, pooling)

    def embed(self, prompt: Any) -> Item[Any]:
        """Queue a prompt of token ids; `await` the result or call `.result()`: a native array, float32 [hidden]."""
        job = self._prepare(prompt, None, max_new_tokens=1)
        assert self._worker is not None
        self._worker.add(job)
        return Item(ItemStream(job.channel, partial(self._cancel, job), native_row))


class _Hidden:
    """A model whose steps end before its head."""

    vocab_size = None

    def __init__(self, model: Any) -> None:
        self._model, self.backend = model, getattr(model, "backend", None)
        self.reach = getattr(model, "reach", None)

    @property
    def params(self) -> Any:
        return self._model.params

    def cache_spec(self) -> CacheSpec:
        spec: CacheSpec = self._model.cache_spec()
        return spec

    def step(self, params: Any, cache: list[Any], x: StepInputs[Array]) -> tuple[Array, list[Any]]:
        out: tuple[Array, list[Any]] = self._model.hidden(params, cache, x)
        return out


class _PoolingRunner(CachedRunner):
    """A `CachedRunner` that wants the outputs of many tokens of a prompt, and gives one vector for all of them."""

    def __init__(self, pooling: Pooling, *args: Any) -> None:
        super().__init__(*args)
        self._pooling = pooling
        self._sums: WeakKeyDictionary[Job, dict[int, Any]] = WeakKeyDictionary()
        """{position: sum over the tokens from there, float64 [hidden]} of each request."""

    @staticmethod
    def _name_of(model: Any) -> str:
        return "hidden"

    def admit(self, seq: Seq) -> None:
        super().admit(seq)
        before_last = seq.prompt_len - 1
        self._unscored[seq.row] = {"mean": before_last, "cls": min(1, before_last), "last": 0}[self._pooling]
        self._sums[seq.owner] = {}

    def written(self, rows: Any, positions: Any, part: Part, keep: Any) -> None:
        pass  # a vector is no token: nothing goes on from it

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
        batch = self.backend.put(vectors.astype(np.float32))
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
        if self._pooling == "mean":
            return sum(sums.values(), last) / job.seq.prompt_len
        return sums[0] if sums else last
