"""Builds an engine: the scheduler, the runner and the table of tokens for one model and one kind of token."""

from __future__ import annotations

import inspect
import logging
import math
import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.backend.layout import State
from hibachi.backend.library import Library
from hibachi.backend.nine import NineBackend
from hibachi.common.shapes import CallShapes
from hibachi.engine.batchengine import Facts
from hibachi.engine.config import EngineConfig
from hibachi.engine.conversions import said_by
from hibachi.engine.group.leader import Leader, LedMemory, facts_of, spread
from hibachi.engine.group.link import connected
from hibachi.engine.kinds import kind_of, takes_lengths
from hibachi.engine.ladder import ModelKind
from hibachi.engine.promise import same_bits
from hibachi.engine.prompts import HostPrompts, NinePrompts, Prompts, kind_of_ids
from hibachi.engine.recording.recorder import RecordedScheduler
from hibachi.engine.runners.cached import CachedRunner
from hibachi.engine.runners.depth import sizes_of
from hibachi.engine.runners.extra_inputs import ExtraInputs, check_taken, declared_by, kept_by
from hibachi.engine.runners.frames import FrameSampler
from hibachi.engine.runners.groups import Alone, Grouping, bucket
from hibachi.engine.runners.heads import ReturnedTokens, Sampled
from hibachi.engine.runners.memory import position_bytes
from hibachi.engine.runners.meters import Tally
from hibachi.engine.runners.nine import NineRunner
from hibachi.engine.runners.overlapping import OverlappingRunner
from hibachi.engine.runners.owncache.runner import OwnCacheRunner
from hibachi.engine.runners.pipelined import PipelinedRunner
from hibachi.engine.runners.runner import ModelRows, Runner
from hibachi.engine.runners.sampler import RowSampler
from hibachi.engine.runners.tokentable import Tables, TokenKind
from hibachi.engine.runners.uncached import WholeRunner
from hibachi.engine.scheduler.policy import Policy
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.errors import ConfigError, UnsupportedOperation, shown

log: logging.Logger = logging.getLogger("hibachi.engine")
NO_LIMIT = 2**31 - 2
UNSTATED = 2**20  # longest request in tokens, where only a stop token ends it
DEFAULT_CACHE_BYTES = 2**30
WHOLE_SEQUENCES = "each step computes whole sequences; with `past` and `step` new tokens only would be"
PIECES = 4, 16  # tokens of each row of such a call, besides one
CHECKPOINTS = 2  # recurrent states kept for each row
STATES_AT_ONCE = 64  # rows of a call of a recurrent model where calls have few sizes: each is computed in full
CHECKPOINT_TOKENS = 256  # tokens of a prompt from one checkpoint to the next


