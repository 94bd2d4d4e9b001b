"""What type checkers must refuse: each line that is marked, and no other. Read by tests/test_typing.py, never run."""

from typing import Any

import numpy.typing as npt

import hibachi
from hibachi import LLM, AutoregressiveBatchInference, FeedforwardBatchInference, ItemStream, SamplingParams

Array = npt.NDArray[Any]


class Level1:
    vocab_size = 10

    def logits(self, tokens: Array, lengths: Array) -> Array:
        return tokens[:, -1]


class NoSize:
    def logits(self, tokens: Array, lengths: Array) -> Array:
        return tokens[:, -1]


class NoSpec:
    vocab_size = 10
    params: Any = None

    def step(self, params: Any, cache: list[Any], x: hibachi.StepInputs[Array]) -> tuple[Array, list[Any]]:
        return x.tok, cache


class OtherLibrary:
    def forward(self, tokens: Array) -> str:
        return str(tokens)


engine = AutoregressiveBatchInference(Level1())
AutoregressiveBatchInference("not a model")  # refused
AutoregressiveBatchInference(NoSize())  # refused
AutoregressiveBatchInference(NoSpec())  # refused
AutoregressiveBatchInference(OtherLibrary())  # refused
AutoregressiveBatchInference(Level1(), max_batch=3)  # refused
AutoregressiveBatchInference(Level1(), max_num_seqs="3")  # refused
FeedforwardBatchInference(object())  # refused
FeedforwardBatchInference(Level1())  # refused
LLM("tiny", max_batch=3)  # refused
LLM(3)  # refused
SamplingParams(temprature=1.0)  # refused
SamplingParams(seed="three")  # refused
engine.run([1], max_new_tokens=3)  # refused
engine.run(3)  # refused
text: str = next(engine.run([1]))  # refused
stream: ItemStream[str] = engine.run([1])  # refused
spec: hibachi.CacheSpec = [3]  # refused
backend: hibachi.Backend[Array] = engine  # refused
