"""Groups of streams without an engine: which have ended, who is woken when."""

import asyncio
import signal
import subprocess
import sys
import threading

import pytest
import trio

from hibachi import ConfigError, EngineError
from hibachi.engine.streams.channel import Bell
from hibachi.llm.gather import Gather
from hibachi.request import Finish

from ..engine.models import PATIENCE, Background, until
from ..engine.pipe import Pipe


@pytest.fixture(params=["thread", "asyncio", "trio"])
def once(request):
    """once(gather): what one wait says, in this thread or in a loop of its own."""

    async def some(gather):
        return await gather.await_some()

    ways = {"thread": Gather.wait, "asyncio": lambda g: asyncio.run(some(g)), "trio": lambda g: trio.run(some, g)}
    return ways[request.param]


def gathered(*pipes, feed=None):
    gather = Gather()
    for key, pipe in enumerate(pipes):
        gather.add(key, [pipe.stream], feed)
    return gather


# ---- which are done ----------------------------------------------------------------------------------------------


def test_keys_come_once_in_the_order_of_their_add(once):
    pipes = [Pipe() for _ in range(4)]
    gather = gathered(*pipes)
    for i in (3, 0, 2):
        pipes[i].end()
    assert once(gather) == [0, 2, 3] and len(gather) == 1
    pipes[1].end(Finish.ERROR, ValueError("asked of the stream, not raised here"))
    gather.add("later", [Pipe(end=Finish.LENGTH).stream])
    assert once(gather) == [1, "later"] and len(gather) == 0
    assert gather.wait(0.001) == []  # each once


def test_a_group_is_done_with_its_last_stream(once):
    a, b, c = Pipe(1), Pipe(), Pipe(end=Finish.STOP)
    gather = Gather()
    gather.add("group", [a.stream, b.stream, c.stream])
    gather.add("none", [])
    assert once(gather) == ["none"]
    waiting = Background(once, gather)
    until(lambda: b.awaited and a.awaited)
    b.end()
    a.push(2)
    assert waiting.is_alive() and len(gather) == 1
    a.end()
    assert waiting.result() == ["group"]
    assert a.stream.come() == [1, 2]  # unread until somebody reads


def test_items_wake_nobody_unless_they_are_fed(once):
    p = Pipe()
    waiting = Background(once, gathered(p))
    until(lambda: p.awaited)
    p.push(1, 2, 3)
    assert p.awaited, "who is woken waits no more"
    p.end()
    assert waiting.result() == [0]


def test_items_are_fed_as_they_come(once):
    a, b, got = Pipe(10), Pipe(20, 21, end=Finish.STOP), []
    gather = Gather()
    gather.add("group", [a.stream, b.stream], lambda i, items: got.append((i, items)))
    waiting = Background(once, gather)
    until(lambda: a.awaited and len(got) == 2)
    a.push(11)
    until(lambda: len(got) == 3)
    a.push(12)
    a.end()
    assert waiting.result() == ["group"]
    assert got[:3] == [(0, [10]), (1, [20, 21]), (0, [11])]
    assert [x for i, items in got[3:] for x in items if i == 0] == [12]
    assert not a.awaited and not b.awaited


def test_whoever_is_fed_may_close_its_stream(once):
    p, other = Pipe(1), Pipe()
    gather = gathered(p, other, feed=lambda i, items: p.stream.close())
    assert once(gather) == [0] and p.cancelled == 1 and len(gather) == 1


