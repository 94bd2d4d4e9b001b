"""Reading a part of a stream, and leaving one: what cancels a request, what does not, and what is said later."""

import _thread
import asyncio
import gc
import itertools
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest
import trio

from hibachi import LLM, InvalidRequest, ModelError, RequestError, SamplingParams
from hibachi.engine.streams.stream import as_it_is, native_row
from hibachi.llm.remote.llm import RemoteLLM
from hibachi.llm.textstream import TextChoice, TextStream
from hibachi.request import Finish, Request

from ..engine.models import PATIENCE, Background, Next, until
from ..engine.pipe import Pipe

LEFT = r"[Ll]oop over its stream.*ended early.*next\(stream\) or stream\.take\(n\)"


def boom():
    return ModelError("boom")


@pytest.fixture(params=[asyncio, trio], ids=["asyncio", "trio"])
def loop(request):
    """loop(function of no arguments, asynchronous): its result."""
    return trio.run if request.param is trio else lambda main: asyncio.run(main())


async def yielding():
    """Let other tasks run, in either kind of loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        await trio.sleep(0.001)
    else:
        await asyncio.sleep(0.001)


async def cancelled(work, then):
    """Start work() as a task, cancel it after `then()`, wait until it has gone."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            await then()
            nursery.cancel_scope.cancel()
    else:
        task = asyncio.create_task(work())
        await then()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def interrupted_once(condition):
    """Ctrl-C for this thread, the main one, as soon as it has come to some point."""
    me = threading.get_ident()
    Background(lambda: (until(condition), signal.pthread_kill(me, signal.SIGINT)))


# ---- leaving ---------------------------------------------------------------------------------------------------------


def by_break(stream):
    for _ in stream:
        break


def by_error(stream):
    with pytest.raises(KeyError):
        for _ in stream:
            raise KeyError


def by_half_a_list(stream):
    assert list(itertools.islice(stream, 1)) == [1]


def by_zip(stream):
    assert list(zip(stream, range(2), strict=False)) == [(1, 0), (2, 1)]


def by_a_dropped_iterator(stream):
    iterator = iter(stream)
    next(iterator)
    del iterator


def by_an_iterator_that_never_ran(stream):
    iter(stream)


def by_an_asynchronous_iterator_that_never_ran(stream):
    aiter(stream)


def by_async_break(stream):
    async def main():
        async for _ in stream:
            break

    asyncio.run(main())


def by_trio_break(stream):
    async def main():
        async for _ in stream:
            break

    trio.run(main)


def by_timeout(stream):
    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.acollect(), 0.01)

    asyncio.run(main())


LEAVING = [
    by_break,
    by_error,
    by_half_a_list,
    by_zip,
    by_a_dropped_iterator,
    by_an_iterator_that_never_ran,
    by_an_asynchronous_iterator_that_never_ran,
    by_async_break,
    by_trio_break,
    by_timeout,
]


async def each(stream):
    return [item async for item in stream]


async def _awaited(call, *args):
    return await call(*args)


READING = {
    "next": next,
    "collect": lambda s: s.collect(),
    "for": list,
    "take": lambda s: s.take(2),
    "anext": lambda s: asyncio.run(_awaited(anext, s)),
    "acollect": lambda s: asyncio.run(s.acollect()),
    "async for": lambda s: asyncio.run(each(s)),
    "atake": lambda s: asyncio.run(s.atake(2)),
    "trio": lambda s: trio.run(s.atake, 2),
}


@pytest.mark.parametrize("leave", LEAVING)
def test_leaving_cancels_and_reading_again_says_so(leave):
    p = Pipe(1, 2, 3, 4)
    leave(p.stream)
    assert (p.cancelled, p.stream.finish_reason, p.stream.left) == (1, Finish.CANCELLED, True)
    p.channel.buffer.append(5)  # the engine may not know yet
    for _ in range(2):
        for how, read in READING.items():
            with pytest.raises(RequestError, match=LEFT):
                pytest.fail(f"{how} gave {read(p.stream)}")
    assert p.cancelled == 1


@pytest.mark.parametrize("leave", [leave for leave in LEAVING if leave is not by_timeout])
def test_leaving_is_the_same_where_the_engine_was_faster(leave):
    p = Pipe(1, 2, 3, 4, end=Finish.LENGTH)
    leave(p.stream)
    gc.collect()
    assert (p.cancelled, p.stream.finish_reason, p.stream.left) == (0, Finish.LENGTH, True)
    for how, read in READING.items():
        with pytest.raises(RequestError, match=LEFT):
            pytest.fail(f"{how} gave {read(p.stream)}")


