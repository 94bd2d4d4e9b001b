"""Ranks of torch.distributed as a `hibachi.backend.group.RankGroup`: gloo on the CPU, NCCL on CUDA. On the CPU those of
one host exchange most through shared memory (`hibachi_torch.exchange`).

Sums are never a library's all-reduce: gloo's adds in another order at each place of the buffer, so from three ranks on
a row's bits depend on its place in the batch. Parts are exchanged, and added as a tree.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from hibachi.backend.array_backend import Array
from hibachi.backend.group import MOST_LEAVES, GroupLost, place_of, share, tree
from hibachi.errors import ConfigError
from hibachi_torch.exchange import HostExchange, opened

FOLDER = "HIBACHI_RANKS"  # the variable that names the folder by which ranks meet that this process has started
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name changed
_dist: Any = dist  # what it exports, it does not say
MEET = timedelta(seconds=600)  # in which all must have come, and loaded the model
SMALL = 1 << 16  # bytes: less than this goes whole to all, as one exchange takes less time than two
FOR_EVER = timedelta(days=365)


class TorchGroup:
    """The processes that torchrun, or `started`, has made: `size` of them in so many stages. timeout: seconds that a
    rank may be late.
    """

    opened: ClassVar[TorchGroup | None] = None
    """The one of this process."""

    def __init__(
        self,
        size: int,
        stages: int,
        device: torch.device,
        timeout: float | None,
        started: Started | None = None,
    ) -> None:
        # What is told of a rank that hangs is to come before the whole engine counts as hanging.
        most = FOR_EVER.total_seconds()
        self._timeout = timedelta(seconds=most if timeout is None else min(max(1.0, timeout * 0.6), most))
        self.device, self.sums, self.facts = device, 0, dict[str, str]()
        if device.type == "cuda" and device.index is None:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        self._own = not dist.is_initialized()
        if self._own:
            folder = os.environ.get(FOLDER)
            if folder:
                store: Any = _dist.FileStore(str(Path(folder) / "store"), size)
                rank = int(os.environ["RANK"])
                store.set(f"rank {rank}", "")
                while started is not None and not store.check([f"rank {other}" for other in range(size)]):
                    started.check()
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=MEET)
            else:
                dist.init_process_group("gloo", timeout=MEET)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.place = place_of(self.rank, self.size, stages)
        one_host = os.environ.get("LOCAL_WORLD_SIZE", str(size)) == str(size)
        self.host = "127.0.0.1" if one_host else os.environ["MASTER_ADDR"]
        self.started = started
        self._all: Any = None  # all ranks
        self._group: Any = None  # those of this stage
        self._sent: deque[tuple[Any, Array]] = deque()
        self.exchange: HostExchange | None = None  # of those of this stage, if they are on one host
        self.renew(0)
        if one_host and self.device.type == "cpu" and self.size <= MOST_LEAVES:  # the memory has turns for no more
            self.exchange = opened(self.rank, self.size, self.place, self._timeout.total_seconds())
        TorchGroup.opened = self

    def sum(self, x: Array) -> Array:
        """See `RankGroup`. The result is in x."""
        self.sums += 1
        if self.exchange is not None:
            self.exchange.sum(x)
            return x
        n, flat, size = x.numel(), x.view(-1), self.place.tp_size
        each = -(-n // size)
        with self._told():
            if n * 4 < SMALL:
                parts = torch.empty((size, n), dtype=x.dtype, device=x.device)
                _gather(parts.view(-1), flat, group=self._group)
                flat.copy_(tree(parts.unbind(0)))
                return x
            if each * size != n:
                flat = torch.cat([flat, flat.new_zeros(each * size - n)])
            parts = torch.empty((size, each), dtype=x.dtype, device=x.device)
            dist.all_to_all_single(parts.view(-1), flat, group=self._group)
            _gather(flat, tree(parts.unbind(0)), group=self._group)
        if each * size != n:
            x.view(-1).copy_(flat[:n])
        return x

    def gather(self, x: Array, columns: int) -> Array:
        """See `RankGroup`."""
        widest = share(columns, 0, self.place.tp_size).stop
        if x.shape[1] < widest:
            x = torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        if self.exchange is not None:
            return self.exchange.gather(x, columns)
        first = self.rank - self.place.tp_rank
        return self._side_by_side(x, self._group, range(first, first + self.place.tp_size))[:, :columns]

    def collect(self, x: Array) -> Array:
        """See `RankGroup`."""
        return self._side_by_side(x, self._all, range(self.size))

    def _side_by_side(self, x: Array, group: Any, ranks: range) -> Array:
        x, others = x.contiguous(), [torch.empty_like(x) for _ in ranks[1:]] if self.rank == ranks[0] else []
        with self._told():
            if self.rank != ranks[0]:
                dist.send(x, ranks[0], group=group)
            for rank, other in zip(ranks[1:], others, strict=False):
                dist.recv(other, rank, group=group)
        return torch.cat([x, *others], 1) if others else x

    def send(self, x: Array) -> None:
        """See `RankGroup`."""
        with self._told():
            if len(self._sent) > self.place.stages:
                self._sent.popleft()[0].wait()
            x = x.contiguous()
            self._sent.append((dist.isend(x, self.place.of_stage(self.place.stage + 1), group=self._all), x))

    def receive(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """See `RankGroup`."""
        x = torch.empty(shape, dtype=dtype, device=self.device)
        with self._told():
            dist.recv(x, self.place.of_stage(self.place.stage - 1), group=self._all)
        return x

    def meet(self, name: str, value: bytes | None, timeout: float) -> bytes:
        """See `RankGroup`."""
        self.check()
        said = [value]
        with self._told():
            dist.broadcast_object_list(said, src=0)
        assert said[0] is not None
        return said[0]

    def check(self) -> None:
        """See `RankGroup`."""
        if self.started is not None:
            self.started.check()

    def cancel(self) -> None:
        """See `RankGroup`."""
        if self.exchange is not None:
            self.exchange.cancel()

    def abort(self) -> None:
        """See `RankGroup`."""
        self.cancel()
        for group in {self._group, self._all} - {None}:
            dist.destroy_process_group(group)
        self._group = self._all = None
        self._sent.clear()

    def renew(self, epoch: int) -> None:
        """See `RankGroup`."""
        self.abort()
        if self.exchange is not None:
            self.exchange.renew(epoch)
        how, place = "nccl" if self.device.type == "cuda" else "gloo", self.place

        def made(ranks: range | None) -> Any:
            return dist.new_group(ranks, backend=how, timeout=self._timeout, group_desc=f"hibachi {epoch}")

        with self._told():
            self._group = self._all = made(None)
            if place.stages > 1:
                stages = [made(range(at, at + place.tp_size)) for at in range(0, self.size, place.tp_size)]
                self._group = stages[self.rank // place.tp_size]

    def close(self) -> None:
        """See `RankGroup`."""
        TorchGroup.opened = None
        self.abort()
        if self._own and dist.is_initialized():
            dist.destroy_process_group()
        if self.started is not None:
            self.started.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:  # of gloo and of NCCL, whose classes differ by version
            raise GroupLost(str(e).partition("\n")[0]) from e


@contextmanager
def _signals_kept() -> Iterator[None]:
    """The launcher sets handlers of its own, which would end this process in their way."""
    main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT] if main else []
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


class Started:
    """Ranks 1 and on of a group, as processes of torch's elastic launcher. opening: what they unpickle and call."""

    def __init__(self, size: int, opening: bytes) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

        self._folder = tempfile.mkdtemp(prefix="hibachi-ranks-")  # for nobody else
        Path(self._folder, "opening").write_bytes(opening)
        self._threads = torch.get_num_threads()
        threads = max(1, self._threads // size)
        here = {FOLDER: self._folder, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        each = {**os.environ, **here, "OMP_NUM_THREADS": str(threads)}
        os.environ.update(here | {"RANK": "0", "LOCAL_RANK": "0"})
        torch.set_num_threads(threads)
        others = range(1, size)
        with _signals_kept():
            self._processes = start_processes(
                "hibachi",
                sys.executable,
                {i: ("-m", "hibachi_torch.rank") for i in range(size - 1)},
                {i: {**each, "RANK": str(rank), "LOCAL_RANK": str(rank)} for i, rank in enumerate(others)},
                DefaultLogsSpecs(log_dir=self._folder),
            )

    def check(self) -> None:
        """Raises GroupLost if one has ended."""
        done = self._processes.wait(0.05)
        if done is not None and done.failures:
            at, failure = next(iter(done.failures.items()))
            raise GroupLost(
                f"Rank {at + 1} has ended with status {failure.exitcode}, before it was ready; see its log."
            )

    def close(self) -> None:
        """Wait for their end, and end those that do not."""
        self._processes.wait(2.0)
        self._processes.close(signal.SIGKILL)
        for name in (FOLDER, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"):
            os.environ.pop(name, None)
        torch.set_num_threads(self._threads)
        shutil.rmtree(self._folder, ignore_errors=True)


def joined(size: int, stages: int, device: torch.device, timeout: float | None, opening: bytes) -> TorchGroup:
    """The group of this process, with `size` ranks in each of so many stages; if no launcher has made one, its other
    ranks are started now. Raises ConfigError.
    """
    size *= stages
    if TorchGroup.opened is not None:
        raise ConfigError(
            "This process has a model over several processes already, and ranks follow one. Close it first, or take "
            "another process."
        )
    there = os.environ.get("WORLD_SIZE")
    if there is not None and int(there) != size:
        raise ConfigError(
            f"torchrun has started {there} processes, and tensor_parallel_size times pipeline_parallel_size is {size}. "
            f"Start as many as the model is to have."
        )
    started = None
    if there is None and not dist.is_initialized():
        if not opening:
            raise ConfigError("Expected ranks, as `torchrun --nproc-per-node N script.py` starts them; there are none.")
        started = Started(size, opening)
    try:
        return TorchGroup(size, stages, device, timeout, started)
    except BaseException:
        if started is not None:
            started.close()
        raise