class Share(NamedTuple):
    """Memory of a draft model's pools: bytes of a position; of each row, positions besides those of its blocks."""

    position: int
    more: int


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is built from. longest: tokens of a request, whoever says so.
    dtype: of the cache. draft: None means there is no draft model.
    """

    model: Any
    kind: ModelKind
    config: EngineConfig
    longest: int
    dtype: str
    draft: Share | None = None

    @property
    def rows(self) -> int:
        """Requests that run at once."""
        return self.config.max_num_seqs

    @property
    def budget(self) -> int:
        """Tokens of a step: at least one for each row."""
        return max(self.config.max_num_batched_tokens, self.config.max_num_seqs)

    @property
    def vocab_size(self) -> int | None:
        """Size of the vocabulary; None means the model returns tokens."""
        return getattr(self.model, "vocab_size", None) if self.kind.level else None

    @property
    def codebooks(self) -> int | None:
        """Ids of a token, where it has several and the engine samples them. Raises ConfigError."""
        return codebooks_of(self.model) if self.vocab_size is not None else None


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """The parts of a built engine. block_size: 0 means nothing is shared."""

    facts: Facts
    scheduler: RecordedScheduler
    runner: Runner
    prompts: Prompts
    block_size: int


def build(
    spec: EngineSpec,
    backend: ArrayBackend | NineBackend,
    policy: Policy,
    tokens: dict[str, Any],
    check: Callable[[CachedRunner], bool],
    deterministic: bool | None,
) -> Built:
    """Build the parts of an engine.

    tokens: token, stop_token, padding_token and stop, as given to `AutoregressiveBatchInference`. check: tries a new
    runner and says whether it is deterministic. Raises ConfigError, and what `check` raises.
    """
    if isinstance(backend, NineBackend):
        return _nine(spec, backend, policy, tokens, deterministic)
    if backend.group is not None:
        check_group(spec, backend.place.stages)
    vocab = spec.vocab_size
    sizes = () if spec.codebooks is None else sizes_of(spec.model)
    prompts = HostPrompts(backend, vocab_size=vocab, sizes=sizes, **tokens)
    tables = Tables(spec.rows, prompts.kind)
    sampler = None if vocab is None else _sampler(backend, spec, vocab, tables)
    beside = _beside(spec, backend)
    rows = ModelRows(spec.model, backend, tables, beside)
    runner: Runner
    remarks: list[str] = []
    size = 0
    if spec.kind is ModelKind.PAGED:
        if (knows := beside.declared.knows) and spec.config.enable_prefix_caching:
            remarks.append(f"no prefix is shared, as what it caches may depend on {' and '.join(sorted(knows))}")
            log.info("%s: %s", type(spec.model).__name__, remarks[-1])
            spec = replace(spec, config=replace(spec.config, enable_prefix_caching=False))
        if spec.draft is not None:
            main = position_bytes(spec.model.cache_spec(), spec.dtype)
            remarks.append(f"a token takes {main} bytes of the cache, and {spec.draft.position} of the draft model's")
        size = spec.config.block_size or backend.block_size
        scheduler = RecordedScheduler(
            _cached_limits(spec, backend, size), policy, partial(_generated_key, tables, size)
        )
        runner = cached = cached_runner(spec.model, backend, scheduler, tables, sampler, spec.dtype, beside)
        deterministic = check(cached)
    elif spec.kind is ModelKind.OWN_CACHE:
        examples = _examples(spec.model, prompts, vocab)
        kind = prompts.kind
        assert kind is not None  # of all: these examples have fixed it
        head, tally = _head(rows, sampler)
        runner = own = OwnCacheRunner(rows, head, kind, tally, examples, spec.longest)
        limits = replace(_own_limits(spec, backend, own.layout.position_bytes), apart=True)
        own.bound((limits.blocks - 1) * limits.block_size, limits.chunk)
        own.decide(deterministic)
        deterministic, remarks = own.deterministic, own.remarks
        if spec.config.enable_prefix_caching and own.try_copies():
            limits, size = replace(limits, copies=True), limits.block_size
        scheduler = RecordedScheduler(limits, policy, partial(_generated_key, tables, size) if size else None)
        own.adopt(scheduler)
    else:
        scheduler = RecordedScheduler(_whole_limits(spec), policy)
        remarks.append(WHOLE_SEQUENCES)
        head, _ = _head(rows, sampler, "logits")
        sampled = head if isinstance(head, Sampled) else None
        runner = whole = WholeRunner(rows, sampled, _grouping(spec, tokens, backend), deterministic)
        if vocab is not None and deterministic is not False and not inspect.iscoroutinefunction(spec.model.logits):
            kind = kind_of_ids(spec.codebooks)
            whole.try_calls(_examples(spec.model, prompts, vocab), prompts.fitted(kind).padding)
        deterministic = whole.deterministic
    facts = _facts(spec, scheduler, backend, bool(deterministic), prompts.kind)
    if sampler is not None and sampler.depth is not None:
        sampler.depth.theirs = runner.theirs
    facts = replace(facts, remarks=tuple(remarks), inputs=beside.declared.inputs)
    return Built(facts, scheduler, runner, prompts, size if spec.config.enable_prefix_caching else 0)


def check_group(spec: EngineSpec, stages: int) -> None:
    """Raise UnsupportedOperation for what several processes, in so many stages, do not compute together."""
    asked = {
        "a model without a paged cache": spec.kind is not ModelKind.PAGED,
        "recurrent states": spec.kind is ModelKind.PAGED
        and any(isinstance(layer, State) for layer in spec.model.cache_spec()),
        "a model with draws, inputs or knows": bool(declared_by(spec.model)),
        "a draft model": spec.draft is not None,
        "a model without stages": stages > 1 and not getattr(spec.model, "stage_layers", ()),
    }
    for what, there in asked.items():
        if there:
            raise UnsupportedOperation(
                f"Several processes do not compute {what} together. Pass tensor_parallel_size=1 and "
                f"pipeline_parallel_size=1."
            )


def _beside(spec: EngineSpec, backend: ArrayBackend) -> ExtraInputs:
    declared = kept_by(backend, declared_by(spec.model), type(spec.model).__name__)
    if spec.kind is ModelKind.PAGED:
        check_taken(spec.model, declared, fields=True)
    elif spec.kind is ModelKind.OWN_CACHE:
        check_taken(spec.model, declared, "step", "encode")
    else:
        check_taken(spec.model, declared, "logits" if spec.kind is ModelKind.LOGITS else "forward")
    return ExtraInputs(declared, spec.rows)


def _nine(
    spec: EngineSpec, backend: NineBackend, policy: Policy, tokens: dict[str, Any], deterministic: bool | None
) -> Built:
    """Build for a backend that has the nine operations only."""
    if level := spec.kind.level:
        raise ConfigError(
            f"A model with {'`step`' if spec.kind is ModelKind.PAGED else '`logits`'} (level {level}) needs a "
            f"hibachi.ArrayBackend; {backend.name} has the nine operations only, which serve `forward` (level 0) and "
            f"feed-forward. Inherit from hibachi.ArrayBackend, which derives the rest from an array-API namespace."
        )
    if declared_by(spec.model):
        raise ConfigError(
            f"`draws` and `inputs` need a hibachi.ArrayBackend, which takes arrays from the host; {backend.name} has "
            f"the nine operations only. Inherit from hibachi.ArrayBackend, or leave them out."
        )
    prompts, scheduler = NinePrompts(backend, **tokens), RecordedScheduler(_whole_limits(spec), policy)
    grouping = _grouping(spec, tokens, backend)
    if deterministic:  # tokens that cannot be compared cannot be shared
        grouping = replace(grouping, known=Alone(), padded=grouping.padded and takes_lengths(spec.model, spec.kind))
    runner = NineRunner(spec.model, backend, grouping)
    facts = _facts(spec, scheduler, backend, bool(deterministic), prompts.kind)
    return Built(facts, scheduler, runner, prompts, 0)


def _whole_limits(spec: EngineSpec) -> Limits:
    return Limits(spec.rows, NO_LIMIT, NO_LIMIT, spec.longest, prefill=spec.config.max_prefill_tokens)


def _grouping(spec: EngineSpec, tokens: dict[str, Any], backend: Library) -> Grouping:
    shapes, padded = backend.shapes, tokens["padding_token"] is not None
    return Grouping(padded=padded, longest=spec.longest, bucket=shapes.length if shapes.compiled else bucket)


def _examples(model: Any, prompts: HostPrompts, vocab: int | None) -> list[HostArray]:
    """Prompts to try a model with: its own `example_prompts`, or arbitrary ones. vocab: None means that tokens are no
    ids: all requests have the kind of the examples then. Raises ConfigError.
    """
    own = getattr(model, "example_prompts", None)
    if own is not None:
        given = own() if callable(own) else own
        if not isinstance(given, Iterable) or not (found := [prompts.taken(prompt) for prompt in given]):
            raise ConfigError(
                f"{type(model).__name__}.example_prompts must be prompts{'' if vocab is None else ' of ids'}, at least "
                f"one; got {shown(given)}."
            )
        prompts.kind = prompts.kind or found[0][1]
        return [prompt for prompt, kind, _ in found if kind == prompts.kind]
    if prompts.kind is None:
        raise ConfigError(
            f"{type(model).__name__} returns tokens, and nothing says of what kind: expected token=, one token, or an "
            f"attribute `example_prompts` of the model; got neither."
        )
    random, (shape, dtype) = np.random.default_rng(0), prompts.kind
    if vocab is None:
        return [random.normal(size=(128, *shape)).astype(dtype) for _ in range(4)]
    sizes = sizes_of(model) if shape else vocab
    return [random.integers(0, sizes, (128, *shape)).astype(np.int32) for _ in range(128)]


def _facts(
    spec: EngineSpec, scheduler: Scheduler, backend: Library, deterministic: bool, kind: TokenKind | None
) -> Facts:
    return Facts(
        vocab_size=spec.vocab_size,
        limits=scheduler.limits,
        cached=spec.kind is ModelKind.PAGED,
        embed_size=getattr(spec.model, "embed_size", None),
        has_hidden=has_hidden(spec.model),
        deterministic=deterministic,
        fingerprint=backend.fingerprint(),
        dtype=spec.dtype,
        model=type(spec.model).__name__,
        numerics=f"{backend.numerics} {spec.dtype}"
        if backend.numerics and getattr(spec.model, "portable", False)
        else None,
        layers=tuple(spec.model.cache_spec()) if spec.kind is ModelKind.PAGED else (),
        token=None if kind is None else (kind.shape, str(kind.dtype)),
        quantization=getattr(spec.model, "quantization", getattr(backend, "quantization", "none")),
        eos_ids=eos_ids_of(spec.model, spec.vocab_size, spec.codebooks),
        codebooks=spec.codebooks,
        vocab_sizes=() if spec.codebooks is None else sizes_of(spec.model),
        seeded=(declared := declared_by(spec.model)).seeded,
        inputs=declared.inputs,
        **said_by(spec.model),
    )


def codebooks_of(model: Any) -> int | None:
    """Ids of a token, from a model's attribute `codebooks`; None means a token is one id. Raises ConfigError."""
    own = getattr(model, "codebooks", None)
    if own is not None and (not isinstance(own, int) or isinstance(own, bool) or own < 1):
        raise ConfigError(
            f"{type(model).__name__}.codebooks must be the number of ids in a token, an integer >= 1; got {shown(own)}."
        )
    return own


