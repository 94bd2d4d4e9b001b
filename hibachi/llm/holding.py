"""Base class of objects that hold an engine: its life cycle, health and figures."""

from __future__ import annotations

from functools import partial
from typing import Any

from hibachi.engine.batchengine import BatchEngine
from hibachi.engine.health import Health
from hibachi.engine.runners.meters import Meters
from hibachi.engine.stats import Stats
from hibachi.engine.streams.channel import in_thread
from hibachi.engine.streams.closeable import CLOSE_WITHIN, Closing
from hibachi.request import SamplingParams


class Holding(Closing):
    """Base class of models by kind of token. engine: in this process or another."""

    engine: BatchEngine[Any]

    def __init__(self, engine: BatchEngine[Any]) -> None:
        self.engine = engine

    def check_form(self, params: SamplingParams | None) -> None:
        """Check the form that an output must have; requests that ask for it later find it checked. It may take two
        seconds, in which a server does other things. Raises InvalidRequest, UnsupportedOperation or MissingExtra.
        """
        self.engine.forms.check(params)

    def knows_form(self, params: SamplingParams) -> bool:
        """Whether `check_form` answers at once."""
        return self.engine.forms.knows(params)

    def stats(self) -> Stats:
        """A snapshot of the engine's counters: waiting, running, steps, tokens, free blocks."""
        return self.engine.stats()

    def meters(self) -> Meters:
        """Histograms of the engine's steps since its start: rows, tokens and times; padding."""
        return self.engine.meters()

    def health(self) -> Health:
        """The engine's health, callable from any thread, also while a forward pass hangs."""
        return self.engine.health()

    def dump(self) -> dict[str, Any]:
        """The flight recorder: the plans of the last steps, in a form that JSON can hold. It holds no tokens."""
        return self.engine.dump()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for the running and waiting ones.

        False if `timeout` seconds were not enough, or if the engine stalled or failed meanwhile.
        """
        return self.engine.drain(timeout)

    def close(self, timeout: float | None = CLOSE_WITHIN) -> None:
        """End all streams; a step that takes longer than `timeout` seconds is abandoned. Closing twice is fine."""
        self.engine.close(timeout)

    async def aclose(self, timeout: float | None = CLOSE_WITHIN) -> None:
        """`close`, without blocking the event loop while the running step ends."""
        await in_thread(partial(self.close, timeout))


def about(served: Holding) -> str:
    """The engine in a few words."""
    engine = served.engine
    facts = engine.facts
    library, device, *_ = facts.fingerprint.split("; ")
    same = "deterministic" if facts.deterministic else "not deterministic"
    where = "this process" if engine.pid is None else f"process {engine.pid}"
    return f"{library} on {device}, {facts.dtype}, {same}; engine in {where}"
