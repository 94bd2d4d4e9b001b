"""Protocols of the batchers: single prompts or inputs in, streams out."""

from __future__ import annotations

from typing import Protocol, TypeVar

from hibachi.engine.streams.stream import Item, ItemStream

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out")


class AutoregressiveBatcher(Protocol[In, Out]):
    """Takes single prompts and streams their tokens; batches them internally."""

    def run(self, prompt: In, /) -> ItemStream[Out]:
        """Queue a prompt; returns its stream at once."""
        ...


class FeedforwardBatcher(Protocol[In, Out]):
    """Takes single inputs and returns the output of each; batches them internally."""

    def run(self, item: In, /) -> Item[Out]:
        """Queue an input; returns at once: `await` the result, or call its `result()`."""
        ...
