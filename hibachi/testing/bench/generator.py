"""Sends requests at their times, reads the answers as they stream, and notes when everything came."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from hibachi.errors import ConfigError
from hibachi.server.web.client import Answer, BadAnswer, Client, Unreachable
from hibachi.testing.bench.events import Events
from hibachi.testing.bench.samples import CUT, INTERRUPTED, REJECTED, Loaded, Sample
from hibachi.testing.bench.traffic import Ask, RequestForm

_AHEAD = 1000  # bodies that are made before the start, so that making them is no part of it
_MOST_ERROR = 4096  # bytes of the body of an error that are read
_loads = json.loads


class AnswerReader:
    """Takes the bytes of one answer as they come, and notes in `sample` what they are."""

    def __init__(self, sample: Sample, start: float, stream: bool) -> None:
        self._sample, self._start, self._stream = sample, start, stream
        self._events = Events()
        self._rest = bytearray()  # of an answer that is no stream
        self._over = False

    def __call__(self, answer: Answer, body: bytes, now: float) -> None:
        sample = self._sample
        sample.status = answer.status
        if not body:
            return
        if answer.status != 200 or not self._stream:
            if answer.status == 200 or len(self._rest) < _MOST_ERROR:
                self._rest += body
            return
        for data in self._events.feed(body):
            if data == b"[DONE]":
                self._over = True
            elif data:
                self._chunk(_loads(data.decode()), now)

    def _chunk(self, said: Any, now: float) -> None:
        sample = self._sample
        if not isinstance(said, dict):
            raise BadAnswer(f"expected a chunk; got {str(said)[:60]}")
        if (error := said.get("error")) is not None:
            sample.error, sample.message = "error in the stream", _message(error)
        self._usage(said)
        for choice in said.get("choices") or ():
            delta = choice.get("delta", choice)
            if choice.get("finish_reason") is not None:
                self._over = True
            if delta.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
                sample.chunks.append(now - self._start)
                break

    def _usage(self, said: dict[str, Any]) -> None:
        if used := said.get("usage"):
            self._sample.counted, self._sample.prompt_tokens = used.get("completion_tokens"), used.get("prompt_tokens")

    def ended(self) -> None:
        """The whole answer is there."""
        sample = self._sample
        if sample.status == 200 and not self._stream:
            self._usage(_loads(self._rest))
        elif sample.status == 200:
            if not self._over and sample.error is None:
                sample.error, sample.message = CUT, "the stream ended without [DONE]"
        else:
            sample.error = REJECTED if sample.status == 429 else f"HTTP {sample.status}"
            sample.message = _said(bytes(self._rest))


def _said(body: bytes) -> str:
    try:
        return _message(json.loads(body))
    except ValueError:
        return body[:300].decode(errors="replace")


def _message(error: Any) -> str:
    """Of an error's body."""
    while isinstance(error, dict):
        error = error.get("error") or error.get("message") or error.get("detail") or str(error)
    return str(error)[:300]


