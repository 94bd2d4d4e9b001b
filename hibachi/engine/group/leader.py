"""Rank 0's side: its memory tells the others of every call, before it is made."""

from __future__ import annotations

import json
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any, NoReturn

import numpy as np
from typing_extensions import override

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.group import GroupLost, RankGroup
from hibachi.backend.layout import CacheSpec, StepInputs
from hibachi.common.installed import version
from hibachi.common.shapes import StepShape
from hibachi.engine.group.link import Connection, RankWatch
from hibachi.engine.group.message import Mirror, StepCall
from hibachi.engine.runners.entries import Kind, arrays_of, bytes_of, kinds_of
from hibachi.engine.runners.memory import Memory
from hibachi.engine.scheduler.step import Limits
from hibachi.errors import UnsupportedOperation

STEP, HIDDEN, OTHER = range(3)  # kinds of messages: the first byte; then the memory's number
REPORTED = 2.0  # seconds within which a rank says what failed there
MEMORIES = 256  # of a trial each, besides the engine's, which is number 0


def facts_of(model: Any, backend: ArrayBackend) -> dict[str, str]:
    """What must be the same on all ranks."""
    return {
        "version of hibachi": version(),
        "numerics": str(backend.numerics or f"{backend.name}, {backend.kernels}"),
        "leaves": str(backend.leaves),
        "dtype": str(getattr(model, "dtype", None)),
        "quantization": str(getattr(model, "quantization", backend.quantization)),
        "longest context": str(getattr(model, "max_model_len", None)),
        "layers": repr(getattr(model, "stage_layers", ()) or list(model.cache_spec())),
    }


def spread(model: Any, backend: ArrayBackend) -> float:
    """Layers of the stage that has most of them, for each of this one."""
    layers = getattr(model, "stage_layers", ())
    return max(layers) / layers[backend.place.stage] if layers else 1.0


def gathered(backend: ArrayBackend, held: Sequence[Array], spread: float) -> Array:
    """On rank 0 what `read_entries` has returned on all ranks, as bytes, uint8 [n, bytes]: for each rank as many as any
    has, see `spread`.
    """
    group, arrays = backend.group, backend.fetch(held)()
    assert group is not None
    mine = np.concatenate([np.ascontiguousarray(a).reshape(len(a), -1).view(np.uint8) for a in arrays], axis=1)
    return group.collect(backend.put(np.pad(mine, ((0, 0), (0, round(mine.shape[1] * (spread - 1)))))))


class RankFailed(RuntimeError):
    """A step failed on another rank."""


class RankOutOfMemory(MemoryError):
    """Memory ran out on another rank."""