@pytest.mark.parametrize("how", READING)
def test_a_stream_that_was_read_to_its_end_is_not_left(how):
    p = Pipe(1, 2, end=Finish.LENGTH)
    if how in ("next", "anext", "take", "atake", "trio"):  # these tell of the end only when there is nothing more
        assert p.stream.take(3) == [1, 2] and p.stream.take(1) == []
    else:
        assert READING[how](p.stream) == [1, 2]
    by_an_iterator_that_never_ran(p.stream)
    assert list(p.stream) == [] and not p.stream.left and p.cancelled == 0


def test_a_failed_stream_is_not_left():
    p = Pipe(1)
    p.end(Finish.ERROR, boom())
    for _ in range(2):
        with pytest.raises(ModelError, match="boom"):
            list(p.stream)
        with pytest.raises(ModelError, match="boom"):
            asyncio.run(p.stream.acollect())
    assert p.cancelled == 0 and not p.stream.left


def test_closing_is_not_leaving():
    p = Pipe(1, 2, 3)
    p.stream.close()
    by_an_iterator_that_never_ran(p.stream)
    assert p.stream.collect() == [1, 2, 3] and list(p.stream) == [] and p.cancelled == 1


def test_another_reader_that_waits_is_told():
    p = Pipe()
    reading = Background(next, p.stream)
    until(lambda: p.awaited)
    by_an_iterator_that_never_ran(p.stream)
    with pytest.raises(RequestError, match=LEFT):
        reading.result()


def test_two_loops_over_one_stream():
    """The one that ends first cancels; while both are there, each item comes once."""
    p = Pipe(1, 2, 3)
    outer = iter(p.stream)
    assert next(outer) == 1
    inner = iter(p.stream)
    assert (next(inner), next(outer)) == (2, 3) and p.cancelled == 0
    del inner
    with pytest.raises(RequestError, match=LEFT):
        next(outer)


def test_an_interrupt_inside_a_loop_cancels():
    p = Pipe(1)
    interrupted_once(lambda: p.awaited)
    with pytest.raises(KeyboardInterrupt) as caught:
        for _ in p.stream:
            pass
    assert caught.traceback and p.cancelled == 1  # at once, though the traceback is held
    with pytest.raises(RequestError, match=LEFT):
        next(p.stream)


# ---- taking ----------------------------------------------------------------------------------------------------------


WAYS = {  # (the next item, the next n)
    "thread": (next, lambda s, n: s.take(n)),
    "asyncio": (lambda s: asyncio.run(_awaited(anext, s)), lambda s, n: asyncio.run(s.atake(n))),
    "trio": (lambda s: trio.run(anext, s), lambda s, n: trio.run(s.atake, n)),
}
each_way = pytest.mark.parametrize("first, take", WAYS.values(), ids=WAYS)


@each_way
def test_next_and_take_cancel_nothing_and_lose_nothing(first, take):
    p = Pipe(*range(9))
    assert [first(p.stream), take(p.stream, 2), take(p.stream, 0), take(p.stream, np.int64(1))] == [0, [1, 2], [], [3]]
    gc.collect()
    assert p.cancelled == 0 and p.stream.finish_reason is None
    p.end(Finish.LENGTH)
    assert [take(p.stream, n) for n in (2, 10**30, 1, 1)] == [[4, 5], [6, 7, 8], [], []]
    assert p.cancelled == 0 and p.stream.finish_reason == Finish.LENGTH


@pytest.mark.parametrize("end", [None, Finish.STOP])
def test_take_waits_for_all_of_them_or_the_end(end):
    p = Pipe(1)
    reading = Background(p.stream.take, 3)
    until(lambda: p.awaited)
    p.push(2)
    time.sleep(0.01)
    assert reading.is_alive()
    if end is None:
        p.push(3, 4)
    else:
        p.end(end)
    assert reading.result() == ([1, 2, 3] if end is None else [1, 2])
    assert list(p.channel.buffer) == ([4] if end is None else [])


def test_take_does_not_wait_for_more_than_it_gives():
    p = Pipe(1, 2)
    assert Background(p.stream.take, 2).result() == [1, 2]
    p.push(3)
    assert asyncio.run(asyncio.wait_for(p.stream.atake(1), 5)) == [3]


@each_way
def test_the_error_comes_after_the_items_before_it(first, take):
    p = Pipe(1, 2, 3)
    p.end(Finish.ERROR, boom())
    assert take(p.stream, 2) == [1, 2] and take(p.stream, 2) == [3] and take(p.stream, 0) == []
    for _ in range(2):
        with pytest.raises(ModelError, match="boom"):
            take(p.stream, 1)


@pytest.mark.parametrize("n", [-1, 1.0, "3", None, True, [2], np.float32(1)])
def test_a_wrong_number_is_refused(n):
    p = Pipe(1)
    for call in (p.stream.take, lambda n: asyncio.run(p.stream.atake(n)), text_of(p).take):
        with pytest.raises(InvalidRequest, match=r"take\(n\) takes a number of items, an integer >= 0; got"):
            call(n)
    with pytest.raises(InvalidRequest, match="an integer >= 0"):
        asyncio.run(text_of(p).atake(n))
    assert p.stream.take(1) == [1] and p.cancelled == 0


