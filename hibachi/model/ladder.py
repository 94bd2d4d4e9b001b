"""The ladder: what a model may look like. Each rung gives the engine more to do, and no rung changes the caller.

    0  Autoregressive   tokens in, next token out: the forward pass you train with
    1  LogitsModel      tokens in, logits out: the engine samples
    2  CachedModel      new tokens and a cache in: the engine owns paged keys and values, or recurrent state
    -  Feedforward      one input, one output, batched

Dimension 0 is the batch, 1 the sequence, the rest (`*tok`) belong to the token: none for token ids, (codebooks,) for
audio codes, (features,) for continuous values.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

from hibachi.tensor.cache import CacheSpec, StepInputs

T = TypeVar("T")
In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", covariant=True)


class Autoregressive(Protocol[T]):
    """Level 0. Any token shape, any dtype; may be `async def`.

    `forward` may declare a second parameter called `lengths`: the number of real tokens of each row, int32 (B,). With
    a padding token, row i is `S - lengths[i]` padding tokens and then its own. Without one, rows are never padded.
    """

    def forward(self, tokens: T) -> T | Awaitable[T]:
        """(B, S, *tok) -> (B, *tok): the next token of each row."""
        ...


class LogitsModel(Protocol[T]):
    """Level 1: token ids in, logits out; the engine samples. May be `async def`."""

    vocab_size: int

    def logits(self, tokens: T, lengths: T) -> T | Awaitable[T]:
        """(B, S), (B,) -> (B, vocab_size): logits after the last token of each row (rows are padded on the left)."""
        ...


class CachedModel(Protocol[T]):
    """Level 2: the engine owns the cache, the model is a pure step.

    vocab_size: size of the logits, so that the engine samples; None if `step` returns the next tokens itself.
    params: the weights, passed to every step (a pytree), so that a library can compile the step around them.

    A model may have `reach(n)`: it is called before a step at positions below n, which takes `params` after it.
    """

    vocab_size: int | None
    params: Any

    def cache_spec(self) -> CacheSpec:
        """What each layer remembers: `Paged` keys and values, or a recurrent `State`."""
        ...

    def step(self, params: Any, cache: list[Any], x: StepInputs[T]) -> tuple[T, list[Any]]:
        """One step over the packed new tokens: ([n_out, vocab_size] or [n_out, *tok], the new cache).

        cache[i] belongs to layer i of the spec. Paged: a handle for `backend.attend`, which returns its successor.
        State: [B, *shape], the states of this step's rows, zeros for a row that starts; return the new ones. With
        a `State` in the spec all rows of a call have equally many tokens, so `tok` reshapes to (B, T // B, *tok).
        """
        ...


class LanguageModel(CachedModel[T], Protocol[T]):
    """A cached model with what `LLM` needs to know besides; what `load_model` gives.

    dtype: name of the one it computes in. max_len: the longest sequence. bos_ids, eos_ids: ids that begin and end a
    text, perhaps none.
    """

    dtype: str
    max_len: int
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]


class Feedforward(Protocol[T]):
    """One input, one output, no sequence; may be `async def`."""

    def forward(self, x: T) -> T | Awaitable[T]:
        """(B, *shape) -> (B, *any)."""
        ...


class AutoregressiveBatcher(Protocol[In, Out]):
    """Something that takes single prompts and streams their tokens, batching them behind the scenes."""

    def run(self, prompt: In, /) -> Any:
        """Returns an `ItemStream` at once."""
        ...


class FeedforwardBatcher(Protocol[In, Out]):
    """Something that takes single inputs and returns each one's output, batching them behind the scenes."""

    def run(self, item: In, /) -> Awaitable[Out]:
        """Returns an `Item` at once: await it, or call its `result()`."""
        ...
