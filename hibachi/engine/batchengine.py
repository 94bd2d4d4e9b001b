"""The protocol of an engine, in this process or in another one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from hibachi.backend.array_backend import HostArray
from hibachi.backend.layout import CacheSpec, Input
from hibachi.engine.forms import Forms
from hibachi.engine.health import Health
from hibachi.engine.runners.meters import Meters
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.stats import Stats
from hibachi.engine.streams.stream import ItemStream
from hibachi.request import Request

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Facts:
    """What callers that send requests must know of an engine.

    vocab_size: None means the model returns tokens, and any tokens are accepted.
    cached: it has a cache (level 2).
    embed_size: size of the embeddings that may be given in place of a prompt; None means none may be given.
    has_hidden: the model gives hidden states, so vectors can be made.
    fingerprint: library, device and kernels. model: the model's name in errors.
    numerics: the name of the bits that come out, such as "cpu-2 float32"; None means they have no name.
    layers: what each layer keeps in the cache; () means there is no cache.
    feedforward: one input, one output.
    token: shape and name of the dtype of all tokens, or of all inputs; None means each request has its own.
    labels: of a classifier, the names of its outputs. probabilities: outputs are probabilities already, not logits.
    reads, writes: the model has `read`, or `write`: see `BatchEngine`.
    quantization: of the matrices.
    eos_ids: for a model that returns logits, token ids that end a request, unless its parameters say ignore_eos.
    codebooks: of a token that is sampled; None means it is one id. vocab_sizes: ids of each of them. seeded: the model
    draws itself, from a request's seed. inputs: arrays that come with each request.
    speculates: tokens are proposed, so a prediction of the output is of use.
    remarks: what was found when the engine was made, or later, in words.
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
    codebooks: int | None = None
    vocab_sizes: tuple[int, ...] = ()
    seeded: bool = False
    inputs: Mapping[str, Input] = field(default_factory=dict)
    speculates: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def arrays(self) -> bool:
        """Whether items of streams are arrays, not ids."""
        return self.vocab_size is None or self.codebooks is not None


class BatchEngine(Protocol[R]):
    """Takes requests and fills their streams. Closing a stream cancels its request; a stream that is not read pauses
    it.

    Three classes implement it: `AutoregressiveBatchInference`, `FeedforwardBatchInference`, and `RemoteEngine` for one
    of these in another process. R is the type of a checked request.
    """

    @property
    def facts(self) -> Facts: ...

    @property
    def forms(self) -> Forms:
        """Checks the form that a request asks for."""
        ...

    @property
    def pid(self) -> int | None:
        """Process id of the engine's process; None means this process."""
        ...

    @property
    def begins_again(self) -> bool:
        """Whether a process that fails is replaced by another."""
        ...

    def check(self, request: Request) -> R:
        """Check a request completely; nothing is queued yet. Raises InvalidRequest, PromptTooLong or
        UnsupportedOperation.
        """
        ...

    def check_room(self, tenant: Hashable, new: int) -> None:
        """Raise QueueFull if there is no room for this many more requests of this tenant."""
        ...

    def submit(self, ready: R) -> ItemStream[Any]:
        """Queue what `check` returned, and return its stream.

        Items of the stream: ints, where tokens are sampled; one vector on the host, where one is wanted; otherwise
        native arrays, or NumPy's from another process; one item for feed-forward. Raises QueueFull, EngineClosed or
        EngineFailed.
        """
        ...

    def submit_many(self, ready: R, n: int) -> list[ItemStream[Any]]:
        """Queue what `check` returned n times: the first with its seed, the others with seeds derived from it.

        Where the model returns logits, the prompt is computed once. Raises what `submit` raises.
        """
        ...

    def read(self, data: bytes, kind: str) -> HostArray:
        """Convert a request body to a prompt or an input by the model's own `read(bytes, type)`; kind: its media type.

        It runs where the model lives, beside the steps, and blocks the calling thread only. Raises InvalidRequest if
        `read` raises ValueError, ModelError if it fails otherwise or returns no numbers, EngineFailed if it takes too
        long, QueueFull, and UnsupportedOperation for a model without `read`.
        """
        ...

    def write(self, tokens: HostArray) -> tuple[bytes, str]:
        """Convert all items, [n, *token], or the one output to the bytes of an answer and their media type, by the
        model's own `write(tokens)`. Raises as `read` does.
        """
        ...

    def stats(self) -> Stats: ...

    def meters(self) -> Meters: ...

    def health(self) -> Health: ...

    def dump(self) -> dict[str, Any]: ...

    def reset_cache(self) -> None:
        """Empty the prefix cache: later requests find no prefix that was computed before; running requests go on.

        Waits for the end of the running step. Raises EngineClosed or EngineFailed.
        """
        ...

    def keep(self, ready: R, *, pin: bool | None = None, importance: float | None = None) -> int:
        """Say how long to keep in host memory what a prompt, which `check` returned, computes.

        pin: it never makes way, until False takes that back; None changes nothing. importance: where that is the
        eviction, its own in place of its keys' mean norm. Returns of how many tokens that is. Raises
        UnsupportedOperation without tiers (`kv_tiers`), and InvalidRequest if too much would be pinned, or nothing is
        kept for its importance.
        """
        ...

    def cache_events(self, since: int = 0) -> list[tuple[int, str, str, str]]:
        """(number, "stored" or "removed", tier, name in hexadecimal digits) of the last changes in tiers, from number
        `since` on. Without tiers there are none.
        """
        ...

    def drain(self, timeout: float | None = None) -> bool: ...

    def close(self, timeout: float | None = None) -> None: ...
