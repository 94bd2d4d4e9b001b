"""Shows how many requests have ended while they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from hibachi.common.progress import FRAME, shown
from hibachi.llm.gather import Gather
from hibachi.llm.textstream import TextStream

T = TypeVar("T")


def watch(streams: Sequence[TextStream]) -> None:
    """Read all tokens of these streams until they have ended, and show progress. Raises the first error."""
    began, tokens, done = time.perf_counter(), 0, 0

    def feed(stream: TextStream, i: int, ids: Sequence[int]) -> None:
        nonlocal tokens
        tokens += len(ids)
        stream.choices[i].feed(ids)

    with shown(len(streams), "requests") as bar, Gather() as gather:
        for i, stream in enumerate(streams):
            gather.add(i, [choice.tokens for choice in stream.choices], partial(feed, stream))
        while len(gather):
            for i in gather.wait(FRAME):
                done += 1
                for choice in streams[i].choices:
                    if not choice.stopped:
                        choice.tokens.check()
            bar.update(done, **{"tokens/s": tokens / (time.perf_counter() - began)})


def counted(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make these calls one after another and show progress; returns their results."""
    with shown(len(calls), "texts") as bar:
        out = []
        for call in calls:
            out.append(call())
            bar.update(len(out))
        return out
