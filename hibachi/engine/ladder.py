"""The ladder: what a model may look like. Each rung gives the engine more to do, and no rung changes the caller.

    0  Autoregressive   tokens in, next token out: the forward pass you train with
    1  LogitsModel      tokens in, logits out: the engine samples
    -  OwnCacheModel    new tokens and the model's own cache in, logits and that cache out
    2  CachedModel      new tokens and a cache in: the engine owns paged keys and values, or recurrent state
    -  Feedforward      one input, one output, batched

Dimension 0 is the batch, 1 the sequence, the rest (`*tok`) belong to the token: none for token ids, (codebooks,) for
audio codes, (features,) for continuous values.
"""

from __future__ import annotations

from collections.abc import Awaitable
from enum import Enum
from typing import Any, Protocol, TypeAlias, runtime_checkable

from typing_extensions import TypeVar, override

from hibachi.backend.layout import CacheSpec, OwnCache, StepInputs

T = TypeVar("T", default=Any)  # an array of the model's library


class ModelKind(Enum):
    """What a model looks like, and so how it is run: see the protocols below."""

    FORWARD = "Autoregressive"
    LOGITS = "LogitsModel"
    OWN_CACHE = "OwnCacheModel"
    PAGED = "CachedModel"
    FEEDFORWARD = "Feedforward"

    @property
    def level(self) -> int:
        """As it is told to users. A model with a cache of its own counts as level 1, a feed-forward one as 0."""
        return {ModelKind.LOGITS: 1, ModelKind.OWN_CACHE: 1, ModelKind.PAGED: 2}.get(self, 0)

    @property
    def has_tokens(self) -> bool:
        """Whether a request is a sequence of tokens, and its output more of them; else it is one input."""
        return self is not ModelKind.FEEDFORWARD

    @property
    def has_past(self) -> bool:
        """Whether new tokens only are computed."""
        return self in (ModelKind.OWN_CACHE, ModelKind.PAGED)


@runtime_checkable
class Autoregressive(Protocol[T]):
    """Level 0. Any token shape, any dtype; may be `async def`. Rows are never padded: see `PaddedAutoregressive`."""

    def forward(self, tokens: T, /) -> T | Awaitable[T]:
        """(B, S, *tok), in the dtype of the prompts -> (B, *tok): the next token of each row.

        Integers for integers, floats for floats; they are cast to the dtype of the prompts.
        """
        ...


@runtime_checkable
class PaddedAutoregressive(Protocol[T]):
    """Level 0 for rows of different lengths, where the engine has a padding token."""

    def forward(self, tokens: T, /, lengths: T) -> T | Awaitable[T]:
        """(B, S, *tok), int32 (B,) -> (B, *tok). Row i is `S - lengths[i]` padding tokens, and then its own."""
        ...


@runtime_checkable
class LogitsModel(Protocol[T]):
    """Level 1: token ids in, logits out; the engine samples. May be `async def`.

    When an engine is made, it tries whether rows may share calls without changing a row's bits (docs/determinism.md).
    `example_prompts`: what it is tried on, prompts of ids, or a method that returns them; without it random ids are
    used. `deterministic = False`: it is not tried.
    """

    @property
    def vocab_size(self) -> int: ...

    def logits(self, tokens: T, lengths: T, /) -> T | Awaitable[T]:
        """Integers (B, S), int32 (B,) -> real numbers (B, vocab_size): logits after the last token of each row.

        Row i is `S - lengths[i]` padding tokens, and then its own.
        """
        ...


@runtime_checkable
class OwnCacheModel(Protocol[T]):
    """Between levels 1 and 2: a model that keeps a cache of its own; the engine samples.

    past: an `OwnCache`, which says where the cache's arrays have rows and positions, or lets the engine find out.
    `example_prompts`: as at level 1.
    """

    past: OwnCache

    @property
    def vocab_size(self) -> int: ...

    def step(self, tokens: T, lengths: T, past: Any, /) -> tuple[T, Any]:
        """int32 (B, q), int32 (B,), the cache -> (logits (B, vocab_size), the cache).

        tokens: the q newest tokens of each row. lengths: tokens of each row, these included. past: what `step` returned
        for the tokens before, any nesting of arrays; None where there are none. Rows are right-aligned in it: the
        newest position is the last one, and row i has `lengths[i] - q` real ones, with padding before them. Return all
        positions, or the new ones only, which the engine appends. The logits are those after the last token of a row.

        A model whose `step` has no parameter `lengths` is called as `step(tokens, past)`, with rows of one length.
        """
        ...


