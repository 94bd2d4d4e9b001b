"""Streams in trio tasks: what test_stream.py shows for asyncio, and trio's own rules."""

import asyncio
import subprocess
import sys
from types import ModuleType

import pytest
import trio
import trio.lowlevel

from hibachi import LLM, FeedforwardBatchInference, SamplingParams
from hibachi.engine.streams.channel import Wakeups, in_trio, loop_future
from hibachi.engine.streams.merge import await_any
from hibachi.request import Finish

from ..engine.models import PATIENCE, Background, Gate, Next, ints, until
from ..engine.pipe import Pipe
from ..lib.inside import thread


def read(stream):
    """All its items, in a trio run of their own."""
    return trio.run(stream.acollect)


async def trio_until(condition):
    with trio.fail_after(PATIENCE):
        while not condition():
            await trio.sleep(0.0005)


# ---- reading -----------------------------------------------------------------------------------------------------


def test_await_any():
    quiet, loud = Pipe(), Pipe()

    async def main():
        await await_any([quiet.stream, loud.stream])

    waiting = Background(trio.run, main)
    until(lambda: quiet.awaited and loud.awaited)
    loud.push(1)
    waiting.result()
    assert not quiet.awaited and not loud.awaited


# ---- leaving early cancels at once -------------------------------------------------------------------------------


async def leave_by_move_on_after(p):
    with trio.move_on_after(0.01) as scope:
        async for _ in p.stream:
            pass
    assert scope.cancelled_caught


async def leave_by_cancel_scope(p):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(p.stream.acollect)
        await trio_until(lambda: p.awaited)
        nursery.cancel_scope.cancel()


async def leave_by_failing_sibling(p):
    async def fail():
        await trio_until(lambda: p.awaited)
        raise KeyError

    with pytest.raises(ExceptionGroup):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(p.stream.acollect)
            nursery.start_soon(fail)


async def leave_by_async_with(p):
    async with p.stream as s:
        assert await anext(s) == 1


async def leave_by_aclose(p):
    await p.stream.aclose()


async def leave_by_async_with_that_is_cancelled(p):
    with trio.CancelScope() as scope:
        async with p.stream:
            scope.cancel()
            await trio.sleep_forever()


async def leave_by_cancelled_scope_before_the_first_item(p):
    with trio.CancelScope() as scope:
        scope.cancel()
        await p.stream.acollect()


@pytest.mark.parametrize("leave", [f for name, f in list(globals().items()) if name.startswith("leave_by_")])
def test_leaving_early_cancels_at_once(leave):
    p = Pipe(1, 2, 3)

    async def main():
        await leave(p)
        assert (p.stream.finish_reason, p.cancelled) == (Finish.CANCELLED, 1)

    trio.run(main)
    assert not p.awaited


def test_waiting_for_one_item_with_a_timeout_neither_cancels_nor_loses_one():
    p = Pipe()

    async def main():
        with trio.move_on_after(0.01) as scope:
            await anext(p.stream)
        assert scope.cancelled_caught and p.stream.finish_reason is None and not p.awaited
        p.push(1)
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(p.stream)
        assert scope.cancelled_caught
        return await anext(p.stream)

    assert trio.run(main) == 1


# ---- trio's rules ------------------------------------------------------------------------------------------------


def test_a_timeout_is_noticed_though_there_is_always_an_item():
    p = Pipe(*range(1000))

    async def main():
        with trio.CancelScope() as scope:
            async for item in p.stream:
                if item == 2:
                    scope.cancel()
                assert item <= 2
        assert scope.cancelled_caught and p.stream.finish_reason == Finish.CANCELLED

    trio.run(main)


def test_reading_what_is_there_lets_others_run():
    pipes, order = [Pipe(*range(100), end=Finish.STOP) for _ in range(2)], []

    async def consume(i):
        async for _ in pipes[i].stream:
            order.append(i)

    async def main():
        async with trio.open_nursery() as nursery:
            for i in range(2):
                nursery.start_soon(consume, i)

    trio.run(main)
    assert order[:20].count(0) == 10


def test_a_result_that_is_there_gives_way_too():
    with FeedforwardBatchInference(Double(), backend="numpy") as engine:
        item = engine.run([1.0])
        item.result(PATIENCE)

        async def main():
            with trio.CancelScope() as scope:
                scope.cancel()
                await item
            assert scope.cancelled_caught

        trio.run(main)


# ---- wake-ups ----------------------------------------------------------------------------------------------------


def test_many_streams_in_one_run_cost_one_post_a_step(monkeypatch):
    pipes, posts, got = [Pipe() for _ in range(50)], [], []

    async def consume(p):
        got.append([item async for item in p.stream])

    async def main():
        token = trio.lowlevel.current_trio_token()
        post = type(token).run_sync_soon
        monkeypatch.setattr(type(token), "run_sync_soon", lambda self, *args: posts.append(self) or post(self, *args))
        async with trio.open_nursery() as nursery:
            for p in pipes:
                nursery.start_soon(consume, p)
            for step in range(3):
                await trio_until(lambda: all(p.awaited for p in pipes))
                wakeups = Wakeups()
                for p in pipes:
                    p.channel.push(step, wakeups)
                wakeups.post()
            await trio_until(lambda: all(p.awaited for p in pipes))
            assert posts == [token] * 3
            for p in pipes:
                p.end()

    trio.run(main)
    assert got == [[0, 1, 2]] * 50


def test_a_run_that_has_ended_harms_nobody():
    gone, here, wakeups = Pipe(), Pipe(), Wakeups()

    async def leave_a_waiter():
        gone.channel.listen(loop_future(in_trio()))

    trio.run(leave_a_waiter)
    reading = Background(read, here.stream)
    until(lambda: here.awaited)
    gone.channel.push(1, wakeups)
    here.channel.push(2, wakeups)
    wakeups.post()
    gone.end()
    here.end()
    assert list(gone.stream) == [1] and reading.result() == [2]


