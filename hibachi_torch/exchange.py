"""What the ranks of one host give each other through memory that all of them have mapped; see exchange.h."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hibachi.backend.array_backend import Array
from hibachi.backend.group import GroupLost, RankPlace
from hibachi.backend.kernels import abi
from hibachi.backend.kernels.library import NativeUnavailable, library
from hibachi.backend.kernels.memory import Reused

MEMORY = "/dev/shm"  # its files are in memory
AWAKE = 200e-6  # seconds in which a rank that waits does not sleep, where each can have a processor
_EPOCH = 1 << 44  # turns of an epoch


class HostExchange:
    """memory: as long as `exchange_bytes` says, the same in all ranks. patience: seconds that one may be late."""

    def __init__(self, kernels: abi.Kernels, memory: mmap.mmap, rank: int, place: RankPlace, patience: float) -> None:
        self._kernels, self._outputs = kernels, Reused()
        self._ended = ctypes.c_uint64.from_buffer(memory)
        first, awake = rank - place.tp_rank, AWAKE if place.tp_size * place.stages <= (os.cpu_count() or 1) else 0.0
        shared = ctypes.addressof(self._ended)
        self._exchange = abi.RankExchange(shared, first, first + place.tp_size, rank, 0, awake, patience)

    def sum(self, x: Array) -> None:
        """See `RankGroup`."""
        self._met(self._kernels.exchange_sum(ctypes.byref(self._exchange), x.data_ptr(), x.numel()))

    def gather(self, x: Array, columns: int) -> Array:
        """See `RankGroup`. x: contiguous, with equally many columns in each rank."""
        out, stride = x, columns * x.element_size()
        if self._exchange.mine == self._exchange.first:
            out = torch.from_numpy(self._outputs.empty((len(x), stride), np.uint8)).view(x.dtype)
        to, width = None if out is x else out.data_ptr(), x.shape[1] * x.element_size()
        self._met(self._kernels.exchange_rows(ctypes.byref(self._exchange), x.data_ptr(), len(x), width, to, stride))
        return out

    def cancel(self) -> None:
        """Nobody waits for another in this epoch any more. From any thread."""
        self._ended.value = max(self._ended.value, self._exchange.last | _EPOCH - 1)

    def renew(self, epoch: int) -> None:
        self._exchange.last = epoch * _EPOCH

    def _met(self, code: int) -> None:
        if code:
            late = f"a rank did not come within {self._exchange.patience:g} s"
            raise GroupLost(late if code == abi.LATE else "a rank has ended, or could not go on")


def opened(rank: int, size: int, place: RankPlace, patience: float) -> HostExchange | None:
    """For the ranks of one host, all of which call it. None: one of them has no kernels, or no memory for it."""
    said: list[str] = [""]
    memory: mmap.mmap | None = None
    with ExitStack() as stack:
        if rank == 0:
            with suppress(OSError, NativeUnavailable):
                folder = MEMORY if os.path.isdir(MEMORY) else None
                file = stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix="hibachi-"))
                file.write(bytes(library().kernels.exchange_bytes(size)))  # where there is no room, it fails here
                file.flush()
                said = [file.name]
        dist.broadcast_object_list(said, src=0)
        with suppress(OSError, NativeUnavailable), open(said[0], "r+b") as there:
            library()
            memory = mmap.mmap(there.fileno(), 0)
        could: list[Any] = [None] * size
        dist.all_gather_object(could, memory is not None)
    if memory is None or not all(could):
        return None
    return HostExchange(library().kernels, memory, rank, place, patience)