def returns_ids(model: Any) -> bool:
    """Whether the engine samples single ids, so that the model may have a text. Raises ConfigError."""
    return bool(kind_of(model).level) and getattr(model, "vocab_size", None) is not None and codebooks_of(model) is None


def _sampler(backend: ArrayBackend, spec: EngineSpec, vocab: int, tables: Tables) -> RowSampler | FrameSampler:
    table, name = tables.of(kind_of_ids(spec.codebooks)), type(spec.model).__name__
    if spec.codebooks is None:
        return RowSampler(backend, spec.rows, vocab, table, name)
    return FrameSampler(backend, spec.rows, spec.model, table)


def eos_ids_of(model: Any, vocab: int | None, codebooks: int | None = None) -> tuple[int, ...]:
    """The end-of-sequence ids of a model that returns logits, from its attribute `eos_ids`: one or several. Raises
    ConfigError. vocab: size of the vocabulary; None means the model returns tokens, which has no such ids.
    """
    own = getattr(model, "eos_ids", None)
    if own is None or vocab is None:
        return ()
    if codebooks is not None:
        raise ConfigError(
            f"{type(model).__name__}.eos_ids is for tokens that are single ids; its tokens have {codebooks} codebooks. "
            f"Write a method or attribute stop_rule, or pass stop_rule=, which sees whole tokens."
        )
    ids = [*own] if isinstance(own, (set, frozenset)) else np.asarray(own, dtype=object).reshape(-1).tolist()
    if not all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) and 0 <= i < vocab for i in ids):
        raise ConfigError(f"{type(model).__name__}.eos_ids must be token ids from 0 to {vocab - 1}; got {shown(own)}.")
    return tuple(int(i) for i in ids)