@runtime_checkable
class CachedModel(Protocol[T]):
    """Level 2: the engine owns the cache, the model is a pure step.

    vocab_size: size of the logits, so that the engine samples; None if `step` returns the next tokens itself.
    params: the weights, passed to every step (a pytree), so that a library can compile the step around them.

    A model may have `reach(n)`: it is called before a step at positions below n, which takes `params` after it.
    """

    @property
    def vocab_size(self) -> int | None: ...

    @property
    def params(self) -> Any: ...

    def cache_spec(self) -> CacheSpec:
        """What each layer remembers: `Paged` keys and values, or a recurrent `State`."""
        ...

    def step(self, params: Any, cache: list[Any], x: StepInputs[T], /) -> tuple[T, list[Any]]:
        """One step over the packed new tokens: ([n_out, vocab_size] or [n_out, *tok], the new cache).

        cache[i] belongs to layer i of the spec. Paged: a handle for `backend.attend`, which returns its successor.
        State: [B, *shape], the states of this step's rows, zeros for a row that starts; return the new ones. With
        a `State` in the spec all rows of a call have equally many tokens, so `tok` reshapes to (B, T // B, *tok).
        """
        ...


class SampledModel(CachedModel[T], Protocol[T]):
    """Level 2 with logits: the engine samples."""

    @property
    @override
    def vocab_size(self) -> int: ...


class TokenModel(CachedModel[T], Protocol[T]):
    """Level 2 whose `step` returns the next tokens."""

    @property
    @override
    def vocab_size(self) -> None: ...


class LanguageModel(SampledModel[T], Protocol[T]):
    """A cached model with what `LLM` needs to know besides; what `load_model` gives.

    dtype: name of the one it computes in. max_model_len: the longest sequence. bos_ids, eos_ids: ids that begin and end
    a text, perhaps none.
    """

    dtype: str
    max_model_len: int
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]


@runtime_checkable
class DepthModel(Protocol[T]):
    """Frames drawn in depth: what a model of any rung with logits may have besides, where tokens have codebooks.

    Its `logits` or `step` then returns, in the place of logits, what frames are drawn from: an array of n rows, or
    tuples, lists and dicts of such arrays. The engine calls `depth` for each codebook within the step, and draws its
    ids.

    vocab_sizes: ids of each codebook, at most `vocab_size`; left out, all have so many.
    """

    codebooks: int

    @property
    def vocab_size(self) -> int: ...

    def depth(self, k: Any, given: Any, codes: T, past: Any, /) -> tuple[T, Any]:
        """Codebook k, rows of what the step returned, int32 (n, codebooks), the past -> (logits (n, V_k), the past).

        codes: the ids of the frame that are drawn, and 0 for those that are not: always of one shape. past: the model's
        own, what the call for the codebook before returned; None for the first one. It is thrown away with the frame,
        and a model keeps nothing else from call to call.

        k is an int. Where a library compiles for each shape, at level 2, it is an int32 array () if all codebooks have
        one size, so that one program serves those whose pasts have one shape. There `depth` may also have a parameter
        `params`, the first one, which gets the weights as `step` does.
        """
        ...


@runtime_checkable
class Feedforward(Protocol[T]):
    """One input, one output, no sequence; may be `async def`."""

    def forward(self, x: T, /) -> T | Awaitable[T]:
        """(B, *shape) -> (B, *any)."""
        ...


Model: TypeAlias = Autoregressive[T] | PaddedAutoregressive[T] | LogitsModel[T] | OwnCacheModel[T] | CachedModel[T]
"""What an engine takes: a model on any rung."""
