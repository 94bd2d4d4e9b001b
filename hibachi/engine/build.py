"""An engine is put together: the scheduler, the runner and the table of tokens for one model and one kind of token."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hibachi.engine.batchengine import Facts
from hibachi.errors import ConfigError
from hibachi.plan.limits import Limits
from hibachi.plan.policy import Policy
from hibachi.plan.scheduler import Scheduler
from hibachi.plan.sequence import Seq
from hibachi.runners.cached import CachedRunner
from hibachi.runners.heads import Head, Sampled, Tokens
from hibachi.runners.meters import Tally
from hibachi.runners.runner import Runner
from hibachi.runners.sampler import RowSampler
from hibachi.runners.selfcheck import same_bits
from hibachi.runners.tokentable import TokenTable
from hibachi.runners.uncached import WholeRunner
from hibachi.tensor.array_backend import ArrayBackend, HostArray
from hibachi.tensor.discover import backend_for, resolve
from hibachi.tensor.layout import Paged, State

NO_LIMIT = 2**31 - 2
DEFAULT_CACHE_BYTES = 2**30
CHECKPOINTS = 2  # recurrent states kept for each row
CHECKPOINT_TOKENS = 256  # of a prompt, from one to the next


@dataclass(frozen=True, slots=True)
class Plan:
    """How an engine is to be, as `AutoregressiveBatchInference` was asked. level: of the model, see `level_of`."""

    model: Any
    level: int
    rows: int
    longest: int  # tokens of a request
    budget: int  # tokens of a step
    prefill: int | None
    block_size: int | None
    cache_bytes: int | None
    dtype: str
    prefix_cache: bool
    reserve_all: bool

    @property
    def vocab_size(self) -> int | None:
        """None: the model returns tokens."""
        return getattr(self.model, "vocab_size", None) if self.level else None


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """What was built. block_size: 0: nothing is shared."""

    facts: Facts
    scheduler: Scheduler
    runner: Runner
    table: TokenTable
    block_size: int

    def block_keys(self, prompt: HostArray) -> list[Hashable]:
        """What each full block of a prompt holds: the tokens themselves, as bytes."""
        size = self.block_size * prompt[:1].nbytes
        raw = prompt.tobytes()
        return [raw[at : at + size] for at in range(0, len(raw) - size + 1, size)] if size else []


def build(
    plan: Plan,
    backend: ArrayBackend,
    policy: Policy,
    shape: tuple[int, ...],
    dtype: Any,
    padding: HostArray | None,
    check: Callable[[CachedRunner], bool],
    deterministic: bool,
) -> Built:
    """An engine for tokens of this shape and dtype. padding: what shorter rows are filled with, or None.

    check: tries a new runner, and says whether it is deterministic. Raises ConfigError, and what `check` raises.
    """
    table = TokenTable(plan.rows, shape, dtype)
    vocab = plan.vocab_size
    sampler = RowSampler(backend, plan.rows, vocab, table) if vocab is not None else None
    runner: Runner
    size = 0
    if plan.level == 2:
        size = plan.block_size or backend.block_size
        scheduler = Scheduler(_cached_limits(plan, backend, size), policy, partial(_generated_key, table, size))
        runner = cached = cached_runner(plan.model, backend, scheduler, table, sampler, plan.dtype)
        deterministic = check(cached)
    else:
        limits = Limits(plan.rows, NO_LIMIT, NO_LIMIT, plan.longest, prefill=plan.prefill)
        scheduler = Scheduler(limits, policy)
        runner = WholeRunner(plan.model, backend, table, padding, sampler, alone=deterministic)
    facts = Facts(
        vocab_size=vocab,
        limits=scheduler.limits,
        cached=plan.level == 2,
        embed_size=getattr(plan.model, "embed_size", None),
        has_hidden=has_hidden(plan.model),
        deterministic=deterministic,
        fingerprint=backend.fingerprint(),
        dtype=plan.dtype,
        model=type(plan.model).__name__,
    )
    return Built(facts, scheduler, runner, table, size if plan.prefix_cache else 0)


def cached_runner(
    model: Any, backend: ArrayBackend, scheduler: Scheduler, table: TokenTable, sampler: RowSampler | None, dtype: str
) -> CachedRunner:
    """A runner for a model of level 2, with the sizes of calls that give the same bits."""
    tally, name = Tally(), type(model).__name__
    head: Head = Sampled(sampler, table, tally, name) if sampler else Tokens(backend, table, tally, name)
    runner = CachedRunner(model, backend, scheduler, table, head, dtype, tally)
    if sizes := runner.inputs.shapes.sizes:
        sizes = (sizes[0], *(size for size in sizes[1:] if same_bits(runner, sizes[0], size)))
        runner.inputs.shapes = replace(runner.inputs.shapes, sizes=sizes)
    return runner


def _cached_limits(plan: Plan, backend: ArrayBackend, size: int) -> Limits:
    """Blocks for a full batch of the longest requests, if the memory allows; at least for one. size: of a block."""
    spec = plan.model.cache_spec()
    paged = [s for s in spec if isinstance(s, Paged)]
    blocks = 0
    if paged:
        position = sum(s.kv_heads * (s.k_dim + s.v_dim) * _bytes(s.dtype or plan.dtype) for s in paged)
        allowed = plan.cache_bytes
        if allowed is None:
            memory, one = backend.memory(), position * (plan.longest + size)
            allowed = memory[0] * 8 // 10 if memory else DEFAULT_CACHE_BYTES
            if memory is None and one <= _physical_memory():
                allowed = max(allowed, one)
        blocks = min(plan.rows * -(-plan.longest // size), allowed // (position * size)) + 1
        if blocks < 2:
            raise ConfigError(
                f"A cache block needs {position * size} bytes; got cache_bytes={allowed}. Allow more, or make "
                f"block_size smaller."
            )
    states = plan.prefix_cache and any(isinstance(s, State) for s in spec)
    return Limits(
        plan.rows,
        plan.budget,
        plan.budget,
        plan.longest,
        blocks,
        size,
        prefill=plan.prefill,
        reserve_all=plan.reserve_all,
        checkpoints=CHECKPOINTS * plan.rows if states else 0,
        checkpoint_every=max(1, CHECKPOINT_TOKENS // size),
    )


def _generated_key(table: TokenTable, size: int, seq: Seq, n: int) -> Hashable:
    """The same for block n of a sequence that runs, or just got a row (then the table does not have its tokens yet)."""
    history, start, end = seq.owner.history, n * size, (n + 1) * size
    tokens = history.read(start, end) if end <= history.length else table.read(seq.row, start, end)
    return tokens.tobytes()


def _physical_memory() -> float:
    """Bytes of this machine; infinity where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