# ---- which loop is it? -------------------------------------------------------------------------------------------


def test_a_guest_of_asyncio_and_its_host_read_side_by_side():
    guest, host, done = Pipe(), Pipe(), []

    async def in_guest():
        assert in_trio() is trio.lowlevel
        return await guest.stream.acollect()

    async def main():
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        trio.lowlevel.start_guest_run(
            in_guest,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=lambda outcome: (done.append(outcome.unwrap()), ended.set()),
        )
        assert in_trio() is None
        own = await host.stream.acollect()
        await ended.wait()
        return own

    reading = Background(lambda: asyncio.run(main()))
    for i in range(10):
        until(lambda: guest.awaited and host.awaited)
        guest.push(i)
        host.push(-i)
    guest.end()
    host.end()
    assert reading.result() == [-i for i in range(10)] and done == [list(range(10))]


def test_asyncio_inside_a_trio_task_is_asyncio():
    """As trio-asyncio does it: the task that runs belongs to asyncio, though a task of trio runs its loop."""

    async def which():
        return in_trio()

    async def main():
        loop = asyncio.new_event_loop()
        try:
            return in_trio(), loop.run_until_complete(which())
        finally:
            loop.close()

    assert trio.run(main) == (trio.lowlevel, None)


@pytest.mark.parametrize("module", [ModuleType("trio.lowlevel"), None], ids=["half imported", "blocked"])
def test_a_trio_that_is_not_there_yet_does_not_disturb_asyncio(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "trio.lowlevel", module)
    assert asyncio.run(Pipe(1, 2, end=Finish.STOP).stream.acollect()) == [1, 2]


def test_no_loop_at_all_is_said():
    with pytest.raises(RuntimeError, match="no running event loop"):
        Pipe().stream.acollect().send(None)


def test_trio_is_never_imported_by_us():
    code = """
import asyncio, sys, hibachi
class Next:
    def forward(self, tokens): return tokens[:, -1] + 1
async def main():
    async with hibachi.AutoregressiveBatchInference(Next(), max_model_len=30) as engine:
        return await engine.run([1], max_tokens=3).acollect()
assert [int(t) for t in asyncio.run(main())] == [2, 3, 4]
assert not {m for m in sys.modules if m.split(".")[0] in ("trio", "sniffio", "anyio")}
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=3 * PATIENCE)


# ---- engines -----------------------------------------------------------------------------------------------------


class Double:
    def forward(self, x):
        return x * 2


class AsyncNext(Next):
    """Its `forward` is awaited in the engine's thread, on asyncio, whatever its callers run."""

    async def forward(self, tokens):
        await asyncio.sleep(0)
        return super().forward(tokens)


def test_an_engine_serves_many_tasks(serve):
    engine, got = serve(AsyncNext(), max_num_seqs=4), {}

    async def one(k):
        got[k] = [int(t) async for t in engine.run([k], max_tokens=5)]

    async def main():
        async with trio.open_nursery() as nursery:
            for k in range(20):
                nursery.start_soon(one, k)

    trio.run(main)
    assert got == {k: [k + n for n in range(1, 6)] for k in range(20)}


def test_items_are_awaited():
    with FeedforwardBatchInference(Double(), backend="numpy") as engine:

        async def main():
            item = engine.run([1.0, 2.0])
            return (await item).tolist(), (await item).tolist()

        assert trio.run(main) == ([2, 4], [2, 4])


def test_aclose_leaves_the_run_free_while_the_last_step_ends(serve):
    gate = Gate()
    engine = serve(gate)

    async def main():
        stream = engine.run([1])
        await trio.to_thread.run_sync(gate.wait)

        async def later():  # runs only if nobody holds up the run while we close
            gate.open()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(later)
            await engine.aclose()
        return stream.finish_reason

    assert trio.run(main) == Finish.CLOSED


def test_a_cancelled_block_closes_its_engine_nevertheless(serve):
    """In a cancelled scope each `await` raises at once; what closes must not depend on one."""
    engine = serve()

    async def main():
        with trio.move_on_after(0.01) as scope:
            async with engine:
                stream = engine.run([1], max_tokens=900)
                await trio.sleep_forever()
        assert scope.cancelled_caught
        await trio_until(lambda: stream.finish_reason is not None)

    trio.run(main)
    until(lambda: thread(engine) is None or not thread(engine).is_alive())


def test_aclose_raises_what_close_raises(serve, monkeypatch):
    engine = serve()

    def fail(timeout):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "close", fail)
        for run in (trio.run, lambda f: asyncio.run(f())):
            with pytest.raises(OSError, match="disk is full"):
                run(engine.aclose)


# ---- texts -------------------------------------------------------------------------------------------------------

PROMPTS = ["She was", "It is a truth universally acknowledged, that", "Mr. Knightley looked at her with"]


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny") as llm:
        llm.generate("A", greedy(1))  # its thread starts here, not in a test
        yield llm


def greedy(n=24, **options):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **options)


def test_agenerate_is_generate(llm):
    for params in (greedy(), greedy(n=2, seed=1).with_(temperature=1.0), greedy(stop=(" and",), logprobs=1)):
        assert trio.run(llm.agenerate, PROMPTS, params) == llm.generate(PROMPTS, params)
    assert trio.run(llm.agenerate, []) == []


def test_what_a_stream_yields_is_the_same_everywhere(serve):
    engine = serve()
    run = [engine.run([5], max_tokens=4) for _ in range(3)]
    assert ints(run[0]) == ints(asyncio.run(run[1].acollect())) == ints(read(run[2])) == [6, 7, 8, 9]