def test_an_error_of_feed_passes(once):
    p, fine = Pipe(1), Pipe(end=Finish.STOP)
    gather = gathered(p, fine, feed=lambda i, items: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        once(gather)
    assert once(gather) == [1]


def test_none_is_missed_while_threads_race(once, eager_switching):
    pipes = [Pipe(1) for _ in range(300)]
    gather, got, seen = Gather(), [], []
    ending = Background(lambda: [p.end() for p in pipes for _ in (p.push(2),)])
    for key, pipe in enumerate(pipes):
        gather.add(key, [pipe.stream], (lambda i, items: seen.extend(items)) if key % 2 else None)
        if key % 32 == 0:
            got += gather.wait(0)
    while len(gather):
        got += once(gather)
    ending.result()
    assert sorted(got) == list(range(300)) and sum(seen) == 150 * 3


def test_an_end_while_it_looks_is_not_missed(once, monkeypatch):
    monkeypatch.setattr("hibachi.llm.gather.NOTICED", 1000)
    first, fed = Pipe(), Pipe(1)
    gather = gathered(first)
    gather.add("fed", [fed.stream], lambda i, items: first.end())  # when the first was looked at
    assert Background(once, gather).result() == [0]


# ---- timeouts and wakes ------------------------------------------------------------------------------------------


def test_nothing_comes_within_the_timeout():
    gather = gathered(Pipe())
    assert gather.wait(0) == gather.wait(0.001) == [] and len(gather) == 1


def test_wake_ends_the_wait_that_runs(once):
    p = Pipe()
    gather = gathered(p)
    waiting = Background(once, gather)
    until(lambda: p.awaited)
    gather.wake()
    assert waiting.result() == [] and len(gather) == 1


def test_wake_ends_the_next_wait_and_no_other(once):
    gather = gathered(Pipe())
    gather.wake()
    assert once(gather) == [] and gather.wait(0.001) == []


def test_a_wait_in_a_loop_may_follow_one_in_a_thread():
    p, q = Pipe(), Pipe()
    gather = gathered(p, q)
    assert gather.wait(0.001) == []
    waiting = Background(lambda: asyncio.run(gather.await_some()))
    p.end()
    assert waiting.result() == [0]
    waiting = Background(gather.wait)
    q.end()
    assert waiting.result() == [1]


def test_a_signal_may_wake_whoever_waits_and_ctrl_c_passes():
    program = """
import signal
from hibachi.engine.streams.channel import Channel
from hibachi.llm.gather import Gather
from hibachi.engine.streams.stream import ItemStream
gather = Gather()
gather.add("a", [ItemStream(Channel(), lambda: None, int)])
signal.signal(signal.SIGTERM, lambda *_: gather.wake())
print("begun", flush=True)
assert gather.wait() == []
print("woken", flush=True)
gather.wait()
"""
    run = subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True)
    try:
        assert run.stdout.readline() == "begun\n", run.communicate()
        run.send_signal(signal.SIGTERM)
        assert run.stdout.readline() == "woken\n", run.communicate()
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=PATIENCE)
    finally:
        run.kill()
        run.communicate()
    assert err.strip().endswith("KeyboardInterrupt") and "Exception ignored" not in err, err


def test_a_task_that_is_cancelled_leaves_the_groups():
    p = Pipe()
    gather = gathered(p)

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await gather.await_some()

    asyncio.run(main())
    p.end()  # rings in a loop that is closed
    assert gather.wait() == [0]


# ---- leaving -----------------------------------------------------------------------------------------------------


def test_what_is_discarded_is_neither_told_nor_cancelled():
    a, b, gather = Pipe(), Pipe(), Gather()
    gather.add("a", [a.stream])
    gather.add("b", [b.stream], print)
    assert gather.wait(0) == []
    gather.discard("a")
    gather.discard("b")
    gather.discard("never there")
    assert not a.awaited and not b.awaited and a.cancelled == b.cancelled == 0
    a.end()
    assert gather.wait(0) == []


def test_close_cancels_what_runs():
    a, b, over = Pipe(), Pipe(), Pipe(end=Finish.STOP)
    with Gather() as gather:
        gather.add("ab", [a.stream, b.stream])
        gather.add("over", [over.stream])
    assert (a.cancelled, b.cancelled, over.cancelled) == (1, 1, 0) and len(gather) == 0


def test_what_cannot_work_is_refused():
    p, gather = Pipe(), Gather()
    gather.add("a", [p.stream])
    with pytest.raises(ConfigError, match="a key of its own; 'a' is still there"):
        gather.add("a", [])
    p.channel.pause_after = 4
    with pytest.raises(ConfigError, match="Pass feed="):
        gather.add("b", [p.stream])
    gather.add("c", [p.stream], print)


def test_the_engines_own_thread_cannot_wait(once):
    p = Pipe()
    gather = gathered(p)
    own = Background(lambda: [setattr(p.channel, "thread", threading.get_ident()), once(gather)])
    with pytest.raises(EngineError, match="own thread cannot wait"):
        own.result()


# ---- the bell ----------------------------------------------------------------------------------------------------


def test_a_bell_remembers_one_ring():
    bell = Bell()
    assert not bell.wait(0)
    bell.set()
    bell.set()
    assert bell.wait(0) and not bell.wait(0)
    bell.set()
    bell.clear()
    bell.clear()
    assert not bell.wait(0)
