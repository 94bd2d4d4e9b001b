"""Text in, text out: a model folder, its tokenizer and an engine."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.decode.uniforms import fork
from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.autotune import choose, seconds_of, sizes_of
from hibachi.engine.closing import Closing
from hibachi.engine.engine import Stats
from hibachi.engine.health import Health
from hibachi.engine.job import Job
from hibachi.engine.loops import give_way, in_thread
from hibachi.engine.measured import SCORING, Embedding, Score, embed, paired, score_of
from hibachi.engine.pooling import PoolingBatchInference
from hibachi.engine.stream import amerge, merge
from hibachi.engine.textstream import Completion, Prompt, TextChoice, TextStream
from hibachi.errors import ConfigError, InvalidRequest
from hibachi.model.files import locate, open_files
from hibachi.model.generation import generation_defaults
from hibachi.model.pooling import Pooling, pooling_of
from hibachi.model.registry import arch_of, load_model
from hibachi.model.text import Detokenizer
from hibachi.request import SamplingParams, Terms, as_params
from hibachi.tensor.array_backend import ArrayBackend
from hibachi.tensor.discover import resolve

QUANTIZATIONS = ("auto", "none", "int8")


class LLM(Closing):
    """A language model from its files, batched.

    model: "tiny", which ships with hibachi; a folder in Hugging Face layout; a GGUF file; or "org/name" on the Hugging
    Face Hub, from the local cache or downloaded (extra 'hf'). backend: a name, a backend, or None: numpy.
    device: in the backend's own notation. dtype: to compute in; None: float32. max_model_len: None: what the model
    was trained for.
    max_batch_size: requests at once; max_batch_tokens: tokens of a step; cache_bytes, block_size: memory for keys and
    values; options: see `AutoregressiveBatchInference`, such as prefix_cache, policy, max_waiting, restart.
    deterministic: who shares the batch never changes a bit of an answer; None: where that costs little, which is on the
    CPU with numpy (if the processor has AVX-512) and torch. See docs/determinism.md.

    autotune: how long to time kernels on the model's shapes, where there is a choice of them: "1s", other seconds,
    "full" or "off"; None: a second, or what the environment variable HIBACHI_AUTOTUNE says. The choice is kept for this
    machine, so it is made once. See docs/backends.md.
    quantization: "int8": matrices in eight bits, which takes half the memory of bfloat16 and less time; "auto": where
    it was measured to take less time on this machine; None or "none": as the dtype says. See docs/quantization.md.

    default_params: the SamplingParams of a request that brings none; from the model's generation_config.json. As in
    vLLM, parameters of one's own take the place of all of them; `llm.default_params.with_(...)` changes a few.

    Raises UnknownArchitecture, InvalidModelFiles, MissingExtra, ConfigError, UnsupportedOperation, BackendNotFound,
    BackendNotInstalled.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: str | ArrayBackend | None = None,
        dtype: str | None = None,
        quantization: str | None = None,
        autotune: str | float | None = None,
        device: Any = None,
        deterministic: bool | None = None,
        max_model_len: int | None = None,
        max_batch_size: int = 16,
        max_batch_tokens: int = 2048,
        cache_bytes: int | None = None,
        block_size: int | None = None,
        **options: Any,
    ) -> None:
        files = open_files(locate(model))
        self.path, self.backend = files.path, _backend(backend, device)
        dtype, budget = dtype or "float32", seconds_of(autotune)
        invariant = bool(deterministic or (deterministic is None and self.backend.prefers_invariant))
        arch = arch_of(files)
        if arch is not None and quantization in (None, "none", "auto"):
            rounding, sizes = quantization == "auto", sizes_of(arch, dtype)
            choice = choose(self.backend, sizes, deterministic=invariant, rounding=rounding, budget=budget)
            self.backend = choice.backend
            quantization = None if choice.trials else quantization
        elif invariant:
            self.backend = self.backend.invariant()
        self.backend = _quantized(self.backend, quantization, dtype)
        self.model = load_model(files, self.backend, dtype=dtype, max_model_len=max_model_len)
        self.tokenizer = files.tokenizer(vocab_size=self.model.vocab_size)
        self.default_params = SamplingParams(**generation_defaults(self.path))
        self._options: dict[str, Any] = dict(
            max_batch_size=max_batch_size,
            max_model_len=self.model.max_len,
            backend=self.backend,
            max_batch_tokens=max_batch_tokens,
            block_size=block_size,
            cache_bytes=cache_bytes,
            dtype=self.model.dtype,
            deterministic=deterministic,
            **options,
        )
        self.engine = AutoregressiveBatchInference(self.model, **self._options)
        self._poolers: dict[Pooling, PoolingBatchInference] = {}
        self._poolers_lock = threading.Lock()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, terms: Terms | None = None) -> TextStream:
        """The text as it comes, piece by piece: iterate with `for` or `async for`. params: None: `default_params`.
        terms: priority, tenant, deadlines, cache salt.

        Raises InvalidRequest or PromptTooLong, also for best_of > n: which are the best is known only at the end.
        """
        params = as_params(params, self.default_params)
        if params.runs > params.n:
            raise InvalidRequest(
                f"best_of cannot be streamed: expected best_of to be n, {params.n}, or None; got {params.best_of}. Use "
                f"generate."
            )
        return self._start([prompt], [self._ids(prompt)], [params], terms)[0]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        terms: Terms | Sequence[Terms] | None = None,
    ) -> list[Completion]:
        """Complete all prompts together; results in their order. params, terms: one for all, or one for each; None:
        `default_params`, and plain terms. A prompt is a text, a list of token ids, or {"prompt_embeds": floats
        (sequence, hidden)}, which the first layer sees instead of the embeddings of tokens.

        Raises InvalidRequest or PromptTooLong for a prompt that cannot be served (then none is), or the first error.
        """
        prompts = _listed(prompts)
        return _finish(self._start(prompts, [self._ids(p) for p in prompts], params, terms))

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        terms: Terms | Sequence[Terms] | None = None,
    ) -> list[Completion]:
        """`generate` for asyncio and trio."""
        prompts = _listed(prompts)
        streams = self._start(prompts, [self._ids(p) for p in prompts], params, terms)
        try:
            choices = [c for s in streams for c in s.choices]
            await give_way()
            await amerge([c.tokens for c in choices], lambda i, tokens: choices[i].feed(tokens))
            return [s.completion() for s in streams]
        finally:
            for s in streams:
                s.close()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        terms: Terms | Sequence[Terms] | None = None,
        **variables: Any,
    ) -> list[Completion]:
        """Answer a conversation, or several: lists of {"role": ..., "content": ...}, in the model's chat template.

        variables: further ones for the template, such as tools. Raises InvalidRequest if the model has no template.
        """
        texts = [self.tokenizer.render_chat(m, **variables) for m in _conversations(messages)]
        ids = [self.tokenizer.encode(t, add_special_tokens=False) for t in texts]
        return _finish(self._start(texts, ids, params, terms))

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None, normalize: bool | None = None
    ) -> list[Embedding]:
        """A vector for each text, from the model's last hidden states.

        pooling: "mean" of all tokens, the "last" or the first ("cls"); None: what the model's files say, else the last.
        normalize: to length 1; None: likewise. Raises InvalidRequest, PromptTooLong, ConfigError for a model whose
        hidden states cannot be had.
        """
        prompts = _listed(prompts)
        ids = [self._known(self._encode(p)) for p in prompts]
        own, to_one = ("last", True) if pooling else pooling_of(self.path)
        engine = self._pooler(pooling or own)
        return embed(engine, prompts, ids, self.backend, to_one if normalize is None else normalize)

    def score(self, prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt]) -> list[Score]:
        """The log-likelihood of each continuation after its prompt; one prompt may stand for all.

        Two texts are tokenized together, as the tokenizer may join what stands at the border; the continuation's
        tokens are those after as many as the prompt alone has. Raises InvalidRequest, PromptTooLong.
        """
        pairs = paired(_listed(prompts), _listed(continuations))
        split = [self._joined(p, c) for p, c in pairs]
        outs = _finish(self._start([p for p, _ in pairs], [before + after for before, after in split], SCORING))
        each = zip(pairs, split, outs, strict=True)
        return [score_of(p, c, out, len(after)) for (p, c), (_, after), out in each]

    def _joined(self, prompt: Prompt, continuation: Prompt) -> tuple[list[int], list[int]]:
        """The tokens of a prompt and of its continuation."""
        before = self._encode(prompt)
        if isinstance(prompt, str) and isinstance(continuation, str):
            after = self._encode(prompt + continuation)[len(before) :]
        elif isinstance(continuation, str):
            after = self.tokenizer.encode(continuation, add_special_tokens=False)
        else:
            after = self._encode(continuation)
        if not after:
            raise InvalidRequest(f"A continuation must hold at least one token; got {continuation!r} after a prompt.")
        return before, after

    def _pooler(self, pooling: Pooling) -> PoolingBatchInference:
        """The engine that makes vectors, made when first needed."""
        with self._poolers_lock:
            if pooling not in self._poolers:
                options = self._options | {"record": None, "policy": None}  # those are the other engine's
                self._poolers[pooling] = PoolingBatchInference(self.model, pooling=pooling, **options)
            return self._poolers[pooling]

    def _known(self, ids: list[int]) -> list[int]:
        """Ids of the vocabulary; where no logits are made, nobody else looks."""
        size = self.model.vocab_size
        if size is not None and not (min(ids) >= 0 and max(ids) < size):
            raise InvalidRequest(f"Token ids must be from 0 to {size - 1}; got {min(ids)} to {max(ids)}.")
        return ids

    def _start(
        self, prompts: Sequence[Prompt], ids: list[list[int]], params: Any, terms: Any = None
    ) -> list[TextStream]:
        """Queue requests, after all of them have been checked."""
        each = [as_params(p, self.default_params) for p in _for_each(params, prompts, "SamplingParams")]
        served = _for_each(terms, prompts, "Terms")
        jobs = [self._jobs(prompt, own, p, t) for prompt, own, p, t in zip(prompts, ids, each, served, strict=True)]
        return [
            TextStream(
                prompt,
                own,
                [
                    TextChoice(
                        i,
                        self.engine._submit(job),
                        self._text(p, after=own),
                        p.logprobs is not None,
                    )
                    for i, job in enumerate(some)
                ],
                p.n,
            )
            for prompt, own, p, some in zip(prompts, ids, each, jobs, strict=True)
        ]

    def _jobs(self, prompt: Prompt, ids: list[int], p: SamplingParams, terms: Any) -> list[Job]:
        """What the engine has to do for one prompt: a job for each continuation."""
        eos = () if p.ignore_eos else self.model.eos_ids
        run = p.with_(stop=(), bad_words=(), n=1, best_of=None, stop_token_ids=(*p.stop_token_ids, *eos))
        if p.runs > p.n and p.logprobs is None:
            run = run.with_(logprobs=0)  # to choose by
        words = tuple(seq for word in p.bad_words for seq in self._spellings(word))
        embeds = prompt["prompt_embeds"] if isinstance(prompt, Mapping) else None
        host = np.asarray(ids) if embeds is None else None
        jobs = []
        for i in range(p.runs):
            if i:
                seed = None if p.seed is None else fork(p.seed, i)
                run = run.with_(seed=seed, prompt_logprobs=None)
            jobs.append(
                self.engine._prepare(
                    host, run, include_stop=p.include_stop, bad_words=words, embeds=embeds, terms=terms
                )
            )
        return jobs

    def _text(self, p: SamplingParams, *, after: list[int]) -> Detokenizer:
        return Detokenizer(self.tokenizer, p.stop, after=after, include_stop=p.include_stop, min_tokens=p.min_tokens)

    def _spellings(self, word: str) -> set[tuple[int, ...]]:
        """A bad word in tokens: at the beginning of a word, and elsewhere. As in vLLM."""
        texts = word.lstrip(), " " + word.lstrip()
        found = {tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts} - {()}
        if not found:
            raise InvalidRequest(f"bad_words must be texts that the tokenizer has tokens for; got {word!r}.")
        return found

    def _ids(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt; none if it is given as embeddings."""
        if not isinstance(prompt, Mapping):
            return self._encode(prompt)
        if set(prompt) != {"prompt_embeds"}:
            raise InvalidRequest(
                f'A prompt that is a dictionary must be {{"prompt_embeds": array}}; got the keys {list(prompt)!r:.80}.'
            )
        return []

    def _encode(self, prompt: Prompt) -> list[int]:
        ids: Any
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        else:
            ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
            if not isinstance(ids, Sequence) or isinstance(ids, (bytes, bytearray)) or not all(map(_is_id, ids)):
                raise InvalidRequest(f"A prompt must be a text or a list of token ids; got {prompt!r:.80}.")
        if not len(ids):
            raise InvalidRequest(f"A prompt must hold at least one token; got {prompt!r}. Write something in it.")
        return [int(i) for i in ids]

    # ---- life --------------------------------------------------------------------------------------------------

    @property
    def deterministic(self) -> bool:
        return self.engine.deterministic

    def selfcheck(self) -> int:
        """Compute a few random prompts alone and beside others; returns how many outputs agreed in every bit.

        Raises NotDeterministic, which names the first difference.
        """
        return self.engine.selfcheck()

    def stats(self) -> Stats:
        return self.engine.stats()

    def health(self) -> Health:
        """How the engine is, asked from any thread, also while a forward pass hangs."""
        return self.engine.health()

    def dump(self) -> dict[str, Any]:
        """The flight recorder: what the last steps computed, and for whom, as JSON could hold it. No tokens."""
        return self.engine.dump()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for the others; False if `timeout` seconds were not enough."""
        return self.engine.drain(timeout)

    def close(self) -> None:
        """End all streams. Closing twice is fine."""
        for engine in (self.engine, *self._poolers.values()):
            engine.close()

    async def aclose(self) -> None:
        """`close`, without holding up the event loop while the running step ends."""
        await in_thread(self.close)


def _backend(backend: str | ArrayBackend | None, device: Any) -> ArrayBackend:
    if backend is None or isinstance(backend, str):
        return resolve(backend or "numpy", device=device)
    if not isinstance(backend, ArrayBackend):
        raise ConfigError(f"backend must be a name, an ArrayBackend or None; got {backend!r}.")
    if device is not None:
        raise ConfigError(f"{backend!r} has its device already; got device={device!r} as well. Leave device out.")
    return backend


def _quantized(backend: ArrayBackend, how: str | None, dtype: str) -> ArrayBackend:
    if how not in (None, *QUANTIZATIONS):
        raise ConfigError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, or None; got {how!r}.")
    if how in (None, "none", backend.quantization) or (how == "auto" and not backend.prefers("int8", dtype)):
        return backend
    return backend.quantized("int8" if how == "auto" else str(how))


def _listed(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequest(
            f"Expected a prompt (a text or a list of token ids) or a list of prompts; got {prompts!r:.80}."
        )
    prompts = list(prompts)
    return [prompts] if prompts and all(map(_is_id, prompts)) else prompts


def _for_each(given: Any, prompts: Sequence[Prompt], what: str) -> list[Any]:
    """One for all prompts, or one for each, as a list."""
    each = list(given) if isinstance(given, Sequence) else [given] * len(prompts)
    if len(each) != len(prompts):
        raise InvalidRequest(f"Expected one {what}, or one for each of {len(prompts)} prompts; got {len(each)}.")
    return each


def _is_id(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _conversations(messages: Any) -> list[Any]:
    """One conversation or several, as a list."""
    many = [messages] if _is_conversation(messages) else messages
    if not isinstance(many, Sequence) or not all(map(_is_conversation, many)):
        raise InvalidRequest(
            f'A conversation must be a list of messages {{"role": "user", "content": "..."}}; got {messages!r:.80}.'
        )
    return list(many)


def _is_conversation(x: Any) -> bool:
    return isinstance(x, Sequence) and len(x) > 0 and all(isinstance(m, Mapping) for m in x)


def _finish(streams: list[TextStream]) -> list[Completion]:
    """What becomes of all of them. Whatever happens, no request outlives the call."""
    try:
        choices = [c for s in streams for c in s.choices]
        for i, tokens in merge([c.tokens for c in choices]):
            choices[i].feed(tokens)
        return [s.completion() for s in streams]
    finally:
        for s in streams:
            s.close()
