"""Requests to a server, many at a time, from a thread with its own event loop; passing failures are retried.

A server counts as reachable as long as it answers any request. So a request that fails again and again while others are
answered is at fault itself, and one that fails while none is answered is not.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from hibachi.errors import MOST_WORDS, ConfigError, text_of
from hibachi.llm.dialects.dialects import TOO_LONG
from hibachi.llm.dialects.errors import INVALID, SERVER, Refused
from hibachi.offline.tasks.task import Lost
from hibachi.server.web.client import BadAnswer, Client, Unreachable, Url

T = TypeVar("T")
LARGEST = 64 << 20  # bytes of an answer
LONGEST_PAUSE = 60.0  # seconds, whatever Retry-After says
ASK_WITHIN = 30.0  # seconds for what is no row
CLOSE_WITHIN = 10.0  # seconds
DENIED = (401, 403)
BUSY = 429
MAY_PASS = (408, BUSY, 500, 502, 503, 504, 529)  # statuses with which a request is repeated
_IDS = re.compile(  # in messages: of a request, and other than the next time
    r"\b(?:req|request|cmpl|chatcmpl|embd|trace)[-_][0-9A-Za-z_-]{8,}\b"
    r"|\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
)


@dataclass(frozen=True, slots=True)
class Patience:
    """tries: of a request that meets an error that may pass. pause: seconds before the second; before each further one
    `factor` times as many, so that by default there is a minute from the first to the last. busy: seconds for which a
    request may be told that the server has too many (429), which is no error. timeout: seconds for an answer; timeouts:
    how often one may miss it while others are answered. back: seconds for which a server that is away is waited for.
    """

    tries: int = 5
    pause: float = 1.5
    factor: float = 3.0
    busy: float = 600.0
    timeout: float = 600.0
    timeouts: int = 2
    back: float = 20.0


class _TooLarge(Exception):
    pass


class _Answer:
    """Takes the parts of a body as they come."""

    __slots__ = ("data", "parts", "size")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def __call__(self, answer: object, body: bytes, now: float) -> None:
        self.size += len(body)
        if self.size > LARGEST:
            raise _TooLarge
        self.parts.append(body)


@dataclass(slots=True, eq=False)
class _Flight:
    """One request. outcome: status and body, or why there is none. since: number of answers to any request when it
    began, or failed the last time. pausing: nothing of it is at the server.
    """

    number: int
    path: str
    body: bytes
    outcome: tuple[int, bytes] | Exception | None = None
    task: asyncio.Task[None] | None = None
    pausing: bool = False
    tries: int = 0
    timeouts: int = 0
    busy: int = 0
    since: int = 0
    busy_since: float | None = None


class Sender:
    """Requests that are known by numbers. Called by one thread, but for `wake`.

    key: sent with each, and never told. Raises ConfigError for one that cannot be sent.
    """

    def __init__(self, url: Url, key: str | None, patience: Patience) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._client = Client(url, headers, agent="hibachi-run-batch")
        self._url, self._key, self._patience = url, key, patience
        self._flights: dict[int, _Flight] = {}
        self._inbox: deque[_Flight] = deque()
        self._called = False  # the loop knows that something is in the inbox
        self._done: SimpleQueue[int | None] = SimpleQueue()  # None: `wake`; may be filled in a signal's handler
        self._ended: Exception | None = None  # why nothing more is sent
        self._answered = 0
        begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(begun,), name="hibachi-sender", daemon=True)
        self._thread.start()
        begun.wait()

    # ---- for the caller ----------------------------------------------------------------------------------------------

    def get(self, path: str) -> tuple[int, bytes]:
        """Once. Raises Unreachable, BadAnswer, OSError."""

        async def get() -> tuple[int, bytes]:
            async with asyncio.timeout(ASK_WITHIN):
                answer, data = await self._client.get(path)
            return answer.status, data

        return self._on_loop(get())

    def start(self, number: int, path: str, body: bytes) -> None:
        """Raises Lost, and ConfigError if the server takes nothing of us."""
        if self._ended is not None:
            raise self._ended
        flight = self._flights[number] = _Flight(number, path, body)
        self._inbox.append(flight)
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._begin)

    def wait(self, timeout: float) -> Sequence[int]:
        """The finished requests, after at most this many seconds."""
        done: list[int] = []
        with suppress(Empty):
            number = self._done.get(timeout=max(timeout, 0.0))
            while True:
                if number is not None:
                    done.append(number)
                number = self._done.get_nowait()
        if self._ended is not None:  # what has an answer first
            done.sort(key=lambda n: not isinstance(self._flights[n].outcome, tuple))
        if not done and not self._thread.is_alive():
            raise Lost("The thread that sends requests has ended.")
        return done

    def wake(self) -> None:
        """End `wait`; from any thread, and from a signal's handler."""
        self._done.put(None)

    def take(self, number: int) -> tuple[int, bytes]:
        """Status and body. Raises Refused for a request that failed, Lost, and ConfigError as `start` does."""
        outcome = self._flights.pop(number).outcome
        if isinstance(outcome, tuple):
            return outcome
        assert outcome is not None
        raise outcome

    def withdraw(self) -> list[int]:
        """Take back those of which nothing is at the server; their numbers."""

        async def withdraw() -> list[int]:
            found = [f for f in list(self._flights.values()) if f.outcome is None and (f.pausing or f.task is None)]
            for flight in found:
                if flight.task is not None:
                    flight.task.cancel()
            self._inbox.clear()
            return [flight.number for flight in found]

        numbers = self._on_loop(withdraw())
        for number in numbers:
            del self._flights[number]
        return numbers

    def close(self) -> None:
        """End all at once, by closing connections, so that the server computes no more for us."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(CLOSE_WITHIN)

    def refusal(self, status: int, data: bytes) -> Refused:
        """Of an answer that is none: what the server said."""
        return refusal(status, data, self._key)

    def _on_loop(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _run(self, begun: threading.Event) -> None:
        asyncio.run(self._main(begun))

    async def _main(self, begun: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        begun.set()
        await self._over.wait()
        self._ended = self._ended or Lost("The requests were abandoned.")
        tasks = [f.task for f in list(self._flights.values()) if f.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def _begin(self) -> None:
        self._called = False
        while self._inbox:
            flight = self._inbox.popleft()
            flight.task = self._loop.create_task(self._fly(flight))

    async def _fly(self, flight: _Flight) -> None:
        try:
            flight.outcome = await self._answer(flight)
        except Exception as e:
            flight.outcome = e
        self._done.put(flight.number)

    async def _answer(self, flight: _Flight) -> tuple[int, bytes]:
        """Raises Refused, Lost, ConfigError."""
        flight.since = self._answered
        while True:
            taken, after = _Answer(), None
            try:
                async with asyncio.timeout(self._patience.timeout):
                    answer = await self._client.post(flight.path, flight.body, taken)
            except TimeoutError:
                flight.timeouts += 1
                if self._answered == flight.since:  # that is no fault of this one
                    flight.timeouts = self._patience.timeouts
                status, why = 504, f"no answer within {self._patience.timeout:g} s"
            except _TooLarge:
                raise Refused(
                    f"The answer has more than {LARGEST} bytes.", status=502, kind=SERVER, code="answer_too_large"
                ) from None
            except (Unreachable, BadAnswer, OSError) as e:
                status, why = 503, str(e) or text_of(e)
            else:
                status, data = answer.status, b"".join(taken.parts)
                if status in DENIED:
                    raise self._end(denied(self._url, self.refusal(status, data)))
                if status not in MAY_PASS:
                    self._answered += 1
                    return status, data
                why, after = f"HTTP {status}: {self.refusal(status, data)}", answer.headers.get("retry-after")
            await self._pause(flight, status, why, after)

    async def _pause(self, flight: _Flight, status: int, why: str, after: str | None) -> None:
        """Raises Refused or Lost when there have been enough."""
        patience = self._patience
        others, flight.since = self._answered > flight.since, self._answered
        if status == BUSY:
            now, flight.busy = time.monotonic(), flight.busy + 1
            flight.busy_since = now if flight.busy_since is None else flight.busy_since
            times, enough = flight.busy, now - flight.busy_since >= patience.busy
        else:
            flight.tries += 1
            times = flight.tries
            enough = times >= patience.tries or flight.timeouts >= patience.timeouts
        if enough:
            if others:
                raise Refused(
                    f"The server answered others, but not this request, also not when it was repeated. The last time: "
                    f"{why}.",
                    status=status,
                    kind=SERVER,
                    code="no_answer",
                )
            raise self._end(Lost(f"{self._url} has answered nothing for a while. The last time: {why}."))
        told = _seconds(after)
        if status == BUSY and told is not None:
            times = 1  # a server that says when to retry is believed, even if that is soon
        seconds = patience.pause * patience.factor ** min(times - 1, patience.tries)
        seconds *= 0.75 + 0.5 * (flight.number * 0.618 % 1)  # not all at the same time
        flight.pausing = True
        await asyncio.sleep(min(max(seconds, told or 0.0), LONGEST_PAUSE))
        flight.pausing = False

    def _end(self, why: Exception) -> Exception:
        if self._ended is None:
            self._ended = why
        return why


def denied(url: Url, why: Refused) -> ConfigError:
    return ConfigError(f"{url} refuses the API key, or wants one ({why.status}: {why}). Give it by --api-key.")


def refusal(status: int, data: bytes, secret: str | None = None) -> Refused:
    """What a server said instead of answering, in OpenAI's form or another; `secret` is not repeated."""
    found: Any = None
    with suppress(ValueError, RecursionError):
        found = json.loads(data)
    about = found.get("error", found) if isinstance(found, Mapping) else found
    more: Callable[[str], Any] = about.get if isinstance(about, Mapping) else lambda name: None
    said = more("message") or more("detail") or (about if isinstance(about, str) else None)
    if isinstance(said, str):
        said = _cleaned(said.strip(), secret)[:MOST_WORDS]
    else:
        text = json.dumps(said) if said else data.decode(errors="replace")
        said = " ".join(_cleaned(text, secret)[:2000].split())[:200]
    said = said or f"HTTP {status}, and no word why"
    kind, param, code = (
        None if more(n) is None else _cleaned(str(more(n)), secret)[:200] for n in ("type", "param", "code")
    )
    if code is None and isinstance(details := more("details"), Mapping) and "error_code" in details:  # Anthropic's form
        code = _cleaned(str(details["error_code"]), secret)[:200]
        if code == "context_length_exceeded":
            said = said.removeprefix(TOO_LONG)  # it is told again
    return Refused(said, status=status, kind=kind or (INVALID if status < 500 else SERVER), param=param, code=code)


def _cleaned(text: str, secret: str | None) -> str:
    """All of it, as of what was cut off in the middle nothing is known again."""
    return _IDS.sub("(id)", text.replace(secret, "***") if secret else text)


def _seconds(after: str | None) -> float | None:
    """Of a Retry-After: seconds, or a date; None means it says neither."""
    if after is None:
        return None
    if after.isascii() and after.isdigit():
        return float(after[:9])
    with suppress(ValueError, TypeError, OverflowError):
        return max(parsedate_to_datetime(after).timestamp() - time.time(), 0.0)
    return None
