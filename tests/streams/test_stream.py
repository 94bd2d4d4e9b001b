"""Streams without an engine: the test holds the engine's end, a `Channel`, in its own hand."""

import asyncio
import gc
import itertools
import threading
from functools import partial

import pytest
import trio

from hibachi import ItemStream, ModelError
from hibachi.engine.streams.channel import Channel, Wakeups
from hibachi.engine.streams.merge import amerge, merge
from hibachi.request import Finish

from ..engine.models import PATIENCE, Background, until
from ..engine.pipe import Pipe

LOOPS = {"asyncio": lambda main: asyncio.run(main()), "trio": trio.run}
in_each_loop = pytest.mark.parametrize("run", LOOPS.values(), ids=LOOPS)


@pytest.fixture(params=["thread", *LOOPS])
def read(request):
    """read(stream): all its items, by `for` in this thread or by `async for` in a loop."""

    async def each(stream):
        return [item async for item in stream]

    return list if request.param == "thread" else lambda stream: LOOPS[request.param](partial(each, stream))


def boom():
    error = ModelError("boom")
    error.__cause__ = RuntimeError("below")
    return error


# ---- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [Finish.STOP, Finish.LENGTH, Finish.CLOSED])
def test_items_in_order_then_the_end(read, reason):
    p = Pipe(1, 2, 3, end=reason)
    assert read(p.stream) == [1, 2, 3]
    assert p.stream.finish_reason == reason and p.cancelled == 0
    assert read(p.stream) == []


def test_a_consumer_is_woken_by_items_and_by_the_end(read):
    p = Pipe()
    reading = Background(read, p.stream)
    for item in range(3):
        until(lambda: p.awaited)
        p.push(item)
    until(lambda: p.awaited)
    p.end()
    assert reading.result() == [0, 1, 2]


def test_collect_gives_what_is_left():
    p = Pipe(1, 2, 3, 4, end=Finish.STOP)
    assert next(p.stream) == 1
    assert p.stream.collect() == [2, 3, 4]
    assert p.stream.collect() == []


@pytest.mark.parametrize("collect", [lambda s: s.collect(), lambda s: asyncio.run(s.acollect())])
@pytest.mark.parametrize("pause_after", [None, 2])
def test_who_wants_all_is_woken_by_the_end_only(collect, pause_after):
    """Unless the stream waits for its reader."""
    p = Pipe()
    p.channel.pause_after = pause_after
    reading = Background(collect, p.stream)
    until(lambda: p.awaited)
    p.push(1)
    until(lambda: p.awaited)
    p.end()
    assert reading.result() == [1] and not p.awaited


def test_next_and_anext_can_be_mixed():
    p = Pipe(1, 2, 3, end=Finish.STOP)

    async def main():
        return await anext(p.stream), next(p.stream), await anext(p.stream), await anext(p.stream, "end")

    assert asyncio.run(main()) == (1, 2, 3, "end")


def test_an_index_error_of_the_reader_is_not_an_empty_buffer():
    channel = Channel()
    stream = ItemStream(channel, lambda: None, lambda item: [][item])
    channel.push(0, Wakeups())
    with pytest.raises(IndexError):
        next(stream)


# ---- errors ------------------------------------------------------------------------------------------------------


def test_an_error_comes_after_the_items_before_it():
    p = Pipe(1, 2)
    p.end(Finish.ERROR, boom())
    got = []
    with pytest.raises(ModelError, match="boom") as caught:
        for item in p.stream:
            got.append(item)
    assert got == [1, 2] and str(caught.value.__cause__) == "below"
    assert p.stream.finish_reason == Finish.ERROR and p.stream.error is caught.value


def test_an_error_is_raised_again_and_again(read):
    p = Pipe(end=None)
    p.end(Finish.ERROR, boom())
    depths = set()
    for _ in range(5):
        with pytest.raises(ModelError) as caught:
            read(p.stream)
        depths.add(len(caught.traceback))
    assert len(depths) == 1, "its traceback grows"


