"""A stream without an engine: the test holds the engine's end in its own hand."""

from hibachi import ItemStream
from hibachi.engine.streams.channel import Channel, Wakeups
from hibachi.request import Finish


class Pipe:
    """Both ends of a stream, and how often it was cancelled."""

    def __init__(self, *items, end=None):
        self.channel, self.wakeups, self.cancelled = Channel(), Wakeups(), 0
        self.stream = ItemStream(self.channel, self.cancel, lambda item: item)
        self.push(*items)
        if end is not None:
            self.end(end)

    def cancel(self):
        self.cancelled += 1

    def push(self, *items):
        for item in items:
            self.channel.push(item, self.wakeups)
        self.wakeups.post()

    def end(self, reason=Finish.STOP, error=None):
        ended = self.channel.end(reason, error, self.wakeups)
        self.wakeups.post()
        return ended

    @property
    def awaited(self):
        return bool(self.channel._waiters or self.channel._at_end)