class Leader:
    """The other ranks, as rank 0 sees them. told: see `watch`."""

    def __init__(self, group: RankGroup, connections: dict[int, Connection]) -> None:
        self.group, self._connections = group, connections
        self._wake: Callable[[], object] = lambda: None
        self._lock = threading.RLock()
        """Held from a message to the end of what it asks for: a trial may be made in another thread than steps."""
        self.waiting: set[int] = set()
        """Threads that wait for it."""
        self._told: deque[StepInputs[Array]] = deque()
        """Calls that the others know of, and that were not made here. For each the lock is held once more."""
        self._watch = RankWatch(connections, self._one_ended)
        self._silent: str | None = None
        self.free: list[int] = list(range(1, MEMORIES))
        """Numbers of memories that there are not, the last ones first to be taken again."""
        self.steps = self._epoch = 0
        self.bytes: deque[int] = deque(maxlen=1000)
        """Of the messages of the last steps."""

    def watch(self, wake: Callable[[], object]) -> None:
        """wake: called from another thread when a rank has ended; `check` raises then."""
        self._wake = wake

    def _one_ended(self) -> None:
        self.group.cancel()
        self._wake()

    def check(self) -> None:
        """Raises GroupLost if a rank has ended, or did not answer."""
        ended = self._watch.ended or self._silent
        if ended is not None:
            raise GroupLost(f"{ended} The model needs all {self.group.size} ranks; start them again.")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing else is asked of the other ranks meanwhile, and what they know of is done, or given up."""
        me = threading.get_ident()
        self.waiting.add(me)
        with self._lock:
            self.waiting.discard(me)
            if self._told:
                self._renew()
            yield

    def announce(self, x: StepInputs[Array], data: Callable[[], bytes]) -> None:
        """Tell the others of a call that is made here later, in its turn."""
        self._lock.acquire()
        self._told.append(x)
        self._tell(data())

    @contextmanager
    def calling(self, x: StepInputs[Array], data: Callable[[], bytes]) -> Iterator[None]:
        """Around a call of which the others are told by this data, unless they know of it."""
        known = bool(self._told) and self._told[0] is x
        with nullcontext() if known else self.alone():
            try:
                if known:
                    self._told.popleft()
                else:
                    self.check()
                    self._tell(data())
                yield
            except BaseException as e:
                raise self._mended(e) from e
            finally:
                if known:
                    self._lock.release()

    def _tell(self, data: bytes) -> None:
        self.send(data)
        self.bytes.append(len(data))
        self.steps += 1

    def send(self, data: bytes, parts: Sequence[bytes] = ()) -> None:
        for rank, connection in self._connections.items():
            try:
                connection.send(data + b"\0" + parts[rank] if parts else data)
            except OSError:
                self._watch.failure(REPORTED, -1)  # until it is seen to have ended
                self.lost("a message could not be sent")

    def order(self, what: str, number: int = 0, parts: Sequence[bytes] = (), **more: Any) -> None:
        """Tell all ranks to do something. parts: what goes to each of them besides, in their order."""
        data = bytes([OTHER, number]) + json.dumps({"do": what, **more}).encode()
        self.send(data, parts)

    def lost(self, why: object) -> NoReturn:
        self._silent = f"{self._watch.slowest()} ({str(why).rpartition('] ')[2]})."
        self.check()
        raise AssertionError

    def _mended(self, error: BaseException) -> BaseException:
        """What a step that failed here or elsewhere has failed with; all ranks can take the next one. Raises
        GroupLost.
        """
        if isinstance(error, GroupLost):
            said = self._watch.failure(REPORTED, self._epoch)
            if said is None:
                self.lost(error)
            if said["fatal"]:
                self._silent = f"Rank {said['rank']} went astray: {said['failed']}"
                self.check()
            text = f"On rank {said['rank']} the step failed: {said['failed']}"
            error = RankOutOfMemory(text) if said["memory"] else RankFailed(text)
        self._renew()
        return error

    def _renew(self) -> None:
        """All ranks can take another step; those that were announced are not made."""
        self._drop()
        self._epoch += 1
        self.group.abort()
        self.order("renew", epoch=self._epoch)
        self.group.renew(self._epoch)

    def _drop(self) -> None:
        while self._told:
            self._told.pop()
            self._lock.release()

    def close(self) -> None:
        self._drop()  # a thread that waits is not to wait for ever
        for connection in self._connections.values():
            with suppress(OSError):
                connection.send(bytes([OTHER, 0]) + b'{"do": "close"}')
        self._watch.close()
        self.group.close()


class LedMemory(Memory):
    """A memory of which each rank has its part. number: of this one of several. spread: see there."""

    def __init__(
        self,
        spec: CacheSpec,
        backend: ArrayBackend,
        limits: Limits,
        dtype: str,
        leader: Leader,
        spread: float,
        number: int = 0,
    ) -> None:
        self.leader, self._spread, self.number = leader, spread, number
        self._mirror = Mirror(limits)
        super().__init__(spec, backend, limits, dtype)

    @override
    def make(self) -> None:
        self._mirror = Mirror(self.limits)
        with self.leader.alone():
            self.leader.order("make", self.number, limits=asdict(self.limits), dtype=self._dtype)
            super().make()

    @override
    def another(self, limits: Limits) -> Memory:
        # Other ranks keep theirs until another gets its number.
        number = self.leader.free.pop()
        new = LedMemory(self.spec, self.backend, limits, self._dtype, self.leader, self._spread, number)
        weakref.finalize(new, self.leader.free.append, new.number)
        return new

    @override
    def fork(self, blocks: Sequence[tuple[int, int]], rows: Sequence[tuple[int, int]]) -> None:
        with self.leader.alone():
            self.leader.order("fork", self.number, blocks=[[int(a), int(b)] for a, b in blocks])
            super().fork(blocks, rows)

    @override
    def read_entries(self, blocks: Array) -> list[Array]:
        """Of all ranks side by side, as bytes: one array uint8 [n, bytes]."""
        with self.leader.alone():
            self.leader.order("read", self.number, blocks=self.backend.get(blocks).tolist())
            return [gathered(self.backend, super().read_entries(blocks), self._spread)]

    @override
    def write_entries(self, blocks: HostArray, held: Sequence[HostArray]) -> None:
        parts = np.split(held[0], self.leader.group.size, axis=1)
        with self.leader.alone():
            self.leader.order("write", self.number, [part.tobytes() for part in parts], blocks=blocks.tolist())
            mine = parts[0][:, : bytes_of(self._of_a_block)]  # others may have more
            super().write_entries(blocks, arrays_of([*map(bytes, mine)], self._of_a_block, len(blocks)))

    @cached_property
    def _of_a_block(self) -> list[Kind]:
        return kinds_of(super().read_entries(self.backend.put(np.zeros(1, np.int32))), self.backend)

    @override
    def write(self, blocks: Sequence[int], kv: Sequence[tuple[HostArray, HostArray]]) -> None:
        raise UnsupportedOperation(f"Keys and values {_ELSEWHERE}")

    @override
    def read(self, blocks: Sequence[int], tokens: int) -> list[tuple[HostArray, HostArray]]:
        raise UnsupportedOperation(f"Keys and values {_ELSEWHERE}")

    @override
    def watch(self, wake: Callable[[], object]) -> None:
        self.leader.watch(wake)

    @override
    def check(self) -> None:
        self.leader.check()

    @override
    def close(self) -> None:
        self.leader.close()

    @override
    def calling(self, x: StepInputs[Array], *, hidden: bool) -> AbstractContextManager[None]:
        return self.leader.calling(x, partial(self._data, x, HIDDEN if hidden else STEP))

    @override
    def announce(self, x: StepInputs[Array]) -> None:
        self.leader.announce(x, partial(self._data, x, STEP))

    @property
    @override
    def wanted(self) -> bool:
        return bool(self.leader.waiting)

    def _data(self, x: StepInputs[Array], kind: int) -> bytes:
        return bytes([kind, self.number]) + self._mirror.encode(self.leader.steps, self._call_of(x))

    def _call_of(self, x: StepInputs[Array]) -> StepCall:
        def host(t: Any) -> Any:
            return t if isinstance(t, np.ndarray) else self.backend.get(t)

        tok, row, start, cu_q, table, last = map(host, (x.tok, x.row, x.start, x.cu_q, x.block_table, x.last))
        q = np.diff(cu_q)
        n, tokens = int(np.count_nonzero(q)), int(cu_q[-1])
        shape = None
        if n < len(q) or tokens < len(tok):
            tiles, tile = x.tile_q.shape
            shape = StepShape(len(tok), len(q), table.shape[1], tiles, tile, len(last))
        call = StepCall(tok[:tokens], row[:n], start[:n], q[:n], table[:n], last, shape)
        if x.embeds is not None and x.embedded is not None:
            call.embedded = np.flatnonzero(host(x.embedded))
            call.embeds = host(x.embeds)[call.embedded]
        return call


_ELSEWHERE = "of one process are no part of those of several. Leave them out, or pass tensor_parallel_size=1."