# ---- leaving early cancels at once -------------------------------------------------------------------------------


def leave_by_with(stream):
    with stream as s:
        assert next(s) == 1


def leave_by_with_and_exception(stream):
    with pytest.raises(KeyError), stream:
        raise KeyError


def leave_by_close(stream):
    stream.close()


def leave_by_async_exception(stream):
    async def main():
        try:
            async for _ in stream:
                raise KeyError
        except KeyError:
            assert stream.finish_reason == Finish.CANCELLED

    asyncio.run(main())


def leave_by_cancelled_task(stream):
    async def main():
        task = asyncio.create_task(stream.acollect())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stream.finish_reason == Finish.CANCELLED

    asyncio.run(main())


def leave_by_task_group(stream):
    async def fail():
        raise KeyError

    async def main():
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(stream.acollect())
                tasks.create_task(fail())
        assert stream.finish_reason == Finish.CANCELLED

    asyncio.run(main())


def leave_by_async_with(stream):
    async def main():
        async with stream as s:
            assert await anext(s) == 1
        assert stream.finish_reason == Finish.CANCELLED

    asyncio.run(main())


def leave_by_aclose(stream):
    asyncio.run(stream.aclose())


@pytest.mark.parametrize("leave", [f for name, f in list(globals().items()) if name.startswith("leave_by_")])
def test_leaving_early_cancels_at_once(leave):
    p = Pipe(1, 2, 3)
    leave(p.stream)
    assert (p.stream.finish_reason, p.cancelled) == (Finish.CANCELLED, 1)
    p.stream.close()
    assert p.cancelled == 1


def test_dropping_the_last_reference_cancels():
    p = Pipe(1)
    del p.stream
    assert (p.channel.finish, p.cancelled) == (Finish.CANCELLED, 1)


def test_a_stream_in_a_circle_is_cancelled_by_the_garbage_collector():
    p = Pipe(1)
    p.stream.me = p.stream
    del p.stream
    gc.collect()
    assert (p.channel.finish, p.cancelled) == (Finish.CANCELLED, 1)


def test_waiting_for_one_item_with_a_timeout_does_not_cancel():
    p = Pipe()

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(p.stream), 0.01)
        assert p.stream.finish_reason is None and not p.awaited
        p.push(1)
        return await anext(p.stream)

    assert asyncio.run(main()) == 1


def test_what_was_delivered_before_closing_can_be_read_and_nothing_after(read):
    p = Pipe(1, 2)
    p.stream.close()
    p.push(3)  # the engine does not know yet
    assert read(p.stream)[:2] == [1, 2]
    p.push(4)
    assert read(p.stream) == [], "an item after the end"


def test_closing_ends_the_wait_of_another_thread(read):
    p = Pipe()
    reading = Background(read, p.stream)
    until(lambda: p.awaited)
    p.stream.close()
    assert reading.result() == []


# ---- exactly one end ---------------------------------------------------------------------------------------------


def test_the_first_end_counts():
    p = Pipe()
    assert p.end(Finish.LENGTH)
    assert not p.end(Finish.ERROR, boom())
    p.stream.close()
    assert (p.stream.finish_reason, p.stream.error, p.cancelled) == (Finish.LENGTH, None, 0)


def test_racing_ends_give_exactly_one(eager_switching):
    for _ in range(100):
        p, start = Pipe(), threading.Barrier(4)

        def engine(p=p, start=start):
            start.wait(PATIENCE)
            return p.channel.end(Finish.STOP)

        def user(p=p, start=start):
            start.wait(PATIENCE)
            p.stream.close()

        ends = [Background(f) for f in (engine, user, engine, user)]
        won = sum(bool(f.result()) for f in ends)
        assert won + p.cancelled == 1
        assert p.stream.finish_reason == (Finish.STOP if won else Finish.CANCELLED)


# ---- many consumers ----------------------------------------------------------------------------------------------


