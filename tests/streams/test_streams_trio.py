"""Streams in trio tasks: what test_stream.py shows for asyncio, and trio's own rules."""

import asyncio
import itertools
import subprocess
import sys
from queue import SimpleQueue
from types import ModuleType

import pytest
import trio
import trio.lowlevel

from hibachi import LLM, FeedforwardBatchInference, ModelError, SamplingParams
from hibachi.engine.streams.channel import Wakeups, in_trio, loop_future
from hibachi.engine.streams.merge import amerge, await_any
from hibachi.request import Finish

from ..engine.models import PATIENCE, Background, Gate, Next, ints, until
from ..engine.pipe import Pipe
from ..lib.inside import thread
from .reading import by_anext


def read(stream):
    """All its items, in a trio run of their own."""
    return trio.run(stream.acollect)


def boom():
    error = ModelError("boom")
    error.__cause__ = RuntimeError("below")
    return error


async def trio_until(condition):
    with trio.fail_after(PATIENCE):
        while not condition():
            await trio.sleep(0.0005)


# ---- reading -----------------------------------------------------------------------------------------------------


def test_a_task_is_woken_by_items_and_by_the_end():
    p = Pipe()
    reading = Background(read, p.stream)
    for item in range(3):
        until(lambda: p.awaited)
        p.push(item)
    until(lambda: p.awaited)
    p.end()
    assert reading.result() == [0, 1, 2]
    assert not p.awaited


def test_an_iterator_made_outside_of_the_run_works_inside():
    p = Pipe(1, 2, end=Finish.STOP)
    items = aiter(p.stream)

    async def main():
        return [item async for item in items]

    assert trio.run(main) == [1, 2]


def test_a_bounded_stream_resumes():
    p, drained = Pipe(*range(4)), []
    p.channel.pause_after = 4
    assert p.channel.full and p.channel.pause(lambda: drained.append(1))

    async def main():
        got = [await anext(p.stream)]
        assert not drained
        got.append(await anext(p.stream))
        assert drained == [1]
        return got

    assert trio.run(main) == [0, 1]


def test_all_of_merge():
    pipes, took = [Pipe(10), Pipe(), Pipe(30, 31, end=Finish.STOP)], []

    async def main():
        await amerge([p.stream for p in pipes], lambda i, items: took.append((i, items)))

    taking = Background(trio.run, main)
    until(lambda: pipes[0].awaited and pipes[1].awaited)
    pipes[1].push(20)
    until(lambda: not pipes[1].channel.buffer)
    pipes[0].end()
    pipes[1].end()
    taking.result()
    assert took == [(0, [10]), (2, [30, 31]), (1, [20])]
    assert not any(p.awaited for p in pipes)


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


async def leave_by_break(p):
    async for _ in p.stream:
        break


async def leave_by_exception(p):
    try:
        async for _ in p.stream:
            raise KeyError
    except KeyError:  # the traceback is still alive, and the stream closed nevertheless
        assert p.stream.finish_reason == Finish.CANCELLED


async def leave_by_move_on_after(p):
    with trio.move_on_after(0.01) as scope:
        async for _ in p.stream:
            pass
    assert scope.cancelled_caught


async def leave_by_fail_after(p):
    try:
        with trio.fail_after(0.01):
            await p.stream.acollect()
    except trio.TooSlowError:
        assert p.stream.finish_reason == Finish.CANCELLED


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


async def three_tasks(stream):
    got = []

    async def one():
        got.extend(await by_anext(stream))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(one)
    return got


def consume(stream):
    got = []
    while (item := next(stream, None)) is not None:
        got.append(item)
    return got


@pytest.mark.parametrize(
    "consumers",
    [
        [lambda s: trio.run(three_tasks, s)],
        [lambda s: trio.run(by_anext, s)] * 3,
        [consume, lambda s: asyncio.run(by_anext(s)), lambda s: trio.run(three_tasks, s)],
    ],
    ids=["tasks of a run", "runs", "threads, asyncio and trio"],
)
@pytest.mark.parametrize("pause_after", [None, 1, 2])
@pytest.mark.parametrize("n", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_several_consumers_share_one_stream(consumers, pause_after, n, eager_switching):
    """Each item goes to one of them, none is lost, all learn of the end, and a bounded stream always goes on."""
    p, inbox = Pipe(), SimpleQueue()
    p.channel.pause_after = pause_after
    reading = [Background(c, p.stream) for c in consumers]
    for i in range(n):
        p.push(i)
        if p.channel.full and p.channel.pause(lambda: inbox.put(None)):
            inbox.get(timeout=PATIENCE)
        elif i % 10 == 0:
            until(lambda: not p.channel.buffer)
    p.end()
    got = [r.result() for r in reading]
    assert sorted(itertools.chain(*got)) == list(range(n))
    assert inbox.empty() and not p.awaited


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
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=PATIENCE)


