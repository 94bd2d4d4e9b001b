"""Who holds an engine: its life, and how it is."""

from __future__ import annotations

from functools import partial
from typing import Any

from hibachi.engine.batchengine import BatchEngine
from hibachi.engine.health import Health
from hibachi.engine.stats import Stats
from hibachi.runners.meters import Meters
from hibachi.streams.closeable import CLOSE_WITHIN, Closing
from hibachi.streams.loops import in_thread


class Holding(Closing):
    """What a model is asked through, whatever its tokens are. engine: here, or in another process."""

    engine: BatchEngine[Any]

    def __init__(self, engine: BatchEngine[Any]) -> None:
        self.engine = engine

    def stats(self) -> Stats:
        return self.engine.stats()

    def meters(self) -> Meters:
        """What the engine's steps were like since the start: histograms of rows, tokens and times; padding."""
        return self.engine.meters()

    def health(self) -> Health:
        """How the engine is, asked from any thread, also while a forward pass hangs."""
        return self.engine.health()

    def dump(self) -> dict[str, Any]:
        """The flight recorder: what the last steps computed, and for whom, as JSON could hold it. No tokens."""
        return self.engine.dump()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for the others.

        False if `timeout` seconds were not enough, or if the engine stalled or failed meanwhile.
        """
        return self.engine.drain(timeout)

    def close(self, timeout: float | None = CLOSE_WITHIN) -> None:
        """End all streams; a step that takes longer than `timeout` seconds is let go. Closing twice is fine."""
        self.engine.close(timeout)

    async def aclose(self, timeout: float | None = CLOSE_WITHIN) -> None:
        """`close`, without holding up the event loop while the running step ends."""
        await in_thread(partial(self.close, timeout))
