"""An engine, wherever it runs: what is asked of one in this process, and of one in another."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hibachi.engine.health import Health
from hibachi.engine.stats import Stats
from hibachi.plan.limits import Limits
from hibachi.request import Request
from hibachi.runners.meters import Meters
from hibachi.streams.stream import ItemStream
from hibachi.tensor.array_backend import HostArray
from hibachi.tensor.layout import CacheSpec

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Facts:
    """What those must know of an engine who send it requests.

    vocab_size: None means the model returns tokens, and any are welcome. cached: it has a cache (level 2). embed_size:
    of the embeddings that may stand in the place of a prompt; None means none may. has_hidden: vectors can be made.
    fingerprint: library, device and kernels. model: how errors name it. numerics: the name of the bits that come out,
    such as "cpu-1 float32"; None means they have none. layers: what each keeps in the cache; (): there is none.
    feedforward: one input, one output. token: shape and name of the dtype of all tokens, or of all inputs; None means
    each request has its own. labels: of a classifier, what its outputs stand for;
    probabilities: these are such already, and not logits. reads, writes: the model has `read`, or
    `write`: see `BatchEngine`. quantization: of the matrices. eos_ids: of a model that returns logits, token ids that
    end a request, unless its parameters say ignore_eos.
    """

    vocab_size: int | None
    limits: Limits
    cached: bool
    embed_size: int | None
    has_hidden: bool
    deterministic: bool
    fingerprint: str
    dtype: str
    model: str
    numerics: str | None = None
    layers: CacheSpec = ()
    feedforward: bool = False
    token: tuple[tuple[int, ...], str] | None = None
    labels: tuple[str, ...] = ()
    probabilities: bool = False
    reads: bool = False
    writes: bool = False
    quantization: str = "none"
    eos_ids: tuple[int, ...] = ()


class BatchEngine(Protocol[R]):
    """Takes requests, and fills their streams. To close a stream cancels its request; one that is not read pauses it.

    Three have all of it: `AutoregressiveBatchInference`, `FeedforwardBatchInference`, and `RemoteEngine` for one of
    these in another process. R: what a request is once it was checked.
    """

    @property
    def facts(self) -> Facts: ...

    @property
    def pid(self) -> int | None:
        """Of its process; None means this one."""
        ...

    @property
    def begins_again(self) -> bool:
        """Is a process that fails replaced by another?"""
        ...

    def check(self, request: Request) -> R:
        """All that can be wrong with a request; nothing is queued yet. Raises InvalidRequest, PromptTooLong,
        UnsupportedOperation."""
        ...

    def check_room(self, tenant: Hashable, new: int) -> None:
        """Raises QueueFull if there is no room for so many requests more of this tenant."""
        ...

    def submit(self, ready: R) -> ItemStream[Any]:
        """Queue what `check` returned. The stream has ints, where tokens are sampled; one vector on the host, where one
        is wanted; else native arrays, or NumPy's from another process; of feed-forward, one. Raises QueueFull,
        EngineClosed or EngineFailed."""
        ...

    def read(self, data: bytes, kind: str) -> HostArray:
        """A prompt, or an input, as the model's own `read(bytes, type)` makes it of a body; kind: its media type. It
        runs where the model lives, beside the steps, and holds up the calling thread only.

        Raises InvalidRequest for what `read` refuses by a ValueError, ModelError if it fails otherwise or returns no
        numbers, EngineFailed if it takes too long, QueueFull, and UnsupportedOperation for a model without `read`.
        """
        ...

    def write(self, tokens: HostArray) -> tuple[bytes, str]:
        """Likewise by the model's own `write(tokens)`: all that came, [n, *token], or the one output, as the bytes of
        an answer, and their media type."""
        ...

    def stats(self) -> Stats: ...

    def meters(self) -> Meters: ...

    def health(self) -> Health: ...

    def dump(self) -> dict[str, Any]: ...

    def reset_cache(self) -> None:
        """Who comes from now on finds no prefix in the cache that was computed before; who runs goes on. Waits for the
        end of the running step. Raises EngineClosed or EngineFailed."""
        ...

    def drain(self, timeout: float | None = None) -> bool: ...

    def close(self, timeout: float | None = None) -> None: ...