# ---- engines -----------------------------------------------------------------------------------------------------


class Double:
    def forward(self, x):
        return x * 2


class AsyncNext(Next):
    """Its `forward` is awaited in the engine's thread, on asyncio, whatever its callers run."""

    async def forward(self, tokens):
        await asyncio.sleep(0)
        return super().forward(tokens)


@pytest.mark.parametrize("model", [Next, AsyncNext])
def test_an_engine_serves_many_tasks(model, serve):
    engine, got = serve(model(), max_num_seqs=4), {}

    async def one(k):
        got[k] = [int(t) async for t in engine.run([k], max_tokens=5)]

    async def main():
        async with trio.open_nursery() as nursery:
            for k in range(20):
                nursery.start_soon(one, k)

    trio.run(main)
    assert got == {k: [k + n for n in range(1, 6)] for k in range(20)}


def test_a_timeout_frees_the_row(serve):
    engine = serve()

    async def main():
        with trio.move_on_after(0.02):
            async for _ in engine.run([1], max_tokens=900):
                await trio.sleep(0.001)
        await trio_until(lambda: engine.stats().running == 0)

    trio.run(main)


@pytest.mark.parametrize("run, sleep", [(trio.run, trio.sleep), (lambda f: asyncio.run(f()), asyncio.sleep)])
def test_a_slow_task_pauses_its_request_and_gets_everything(run, sleep, serve):
    engine, unread = serve(pause_after=4), []

    async def main():
        stream, got = engine.run([0], max_tokens=60), []
        async for token in stream:
            got.append(int(token))
            await sleep(0.001)
            unread.append(len(stream.channel.buffer))
        return got

    assert run(main) == list(range(1, 61))
    assert max(unread) <= 4


def test_items_are_awaited_and_a_cancelled_wait_cancels():
    with FeedforwardBatchInference(Double(), backend="numpy") as engine:

        async def main():
            item = engine.run([1.0, 2.0])
            return (await item).tolist(), (await item).tolist()

        assert trio.run(main) == ([2, 4], [2, 4])

    gate = Gate()
    with FeedforwardBatchInference(gate, backend="numpy") as engine:

        async def impatient():
            item = engine.run([[1.0]])
            with trio.move_on_after(0.01) as scope:
                await item
            assert scope.cancelled_caught
            return item._stream.finish_reason

        assert trio.run(impatient) == Finish.CANCELLED
        gate.open()


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


@pytest.mark.parametrize("n", [1, 3])
def test_pieces_of_a_text(n, llm):
    params = SamplingParams(seed=1, max_tokens=24, ignore_eos=True, n=n)

    async def main():
        async with llm.stream(PROMPTS[0], params) as stream:
            return [piece async for piece in stream]

    pieces, whole = trio.run(main), llm.generate(PROMPTS[0], params)[0]
    for choice in whole.choices:
        mine = [p for p in pieces if p.index == choice.index]
        assert "".join(p.text for p in mine) == choice.text
        assert [i for p in mine for i in p.token_ids] == choice.token_ids


async def left_text(llm):
    async for _ in llm.stream(PROMPTS[0], greedy(400)):
        break


async def timed_out_text(llm):
    with trio.move_on_after(0.02) as scope:
        async for _ in llm.stream(PROMPTS[0], greedy(400)):
            pass
    assert scope.cancelled_caught


async def timed_out_generation(llm):
    with trio.move_on_after(0.02) as scope:
        await llm.agenerate(PROMPTS, greedy(400))
    assert scope.cancelled_caught


@pytest.mark.parametrize("leave", [left_text, timed_out_text, timed_out_generation])
def test_leaving_a_text_frees_its_rows(leave, llm):
    trio.run(leave, llm)
    until(lambda: llm.stats().running == llm.stats().waiting == 0)


def test_aclose_of_an_llm():
    async def main():
        async with LLM("tiny") as llm:
            stream = llm.stream(PROMPTS[0], greedy(400))
        return stream.finish_reason

    assert trio.run(main) == Finish.CLOSED


def test_what_a_stream_yields_is_the_same_everywhere(serve):
    engine = serve()
    run = [engine.run([5], max_tokens=4) for _ in range(3)]
    assert ints(run[0]) == ints(asyncio.run(run[1].acollect())) == ints(read(run[2])) == [6, 7, 8, 9]
