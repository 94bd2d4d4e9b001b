"""What can be closed is a context manager, sync and async."""

from __future__ import annotations

from typing import Self

CLOSE_WITHIN = 10.0  # seconds that `close` waits for what runs


class Closing:
    """Leaving a `with` or `async with` block closes. Subclasses bring `close`, and `aclose` if that takes a while."""

    def close(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        """`close`, from asyncio or trio."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
