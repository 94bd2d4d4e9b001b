"""Continuous batching of an autoregressive model: hand over prompts, get a stream for each."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, overload

import numpy as np
from typing_extensions import TypeVar, Unpack, override

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.backend.infer import backend_of, prompt_backend, training
from hibachi.backend.nine import NineBackend
from hibachi.common.options import spelled, takes
from hibachi.engine import ladder, tiering
from hibachi.engine.admission import check_pooling, checked, embeddings
from hibachi.engine.batchengine import Facts
from hibachi.engine.batchinference import BatchInference
from hibachi.engine.build import (
    NO_LIMIT,
    UNSTATED,
    Built,
    EngineSpec,
    build,
    check_group,
    eos_ids_of,
    has_hidden,
    limit_of,
    returns_ids,
)
from hibachi.engine.config import BatchConfig, BatchOptions, at_least
from hibachi.engine.declared import own_params, own_stop, own_tokens
from hibachi.engine.feeding import TokenFeed
from hibachi.engine.forms import own_vocabulary
from hibachi.engine.group.follower import follow
from hibachi.engine.guidance import guide
from hibachi.engine.guide.protocol import Grammar, Vocabulary
from hibachi.engine.kinds import kind_of, level_told
from hibachi.engine.many import counted, together
from hibachi.engine.promise import Promise
from hibachi.engine.prompts import HostPrompts
from hibachi.engine.runners.job import Job
from hibachi.engine.scheduler.policies import policy_of
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.speculation import choose as speculation
from hibachi.engine.speculation.config import as_config
from hibachi.engine.speculation.howmany import Waits
from hibachi.engine.speculation.ngram import ExpectedTokens
from hibachi.engine.streams.channel import Channel
from hibachi.engine.streams.stream import Item, ItemStream, as_it_is, native_row
from hibachi.engine.trie import Trie, TrieGuides
from hibachi.errors import ConfigError, EngineError, InvalidRequest, shown
from hibachi.request import Guidance, Pooling, Request, SamplingParams, Terms

T = TypeVar("T", default=Any)  # an array of the model's library
Token = TypeVar("Token", default=Any)  # what streams yield
log: logging.Logger = logging.getLogger("hibachi.engine")
_IDS = "Here a stop is stop_rule= or stop_token_ids, and allowed_token_ids or logit_bias keep tokens away."


class AutoregressiveBatchInference(BatchInference, Generic[T, Token]):
    """Continuous batching for one model: requests join and leave the batch at every step.

    To type checkers it is generic in the model's array and in the item of its streams: `int` where the engine samples,
    else the array.

    model: an object with `step` and `cache_spec` (level 2, `CachedModel`), `logits` (level 1, `LogitsModel`) or
    `forward` (level 0, `Autoregressive`); the highest level it has is used.
    stop_token: ends every request; a number or an array of shape (*tok) or (1, *tok). See also `run(stop_rule=)`. None
    means the model's attribute of the same name, as it does for stop_rule, token and padding_token.
    stop_rule: a further stop rule for every request, as `run(stop_rule=)` takes it; with a tolerance of its own.
    token: one of the kind (shape and dtype) that all tokens have, a number or an array (*tok). None means each request
    has its own kind; requests of different kinds share no call.
    padding_token: (*tok) or (1, *tok), or a number; levels 0 and 1 pad shorter rows with it on the left. None means
    only rows of equal length share a forward pass, and nothing is padded. A request whose tokens do not fit stop_token
    or padding_token is refused.
    max_num_seqs: requests that run at once.
    max_model_len: most tokens of a request, prompt included; None means the model's own `max_model_len`, else, with a
    stop_token or stop_rule, 2**20.
    max_num_batched_tokens: level 2, tokens computed in a step.
    block_size: level 2, positions in a cache block; None means what suits the backend, 16 or more.
    kv_cache_memory_bytes: level 2, memory for keys and values; None means enough for a full batch, at most 1 GiB or the
    device's.
    cache_tokens: level 2, positions that the cache holds, if the memory does; None means any number.
    dtype: level 2, of the cache; None means the model's own `dtype`, where that is a name, else "float32".
    enable_prefix_caching: level 2 and own caches, requests that begin alike share what is computed for their common
    beginning, also with ended requests, as long as no other request needs the memory. Of a cache of the model's own
    each gets a copy.
    scheduling_policy: which request starts next: "priority" (None; by `Terms.priority`, then by arrival), "fcfs",
    "fair", "shares", "waiting-served", an installed one, or an object (`hibachi.engine.scheduler.policy`).
    reserve_all: level 2, a request starts when there is memory for all that it may generate, and is never preempted.
    False means that it starts when there is memory for its prompt; if memory runs out later, the last in the order of
    service is preempted and computes its tokens again.
    max_prefill_tokens: tokens of prompts computed in a step; None means what max_num_batched_tokens leaves.
    max_num_queued_reqs: requests that may wait besides the running ones; beyond, `run` raises QueueFull. None means any
    number.
    pause_after: unread items of a stream; beyond, its request pauses until half of them are read. None means any
    number.
    restart: "on_failure" starts again after a lost device or a failed loop, up to three times. None means "never".
    stall_after: seconds without a step, while work waits, after which `health` and the log report a stall; None means
    never.
    record: a file for all plans of the scheduler. None means only the last plans are kept, in memory.
    overlap: begin a step before the tokens of the last one are read. None means where the backend is asynchronous, or
    the model is cut into stages.
    kv_tiers: where prefixes are kept besides the device: see `KVTiers`. A model of your own names its weights for it in
    an attribute `cache_id`, a text: other weights need another one.
    speculative_config: propose tokens, and keep those that would come anyhow: "auto", where that pays, or a mapping as
    {"method": "ngram", "num_speculative_tokens": 4}. The method: "ngram", an installed drafter's name, a `Drafter`; or
    in its place "model", a draft model of level 2. None and "off" mean no proposals.
    deterministic: other requests in the batch never change a bit of a request. Level 2: on a backend's kernels for that
    (`backend.invariant()`, on which the model must have been made), which `selfcheck` tries when the engine is made, or
    beside the first requests if nobody asked and the bits have a name (`Facts.numerics`).
    Levels 0 and 1: rows share only calls in which no bit differs, which is tried on the model, at level 0 with the
    first prompt; otherwise each call has one row. None means level 2 as the model was made, level 1 if it works when it
    is tried (not where each shape is compiled, nor if the model's attribute `deterministic` is False), level 0 no. See
    docs/determinism.md.
    backend: a name, a backend, or an object with the nine operations (level 0). None means the model's `backend`, else
    that of its parameters, its buffers, other arrays that it holds (NumPy's apart), else of the first prompt.

    Raises ConfigError, BackendNotFound, BackendNotInstalled, UnsupportedOperation or NotDeterministic.
    """

    @overload
    def __init__(
        self: AutoregressiveBatchInference[T, int],
        model: ladder.LogitsModel[T] | ladder.SampledModel[T],
        **options: Unpack[BatchOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: AutoregressiveBatchInference[T, T],
        model: ladder.TokenModel[T] | ladder.Autoregressive[T] | ladder.PaddedAutoregressive[T],
        **options: Unpack[BatchOptions],
    ) -> None: ...

    @overload
    def __init__(
        self: AutoregressiveBatchInference[T, Any], model: ladder.CachedModel[T], **options: Unpack[BatchOptions]
    ) -> None: ...

    @takes(BatchConfig)
    def __init__(self, model: ladder.Model[T], **options: Unpack[BatchOptions]) -> None:
        config = BatchConfig(**options)
        super().__init__(model, config.max_num_seqs, config, overlap=config.overlap)
        self.model = model
        self._speculation = as_config(config.speculative_config)
        self._kind = kind_of(model)
        log.info("%s: %s", type(model).__name__, level_told(self._kind))
        if layers := training(model):
            log.warning(
                "%s is in training mode (%s), in which outputs may be others in every call. Call its .eval() first.",
                type(model).__name__,
                ", ".join(layers),
            )
        tokens = own_tokens(model)
        tokens |= {name: one for name in tokens if (one := getattr(config, name)) is not None}
        if (stop_rule := config.stop_rule) is None:
            stop_rule = own_stop(model, eos=not self._kind.level or getattr(model, "vocab_size", None) is None)
        limit = limit_of(model) if config.max_model_len is None else config.max_model_len
        if limit is None and tokens["stop_token"] is None and stop_rule is None:
            raise ConfigError(
                "Every request must end somewhere: expected max_model_len= (or stop_token=, or stop_rule=, or one of "
                "these as an attribute of the model); got none. Pass max_model_len=N, most tokens of a request."
            )
        at_least(2, "")("max_model_len", limit)
        if self._speculation is not None and self._speculation.model is not None:
            self._speculation = speculation.checked(self._speculation, model, NO_LIMIT if limit is None else limit)
        if limit is None and self._kind.has_past:
            raise ConfigError("A model with a cache needs max_model_len=N, the most tokens of a request; got None.")
        self.max_model_len: int | Any = UNSTATED if limit is None else limit
        self._spec = EngineSpec(
            model,
            self._kind,
            config,
            self.max_model_len,
            _own_dtype(model) if config.dtype is None else config.dtype,
            speculation.share(self._speculation),
        )
        self._policy = policy_of(config.scheduling_policy)
        self._params = None if self._spec.vocab_size is None else own_params(model)  # of a request without any
        self._tokens = {**tokens, "stop": stop_rule}
        self._backend = backend_of(config.backend, model, *tokens.values())
        self._promise = Promise(
            self._decide(config.deterministic), asked=bool(config.deterministic), config=self._speculation
        )
        self._built: Built | None = None
        self._read: Callable[[Any], Any] = as_it_is
        if returns_ids(model):
            self.forms.vocabulary = partial(_vocabulary, model)
        if self._backend is not None:
            self._build(self._backend)

    @property
    def deterministic(self) -> bool:
        """Whether other requests in the batch never change a bit. For `async def` models at level 1, known after the
        first step.
        """
        runner = None if self._built is None else self._built.runner
        return bool(self._promise.deterministic or (runner is not None and runner.deterministic))

    def _decide(self, deterministic: bool | None) -> bool | None:
        """Whether the batch must leave no trace in a request's bits; None means that a trial decides.

        Raises ConfigError or UnsupportedOperation.
        """
        if self._kind is not ladder.ModelKind.PAGED:
            if deterministic is None and getattr(self.model, "deterministic", None) is False:
                return False
            known = self._kind.level == 1 and not (self._backend is not None and self._backend.shapes.compiled)
            return deterministic if deterministic is not None or known else False
        own = getattr(self.model, "backend", None)
        computes = own if isinstance(own, ArrayBackend) else self._backend
        assert not isinstance(computes, NineBackend)  # these serve level 0 only
        if not deterministic or computes is None or computes.deterministic:
            return computes is not None and computes.deterministic if deterministic is None else deterministic
        if computes is own:
            raise ConfigError(
                f"deterministic=True needs a model on kernels that do not depend on the batch; this one was made on "
                f"{own!r}. Make it on that backend's `invariant()`, or pass deterministic=False."
            )
        self._backend = computes.invariant()
        return True

    def selfcheck(self) -> int:
        """Compute a few prompts alone, beside others, and with proposed tokens where these are possible; returns how
        many outputs agreed in every bit.

        It may be called at any time: it uses a cache of its own, or at levels 0 and 1 the trial from before the first
        step. A deterministic engine runs it when it is made, or beside its first requests; what is left of that is not
        needed after this. 0 means there was nothing to compare: no request has come, each call has one row, or the
        model has a cache and returns tokens, not logits. Raises NotDeterministic with the first difference.
        """
        runner = None if self._built is None else self._built.runner
        return self._promise.again() or (0 if runner is None else runner.selfcheck())

    # ---- requests ----------------------------------------------------------------------------------------------

    @spelled
    def run(
        self,
        prompt: T | Sequence[Any] | HostArray | None,
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop_rule: Any = None,
        include_stop: bool | None = None,
        prompt_embeds: Any = None,
        inputs: Mapping[str, Any] | None = None,
        allowed: Trie | None = None,
        fed: bool = False,
        prediction: Sequence[int] | None = None,
        guidance: Guidance | Sequence[Guidance] | None = None,
        terms: Terms | None = None,
    ) -> ItemStream[Token]:
        """Queue a prompt (seq, *tok) and return its stream at once.

        prompt_embeds: (seq, hidden) floats in place of the prompt, which is None then: they replace the embeddings of
        tokens at the model's first layer. For models with an attribute `embed_size`, as our decoder has.
        inputs: {name: array}, what the model declares in its attribute `inputs`; the arrays stay with the request.
        allowed: a catalogue: the output is one of its paths, and the stream ends, with the reason "stop", where no path
        goes on. Where one path is the beginning of another, stop_token_ids and the model's end token may come as well.
        Takes logits of single ids.
        fed: after each item the request waits for `stream.feed(token)`, and gives way to others meanwhile. Stop rules
        judge what the model gives; limits count all tokens.
        prediction: token ids of what the output may be. They save time where the engine speculates and the output
        follows them, and change nothing else.
        params: how to sample (levels 1 and 2); None means the model's `default_params`, else SamplingParams(). Fields
        that need a tokenizer (stop, bad_words) or several streams (n, best_of) are refused: `hibachi.LLM` serves them.
        Models that return tokens take a seed and max_tokens, if they declare `draws`.
        max_tokens: the limit of new tokens, which takes precedence over params.max_tokens. None in both means up to the
        end of the context.
        stop_rule: a `StopRule`, a predicate, a token or a list of token ids, beside the engine's stop_token.
        include_stop: deliver the token that ends the stream as its last item. It takes precedence over
        params.include_stop; None in both means True.
        guidance: a second row, whose logits are mixed into the request's before each draw; or several, with a function
        that mixes them. Takes logits.
        terms: priority, tenant, deadlines, cache salt.

        Level 0 streams yield native arrays (*tok); with sampling they yield ints. Raises InvalidRequest, PromptTooLong,
        QueueFull, EngineClosed or EngineFailed; after any of them, nothing was queued.
        """
        request = Request(
            prompt,
            params,
            max_tokens=max_tokens,
            stop_rule=stop_rule,
            include_stop=include_stop,
            embeds=prompt_embeds,
            inputs=inputs,
            allowed=allowed,
            fed=fed,
            prediction=prediction,
            terms=Terms() if terms is None else terms,
        )
        job = self.check(request := self._own(request))
        if guidance is not None:
            assert self._built is not None
            guide(job, request, guidance, self._built, self.check)
        return self.submit(job)

    @spelled
    def run_many(
        self,
        prompt: T | Sequence[Any] | HostArray | None,
        params: SamplingParams | None = None,
        n: int | None = None,
        *,
        max_tokens: int | None = None,
        stop_rule: Any = None,
        include_stop: bool | None = None,
        prompt_embeds: Any = None,
        inputs: Mapping[str, Any] | None = None,
        allowed: Trie | None = None,
        fed: bool = False,
        prediction: Sequence[int] | None = None,
        terms: Terms | None = None,
    ) -> list[ItemStream[Token]]:
        """Queue a prompt for n continuations, and return their streams at once. n: None means params.n.

        The first has the request's seed, the others have seeds derived from it. A model that returns logits computes
        the prompt, and what its `encode` makes of the inputs, once; then the continuations go their own ways, and each
        can be closed by itself. If they are more than rows or memory can hold at once, the prompt is computed once for
        each part of them. With params.beams they are the best beams, which come when the search ends; each stream has
        its score. The other parameters are those of `run`, and so is what it raises.
        """
        params, n = counted(self._params if params is None else params, n)
        request = Request(
            prompt,
            params,
            max_tokens=max_tokens,
            stop_rule=stop_rule,
            include_stop=include_stop,
            embeds=prompt_embeds,
            inputs=inputs,
            allowed=allowed,
            fed=fed,
            prediction=prediction,
            terms=Terms() if terms is None else terms,
        )
        return self.submit_many(self.check(self._own(request, n)), n)

    def _own(self, request: Request, n: int | None = None) -> Request:
        """A request with the model's own parameters, where it has none; those of each of n continuations. n: None means
        that one is wanted. Raises InvalidRequest.
        """
        params = self._params if request.params is None else request.params
        if isinstance(params, SamplingParams):
            for name in ("stop", "bad_words"):
                if got := getattr(params, name):
                    raise InvalidRequest(
                        f"{name} takes a tokenizer, which only hibachi.LLM has; got {shown(got)}. {_IDS}"
                    )
            if params.best_of is not None or (n is None and params.n > 1):
                raise InvalidRequest(
                    f"run makes one stream, and run_many n: expected n=1 in run, and no best_of; got n={params.n}, "
                    f"best_of={params.best_of}. Use run_many, and choose among its streams, or hibachi.LLM."
                )
            if params.n > 1 or params.beams is not None:
                params = params.for_one(n or 1)
        return replace(request, params=params)

    def embed(
        self, prompt: T | Sequence[int] | HostArray, *, pooling: Pooling = "last", terms: Terms | None = None
    ) -> Item[T]:
        """Queue a prompt of token ids for one vector, a native array, float32 [hidden]: `await` it, or call
        `.result()`.

        pooling: "mean" over the hidden states of all tokens, or the state of the "last" or of the first token ("cls").
        For models of level 2 with `hidden(params, cache, x) -> ([n_out, hidden], cache)`, as our decoders have it. Long
        prompts are computed in chunks, in the same steps as other requests.

        Raises UnsupportedOperation for a model without `hidden`, and what `run` raises.
        """
        request = Request(prompt, pooling=pooling, terms=Terms() if terms is None else terms)
        return Item(self._stream(self.check(request), native_row))

    @property
    def facts(self) -> Facts:
        """Facts about the engine, known once it is built: when it is made, if `backend=`, the model or `token=` tell
        the library, else with the first request. Raises EngineError before.
        """
        if self._built is None:
            raise EngineError("The engine is built with its first request, which tells the library. Send one.")
        return self._promise.told(self._built.facts) if self._promise.waits else self._built.facts

    def check(self, request: Request, channel: Channel[Any] | None = None) -> Job:
        """See `BatchEngine`. channel: where the items go; None means a new one."""
        prompt, embeds = request.prompt, request.embeds
        if request.pooling is not None:
            check_pooling(request.pooling, has_hidden(self.model))
        if embeds is not None:
            size, prompts = getattr(self.model, "embed_size", None), self._ready(embeds).prompts
            given = prompts.host(embeds) if isinstance(prompts, HostPrompts) else embeds
            embeds = embeddings(given, prompt, size, type(self.model).__name__)
            request = replace(request, embeds=embeds)
            prompt = np.zeros(len(embeds), np.int32)  # no tokens, but as many positions
        built = self._ready(prompt)
        host, kind, n = built.prompts.taken(prompt)
        fitted = built.prompts.fitted(kind)
        request, now = checked(request, host, n, built.facts, self.forms), time.monotonic()
        params, terms = request.params, request.terms
        seq = Seq(n, request.max_tokens, priority=terms.priority, tenant=terms.tenant)
        seq.deadline = None if terms.timeout is None else now + terms.timeout
        seq.start_by = None if terms.queue_timeout is None else now + terms.queue_timeout
        scored = params is not None and params.prompt_logprobs is not None
        begun = request.begun
        seq.begun = begun is not None
        # What was begun elsewhere may have other bits than the names of tiers promise.
        known = embeds is None and (begun is None or (begun.known and self._spec.config.kv_tiers is None))
        if built.block_size and known and request.pooling is None and not scored:
            seq.keys = kind.block_keys(host, built.block_size)
            seq.salt = terms.cache_salt if not request.inputs else (terms.cache_salt, _digest(request.inputs))
        seed = params.seed if params and params.seed is not None else secrets.randbits(64)
        job = Job(
            seq,
            channel or Channel(self._spec.config.pause_after),
            request,
            stop=built.prompts.stop(kind, request.stop_rule, params),
            seed=seed & (2**64 - 1),
            kind=kind,
            padding=fitted.padding,
            prediction=None if request.prediction is None else ExpectedTokens(request.prediction),
        )
        job.channel.fed = request.fed
        if begun is not None:
            job.history.append(np.array([begun.token], kind.dtype))
        if request.grammar is not None:
            guides = self.forms.guides
            assert guides is not None
            job.grammar = guides, request.grammar
        if request.allowed is not None:
            vocab = built.facts.vocab_size or 0
            ends = tuple(i for i in params.stop_token_ids if i < vocab) if params else ()
            job.grammar = TrieGuides(request.allowed, ends), Grammar(f"trie {id(request.allowed)}")
        if scored:
            job.scores = job.channel.prompt_logprobs = [None] * len(host)
        return job

    @override
    def reader(self, job: Job) -> Callable[[Any], Any]:
        """The function that converts an item of a request's channel to an item of its stream."""
        if job.request.pooling is not None:
            assert isinstance(self._backend, ArrayBackend)
            return partial(_host_row, self._backend)
        return self._read

    @override
    def enqueue(self, job: Job) -> None:
        """See `BatchInference`."""
        if job.request.params is None or job.request.params.beams is None:
            super().enqueue(job)
        else:
            self.enqueue_many([job])

    @override
    def enqueue_many(self, jobs: Sequence[Job]) -> None:
        """See `BatchInference`. Where rows can go on from others, the prompt is computed once."""
        built, worker = self._built, self._worker
        assert built is not None and worker is not None
        worker.check_room(jobs[0].seq.tenant, len(jobs))
        for job in together(jobs, built.runner, built.facts.limits):
            worker.add(job)

    @override
    def opened(self, job: Job) -> ItemStream[Any]:
        """See `BatchInference`."""
        stream = super().opened(job)
        if job.request.fed:
            assert self._built is not None and self._worker is not None
            turns = TokenFeed(job, self._built.prompts, stream.read, self._worker.feed)
            stream.read, stream.feeder = turns.read, turns.feed
        return stream

    # ---- building ----------------------------------------------------------------------------------------------

    def _ready(self, prompt: Any) -> Built:
        """The engine, built for the first request at the latest, on the library of its prompt."""
        if self._built is not None:
            return self._built
        if self._backend is None:
            self._backend = prompt_backend(prompt, self.model)
        return self._build(self._backend)

    def _build(self, backend: ArrayBackend | NineBackend) -> Built:
        with self._building:
            if self._built is not None:
                return self._built
            self._check_open()
            if isinstance(backend, ArrayBackend) and backend.group is not None and backend.group.rank:
                check_group(self._spec, backend.place.stages)
                follow(self.model, backend, backend.group)
            built = build(
                self._spec, backend, self._policy, self._tokens, self._promise.check, self._promise.deterministic
            )
            self._worker = self._serve(built.scheduler, built.runner)
            engine, config = self._worker.engine, self._speculation
            engine.drafting = speculation.made(config, built, type(self.model).__name__, self._promise.differ)
            engine.promise = self._promise if self._promise.waits else None
            if (tiers := self._spec.config.kv_tiers) is not None:
                engine.tiering = tiering.made(tiers, self.model, built, engine.brought)
            engine.waits = None if config is None else Waits(always=not config.auto)
            speculates = engine.drafting is not None
            self._built = built = replace(built, facts=replace(built.facts, speculates=speculates))
            if built.facts.arrays and not isinstance(backend, NineBackend):
                self._read = native_row
            return built


def _vocabulary(model: Any) -> Vocabulary:
    """Of a model's own attributes."""
    return own_vocabulary(model, eos_ids_of(model, model.vocab_size))


def _own_dtype(model: Any) -> str:
    return own if isinstance(own := getattr(model, "dtype", None), str) else "float32"


def _digest(inputs: Mapping[str, HostArray]) -> bytes:
    """Tells inputs apart: only requests with the same ones share a prefix."""
    found = hashlib.sha256()
    for name, array in inputs.items():
        found.update(repr((name, array.shape)).encode())
        found.update(array.tobytes())
    return found.digest()


def _host_row(backend: ArrayBackend, item: Any) -> HostArray:
    return backend.get(native_row(item))