class Generator:
    """Sends requests to a server. form: how they are said. timeout: seconds for each; concurrency: most at a time."""

    def __init__(
        self,
        client: Client,
        form: RequestForm,
        *,
        concurrency: int | None = None,
        timeout: float = 600.0,
        told: Callable[[list[Sample], int, float], None] | None = None,
    ) -> None:
        self._client, self._form, self._timeout, self._told = client, form, timeout, told
        self._places = None if concurrency is None else asyncio.Semaphore(concurrency)
        self._running = self._peak = 0

    async def one(self, ask: Ask, body: bytes | None = None, start: float | None = None) -> Sample:
        """Send one request, now."""
        start = time.perf_counter() if start is None else start
        sample = Sample(ask.id, ask.due, ask.new)
        reading = AnswerReader(sample, start, self._form.stream)
        sample.sent = time.perf_counter() - start
        try:
            async with asyncio.timeout(self._timeout):
                await self._client.post(self._form.path, self._form.body(ask) if body is None else body, reading)
            reading.ended()
        except TimeoutError:
            sample.error, sample.message = "timed out", f"no end within {self._timeout:g} s"
        except Unreachable as e:
            sample.error, sample.message = "unreachable", str(e)
        except (BadAnswer, ValueError, KeyError, TypeError, AttributeError) as e:
            sample.error, sample.message = "bad answer", str(e)[:300]
        except OSError as e:
            sample.error, sample.message = "connection lost", str(e)
        except asyncio.CancelledError:
            sample.error = INTERRUPTED
        sample.end = time.perf_counter() - start
        return sample

    async def run(self, asks: Iterable[Ask], *, duration: float | None = None) -> Loaded:
        """Send all of them, each when it is due and there is a place; nothing more after `duration` seconds.

        Cancelled, or interrupted, it gives what it has.
        """
        coming = _ahead((ask, self._form.body(ask)) for ask in asks)
        samples: list[Sample] = []
        tasks: set[asyncio.Task[None]] = set()
        interrupted = False
        gc.collect()
        gc.freeze()  # what is there need not be looked at again: a pause would look like one of the server
        cpu, start = time.process_time(), time.perf_counter()
        telling = asyncio.ensure_future(self._tell(samples, start))
        try:
            await self._send(coming, samples, tasks, start, duration)
            while tasks:
                await asyncio.wait(tasks)
        except asyncio.CancelledError:
            interrupted = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            gc.unfreeze()
            telling.cancel()
        seconds = max((s.end for s in samples), default=0.0)
        cpu = time.process_time() - cpu
        samples.sort(key=lambda s: s.id)
        return Loaded(samples, seconds, cpu, self._peak, self._client.made, interrupted)

    async def _send(
        self,
        coming: Iterator[tuple[Ask, bytes]],
        samples: list[Sample],
        tasks: set[asyncio.Task[None]],
        start: float,
        duration: float | None,
    ) -> None:
        for ask, body in coming:
            if ask.due is not None:
                if duration is not None and ask.due >= duration:
                    return
                if (wait := ask.due - (time.perf_counter() - start)) > 0:
                    await asyncio.sleep(wait)
            waited = self._places is not None and self._places.locked()
            if self._places is not None:
                await self._places.acquire()
            if duration is not None and time.perf_counter() - start >= duration:
                return
            task = asyncio.ensure_future(self._counted(ask, body, start, samples, waited))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _counted(self, ask: Ask, body: bytes, start: float, samples: list[Sample], waited: bool) -> None:
        self._running += 1
        self._peak = max(self._peak, self._running)
        try:
            sample = await self.one(ask, body, start)
            sample.waited = waited
            samples.append(sample)
        finally:
            self._running -= 1
            if self._places is not None:
                self._places.release()

    async def _tell(self, samples: list[Sample], start: float) -> None:
        while self._told is not None:
            await asyncio.sleep(5.0)
            self._told(samples, self._running, time.perf_counter() - start)


def _ahead(made: Iterator[tuple[Ask, bytes]]) -> Iterator[tuple[Ask, bytes]]:
    """The same, made `_AHEAD` in advance, the first of them at once."""
    ready = deque(islice(made, _AHEAD))

    def rest() -> Iterator[tuple[Ask, bytes]]:
        while ready:
            yield ready.popleft()
            ready.extend(islice(made, 1))

    return rest()


async def model_of(client: Client) -> str:
    """The first model that the server names. Raises ConfigError."""
    try:
        answer, body = await client.get("/v1/models")
        if answer.status == 200:
            return str(json.loads(body)["data"][0]["id"])
    except (Unreachable, OSError, BadAnswer) as e:
        raise ConfigError(f"No server answers: {e}. Is it running, and is this its address?") from e
    except (ValueError, LookupError, TypeError):
        answer.status = 0
    if answer.status in (401, 403):
        raise ConfigError(f"{client.url} wants a key ({answer.status}: {_said(body)}). Give it by --api-key.")
    raise ConfigError(f"{client.url}/v1/models names no model ({answer.status}: {_said(body)}). Name it by --model.")


def check(sample: Sample, url: object, model: str | None) -> None:
    """That the server answers as it should, by its first answer. Raises ConfigError."""
    if sample.ok or sample.error == REJECTED:
        return
    said = f"{sample.error}: {sample.message}"
    if sample.error == "unreachable":
        raise ConfigError(f"No server answers: {sample.message}. Is it running, and is this its address?")
    if sample.status in (401, 403):
        raise ConfigError(f"{url} wants another key ({said}). Give it by --api-key.")
    if sample.status == 404:
        raise ConfigError(f"{url} has no such route or no model {model!r} ({said}).")
    if sample.status in (400, 422):
        hint = " Servers that do not know ignore_eos need --no-ignore-eos." if "ignore_eos" in sample.message else ""
        raise ConfigError(f"{url} refuses the requests ({said}).{hint}")
    raise ConfigError(f"{url} does not answer the first request as it should ({said}).")


def run(main: Any) -> Any:
    """asyncio.run, on uvloop where it is installed: it costs half as much."""
    try:
        factory = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