def test_a_cancelled_atake_loses_nothing(loop):
    p = Pipe(1, 2)

    async def then():
        while not p.awaited or p.channel.buffer:
            await yielding()

    loop(lambda: cancelled(lambda: p.stream.atake(5), then))
    assert p.cancelled == 0 and p.stream.finish_reason is None and not p.awaited
    p.push(3)
    p.end()
    assert p.stream.take(2) == [1, 2] and p.stream.collect() == [3]


@pytest.mark.parametrize("read", [lambda s: s.take(5), lambda s: s.collect()], ids=["take", "collect"])
def test_an_interrupted_take_loses_nothing(read):
    p = Pipe(1, 2)

    interrupted_once(lambda: p.awaited and not p.channel.buffer)
    with pytest.raises(KeyboardInterrupt):
        read(p.stream)
    p.push(3)
    p.end()
    assert p.cancelled == 0 and p.stream.collect() == [1, 2, 3]


def test_a_paused_request_goes_on_when_items_are_taken(serve):
    with serve(Next(), pause_after=4) as engine:
        stream = engine.run([1], max_tokens=50)
        assert [int(x) for x in Background(stream.take, 20).result()] == list(range(2, 22))
        assert [int(x) for x in asyncio.run(stream.atake(20))] == list(range(22, 42))
        assert stream.finish_reason is None and len(stream.take(99)) == 10


# ---- text ------------------------------------------------------------------------------------------------------------


class Letters:
    """Each token is a letter; those of spaces are held back until the next."""

    def __init__(self, stop=None):
        self.stopped, self.stop, self._end, self._held = False, None, stop, ""

    def push(self, token):
        letter = chr(token)
        if letter == self._end:
            self.stopped, self.stop = True, letter
            return ""
        self._held += letter
        return "" if letter == " " else self.flush()

    def flush(self):
        out, self._held = self._held, ""
        return out


def text_of(*pipes, stop=None):
    choices = [TextChoice(i, p.stream, partial(Letters, stop), False) for i, p in enumerate(pipes)]
    return TextStream("prompt", [1], choices, len(pipes))


def said(pieces):
    return [(piece.text, piece.index) for piece in pieces]


@each_way
def test_pieces_are_taken(first, take):
    p = Pipe(*b"ab c d ")
    text = text_of(p)
    got = [first(text), *take(text, 2)]
    p.end(Finish.LENGTH)
    assert said(got + take(text, 9) + take(text, 1)) == [("a", 0), ("b", 0), (" c", 0), (" d", 0), (" ", 0)]
    assert p.cancelled == 0 and text.completion().text == "ab c d "


def test_an_interrupt_just_before_the_wait_is_noticed():
    """As where nothing wakes a thread that waits for a lock: on Windows always."""
    p = Pipe()
    text = text_of(p)
    Background(lambda: (until(lambda: p.awaited), _thread.interrupt_main()))
    Background(lambda: (time.sleep(PATIENCE), p.end()))
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        next(text)
    assert time.monotonic() - begun < PATIENCE / 2


def async_break(text):
    async def main():
        async for _ in text:
            break

    asyncio.run(main())


TEXT_READING = {
    "next": next,
    "for": list,
    "take": lambda s: s.take(2),
    "completion": lambda s: s.completion(),
    "anext": lambda s: asyncio.run(_awaited(anext, s)),
    "atake": lambda s: asyncio.run(s.atake(2)),
    "async for": lambda s: trio.run(each, s),
    "come": lambda s: asyncio.run(s.come()),
}


@pytest.mark.parametrize("leave", [by_break, by_error, iter, aiter, async_break], ids=lambda leave: leave.__name__)
def test_leaving_a_text_cancels_all_of_it(leave):
    pipes = Pipe(*b"ab"), Pipe(*b"cd")
    text = text_of(*pipes)
    leave(text)
    assert [p.cancelled for p in pipes] == [1, 1] and text.finish_reasons == ["cancelled", "cancelled"]
    for _ in range(2):
        for how, read in TEXT_READING.items():
            with pytest.raises(RequestError, match=LEFT):
                pytest.fail(f"{how} gave {read(text)}")


@pytest.mark.parametrize("first", [True, False])
def test_of_a_text_that_was_left_one_continuation_may_have_ended(first):
    done, runs = Pipe(*b"ab", end=Finish.LENGTH), Pipe(*b"cd")
    text = text_of(*((done, runs) if first else (runs, done)))
    by_break(text)
    assert (done.cancelled, runs.cancelled) == (0, 1) and sorted(text.finish_reasons) == ["cancelled", "length"]
    for read in TEXT_READING.values():
        with pytest.raises(RequestError, match=LEFT):
            read(text)


