"""The crate's face: hand over a model, hand over prompts, get a stream for each."""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from hibachi.engine.admission import check_ids, check_params
from hibachi.engine.job import Job
from hibachi.engine.pooling import MixedRunner, check_pooling, has_hidden
from hibachi.engine.runner import Runner
from hibachi.engine.sampler import RowSampler
from hibachi.engine.selfcheck import selfcheck
from hibachi.engine.service import Service, given_backend
from hibachi.engine.stops import Stopper, as_token
from hibachi.engine.tokentable import TokenTable, misfits
from hibachi.engine.uncached import WholeRunner
from hibachi.engine.worker import Worker
from hibachi.errors import ConfigError, InvalidRequest, shown
from hibachi.model.pooling import Pooling
from hibachi.plan.policies import policy_of
from hibachi.plan.policy import Policy
from hibachi.plan.scheduler import Limits, Scheduler
from hibachi.plan.sequence import Seq
from hibachi.request import SamplingParams, StopRule, Terms, as_params, as_terms
from hibachi.streams.channel import Channel
from hibachi.streams.stream import Item, ItemStream, native_row
from hibachi.tensor.array_backend import ArrayBackend, HostArray
from hibachi.tensor.cache import Paged, State
from hibachi.tensor.discover import backend_for, resolve

log = logging.getLogger("hibachi.engine")
_IDS = "Here a stop is stop= or stop_token_ids, and allowed_token_ids or logit_bias keep tokens away."
NO_LIMIT = 2**31 - 2
DEFAULT_CACHE_BYTES = 2**30
CHECKPOINTS = 2  # recurrent states kept for each row
CHECKPOINT_TOKENS = 256  # of a prompt, from one to the next


