"""`Texts.each`: one completion after another for any number of prompts, by a moving window of requests."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from hibachi.engine.batchengine import BatchEngine
from hibachi.engine.streams.channel import give_way
from hibachi.engine.streams.closeable import Closing
from hibachi.errors import ConfigError, EngineError, InvalidRequest, QueueFull, shown
from hibachi.llm.gather import Gather
from hibachi.llm.sources import Listed, PromptSource, Tasked, Threaded
from hibachi.llm.textstream import Completion, TextStream
from hibachi.llm.tokenizers.prompts import listed
from hibachi.request import Prompt, SamplingParams, Terms, as_params

LOOK = 0.005  # seconds between two looks for further results while some lie ready
AGAIN = 0.05  # seconds until a request that found the queue full is tried again
IN_VAIN = 2.0  # seconds that an engine which has nothing to do may refuse a request; its figures come late
ERRORS = ("raise", "return")

T = TypeVar("T")
Given: TypeAlias = tuple[Prompt, SamplingParams | None, Terms | None]
OneOrEach: TypeAlias = T | Iterable[T] | None
"""One for all prompts, an iterable in step with them, or the default."""


class _Texts(Protocol):
    """The methods of `hibachi.llm.texts.Texts` that are used here."""

    @property
    def engine(self) -> BatchEngine[Any]: ...

    @property
    def default_params(self) -> SamplingParams: ...

    def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, *, terms: Terms | None = None
    ) -> list[TextStream]: ...


class Window:
    """The running requests and the unread results; nothing here waits.

    ahead: the most of both together. ordered, errors: see `Texts.each`.
    """

    def __init__(
        self,
        texts: _Texts,
        gather: Gather,
        source: PromptSource[Given],
        *,
        ordered: bool,
        ahead: int | None,
        errors: str,
    ) -> None:
        if errors not in ERRORS:
            raise ConfigError(f'errors must be "raise" or "return"; got {shown(errors)}.')
        if ahead is not None and (not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 1):
            raise ConfigError(f"ahead must be an integer >= 1 (or None: 2 x max_num_seqs); got {shown(ahead)}.")
        self._texts, self._source, self._ordered, self._raises = texts, source, ordered, errors == "raise"
        self._most = 2 * texts.engine.facts.limits.rows  # requests in the engine
        self._ahead = self._most if ahead is None else ahead
        self.gather = gather
        self._live: dict[int, TextStream] = {}
        self._requests = 0  # that they are
        self._held: Given | None = None  # did not find room in the engine
        self._results: dict[int, Completion | Exception] = {}  # unread results, in the order of their end
        self._broken: dict[int, Exception] = {}  # whose text could not be made; they run still
        self._begun = self._read = 0
        self._last: BaseException | None = None  # the error that comes after all results
        self._full = self._closed = False
        self._looked = 0.0
        self._alone: float | None = None  # since when the engine was idle and still refused a request

    @property
    def patience(self) -> float | None:
        """Seconds until a refused request must be tried again even if nothing ends; None means any time."""
        return None if self._held is None else AGAIN

    def look(self) -> bool:
        """Whether it is time to look for ended requests although results lie unread."""
        now = time.monotonic()
        if self._has_next() and now - self._looked < LOOK:
            return False
        self._looked = now
        return True

    def took(self, keys: Iterable[Any]) -> None:
        """These requests have ended: their results can be read."""
        for key in keys:
            stream = self._live.pop(key)
            self._requests -= len(stream.choices)
            broken = self._broken.pop(key, None)
            self._keep(key, _result(stream) if broken is None else broken)

    def fill(self) -> None:
        """Queue as many requests as there is room for."""
        while not (self._full or self._closed):
            room = self._ahead - (self._begun - self._read)
            if room <= 0 or self._requests >= self._most:
                return
            if self._held is None:
                self._source.ask(room)
                self._held = self._source.take()
            if self._held is None or not self._start(*self._held):
                return
            self._held = None

    def _start(self, prompt: Prompt, params: SamplingParams | None, terms: Terms | None) -> bool:
        """Queue one request, or keep the error that it is refused with; False means there is no room for it yet."""
        texts, key = self._texts, self._begun
        try:
            own = as_params(params, texts.default_params)
            if self._live and self._requests + own.runs > self._most:
                return False
            (stream,) = texts.submit([prompt], own, terms=terms)
        except QueueFull as e:
            if not self._in_vain():
                return False
            self._keep(key, e)
        except EngineError as e:  # it takes no requests any more
            self._last, self._full = e, True
            return True
        except Exception as e:
            self._keep(key, e)
        else:
            tokens = [choice.tokens for choice in stream.choices]
            # A stop string is found where text is made; a stream that pauses must be read to go on.
            fed = bool(own.stop) or tokens[0].channel.pause_after is not None
            self._live[key], self._alone = stream, None
            self._requests += len(tokens)
            self.gather.add(key, tokens, partial(self._feed, key) if fed else None)
        self._begun += 1
        return True

    def _in_vain(self) -> bool:
        """Whether a request is refused although the engine has been idle for a while, so that it would never fit."""
        stats, now = self._texts.engine.stats(), time.monotonic()
        if self._live or stats.waiting or stats.running or self._alone is None:
            self._alone = now
        return now - self._alone >= IN_VAIN

    def _feed(self, key: int, i: int, ids: list[int]) -> None:
        try:
            self._live[key].choices[i].feed(ids)
        except Exception as e:  # of a tokenizer of one's own
            self._broken[key] = e
            self._live[key].close()

    def _keep(self, key: int, result: Completion | Exception) -> None:
        self._results[key] = result
        self._full |= self._raises and isinstance(result, Exception)  # what comes after it would be cancelled

    def _has_next(self) -> bool:
        return (self._read in self._results) if self._ordered else bool(self._results)

    def next(self) -> tuple[int, Completion | Exception] | None:
        """The next result, with the index of its prompt; None means it must be waited for. Raises StopIteration at the
        end, the error of a prompt at its place if errors are to be raised, and the error of the iterable of prompts
        after all results.
        """
        if self._closed:
            raise StopIteration
        if self._has_next():
            key = self._read if self._ordered else next(iter(self._results))
            result = self._results.pop(key)
            self._read += 1
            if self._raises and isinstance(result, Exception):
                raise result
            return key, result
        if self._live or not (self._full or (self._held is None and self._source.over)):
            return None
        raise self._last or self._source.error or StopIteration

    def shown(self, key: int, result: Completion | Exception) -> Any:
        return result if self._ordered else (key, result)

    def close(self) -> None:
        self._closed = True
        self._source.close()
        self.gather.close()  # cancels
        self._live.clear()
        self._results.clear()
        self._held = None


class Each(Closing, Generic[T]):
    """The iterator that `Texts.each` returns, for `for` or `next`. Leaving the loop cancels what runs, as `close`
    does.
    """

    def __init__(self, window: Window) -> None:
        self._window = window

    def __next__(self) -> T:
        window = self._window
        try:
            if window.look():
                window.took(window.gather.poll())
            while True:
                window.fill()
                if (found := window.next()) is not None:
                    shown: T = window.shown(*found)
                    return shown
                window.took(window.gather.wait(window.patience))
        except BaseException:  # Ctrl-C, say: its traceback would keep this object for a while
            self.close()
            raise

    def __iter__(self) -> Iterator[T]:
        return _EachCursor(self)

    def close(self) -> None:
        self._window.close()

    def __del__(self) -> None:
        if hasattr(self, "_window"):
            self.close()


class AsyncEach(Closing, Generic[T]):
    """`Each` for `async for` and `anext`, in asyncio and trio. Cancelling the task cancels what runs."""

    def __init__(self, window: Window) -> None:
        self._window = window

    async def __anext__(self) -> T:
        window = self._window
        try:
            await give_way()
            if window.look():
                window.took(window.gather.poll())
            while True:
                window.fill()
                try:
                    found = window.next()
                except StopIteration:
                    raise StopAsyncIteration from None
                if found is not None:
                    shown: T = window.shown(*found)
                    return shown
                if window.patience is not None:
                    _wake_after(window.patience, window.gather)
                window.took(await window.gather.await_some())
        except BaseException:
            self.close()
            raise

    def __aiter__(self) -> AsyncIterator[T]:
        return _AsyncCursor(self)

    def close(self) -> None:
        self._window.close()

    def __del__(self) -> None:
        if hasattr(self, "_window"):
            self.close()


class _EachCursor(Generic[T]):
    """What `for` holds, and drops when it is left."""

    def __init__(self, each: Each[T]) -> None:
        self._each = each

    def __iter__(self) -> _EachCursor[T]:
        return self

    def __next__(self) -> T:
        return next(self._each)

    def __del__(self) -> None:
        self._each.close()


class _AsyncCursor(Generic[T]):
    """What `async for` holds; an async generator would notice a `break` only later."""

    def __init__(self, each: AsyncEach[T]) -> None:
        self._each = each

    def __aiter__(self) -> _AsyncCursor[T]:
        return self

    def __anext__(self) -> Awaitable[T]:
        return self._each.__anext__()

    def __del__(self) -> None:
        self._each.close()


def _result(stream: TextStream) -> Completion | Exception:
    """The result of a prompt whose requests have ended."""
    try:
        for choice in stream.choices:
            choice.feed(choice.tokens.come())
            if not choice.stopped:
                choice.tokens.check()
        return stream.completion()
    except Exception as e:
        return e


def _wake_after(seconds: float, gather: Gather) -> None:
    timer = threading.Timer(seconds, gather.wake)
    timer.daemon = True
    timer.start()


def window_of(
    texts: _Texts,
    prompts: Any,
    params: Any,
    terms: Any,
    *,
    ordered: bool,
    ahead: int | None,
    errors: str,
    tasks: bool = False,
) -> Window:
    """See `Texts.each`. tasks: prompts may come from an asynchronous iterable. Raises InvalidRequest, ConfigError."""
    gather = Gather()
    along = _Along(_in_step(params, SamplingParams, "params"), _in_step(terms, Terms, "terms"))
    source: PromptSource[Given]
    if tasks and isinstance(prompts, AsyncIterable):
        source = Tasked(aiter(prompts), along, gather.wake)
    elif isinstance(prompts, (Mapping, Sequence)) or hasattr(prompts, "tolist") or not isinstance(prompts, Iterable):
        own = iter(listed(prompts))
        there = all(x is None or isinstance(x, (SamplingParams, Terms, Sequence)) for x in (params, terms))
        source = Listed(map(along, own)) if there else Threaded(map(along, own), gather.wake)
    else:
        source = Threaded(map(along, iter(prompts)), gather.wake)
    return Window(texts, gather, source, ordered=ordered, ahead=ahead, errors=errors)


class _Along:
    """A prompt with what goes with it."""

    def __init__(self, params: Iterator[Any], terms: Iterator[Any]) -> None:
        self._params, self._terms, self._count = params, terms, 0

    def __call__(self, prompt: Prompt) -> Given:
        self._count += 1
        return prompt, self._next(self._params, "params"), self._next(self._terms, "terms")

    def _next(self, some: Iterator[Any], what: str) -> Any:
        try:
            return next(some)
        except StopIteration:
            got = f"they ended before prompt {self._count}"
            raise InvalidRequest(f"{what} must be one, or as many as there are prompts; {got}.") from None


def _in_step(given: Any, kind: type, what: str) -> Iterator[Any]:
    """An iterable of values in step with the prompts, from one value for all or from an iterable. Raises
    InvalidRequest.
    """
    if given is None or isinstance(given, kind):
        return repeat(given)
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping)):
        raise InvalidRequest(f"{what} must be a {kind.__name__}, an iterable of them, or None; got {shown(given)}.")
    return iter(given)
