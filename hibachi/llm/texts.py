"""Text in, text out, by a tokenizer and an engine in any process."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, overload

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.common.options import check_variables, spelled
from hibachi.engine.batchengine import BatchEngine
from hibachi.engine.forms import vocabulary_of
from hibachi.engine.streams.channel import give_way
from hibachi.engine.streams.merge import amerge, merge
from hibachi.engine.streams.stream import Item
from hibachi.errors import InvalidRequest, shown
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.chats import ChatRequest, Chats
from hibachi.llm.each import AsyncEach, Each, OneOrEach, window_of
from hibachi.llm.holding import Holding
from hibachi.llm.model.generation import NO_RULES, TokenRules
from hibachi.llm.predictions import Predictions, for_each
from hibachi.llm.progress import counted, watch
from hibachi.llm.scores import SCORING, Embedding, Score, paired, score_of
from hibachi.llm.textstream import Completion, TextChoice, TextStream
from hibachi.llm.tokenizers import Detokenizer
from hibachi.llm.tokenizers.own import NoTokenizer
from hibachi.llm.tokenizers.prompts import TextPrompts, conversations, listed
from hibachi.request import Pooling, Prompt, Request, SamplingParams, Terms, as_params, as_terms


class Texts(Holding):
    """The methods of a language model: generate, stream, chat, embed, score.

    engine: in this process or another. eos_ids: tokens that end a text. vocab_size: None means any id is valid.
    default_params: for requests that bring none. `rules`, an attribute: for all.
    """

    tokenizer: Any
    vocab_size: int | None
    eos_ids: tuple[int, ...]
    default_params: SamplingParams

    def __init__(
        self,
        engine: BatchEngine[Any],
        tokenizer: Any,
        *,
        vocab_size: int | None,
        eos_ids: Sequence[int],
        default_params: SamplingParams,
    ) -> None:
        super().__init__(engine)
        self.tokenizer = tokenizer
        self.prompts: TextPrompts = TextPrompts(tokenizer, engine.facts.limits.max_model_len)
        self.vocab_size, self.eos_ids, self.default_params = vocab_size, tuple(eos_ids), default_params
        self.rules: TokenRules = NO_RULES
        self._chats: Chats | None = None
        if vocab_size is not None:
            engine.forms.vocabulary = partial(vocabulary_of, tokenizer, vocab_size, self.eos_ids)

    @spelled
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prediction: str | Sequence[int] | None = None,
        terms: Terms | None = None,
    ) -> TextStream:
        """Stream the text of one prompt piece by piece: iterate with `for` or `async for`.

        params: None means `default_params`. prediction: see `generate`. terms: priority, tenant, deadlines, cache salt.
        Raises InvalidRequest or PromptTooLong, also for best_of > n: which continuations are best is known only at the
        end.
        """
        params = as_params(params, self.default_params)
        if params.runs > params.n:
            raise InvalidRequest(
                f"best_of cannot be streamed: expected best_of to be n, {params.n}, or None; got {params.best_of}. Use "
                f"generate."
            )
        return self._start([prompt], [self.prompts.given(prompt)], [params], terms, prediction)[0]

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: Predictions = None,
        terms: Terms | Sequence[Terms] | None = None,
        reader: AnswerReader | None = None,
    ) -> list[TextStream]:
        """Queue all prompts, after all have been checked, and return a stream for each. See `generate`.

        reader: of the texts, if they answer a chat: what it reads by is in them, and stop strings are looked for in
        what is said.
        Raises InvalidRequest, PromptTooLong, QueueFull, EngineClosed or EngineFailed; then nothing is queued.
        """
        return self._start(prompts, [self.prompts.given(p) for p in prompts], params, terms, prediction, reader)

    @spelled
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: Predictions = None,
        terms: Terms | Sequence[Terms] | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete all prompts together; results come in their order.

        prompts: each a text, a list of token ids, or {"prompt_embeds": floats (sequence, hidden)}, which replace the
        embeddings of tokens at the first layer.
        params, terms: one for all, or one for each; None means `default_params`, and plain terms.
        prediction: what the text may be, such as one that is to be changed: a text or token ids for all, or a list with
        one or None for each. It saves time where the engine speculates and the text follows it; no text changes.
        progress: show progress on standard error, by tqdm where that is installed.

        Without a max_tokens, in params or in `default_params`, a completion goes on to the end of the context.

        Raises InvalidRequest or PromptTooLong before anything is queued, if one prompt cannot be served; QueueFull,
        EngineClosed or EngineFailed; else the first error of a request that fails while it runs.
        """
        prompts = listed(prompts)
        return _finish(
            self._start(prompts, [self.prompts.given(p) for p in prompts], params, terms, prediction), progress
        )

    @spelled
    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prediction: Predictions = None,
        terms: Terms | Sequence[Terms] | None = None,
    ) -> list[Completion]:
        """`generate` for asyncio and trio."""
        prompts = listed(prompts)
        streams = self._start(prompts, [self.prompts.given(p) for p in prompts], params, terms, prediction)
        try:
            choices = [c for s in streams for c in s.choices]
            await give_way()
            await amerge([c.tokens for c in choices], lambda i, tokens: choices[i].feed(tokens))
            return [s.completion() for s in streams]
        finally:
            for s in streams:
                s.close()

    @overload
    def each(
        self,
        prompts: Iterable[Prompt],
        params: OneOrEach[SamplingParams] = None,
        *,
        terms: OneOrEach[Terms] = None,
        ordered: Literal[True] = True,
        ahead: int | None = None,
        errors: Literal["raise"] = "raise",
    ) -> Each[Completion]: ...

    @overload
    def each(
        self,
        prompts: Iterable[Prompt],
        params: OneOrEach[SamplingParams] = None,
        *,
        terms: OneOrEach[Terms] = None,
        ordered: bool = True,
        ahead: int | None = None,
        errors: str = "raise",
    ) -> Each[Any]: ...

    @spelled
    def each(
        self,
        prompts: Iterable[Prompt],
        params: OneOrEach[SamplingParams] = None,
        *,
        terms: OneOrEach[Terms] = None,
        ordered: bool = True,
        ahead: int | None = None,
        errors: str = "raise",
    ) -> Each[Any]:
        """Yield a Completion for each prompt of any iterable, also an endless one: `for c in llm.each(prompts)`.

        At most 2 x max_num_seqs requests are in the engine at a time.

        params, terms: one for all, or an iterable in step with the prompts.
        ordered: yield in the order of the prompts; False means as they end, as (index of the prompt, its Completion).
        ahead: at most this many prompts run or have unread results, so that memory is bounded where the first takes
        long; None means 2 x max_num_seqs.
        errors: "raise": the error of a prompt is raised at its place, and the rest is cancelled; "return": the error
        takes the place of the Completion. An error from the iterable of prompts comes after all results.

        Leaving the loop cancels what runs. An iterable that is no sequence is read in a thread of its own, as far ahead
        as said, so one that blocks delays no other request. Raises InvalidRequest, ConfigError; EngineClosed or
        EngineFailed after the results that there are.
        """
        return Each(window_of(self, prompts, params, terms, ordered=ordered, ahead=ahead, errors=errors))

    @overload
    def aeach(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: OneOrEach[SamplingParams] = None,
        *,
        terms: OneOrEach[Terms] = None,
        ordered: Literal[True] = True,
        ahead: int | None = None,
        errors: Literal["raise"] = "raise",
    ) -> AsyncEach[Completion]: ...

    @overload
    def aeach(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: OneOrEach[SamplingParams] = None,
        *,
        terms: OneOrEach[Terms] = None,
        ordered: bool = True,
        ahead: int | None = None,
        errors: str = "raise",
    ) -> AsyncEach[Any]: ...

    @spelled
    def aeach(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: OneOrEach[SamplingParams] = None,
        *,
        terms: OneOrEach[Terms] = None,
        ordered: bool = True,
        ahead: int | None = None,
        errors: str = "raise",
    ) -> AsyncEach[Any]:
        """`each` for asyncio and trio: `async for c in llm.aeach(prompts)`. prompts may also be an asynchronous
        iterable, which is read by its own task.
        """
        window = window_of(self, prompts, params, terms, ordered=ordered, ahead=ahead, errors=errors, tasks=True)
        return AsyncEach(window)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        split_special_tokens: bool = True,
        prediction: Predictions = None,
        terms: Terms | Sequence[Terms] | None = None,
        progress: bool = False,
        **variables: Any,
    ) -> list[Completion]:
        """Answer one conversation or several: lists of {"role": ..., "content": ...}, rendered by the model's chat
        template. The text of an answer is what is said; beside it are its `tool_calls` and its `reasoning`.

        tools, tool_choice, parallel_tool_calls: functions that the model may call, in the words of OpenAI's API.
        tool_call_parser, reasoning_parser: how the model writes calls and reasoning, see docs/tools.md. "none" for the
        latter leaves reasoning in the text. split_special_tokens: names of special tokens in what users and tools say
        are text. prediction, progress: see `generate`. variables: further variables of the
        template. Raises InvalidRequest if the model has no template, or none that shows tools.
        """
        check_variables(f"{type(self).__name__}.chat", variables)
        parsers = Parsers(tool_call_parser, reasoning_parser, split=split_special_tokens)
        asking = ChatRequest(tools, tool_choice, parallel_tool_calls, parsers)
        many = conversations(messages)
        each = [as_params(p, self.default_params) for p in _for_each(params, many, "SamplingParams")]
        if self._chats is None:
            self._chats = Chats(self.prompts, self.check_form, self.eos_ids)
        ready = self._chats.ready(many, each, asking, variables)
        streams = self._start(ready.prompts, ready.ids, ready.params, terms, prediction, ready.readers)
        return ready.told(_finish(streams, progress))

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        terms: Terms | Sequence[Terms] | None = None,
        progress: bool = False,
    ) -> list[Embedding]:
        """A vector for each text, from the model's last hidden states.

        pooling: "mean" of all tokens, the "last" or the first ("cls"); None means what the model's files say, else the
        last. normalize: scale to length 1; None means what the model's files say. progress: see `generate`. Raises
        InvalidRequest, PromptTooLong, QueueFull, or UnsupportedOperation for a model without hidden states.
        """
        prompts = listed(prompts)
        ids = [self.prompts.encode(p) for p in prompts]
        items = self.submit_vectors(ids, pooling=pooling, normalize=normalize, terms=terms)
        try:
            vectors = counted([item.result for item in items]) if progress else [item.result() for item in items]
            return [Embedding(p, own, v) for p, own, v in zip(prompts, ids, vectors, strict=True)]
        finally:  # whatever happens, no request outlives the call
            for item in items:
                item.cancel()

    def submit_vectors(
        self,
        ids: Sequence[list[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        terms: Terms | Sequence[Terms] | None = None,
    ) -> list[Item[HostArray]]:
        """Queue prompts of token ids for vectors, after all have been checked: see `embed`. Each returned item gives
        float32 [hidden] on the host: `await` it, or call `.result()`.
        """
        own, to_one = self._pooling(pooling)
        served = [as_terms(t) for t in _for_each(terms, ids, "Terms")]
        self._check_room(Counter(t.tenant for t in served))
        unit = bool(to_one if normalize is None else normalize)
        ready = [
            self.engine.check(Request(np.asarray(i), terms=t, pooling=own, unit=unit))
            for i, t in zip(ids, served, strict=True)
        ]
        return [Item(self.engine.submit(each)) for each in ready]

    def score(self, prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt]) -> list[Score]:
        """The log-likelihood of each continuation after its prompt; one prompt may serve all continuations.

        Two texts are tokenized together, as the tokenizer may join characters at the border. The continuation's tokens
        are those that follow as many tokens as the prompt alone has. Raises InvalidRequest, PromptTooLong.
        """
        pairs = paired(listed(prompts), listed(continuations))
        split = [self.prompts.joined(p, c) for p, c in pairs]
        outs = _finish(self._start([p for p, _ in pairs], [before + after for before, after in split], SCORING))
        each = zip(pairs, split, outs, strict=True)
        return [score_of(p, c, out, len(after)) for (p, c), (_, after), out in each]

    def _pooling(self, asked: Pooling | None) -> tuple[Pooling, bool]:
        """The default pooling, and whether vectors are scaled to length 1: as sentence-transformers does it."""
        return asked or "last", True

    def _check_room(self, wanted: Mapping[Hashable, int]) -> None:
        """Raise QueueFull if there is no room for this many requests of each tenant."""
        for tenant, n in wanted.items():
            self.engine.check_room(tenant, n)

    def _start(
        self,
        prompts: Sequence[Prompt],
        ids: list[list[int]],
        params: Any,
        terms: Any = None,
        prediction: Predictions = None,
        reader: AnswerReader | Sequence[AnswerReader | None] | None = None,
    ) -> list[TextStream]:
        """Queue requests, after all of them have been checked."""
        each = [as_params(p, self.default_params) for p in _for_each(params, prompts, "SamplingParams")]
        served = [as_terms(t) for t in _for_each(terms, prompts, "Terms")]
        readers = _for_each(reader, prompts, "AnswerReader")
        runs = (t.tenant for p, t in zip(each, served, strict=True) for _ in range(p.runs))
        self._check_room(Counter(runs))  # before anything is made of them
        expected = for_each(prediction, len(prompts), self.prompts.predicted if self.engine.facts.speculates else None)
        ready = [
            self._ready(prompt, own, p, t, guess)
            for prompt, own, p, t, guess in zip(prompts, ids, each, served, expected, strict=True)
        ]
        streams = [
            TextStream(
                prompt,
                own,
                [
                    TextChoice(
                        i,
                        tokens,
                        partial(_text, self.tokenizer, p, after=own, reader=told),
                        p.logprobs is not None,
                        ends=() if p.ignore_eos else self.eos_ids,
                        delivers=bool(p.include_stop),
                        each=isinstance(self.tokenizer, NoTokenizer),
                    )
                    for i, tokens in enumerate(self.engine.submit_many(one, p.runs))
                ],
                p.n,
            )
            for prompt, own, p, told, one in zip(prompts, ids, each, readers, ready, strict=True)
        ]
        return streams

    def _ready(self, prompt: Prompt, ids: list[int], p: SamplingParams, terms: Terms, prediction: Any = None) -> Any:
        """The checked request for one prompt."""
        if (p.stop or p.bad_words) and isinstance(self.tokenizer, NoTokenizer):
            name = "stop" if p.stop else "bad_words"
            raise InvalidRequest.at(
                (name,),
                f" takes a tokenizer, and this model has none; got {shown(getattr(p, name))}. Use "
                f"stop_token_ids; allowed_token_ids and logit_bias keep tokens away.",
            )
        run = p
        if p.stop or p.bad_words or p.runs > 1:
            run = run.with_(stop=(), bad_words=()).for_one(p.n)
        if self.eos_ids and not p.ignore_eos:
            run = run.with_(stop_token_ids=(*p.stop_token_ids, *self.eos_ids), ignore_eos=True)
        if p.runs > p.n and p.logprobs is None:
            run = run.with_(logprobs=0)  # to choose by
        run, banned, first = self.rules.applied(run)
        words = (*(seq for word in p.bad_words for seq in self.prompts.spellings(word)), *banned)
        embeds = prompt["prompt_embeds"] if isinstance(prompt, Mapping) else None
        host = np.asarray(ids) if embeds is None else None
        request = Request(
            host,
            run,
            include_stop=bool(p.include_stop),
            bad_words=words,
            banned_first=first,
            embeds=embeds,
            terms=terms,
            prediction=prediction,
        )
        return self.engine.check(request)


def _text(tokenizer: Any, p: SamplingParams, *, after: list[int], reader: AnswerReader | None) -> Detokenizer:
    return Detokenizer(
        tokenizer,
        p.stop,
        after=after,
        include_stop=bool(p.include_stop),
        min_tokens=p.min_tokens,
        within=None if reader is None else reader.stops,
        skip_special=p.skip_special_tokens,
        shown=frozenset() if reader is None else reader.shown,
    )


def _for_each(given: Any, prompts: Sequence[Prompt], what: str) -> list[Any]:
    """A list with one value for each prompt, from one value for all or one for each."""
    each = list(given) if isinstance(given, Sequence) else [given] * len(prompts)
    if len(each) != len(prompts):
        raise InvalidRequest(f"Expected one {what}, or one for each of {len(prompts)} prompts; got {len(each)}.")
    return each


def _finish(streams: list[TextStream], progress: bool = False) -> list[Completion]:
    """The results of all streams. Whatever happens, no request outlives the call."""
    try:
        if progress:
            watch(streams)
        choices = [c for s in streams for c in s.choices]
        for i, tokens in merge([c.tokens for c in choices]):
            choices[i].feed(tokens)
        return [s.completion() for s in streams]
    finally:
        for s in streams:
            s.close()