def _bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else int(np.dtype(dtype).itemsize)


def level_of(model: Any) -> int:
    """The highest rung of the ladder that the model stands on. Raises ConfigError if none."""

    def has(name: str) -> bool:
        return callable(getattr(model, name, None))

    if has("step") and has("cache_spec"):
        return 2
    if has("logits"):
        if not isinstance(getattr(model, "vocab_size", None), int):
            raise ConfigError(f"{type(model).__name__} has `logits`, so it also needs `vocab_size`, an integer.")
        return 1
    if has("forward"):
        return 0
    raise ConfigError(
        f"A model needs one of `forward(tokens)`, `logits(tokens, lengths)` or `step(params, cache, x)` with "
        f"`cache_spec()`; {type(model).__name__} has none. See docs/models.md."
    )


def given_backend(backend: Any, model: Any) -> ArrayBackend | None:
    """The backend that was passed, by name or as it is, or the model's own; None if there is neither."""
    if backend is None:
        backend = getattr(model, "backend", None)
    if isinstance(backend, str):
        return resolve(backend)
    if backend is None or isinstance(backend, ArrayBackend):
        return backend
    raise ConfigError(
        f"backend must be a name, an ArrayBackend or None; got {type(backend).__qualname__}. A backend of your own "
        f"inherits from hibachi.ArrayBackend."
    )


def find_backend(backend: Any, model: Any, *arrays: Any) -> ArrayBackend | None:
    """`given_backend`, else that of the first native array among these and the model's parameters. The model is
    settled."""
    found = given_backend(backend, model)
    if found is None:
        native = [a for a in (*arrays, *leaves(getattr(model, "params", None))) if hasattr(a, "dtype")]
        found = backend_for(native[0]) if native else None
    if found is not None:
        settle_model(model, found)
    return found


def first_backend(prompt: Any, model: Any) -> ArrayBackend:
    """Where nothing else told: the backend of the first request's prompt. The model is settled."""
    found = backend_for(prompt) if hasattr(prompt, "dtype") else resolve("numpy")
    settle_model(model, found)
    return found


def settle_model(model: Any, backend: ArrayBackend) -> None:
    """What a lazy library has put off of a model is computed here, as the engine's thread may not be able to: arrays
    in its `params`, in its attributes, and in the model itself if it is a dict, as MLX's modules are."""
    if type(backend).settle is ArrayBackend.settle:
        return
    arrays, seen = list[Any](), set[int]()
    todo = [getattr(model, "params", None), getattr(model, "__dict__", None), model]
    while todo:
        value = todo.pop()
        if not isinstance(value, (dict, list, tuple)):
            arrays += [value] if backend.owns(value) else []
        elif id(value) not in seen:  # they may hold one another
            seen.add(id(value))
            todo += value.values() if isinstance(value, dict) else value
    backend.settle(arrays)


def has_hidden(model: Any) -> bool:
    """Does it tell its hidden states?"""
    return all(callable(getattr(model, name, None)) for name in ("hidden", "step", "cache_spec"))


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for v in tree.values() for leaf in leaves(v)]
    if isinstance(tree, (list, tuple)):
        return [leaf for v in tree for leaf in leaves(v)]
    return [tree]
