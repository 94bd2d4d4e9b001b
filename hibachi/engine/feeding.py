"""The caller's end of a request whose next tokens the caller gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hibachi.engine.prompts import Prompts
from hibachi.engine.runners.job import Job
from hibachi.errors import InvalidRequest, RequestError
from hibachi.request import Finish


class TokenFeed:
    """Takes turns with the engine: whoever has read an item may give one token or several, once.

    read: as of the stream. feed: hands over tokens [m, *tok], or None for the one that was drawn. Callable from any
    thread.
    """

    def __init__(
        self, job: Job, prompts: Prompts, read: Callable[[Any], Any], feed: Callable[[Job, Any], None]
    ) -> None:
        self._job, self._prompts, self._read, self._feed = job, prompts, read, feed
        self._tokens = job.seq.prompt_len + job.seq.begun  # that stand
        self._turns: list[None] = []

    def read(self, item: Any) -> Any:
        """An item of the channel as the caller gets it."""
        self._turns[:] = [None]
        return self._read(item)

    def feed(self, tokens: Any) -> None:
        """See `ItemStream.feed`."""
        job = self._job
        if (reason := job.channel.finish) is not None and not (self._turns and reason in (Finish.STOP, Finish.LENGTH)):
            raise RequestError(f"The stream has ended ({reason}), and takes no token any more. Start a new one.")
        n, given = 1, None
        if tokens is not None:
            assert job.kind is not None
            given, n = self._prompts.more(tokens, job.kind)
        room = job.seq.end - 1 - self._tokens
        try:
            self._turns.pop()
        except IndexError:
            raise InvalidRequest("feed answers an item, and none was read since the last time. Read one.") from None
        if room:  # else the item was the last one
            self._tokens += n
            self._feed(job, given)
