"""How what answers requests comes to its end, in order."""

from __future__ import annotations

import asyncio
import logging
import time

log: logging.Logger = logging.getLogger("hibachi.serve")


class Drainable:
    """What answers requests says how many are open, and how to end them."""

    def open_requests(self) -> int:
        return 0

    def drain(self) -> None:
        """Take no further requests."""

    async def end_all(self, left: float) -> None:
        """End what still runs, in `left` seconds and a little more."""

    def works(self) -> bool:
        """Whether running requests will end by themselves."""
        return True

    def is_lost(self) -> str | None:
        """Why the process must end, if it must; asked at intervals."""
        return None

    def leave(self) -> None:
        """The process ends at once: release what would outlive it."""

    async def end(self, patience: float) -> None:
        """Let running requests end, for so many seconds; then end what is left."""
        until = time.monotonic() + patience
        if n := self.open_requests():
            log.info("draining: %d requests are running, and have %g s", n, patience)
        while self.open_requests() and time.monotonic() < until and self.works():
            await asyncio.sleep(0.02)
        if n := self.open_requests():
            log.warning("%d requests were not done after %g s, and are cut off", n, patience)
        await self.end_all(max(until - time.monotonic(), 0.0) if self.works() else 0.0)
