"""What an engine is to whoever has prompts: single ones in, streams out."""

from __future__ import annotations

from typing import Protocol, TypeVar

from hibachi.streams.stream import Item, ItemStream

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out")


class AutoregressiveBatcher(Protocol[In, Out]):
    """Something that takes single prompts and streams their tokens, batching them behind the scenes."""

    def run(self, prompt: In, /) -> ItemStream[Out]:
        """Returns at once."""
        ...


class FeedforwardBatcher(Protocol[In, Out]):
    """Something that takes single inputs and returns each one's output, batching them behind the scenes."""

    def run(self, item: In, /) -> Item[Out]:
        """Returns at once: await what it returns, or call its `result()`."""
        ...
