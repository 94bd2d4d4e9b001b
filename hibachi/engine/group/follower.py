"""The side of the other ranks: they repeat what rank 0 does with its memory and its model, until it closes."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend
from hibachi.backend.group import GroupLost, RankGroup
from hibachi.backend.layout import StepInputs
from hibachi.engine.group.leader import HIDDEN, OTHER, facts_of, gathered, spread
from hibachi.engine.group.link import Connection, Reports, connected
from hibachi.engine.group.message import Astray, Mirror, StepCall
from hibachi.engine.runners.entries import arrays_of, bytes_of
from hibachi.engine.runners.memory import Memory
from hibachi.engine.scheduler.step import Limits

log: logging.Logger = logging.getLogger("hibachi.engine")
ENDS = 5.0  # seconds after the end of rank 0 in which a call must end as well


def follow(model: Any, backend: ArrayBackend, group: RankGroup) -> NoReturn:
    """Be one of the ranks that are not the first, until that has closed; then raises SystemExit."""
    Follower(model, backend, group, connected(group, facts_of(model, backend))[0]).run()
    raise SystemExit(0)


class Follower:
    """A rank that is not the first. model: its part."""

    def __init__(self, model: Any, backend: ArrayBackend, group: RankGroup, connection: Connection) -> None:
        self._model, self._backend, self._group, self._connection = model, backend, group, connection
        self._memories: dict[int, tuple[Memory, Mirror]] = {}
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._over = threading.Event()
        self.steps = self._epoch = 0

    def run(self) -> None:
        """Until rank 0 closes, or ends."""
        self._reports = Reports(self._connection, lambda: self._group.sums)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to rank 0 as well
            signal.signal(signal.SIGTERM, self._asked_to_end)
        threading.Thread(target=self._read, name="hibachi-messages", daemon=True).start()
        try:
            self._follow()
        finally:
            self._over.set()
            self._connection.close()
            self._group.close()

    def _asked_to_end(self, *_: Any) -> None:
        self._reports.asked_to_end = True

    def _follow(self) -> None:
        failed = False
        while (data := self._messages.get()) is not None:
            kind, number = data[0], data[1]
            if kind != OTHER:
                failed = not self._step(data, number, made=not failed)
                continue
            order, _, part = data[2:].partition(b"\0")
            said = json.loads(order)
            if said["do"] == "close":
                return
            if said["do"] == "renew":
                self._epoch = said["epoch"]
                self._group.renew(self._epoch)
                failed = False
            else:
                self._obey(said, number, part)

    def _read(self) -> None:
        while (data := self._connection.receive()) is not None:
            self._messages.put(data)
        self._messages.put(None)
        self._group.cancel()
        if not self._over.wait(ENDS):  # it is in a call that waits for rank 0: no other way leads out
            os._exit(1)

    def _obey(self, said: dict[str, Any], number: int, part: bytes) -> None:
        b = self._backend
        if said["do"] == "make":
            limits = Limits(**said["limits"])
            self._memories.pop(number, None)  # before there is memory for another
            self._memories[number] = Memory(self._model.cache_spec(), b, limits, said["dtype"]), Mirror(limits)
        elif said["do"] == "fork":
            self._memories[number][0].fork([(source, to) for source, to in said["blocks"]], [])
        else:
            memory, blocks = self._memories[number][0], np.array(said["blocks"], np.int32)
            with b.guard():
                if said["do"] == "read":
                    gathered(b, memory.read_entries(b.put(blocks)), spread(self._model, b))
                else:
                    size, kinds = len(part) // len(blocks), memory.entry_kinds()[0]
                    entries = [part[at : at + bytes_of(kinds)] for at in range(0, len(part), size)]
                    memory.write_entries(blocks, arrays_of(entries, kinds, len(blocks)))

    def _step(self, data: bytes, number: int, *, made: bool) -> bool:
        """Whether it went well; else rank 0 is told, and nothing is `made` until the group is renewed."""
        (memory, mirror), b = self._memories[number], self._backend
        try:
            self.steps, call = mirror.decode(data[2:])
            if not made:
                return False
            method = self._model.hidden if data[0] == HIDDEN else self._model.step
            with b.guard():
                _, memory.cache = method(self._model.params, memory.cache, self._inputs(call, memory.limits))
                b.settle(memory.cache)
        except GroupLost as e:
            log.info("%s", e)
            self._group.abort()  # another stage may wait for this one
            return False
        except Astray as e:
            self._reports.failed(e, self._epoch, fatal=True)
            self._group.abort()
            return False
        except Exception as e:
            log.warning("step %d failed on rank %d: %s", self.steps, self._group.rank, e)
            self._reports.failed(e, self._epoch, memory=b.out_of_memory(e))
            self._group.abort()
            return False
        return True

    def _inputs(self, call: StepCall, limits: Limits) -> StepInputs[Array]:
        b, model = self._backend, self._model
        tok, packed = call.packed(limits.block_size, b.shapes.choices, limits.rows)
        if (reach := getattr(model, "reach", None)) is not None:
            reach(packed.block_table.shape[1] * limits.block_size)
        arrays: list[Any] = [tok, *packed.arrays()]
        x = StepInputs(*(arrays if getattr(model, "takes_host", False) else b.put_all(arrays)))
        if call.embeds is None:
            return x
        embeds, embedded = np.zeros((len(tok), call.embeds.shape[1]), np.float32), np.zeros(len(tok), bool)
        embeds[call.embedded], embedded[call.embedded] = call.embeds, True
        return replace(x, embeds=b.put(embeds), embedded=b.put(embedded))