def test_many_streams_in_one_loop_cost_one_post_a_step(monkeypatch):
    pipes = [Pipe() for _ in range(50)]
    posts = []

    async def main():
        loop = asyncio.get_running_loop()
        post = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: posts.append(1) or post(*args))

        async def each(stream):
            return [item async for item in stream]

        tasks = [asyncio.create_task(each(p.stream)) for p in pipes]
        for step in range(3):
            while not all(p.awaited for p in pipes):
                await asyncio.sleep(0)
            wakeups = Wakeups()
            for p in pipes:
                p.channel.push(step, wakeups)
            wakeups.post()
        while not all(p.awaited for p in pipes):
            await asyncio.sleep(0)
        assert len(posts) == 3
        for p in pipes:
            p.end()
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [[0, 1, 2]] * 50


def test_a_loop_that_was_closed_does_not_disturb_the_engine():
    p = Pipe()
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    p.channel.listen(future)
    loop.close()
    p.push(1)
    p.end()
    assert list(p.stream) == [1]


# ---- merge -------------------------------------------------------------------------------------------------------


def test_merge_gives_what_comes_from_anywhere():
    pipes = [Pipe(10), Pipe(), Pipe(30, 31, end=Finish.STOP)]
    merged = merge([p.stream for p in pipes])
    assert [next(merged), next(merged)] == [(0, [10]), (2, [30, 31])]
    coming = Background(next, merged)
    until(lambda: pipes[1].awaited)
    pipes[1].push(20)
    assert coming.result() == (1, [20])
    pipes[0].end()
    pipes[1].end()
    assert list(merged) == []


def test_merge_raises_the_first_error_after_its_items():
    good, bad = Pipe(1), Pipe(2)
    bad.end(Finish.ERROR, boom())
    merged = merge([good.stream, bad.stream])
    assert [next(merged), next(merged)] == [(0, [1]), (1, [2])]
    with pytest.raises(ModelError):
        next(merged)
    assert not good.awaited


# ---- amerge: the same for a task ----------------------------------------------------------------------------------


def taken_by(run, streams):
    """What `amerge` hands over, in order; and the error that it raises, if any."""
    took = []

    async def main():
        try:
            await amerge(streams, lambda i, items: took.append((i, items)))
        except Exception as e:
            return e

    return run(main), took


@in_each_loop
def test_amerge_gives_what_comes_from_anywhere(run):
    pipes = [Pipe(10), Pipe(), Pipe(30, 31, end=Finish.STOP)]
    taking = Background(taken_by, run, [p.stream for p in pipes])
    until(lambda: pipes[0].awaited and pipes[1].awaited)
    for n in range(20, 23):
        until(lambda: not pipes[1].channel.buffer)
        pipes[1].push(n)
    pipes[0].end()
    pipes[1].end()
    error, took = taking.result()
    assert error is None and took[:2] == [(0, [10]), (2, [30, 31])]
    assert list(itertools.chain(*[items for i, items in took if i == 1])) == [20, 21, 22]
    assert not any(p.awaited for p in pipes)


@in_each_loop
def test_amerge_raises_the_first_error_after_its_items(run):
    good, bad = Pipe(1), Pipe(2)
    bad.end(Finish.ERROR, boom())
    error, took = taken_by(run, [good.stream, bad.stream])
    assert isinstance(error, ModelError) and took == [(0, [1]), (1, [2])]
    assert not good.awaited


def test_a_failing_taker_leaves_nobody_waiting():
    p = Pipe(1)

    async def main():
        with pytest.raises(ZeroDivisionError):
            await amerge([p.stream], lambda i, items: 1 / 0)
        assert not p.awaited

    asyncio.run(main())


def test_a_reader_that_sees_the_end_finds_its_error():
    """Readers take no lock: whoever sees `finish` asks for `error` next."""
    seen = []

    class Watched(Channel):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "finish" and value is not None:
                seen.append(self.error)

    error = ValueError("why")
    Watched().end(Finish.ERROR, error)
    assert seen == [error]