def cached_runner(
    model: Any,
    backend: ArrayBackend,
    scheduler: Scheduler,
    tables: Tables,
    sampler: RowSampler | FrameSampler | None,
    dtype: str,
    beside: ExtraInputs | None = None,
) -> CachedRunner:
    """A runner for a model of level 2, limited to call sizes that give the same bits."""
    rows = ModelRows(model, backend, tables, beside or ExtraInputs(declared_by(model), tables.rows))
    head, tally = _head(rows, sampler)
    memory, group = None, backend.group
    if group is not None:
        leader = Leader(group, connected(group, facts_of(model, backend)))
        memory = LedMemory(model.cache_spec(), backend, scheduler.limits, dtype, leader, spread(model, backend))
    kind = OverlappingRunner if backend.place.stages == 1 else PipelinedRunner
    runner = kind(rows, scheduler, head, dtype, tally, memory)
    runner.entries = runner.memory
    if runner.inputs.shapes.sizes:
        runner.inputs.shapes = _shapes_of_same_bits(runner, scheduler.limits.rows)
    return runner


def _head(
    of: ModelRows, sampler: RowSampler | FrameSampler | None, method: str = "step"
) -> tuple[Sampled | ReturnedTokens, Tally]:
    tally, name = Tally(), f"{type(of.model).__name__}.{method}"
    if sampler is None:
        return ReturnedTokens(of.backend, tally, name), tally
    return Sampled(sampler, of.tables.of(kind_of_ids(codebooks_of(of.model))), tally, name), tally


