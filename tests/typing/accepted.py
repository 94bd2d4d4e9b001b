"""What type checkers must accept, and what they must find: read by tests/test_typing.py, never run."""

from collections.abc import Awaitable
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch

import hibachi
from hibachi import AutoregressiveBatchInference, FeedforwardBatchInference, Item, ItemStream

Array = npt.NDArray[Any]


class Level0:
    def forward(self, tokens: Array) -> Array:
        return tokens[:, -1]


class Padded:
    def forward(self, tokens: Array, lengths: Array) -> Array:
        return tokens[:, -1]


class Async:
    async def forward(self, tokens: Array) -> Array:
        return tokens[:, -1]


class Level1:
    vocab_size = 10

    def logits(self, tokens: Array, lengths: Array) -> Array:
        return tokens[:, -1]


class Level2:
    vocab_size = 10
    params: Any = None

    def cache_spec(self) -> hibachi.CacheSpec:
        return [hibachi.Paged(1, 1, 1)]

    def step(self, params: Any, cache: list[Any], x: hibachi.StepInputs[Array]) -> tuple[Array, list[Any]]:
        return x.tok, cache


class Tokens:
    vocab_size = None
    params: Any = None

    def cache_spec(self) -> hibachi.CacheSpec:
        return [hibachi.State((3,))]

    def step(self, params: Any, cache: list[Any], x: hibachi.StepInputs[Array]) -> tuple[Array, list[Any]]:
        return x.tok, cache


class Net(torch.nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens[:, -1]


class Untyped:
    def forward(self, tokens: Any) -> Any:
        return tokens[:, -1]


assert_type(AutoregressiveBatchInference(Level0(), stop_token=3).run([1]), ItemStream[Array])
assert_type(AutoregressiveBatchInference(Padded(), padding_token=0).run([[1, 2]]), ItemStream[Array])
assert_type(AutoregressiveBatchInference(Async()).run(np.zeros(3)), ItemStream[Array])
assert_type(AutoregressiveBatchInference(Level1(), max_num_seqs=3).run([1]), ItemStream[int])
assert_type(AutoregressiveBatchInference(Level2()), AutoregressiveBatchInference[Array, int])
assert_type(AutoregressiveBatchInference(Tokens()).run([1]), ItemStream[Array])
assert_type(AutoregressiveBatchInference(Net()).run(torch.zeros(3)), ItemStream[torch.Tensor])
assert_type(AutoregressiveBatchInference(Untyped()).run([1]), ItemStream[Any])
assert_type(AutoregressiveBatchInference(hibachi.load_model("tiny")).run([1]), ItemStream[int])
assert_type(AutoregressiveBatchInference(Level2()).embed([1]).result(), Array)
assert_type(FeedforwardBatchInference(Level0()).run(np.zeros(3)), Item[Array])
assert_type(FeedforwardBatchInference(Async()).run([1.0]).result(), Array)

batcher: hibachi.AutoregressiveBatcher[list[int], int] = AutoregressiveBatchInference(Level1())
streams: hibachi.AutoregressiveBatcher[Array, Array] = AutoregressiveBatchInference(Level0())
outputs: hibachi.FeedforwardBatcher[Array, Array] = FeedforwardBatchInference(Level0())
model: hibachi.Autoregressive[Array] = Level0()


def any_cached(model: hibachi.CachedModel[Array]) -> None:
    """Whether it samples is not known."""
    assert_type(AutoregressiveBatchInference(model).run([1]), ItemStream[Any])


async def reads(engine: AutoregressiveBatchInference[torch.Tensor, int]) -> Awaitable[object]:
    async for token in engine.run(torch.zeros(3)):
        assert_type(token, int)
    for token in engine.run([1]):
        assert_type(token, int)
    return FeedforwardBatchInference(Level0()).run([1.0])
