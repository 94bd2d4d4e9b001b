"""What a cached model and a backend tell each other: the memory a layer needs, and the inputs of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from hibachi.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Paged:
    """A layer that keeps keys and values of every position, in blocks that the engine hands out.

    kv_heads, k_dim, v_dim: sizes of one position. dtype: name of the stored dtype; None means the model's default.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class State:
    """A layer that keeps one recurrent state for each row.

    shape: of one row's state, without the batch dimension; a row that starts gets zeros. dtype: name of the stored
    dtype; None means the model's default.
    """

    shape: tuple[int, ...]
    dtype: str | None = None


CacheSpec: TypeAlias = Sequence[Paged | State]


@dataclass(frozen=True, slots=True)
class OwnCache:
    """The attribute `past` of a model that keeps a cache of its own: where the arrays in it have rows and positions.

    batch, position: axes of all arrays in the cache. None means that the engine finds them, for each array, by calling
    the model with other numbers of rows and of tokens: an array in which no axis grows with the tokens is a state.
    only: a part of the places of the arrays that belong to the cache, such as "cached_kv" of "[0].cached_kv[1]". What
    else `step` returns is replaced by None, for caches that come with other results. None means all arrays belong.
    """

    batch: int | None = None
    position: int | None = None
    only: str | None = None


@dataclass(frozen=True, slots=True)
class Input:
    """What a model declares in its attribute `inputs`, {name: Input}: an array that comes with each request, beside
    its tokens, `run(prompt, inputs={name: array})`.

    shape, dtype: of the array, without the batch dimension; None stands for any size, of an input that `encode` takes.
    per: "request", one array for all tokens; or "position", one for each: the request gives [positions, *shape].
    example: an array for trials of the model; None means zeros.
    """

    shape: tuple[int | None, ...] = ()
    dtype: str = "float32"
    per: Literal["request", "position"] = "request"
    example: Any = None


@dataclass(frozen=True, slots=True)
class StepInputs(Generic[T]):
    """One step, packed: the new tokens of all rows one after another. All index arrays are int32, on the device.

    T tokens, B rows, `bs` the block size, n_out outputs wanted. Backends with static shapes see all of them padded:
    padding tokens write to block 0, which no request owns, and their outputs are dropped.
    """

    tok: T  # [T, *tok]   tokens of row 0, then of row 1, ...; single-token rows come first
    pos: T  # [T]         position of each token in its sequence, from 0
    slot: T  # [T]        where its key and value go: block * bs + offset in the block
    seg: T  # [T]         which of the B rows it belongs to
    row: T  # [B]         the persistent row that the request holds
    start: T  # [B]       positions cached before this step
    kv_len: T  # [B]      positions cached after it
    cu_q: T  # [B + 1]    tokens of row i are cu_q[i] to cu_q[i + 1] - 1
    block_table: T  # [B, blocks]  blocks of each row, in order
    last: T  # [n_out]    indices into the T tokens whose output is wanted
    tile_q: T  # [N, tile]  query tiles for attention: `tile` tokens of one row each (indices into T, padded with 0)
    tile_row: T  # [N]      which of the B rows a tile belongs to
    tile_of: T  # [T]       where each token stands in the flattened tiles
    embeds: T | None = None  # [T, hidden] float32, where prompts are given as embeddings; None means no token here is
    embedded: T | None = None  # [T] bool: which of the tokens are
    prompt_len: T | None = None  # [B]    tokens of the prompt; where the model's attribute `knows` names it
    seed: T | None = None  # [B]          of the request, its lowest 31 bits; likewise
    uniform: T | None = None  # [n_out, draws] float32 in (0, 1): by seed, position of the next token, and index
    normal: T | None = None  # [n_out, draws] float32, standard normal, likewise
    inputs: Mapping[str, T] | None = None  # as declared: [B, *shape], or [T, *shape] per position

    @property
    def new(self) -> Any:
        """[T] bool: which of the tokens were generated; the others are of prompts. Raises ConfigError."""
        if self.prompt_len is None:
            raise ConfigError('x.new takes x.prompt_len: the model must declare knows = ("prompt_len",); it does not.')
        return self.pos >= self.prompt_len[self.seg]  # type: ignore[index]  # arrays of any library
