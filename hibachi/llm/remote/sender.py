"""Messages to another process, sent without holding up the caller."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from hibachi.errors import QueueFull

MOST_UNSENT = 2**28  # bytes of requests that wait to be sent


class PipeSender:
    """Writes to a process's pipe in a thread of its own, as a full pipe blocks for as long as the process is stalled.

    Streams that are dropped cancel, wherever the garbage collector finds them: perhaps in a thread that is in the midst
    of a method of ours. So there is no lock here, only a SimpleQueue, whose `put` may be entered twice.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._queue: SimpleQueue[tuple[tuple[Any, ...], int] | None] = SimpleQueue()
        self._contents: dict[int, bytes] = {}  # of requests that are in the queue, unless they were withdrawn
        self._posted = self._passed = 0  # bytes; the first belongs to the one thread that posts, the other to `_send`
        threading.Thread(target=self._send, name="hibachi-remote-send", daemon=True).start()

    def tell(self, *message: Any) -> None:
        """Send a short message that can be pickled."""
        self._queue.put((message, 0))

    def check(self, size: int) -> None:
        """Raises QueueFull if a request of `size` bytes is too much, as the process does not read the others."""
        if (unsent := self._posted - self._passed) and unsent + size > MOST_UNSENT:
            raise QueueFull(
                f"The engine's process does not take what it is sent: expected at most {MOST_UNSENT} bytes of requests "
                f"to wait for it; got {unsent}, and {size} more. Try again later, and look at `health`."
            )

    def post(self, contents: bytes, what: str, number: int, *rest: Any) -> None:
        """Send (what, number, ...) and the pickled contents of a request. Called by one thread at a time."""
        self._posted += len(contents)
        # Before the entry is queued: `_send` takes an entry without contents for one that was withdrawn.
        self._contents[number] = contents
        self._queue.put(((what, number, *rest), len(contents)))

    def withdraw(self, number: int) -> bool:
        """Take back a request that has not been sent; False if it has."""
        # `_send` pops too. A pop is atomic, so a request is either withdrawn or sent, and never both.
        return self._contents.pop(number, None) is not None

    def end(self, *last: Any) -> None:
        """Drop the requests that wait, send this last message if there is one, and end the thread."""
        self._contents.clear()
        if last:
            self.tell(*last)
        self._queue.put(None)

    def _send(self) -> None:
        while (entry := self._queue.get()) is not None:
            message, size = entry
            try:
                if not size:
                    self._pipe.send(message)
                elif (contents := self._contents.pop(message[1], None)) is not None:
                    self._pipe.send(message)
                    self._pipe.send_bytes(contents)
            except OSError:
                return  # the process has ended, and `_listen` notices
            self._passed += size  # of those that were withdrawn as well: `post` has counted them
