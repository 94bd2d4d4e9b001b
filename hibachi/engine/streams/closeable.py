"""Base class of objects that `with` and `async with` close."""

from __future__ import annotations

from typing import Any, Self

from hibachi.errors import ConfigError, shown
from hibachi.request import MOST_SECONDS

CLOSE_WITHIN = 10.0  # seconds that `close` waits for what runs


def waited(timeout: Any) -> float | None:
    """A timeout in seconds as clocks take it: from 0 to a century; None means no limit. Raises ConfigError for no
    number.
    """
    if timeout is None:
        return None
    try:
        if timeout == timeout:  # not NaN
            return max(0.0, float(min(timeout, MOST_SECONDS)))
    except Exception as e:
        raise ConfigError(f"timeout must be a number of seconds (or None: any time); got {shown(timeout)}.") from e
    raise ConfigError(f"timeout must be a number of seconds (or None: any time); got {shown(timeout)}.")


class Closing:
    """Leaving a `with` or `async with` block closes. Subclasses define `close`, and `aclose` if closing takes a
    while.
    """

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