class AutoregressiveBatchInference(Service):
    """Continuous batching for one model: requests join and leave the batch at every step.

    model: an object with `step` and `cache_spec` (level 2, `CachedModel`), `logits` (level 1, `LogitsModel`) or
    `forward` (level 0, `Autoregressive`); the highest it has is used.
    stop_token: ends every request; a number or an array of shape (*tok) or (1, *tok). See also `run(stop=)`.
    padding_token: (1, *tok), or a number; levels 0 and 1 pad shorter rows with it on the left. None: only rows of equal
    length share a forward pass, and nothing is padded.
    max_batch_size: requests that run at once. max_model_len: most tokens of a request, prompt included; None: the
    model's own `max_model_len`.
    max_batch_tokens: level 2, tokens computed in a step. block_size: level 2, positions in a cache block;
    None: what suits the backend, 16 or more.
    cache_bytes: level 2, memory for keys and values; None: enough for a full batch, at most 1 GiB or the device's.
    dtype: level 2, of the cache.
    prefix_cache: level 2, requests share the keys and values of what they have in common at the beginning, also with
    those that have ended, as long as nobody needs the memory.
    policy: who is served next: "priority" (None; by `Terms.priority`, then by arrival), "fcfs", "fair",
    "shares", "waiting-served", one that is installed, or an object (`hibachi.plan.policy`).
    reserve_all: level 2, a request starts when there is memory for all that it may generate, and is never preempted.
    False: when there is memory for its prompt; if memory runs out later, the last in the order of service is preempted
    and computes its tokens again.
    max_prefill_tokens: tokens of prompts computed in a step; None: what max_batch_tokens leaves.
    service: max_waiting, pause_after, restart, stall_after, record: see `Service`.
    deterministic: who shares the batch never changes a bit. Level 2: on a backend's kernels for that
    (`backend.invariant()`, on which the model must have been made); levels 0 and 1: one row a call. None: as the model
    was made. At level 2, `selfcheck` tries it when the engine is made. See docs/determinism.md.
    backend: a name, a backend, or None: the model's `backend`, else that of the first array seen.

    Raises ConfigError, BackendNotFound, BackendNotInstalled, UnsupportedOperation or NotDeterministic.
    """

    def __init__(
        self,
        model: Any,
        *,
        stop_token: Any = None,
        padding_token: Any = None,
        max_batch_size: int = 16,
        max_model_len: int | None = None,
        backend: str | ArrayBackend | None = None,
        max_batch_tokens: int = 2048,
        block_size: int | None = None,
        cache_bytes: int | None = None,
        dtype: str = "float32",
        prefix_cache: bool = True,
        policy: str | Policy | None = None,
        reserve_all: bool = False,
        max_prefill_tokens: int | None = None,
        deterministic: bool | None = None,
        **service: Any,
    ) -> None:
        super().__init__(max_batch_size, **service)
        self._model = model
        self._level = level_of(model)
        self._vocab: int | None = getattr(model, "vocab_size", None) if self._level else None
        own = getattr(model, "max_model_len", None)
        limit = max_model_len if max_model_len is not None else own
        if limit is None and stop_token is None:
            raise ConfigError(
                "A request that never stops must end somewhere: expected max_model_len= (or a stop_token=, or an "
                "attribute max_model_len of the model); got none. Pass max_model_len=N, most tokens of a request."
            )
        for name, value, least in (
            ("max_batch_size", max_batch_size, 1),
            ("max_model_len", NO_LIMIT if limit is None else limit, 2),
            ("max_batch_tokens", max_batch_tokens, 1),
            ("block_size", 16 if block_size is None else block_size, 1),
            ("max_prefill_tokens", NO_LIMIT if max_prefill_tokens is None else max_prefill_tokens, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} must be an integer >= {least}; got {value!r}.")
        if self._level == 2 and limit is None:
            raise ConfigError("A model with a cache needs max_model_len=N, the most tokens of a request; got None.")
        self.max_model_len = NO_LIMIT if limit is None else limit
        self._budget, self._asked_block_size = max(max_batch_tokens, max_batch_size), block_size
        self._cache_bytes, self._dtype = cache_bytes, dtype
        self._prefix_cache, self._reserve_all, self._prefill = prefix_cache, reserve_all, max_prefill_tokens
        self._policy = policy_of(policy)
        self._stop_token, self._padding_token = stop_token, padding_token
        self._backend = self._find_backend(backend, stop_token, padding_token)
        self._asked, self.deterministic = bool(deterministic), self._decide(deterministic)
        self._runner: MixedRunner | None = None
        if padding_token is not None:
            _check_padding(self._host(padding_token), padding_token)
        if self._backend is not None and self._vocab is not None:
            self._start((), np.int32 if self._level == 2 else np.int64)

    def _decide(self, deterministic: bool | None) -> bool:
        """Is the batch to leave no trace in anybody's bits? Raises ConfigError, UnsupportedOperation."""
        if self._level < 2:
            return bool(deterministic)
        own = getattr(self._model, "backend", None)
        computes = own if isinstance(own, ArrayBackend) else self._backend
        if not deterministic or computes is None or computes.deterministic:
            return computes is not None and computes.deterministic if deterministic is None else deterministic
        if computes is own:
            raise ConfigError(
                f"deterministic=True needs a model on kernels that do not depend on the batch; this one was made on "
                f"{own!r}. Make it on that backend's `invariant()`, or pass deterministic=False."
            )
        self._backend = computes.invariant()
        return True

    def _check_bits(self, runner: MixedRunner) -> None:
        """`selfcheck` before the first request. If nobody asked for determinism, a model without it is served too."""
        assert self._backend is not None
        if self.deterministic:
            try:
                selfcheck(runner, unused=True)
            except Exception as e:
                if self._asked:
                    raise
                self.deterministic = False
                log.warning("deterministic=False, as the check of the model failed: %s", e)
        self._runner = runner
        log.info("deterministic=%s; %s", self.deterministic, self._backend.fingerprint())

    def selfcheck(self) -> int:
        """Compute a few random prompts alone and beside others; returns how many outputs agreed in every bit.

        With a cache of its own, at any time. A deterministic engine does so when it is made. 0: nothing to compare, as
        the model returns tokens, not logits, or has no cache. Raises NotDeterministic with the first difference.
        """
        return selfcheck(self._runner) if self._runner is not None else 0

    # ---- requests ----------------------------------------------------------------------------------------------

    def run(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Any = None,
        include_stop: bool = True,
        prompt_embeds: Any = None,
        terms: Terms | None = None,
    ) -> ItemStream[Any]:
        """Queue a prompt (seq, *tok); returns its stream at once.

        prompt_embeds: (seq, hidden) floats in the place of the prompt, which is None then: what the model's first layer
        sees instead of the embeddings of tokens. For models with an attribute `embed_size`, as our decoder is one.
        params: levels 1 and 2, how to sample; None: plain sampling up to the limit. What needs a tokenizer (stop,
        bad_words) or several streams (n, best_of) is refused: `hibachi.LLM` serves it. max_new_tokens: overrides
        params.max_tokens. stop: a `StopRule`, a predicate, a token or a list of token ids, beside the engine's
        stop_token. include_stop: deliver the stop token as the last item; so does params.include_stop.
        terms: priority, tenant, deadlines, cache salt.

        Level 0 streams yield native arrays (*tok); with sampling they yield ints.
        Raises InvalidRequest, PromptTooLong, QueueFull, EngineClosed or EngineFailed, before anything else is touched.
        """
        if isinstance(params, SamplingParams):
            for name in ("stop", "bad_words"):
                if got := getattr(params, name):
                    raise InvalidRequest(
                        f"{name} takes a tokenizer, which only hibachi.LLM has; got {shown(got)}. {_IDS}"
                    )
            if params.runs > 1:
                raise InvalidRequest(
                    f"run makes one stream, so n and best_of must be 1; got n={params.n}, best_of={params.best_of}. "
                    f"Call it several times, or use hibachi.LLM."
                )
        return self._submit(
            self._prepare(prompt, params, max_new_tokens, stop, include_stop, embeds=prompt_embeds, terms=terms)
        )

    def embed(self, prompt: Any, *, pooling: Pooling = "last", terms: Terms | None = None) -> Item[Any]:
        """Queue a prompt of token ids for a vector: `await` it, or call `.result()`. A native array, float32 [hidden].

        pooling: "mean" over the hidden states of all tokens, that of the "last" or of the first ("cls"). For models of
        level 2 with `hidden(params, cache, x) -> ([n_out, hidden], cache)`, as our decoders have it. Long prompts are
        computed in chunks, beside others and beside those that generate.

        Raises UnsupportedOperation for a model without `hidden`, and what `run` raises.
        """
        return Item(self._submit(self._prepare(prompt, None, terms=terms, pooling=pooling)))

    def _prepare(
        self,
        prompt: Any,
        params: SamplingParams | None,
        max_new_tokens: int | None = None,
        stop: Any = None,
        include_stop: bool = True,
        bad_words: tuple[tuple[int, ...], ...] = (),
        embeds: HostArray | None = None,
        terms: Terms | None = None,
        pooling: Pooling | None = None,
    ) -> Job:
        """Everything about a request that can be wrong; nothing is queued yet. bad_words: as token ids.

        pooling: a vector is wanted, no tokens.
        """
        if pooling is not None:
            check_pooling(pooling, has_hidden(self._model))
            params, max_new_tokens = (None if self._vocab is None else SamplingParams()), 1
        if embeds is not None:
            embeds = self._check_embeds(prompt, embeds, params)
            prompt = np.zeros(len(embeds), np.int32)  # no tokens, but as many positions
        host = self._admit_prompt(prompt)
        if params is not None and self._vocab is None:
            raise InvalidRequest(
                f"This model returns tokens, not logits, so it samples by itself; got params={params!r}. Leave params "
                f"out and pass max_new_tokens= or stop=."
            )
        if self._vocab is not None:
            params = as_params(params, SamplingParams(max_tokens=None))
        limit = max_new_tokens if max_new_tokens is not None else params.max_tokens if params else None
        if limit is not None and (not isinstance(limit, (int, np.integer)) or isinstance(limit, bool) or limit < 1):
            raise InvalidRequest(f"max_new_tokens must be an integer >= 1 (or None: no limit); got {shown(limit)}.")
        if not isinstance(include_stop, (bool, np.bool_)):
            raise InvalidRequest(f"include_stop must be True or False; got {type(include_stop).__qualname__}.")
        if params is not None:
            assert self._vocab is not None
            check_params(params, limit, vocab=self._vocab, cached=self._level == 2)
        terms, now = as_terms(terms), time.monotonic()
        seq = Seq(len(host), None if limit is None else int(limit), priority=terms.priority, tenant=terms.tenant)
        seq.deadline = None if terms.timeout is None else now + terms.timeout
        seq.start_by = None if terms.queue_timeout is None else now + terms.queue_timeout
        self._scheduler.fit(seq.prompt_len, seq.max_new)
        if self._shares and embeds is None and pooling is None and (params is None or params.prompt_logprobs is None):
            seq.keys, seq.salt = self._block_keys(host), terms.cache_salt
        seed = params.seed if params and params.seed is not None else secrets.randbits(64)
        job = Job(
            seq,
            Channel(self._pause_after),
            host,
            stop=self._stopper(stop, params),
            include_stop=bool(include_stop) or (params is not None and params.include_stop),
            params=params,
            seed=seed & (2**64 - 1),
            bad_words=bad_words,
            embeds=embeds,
            pooling=pooling,
        )
        if params is not None and params.prompt_logprobs is not None:
            job.scores = job.channel.prompt_logprobs = [None] * len(host)
        return job

    def _check_embeds(self, prompt: Any, embeds: Any, params: SamplingParams | None) -> HostArray:
        """Embeddings in the place of a prompt, on the host. Raises InvalidRequest."""
        size = getattr(self._model, "embed_size", None)
        if size is None:
            raise InvalidRequest(
                f"prompt_embeds takes a model with an attribute `embed_size` that looks at `x.embeds`; "
                f"{type(self._model).__name__} has none. Pass token ids."
            )
        host = self._host(embeds)
        if prompt is not None or host.ndim != 2 or host.shape[1] != size or not len(host) or host.dtype.kind != "f":
            raise InvalidRequest(
                f"prompt_embeds must be floats of shape (sequence, {size}), and the prompt None; got shape "
                f"{host.shape} of {host.dtype}, and a prompt of type {type(prompt).__name__}."
            )
        if not np.isfinite(host).all():
            raise InvalidRequest("prompt_embeds must be finite; got NaN or infinity. Look where they were made.")
        if params is not None and params.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs needs a prompt of tokens; got prompt_embeds. Leave one of them out.")
        return host.astype(np.float32)  # a copy: the caller's may change

    def _check_room(self, tenant: Hashable, new: int) -> None:
        """Raises QueueFull if there is no room for so many requests more."""
        if self._worker is not None:
            self._worker.check_room(tenant, new)

    def _submit(self, job: Job) -> ItemStream[Any]:
        assert self._worker is not None
        self._worker.add(job)
        read = _as_it_is if self._vocab is not None and job.pooling is None else native_row
        return ItemStream(job.channel, partial(self._cancel, job), read)

    def _submit_vector(self, job: Job, change: Callable[[HostArray], HostArray] | None) -> ItemStream[HostArray]:
        """A stream of one vector, on the host. change: what is to be made of it."""
        assert self._worker is not None and self._backend is not None
        self._worker.add(job)
        return ItemStream(job.channel, partial(self._cancel, job), partial(_host_row, self._backend, change))

    def _admit_prompt(self, prompt: Any) -> HostArray:
        """Check a prompt; returns it on the host. There is a worker to serve it then."""
        if self._backend is None:
            self._backend = backend_for(prompt) if hasattr(prompt, "dtype") else resolve("numpy")
        host = self._host(prompt)
        if host.ndim == 0:
            raise InvalidRequest(
                f"A prompt must have the shape (sequence, *token), rank 1 or higher; got a scalar: {prompt!r}."
            )
        if not host.shape[0]:
            raise InvalidRequest(
                "A prompt must hold at least one token; got an empty one. Start it with a start token."
            )
        if host.dtype.kind not in "iufb":
            raise InvalidRequest(f"A prompt must hold numbers; got dtype {host.dtype}. Tokenize it first.")
        if self._worker is None:
            self._start(host.shape[1:], host.dtype if self._vocab is None else np.dtype(np.int32))
        table = self._table.values
        if host.shape[1:] != self._table.shape or (host.dtype.kind in "iu") != (table.dtype.kind in "iu"):
            raise InvalidRequest(
                f"This engine batches tokens of shape {self._table.shape} and dtype {table.dtype} (those of its first "
                f"request); got shape {host.shape[1:]} and dtype {host.dtype}. Use an engine for each kind of token."
            )
        if self._vocab is not None:
            check_ids(host, self._vocab)
        with np.errstate(over="ignore", invalid="ignore"):
            tokens = host.astype(table.dtype)  # a copy: the caller's may change
        if self._vocab is None:
            for i, value in misfits(host, tokens):
                raise InvalidRequest(
                    f"This engine's tokens are {table.dtype} (as in its first request), which cannot hold {value}, "
                    f"token {i} of the prompt. Send smaller numbers, or begin with a prompt of a wider dtype."
                )
        return tokens

    def _host(self, value: Any) -> HostArray:
        if self._backend is not None and self._backend.owns(value):
            return self._backend.get(value)
        if hasattr(value, "dtype") and not isinstance(value, (np.ndarray, np.generic)):
            return backend_for(value).get(value)
        try:
            return np.asarray(value)
        except ValueError as e:
            raise InvalidRequest(
                f"A prompt must be an array or a list of equal rows; got {type(value).__name__} ({e})."
            ) from e

    def _stopper(self, stop: Any, params: SamplingParams | None) -> Stopper | None:
        """The engine's own rule, or that and the request's. Equal rules are one object, to be judged at once."""
        ids = tuple(params.stop_token_ids) if params else ()
        if stop is None and not ids:
            return self._default_stop
        extra = as_rule(stop)
        key = StopRule((*extra.tokens, *ids), extra.where, extra.atol)
        try:
            found = self._stoppers.get(key)
        except TypeError:  # its tokens are arrays, which have no hash
            return self._make_stopper(key)
        if found is None:
            found = self._stoppers[key] = self._make_stopper(key)
        return found

    def _make_stopper(self, rule: StopRule) -> Stopper:
        own = () if self._stop_token is None else (self._stop_token,)
        tokens = [self._host(t) for t in (*rule.tokens, *own)]
        return Stopper(StopRule(tokens, rule.where, rule.atol), self._table.shape, self._table.values.dtype)

    # ---- building ----------------------------------------------------------------------------------------------

    def _find_backend(self, backend: Any, *arrays: Any) -> ArrayBackend | None:
        if (found := given_backend(backend, self._model)) is not None:
            return found
        native = [a for a in (*arrays, *leaves(getattr(self._model, "params", None))) if hasattr(a, "dtype")]
        return backend_for(native[0]) if native else None

    def _start(self, shape: tuple[int, ...], dtype: Any) -> Worker:
        """Build the engine, once the kind of token is known."""
        with self._building:
            if self._worker is not None:
                return self._worker
            self._check_open()
            backend = self._backend
            assert backend is not None
            padding = None
            if self._padding_token is not None:
                padding = as_token(self._host(self._padding_token), shape, dtype, "padding token")
            if self._stop_token is not None:
                as_token(self._host(self._stop_token), shape, dtype, "stop token")
            rows = self.max_batch_size
            table = TokenTable(rows, shape, dtype)
            sampler = RowSampler(backend, rows, self._vocab, table) if self._vocab is not None else None
            runner: Runner
            if self._level == 2:
                self._block_size = self._asked_block_size or backend.block_size
                scheduler = Scheduler(
                    self._cached_limits(backend), self._policy, partial(_generated_key, table, self._block_size)
                )
                self._shares = self._prefix_cache
                runner = MixedRunner(self._model, backend, scheduler, table, sampler, self._dtype)
                self._check_bits(runner)
            else:
                limits = Limits(rows, NO_LIMIT, NO_LIMIT, self.max_model_len, prefill=self._prefill)
                scheduler, self._shares = Scheduler(limits, self._policy), False
                runner = WholeRunner(self._model, backend, table, padding, sampler, alone=self.deterministic)
            self._table, self._scheduler = table, scheduler
            self._default_stop: Stopper | None = None
            if self._stop_token is not None:
                self._default_stop = self._make_stopper(StopRule())
            self._stoppers: WeakValueDictionary[StopRule, Stopper] = WeakValueDictionary()
            return self._serve(scheduler, runner)

    def _cached_limits(self, backend: ArrayBackend) -> Limits:
        """Blocks for a full batch of the longest requests, if the memory allows; at least for one."""
        rows, longest, size = self.max_batch_size, self.max_model_len, self._block_size
        paged = [s for s in self._model.cache_spec() if isinstance(s, Paged)]
        blocks = 0
        if paged:
            position = sum(s.kv_heads * (s.k_dim + s.v_dim) * _bytes(s.dtype or self._dtype) for s in paged)
            allowed = self._cache_bytes
            if allowed is None:
                memory, one = backend.memory(), position * (longest + size)
                allowed = memory[0] * 8 // 10 if memory else DEFAULT_CACHE_BYTES
                if memory is None and one <= _physical_memory():
                    allowed = max(allowed, one)
            blocks = min(rows * -(-longest // size), allowed // (position * size)) + 1
            if blocks < 2:
                raise ConfigError(
                    f"A cache block needs {position * size} bytes; got cache_bytes={allowed}. Allow more, or make "
                    f"block_size smaller."
                )
        states = self._prefix_cache and any(isinstance(s, State) for s in self._model.cache_spec())
        return Limits(
            rows,
            self._budget,
            self._budget,
            longest,
            blocks,
            size,
            prefill=self._prefill,
            reserve_all=self._reserve_all,
            checkpoints=CHECKPOINTS * rows if states else 0,
            checkpoint_every=max(1, CHECKPOINT_TOKENS // size),
        )

    def _block_keys(self, prompt: HostArray) -> list[Hashable]:
        """What each full block of a prompt holds: the tokens themselves, as bytes."""
        size = self._block_size * prompt[:1].nbytes
        raw = prompt.tobytes()
        return [raw[at : at + size] for at in range(0, len(raw) - size + 1, size)]


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


def as_rule(stop: Any) -> StopRule:
    if stop is None:
        return StopRule()
    if isinstance(stop, StopRule):
        return stop
    if callable(stop):
        return StopRule(where=stop)
    return StopRule(tuple(stop) if isinstance(stop, (list, tuple, set, frozenset)) else (stop,))


def _check_padding(host: HostArray, given: Any) -> None:
    if isinstance(given, (int, float)):
        return  # a plain number stands for a scalar token
    if host.ndim == 0:
        raise ConfigError("The padding token must have rank 1 or higher: (1, *token); got rank 0. Reshape it to (1,).")
    if host.shape[0] != 1:
        raise ConfigError(f"The first dimension of the padding token must be 1: (1, *token); got {host.shape}.")


def _host_row(backend: ArrayBackend, change: Callable[[HostArray], HostArray] | None, item: Any) -> HostArray:
    vector = backend.get(native_row(item))
    return vector if change is None else change(vector)


def _as_it_is(item: Any) -> Any:
    return item


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for v in tree.values() for leaf in leaves(v)]
    if isinstance(tree, (list, tuple)):
        return [leaf for v in tree for leaf in leaves(v)]
    return [tree]


def _bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else int(np.dtype(dtype).itemsize)