def _shapes_of_same_bits(runner: CachedRunner, rows: int) -> CallShapes:
    """The shapes of calls that a trial of the model found to give the same bits. rows: of the batch."""
    shapes, recurrent = runner.inputs.shapes, bool(runner.memory.states)
    first, *more = shapes.sizes
    if recurrent:  # no call has more rows than the batch
        most = min(1 << (rows - 1).bit_length(), STATES_AT_ONCE)
        more = [most] if most > first else []
    one = replace(shapes, sizes=(first,), pieces=(1,))

    def same(size: int, piece: int) -> bool:
        few = replace(one, sizes=(size,), pieces=(1, piece) if piece > 1 else (1,))
        return same_bits(runner, one, few if recurrent else replace(one, sizes=(first, size)))

    sizes = (first, *(size for size in more if same(size, 1)))
    pieces = [piece for piece in PIECES if recurrent and all(same(size, piece) for size in sizes)]
    return replace(shapes, sizes=sizes, pieces=(1, *pieces))


def _cached_limits(spec: EngineSpec, backend: ArrayBackend, size: int) -> Limits:
    """Limits with blocks for a full batch of the longest requests, if memory allows; at least for one. size: of a
    block.
    """
    layers = spec.model.cache_spec()
    position = round(position_bytes(layers, spec.dtype) * spread(spec.model, backend))
    blocks = _blocks(spec, backend, position, size) if position else 0
    states = spec.config.enable_prefix_caching and any(isinstance(s, State) for s in layers)
    return replace(
        _limits(spec, blocks, size),
        checkpoints=CHECKPOINTS * spec.rows if states else 0,
        checkpoint_every=max(1, CHECKPOINT_TOKENS // size),
        stages=backend.place.stages,
    )


def _own_limits(spec: EngineSpec, backend: ArrayBackend, position: int) -> Limits:
    """Limits for a model with a cache of its own, in which a position takes `position` bytes."""
    size = spec.config.block_size or backend.block_size
    return _limits(spec, _blocks(spec, backend, max(1, position), size), size)


def _limits(spec: EngineSpec, blocks: int, size: int) -> Limits:
    return Limits(
        spec.rows,
        spec.budget,
        spec.budget,
        spec.longest,
        blocks,
        size,
        prefill=spec.config.max_prefill_tokens,
        reserve_all=spec.config.reserve_all,
    )


def _blocks(spec: EngineSpec, backend: ArrayBackend, position: int, size: int) -> int:
    """Blocks for a full batch of the longest requests, if memory allows; at least for one. position: bytes of one;
    size: positions of a block.
    """
    allowed, more = spec.config.kv_cache_memory_bytes, 0
    if spec.draft is not None:
        position += spec.draft.position
        more = spec.rows * -(-spec.draft.more // size) * size * spec.draft.position
    if allowed is None:
        memory, one = backend.memory(), position * (spec.longest + size) + more
        allowed = memory[0] * 8 // 10 if memory else DEFAULT_CACHE_BYTES
        if memory is None and one <= _physical_memory():
            allowed = max(allowed, one)
    allowed -= more
    blocks = min(spec.rows * -(-spec.longest // size), allowed // (position * size)) + 1
    if spec.config.cache_tokens is not None:
        blocks = min(blocks, -(-spec.config.cache_tokens // size) + 1)
    if blocks < 2:
        raise ConfigError(
            f"A cache block needs {position * size} bytes"
            + (f", and the draft model {more} bytes of its own" if more else "")
            + f"; got kv_cache_memory_bytes={allowed + more}. Allow more, or make block_size smaller."
        )
    return blocks


def _generated_key(tables: Tables, size: int, seq: Seq, n: int) -> Hashable:
    """The key of block n of a sequence that runs, or just got a row (its tokens are not in the table yet then)."""
    history, start, end = seq.owner.history, n * size, (n + 1) * size
    tokens = history.read(start, end) if end <= history.length else tables.at(seq.row).read(seq.row, start, end)
    kind: TokenKind = seq.owner.kind
    return kind.key(tokens.tobytes())


def _physical_memory() -> float:
    """Bytes of memory of this machine; infinity where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


def limit_of(model: Any) -> int | None:
    """Most tokens of a request, as the model says it; None means that it does not."""
    own: int | None = getattr(model, "max_model_len", None)
    return own


def has_hidden(model: Any) -> bool:
    """Whether the model gives hidden states."""
    return all(callable(getattr(model, name, None)) for name in ("hidden", "step", "cache_spec"))