@pytest.mark.parametrize("stop", [None, "c"])
def test_a_text_that_was_read_to_its_end_is_not_left(stop):
    p = Pipe(*b"ab ")
    text = text_of(p, stop=stop)
    if stop is None:
        p.end(Finish.LENGTH)
    else:
        p.push(*b"cdef")
    assert said(text.take(1)) == [("a", 0)]
    assert text.completion().text == "ab " and text.finish_reason == ("length" if stop is None else "stop")
    assert said(text.take(1)) == [("b", 0)]  # `completion` took nothing from readers
    assert said(text.take(5)) == [(" ", 0)] and p.cancelled == (stop is not None)  # by the stop string
    by_break(text)
    assert text.completion().text == "ab " and list(text) == []


# ---- tokenizers that raise, and Ctrl-C within ------------------------------------------------------------------------


class Breaks(Letters):
    """Raises at "x", as often as `errors` says, and after it has taken the token in."""

    errors = ()

    def push(self, token):
        out = super().push(token)
        if chr(token) == "x" and Breaks.errors:
            raise Breaks.errors.pop()
        return out


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no such letter")])
@pytest.mark.parametrize("how", ["next", "take", "list"])
def test_a_push_that_raises_loses_no_token(error, how):
    p = Pipe(*b"ab xyz", end=Finish.LENGTH)
    text = TextStream("prompt", [1], [TextChoice(0, p.stream, Breaks, False)], 1)
    Breaks.errors = [error, error]
    for _ in range(2):
        with pytest.raises(type(error)):
            next(text) if how == "next" else text.take(9)
    pieces = text.take(9) if how == "take" else list(text)
    assert "".join(piece.text for piece in pieces) == "ab xyz"
    assert [i for piece in pieces for i in piece.token_ids] == [*b"ab xyz"]
    assert text.completion().text == "ab xyz"


@pytest.mark.parametrize("rows", [False, True])
def test_ctrl_c_anywhere_in_a_take_loses_nothing(rows):
    """Also while items are converted, where most of the time goes."""
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    random, batch, hits = np.random.default_rng(5), np.arange(2000), 0
    try:
        for turn in range(2000):
            if turn >= 20 and hits:  # a fast processor is seldom interrupted
                break
            p = Pipe()
            p.channel.buffer.extend((batch, i) for i in range(2000))
            p.stream.read = native_row if rows else as_it_is
            p.end(Finish.LENGTH)
            got = []
            while True:
                found = None
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-6, 2e-4))
                    found = p.stream.take(100)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    hits += 1
                if found is not None:  # else it was interrupted before it returned
                    got += found
                    if not found:
                        break
            assert [int(item) if rows else item[1] for item in got] == [*range(2000)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert hits


def test_a_completion_needs_the_end_and_not_that_all_was_read():
    p, q = Pipe(*b"ab"), Pipe(*b"c", end=Finish.LENGTH)
    text = text_of(p, q)
    text.take(2)
    with pytest.raises(RequestError, match=r"not done yet\. Read its stream to the end"):
        text.completion()
    p.push(*b"d")
    p.end(Finish.STOP)
    assert [c.text for c in text.completion().choices] == ["abd", "c"] and p.cancelled == 0


# ---- engines ---------------------------------------------------------------------------------------------------------

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def child():
    """The shipped model with its engine here, and with one in another process."""
    with LLM("tiny", backend="numpy") as here, RemoteLLM("tiny", backend="numpy") as there:
        yield here, there


def remote(llm, params):
    return llm.engine.submit(llm.engine.check(Request(np.array([3, 4, 5]), params)))


def test_a_remote_stream_is_as_one_here(child):
    here, there = child
    expected = here.engine.run([3, 4, 5], SHORT).collect()
    stream = remote(there, SHORT)
    assert [next(stream), *stream.take(4), *asyncio.run(stream.atake(3)), *stream.take(99)] == expected
    assert stream.finish_reason == "length" and stream.take(1) == []
    for leave in (by_break, iter, aiter):
        stream = remote(there, LONG)
        beside = remote(there, SHORT)
        leave(stream)
        assert stream.finish_reason == "cancelled"
        with pytest.raises(RequestError, match=LEFT):
            next(stream)
        assert beside.collect() == expected
    text = there.stream("It is a truth", SHORT)
    pieces = [next(text), *text.take(2), *asyncio.run(text.atake(99))]
    assert "".join(p.text for p in pieces) == here.generate("It is a truth", SHORT)[0].text == text.completion().text
    text = there.stream("It is a truth", LONG.with_(n=2))
    by_break(text)
    with pytest.raises(RequestError, match=LEFT):
        text.take(1)
    until(lambda: there.stats().running == 0)
