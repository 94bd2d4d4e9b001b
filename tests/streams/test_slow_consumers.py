"""A bound on what lies unread: the channel's side. The test plays the engine, with a queue for an inbox."""

import asyncio
import itertools
import threading
from collections import deque
from queue import SimpleQueue

import pytest
import trio

from hibachi import ItemStream
from hibachi.engine.streams.channel import Channel, Wakeups
from hibachi.engine.streams.merge import merge
from hibachi.request import Finish

from ..engine.models import PATIENCE, Background
from .reading import by_anext, by_next, by_three_of_trio, by_three_tasks


class Engine:
    """Pushes items 0 to n - 1 into a stream, and pauses as the engine does."""

    def __init__(self, n, pause_after):
        self.channel, self.wakeups, self.inbox = Channel(pause_after), Wakeups(), SimpleQueue()
        self.stream = ItemStream(self.channel, lambda: None, lambda item: item)
        self.items, self.paused, self.most, self.pauses, self.refused = iter(range(n)), False, 0, 0, 0

    def push(self):
        for item in itertools.islice(self.items, 1):
            self.channel.push(item, self.wakeups)
            self.most = max(self.most, len(self.channel.buffer))
            if self.channel.full:
                self.paused = self.channel.pause(lambda: self.inbox.put(None))
                self.pauses += self.paused
                self.refused += not self.paused
            self.wakeups.post()
            return True
        self.channel.end(Finish.LENGTH)
        return False

    def serve(self):
        """All items, from a thread of its own. Blocks for ever if a wake-up is lost."""
        while self.push():
            if self.paused:
                self.inbox.get(timeout=PATIENCE)
                self.paused = False
        assert self.inbox.empty(), "drained was called twice"

    def drained(self):
        return self.inbox.qsize()


def test_without_a_bound_nothing_is_ever_full():
    e = Engine(1000, None)
    while e.push():
        assert not e.channel.full
    assert e.most == 1000 and e.stream.collect() == list(range(1000))


@pytest.mark.parametrize("pause_after, low", [(1, 0), (2, 1), (3, 1), (8, 4), (9, 4)])
def test_full_at_the_bound_and_drained_once_at_half(pause_after, low):
    e = Engine(100, pause_after)
    for n in range(1, pause_after + 1):
        assert not e.paused
        e.push()
        assert e.channel.paused == (n == pause_after)
    assert e.paused and not e.channel.full, "it is paused already"
    for left in range(pause_after - 1, -1, -1):
        next(e.stream)
        assert (e.drained(), e.channel.paused) == ((1, False) if left <= low else (0, True))
    assert e.drained() == 1


def test_a_reader_that_was_faster_than_the_pause_leaves_nothing_to_wait_for():
    channel, called = Channel(2), []
    channel.push("a", Wakeups())
    assert not channel.pause(lambda: called.append(1)), "half of the bound lies there: nobody would call"
    assert not channel.paused and not called


@pytest.mark.parametrize(
    "end", [lambda e: e.channel.end(Finish.STOP), lambda e: e.stream.close()], ids=["end", "close"]
)
def test_an_end_while_paused_calls_nobody_and_leaves_the_items(end):
    e = Engine(10, 2)
    while not e.paused:
        e.push()
    end(e)
    assert not e.channel.paused
    assert e.stream.collect() == [0, 1] and e.drained() == 0


WAYS = {
    "for": list,
    "collect": ItemStream.collect,
    "async for": lambda s: asyncio.run(s.acollect()),
    "anext": lambda s: asyncio.run(by_anext(s)),
    "merge": lambda s: [item for _, items in merge([s]) for item in items],
}


@pytest.mark.parametrize("pause_after", [1, 2, 7])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_reading_resumes(way, pause_after):
    e = Engine(2000, pause_after)
    serving = Background(e.serve)
    assert WAYS[way](e.stream) == list(range(2000))
    serving.result()
    assert e.most <= pause_after and e.pauses + e.refused > 0


READERS = {
    "thread": [by_next],
    "threads": [by_next] * 3,
    "tasks of a loop": [lambda s: asyncio.run(by_three_tasks(s))],
    "loops": [lambda s: asyncio.run(by_anext(s))] * 3,
    "tasks of a trio run": [lambda s: trio.run(by_three_of_trio, s)],
    "all": [by_next, lambda s: asyncio.run(by_three_tasks(s)), lambda s: trio.run(by_three_of_trio, s)],
}


@pytest.mark.parametrize("n", [1500, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pause_after", [None, 1, 2])
@pytest.mark.parametrize("readers", READERS)
def test_no_item_and_no_wake_up_is_lost(readers, pause_after, n, eager_switching):
    """Each item goes to one of them, and all learn of the end. One lost call of `drained` and the engine would sleep
    for ever; one too many stays in its inbox."""
    e = Engine(n, pause_after)
    reading = [Background(read, e.stream) for read in READERS[readers]]
    e.serve()
    got = [r.result() for r in reading]
    assert sorted(itertools.chain(*got)) == list(range(n))
    assert pause_after is None or e.most <= pause_after


def test_pauses_and_reads_that_collide(eager_switching):
    """The moment between `full` and `pause`: whoever is late must see the other."""
    refused = 0
    for _ in range(2000):
        channel, start, called = Channel(1), threading.Barrier(2), deque()
        stream = ItemStream(channel, lambda: None, lambda item: item)
        channel.push("a", Wakeups())

        def read(stream=stream, start=start):
            start.wait(PATIENCE)
            return next(stream)

        reading = Background(read)
        start.wait(PATIENCE)
        paused = channel.pause(lambda called=called: called.append(1))
        assert reading.result() == "a"
        assert len(called) == paused and not channel.paused
        refused += not paused
        channel.end(Finish.STOP)
