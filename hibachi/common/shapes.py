"""Shapes of calls: which shapes a backend allows, and the shape that a step is padded to.

Where a library compiles or records a program for each shape, there should be few shapes. They follow a ladder, given by
two numbers: into how many equal parts the way from one power of two to the next is cut, for rows that decode and for
the tokens of steps with prompts. (1, 1) means powers of two: the fewest programs, and up to half of the work is
padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from hibachi.errors import ConfigError

Ladder = tuple[int, int]


class StepShape(NamedTuple):
    """Lengths of the arrays of a packed step; see `StepInputs`."""

    tokens: int
    rows: int
    blocks: int
    """Columns of the block table."""
    tiles: int
    tile: int
    """Tokens in a query tile."""
    outputs: int


@dataclass(frozen=True)
class CallShapes:
    """The shapes of calls that a backend allows; by default any. Raises ConfigError for sizes that cannot be
    satisfied.
    """

    few: Literal["none", "decode", "all"] = "none"
    """Which steps come in few shapes: "none"; "decode", those in which every row computes one token; "all", also all
    other calls, as the library compiles a program for each shape.
    """
    multiple: int = 1
    """The tokens, rows and outputs of each step are multiples of this."""
    sizes: tuple[int, ...] = ()
    """Each step has exactly one of these numbers of tokens, and at most as many rows; empty means any number. With
    several sizes, rising, the engine tries at its start whether the others give the same bits as the first with its
    model, and drops those that do not.
    """
    pieces: tuple[int, ...] = (1,)
    """With `sizes`: how many tokens of each of its rows a call of a model with a `State` may take, rising from 1. The
    engine tries which of them give the same bits with its model.
    """
    tiles: tuple[int, int] = (1, 32)
    """Tokens in a query tile: of a step of single tokens, and of a step with longer pieces. Where steps come in any
    shape, the second may be smaller if its pieces are short, see `choices`.
    """
    any_width: bool = False
    """Attention takes no longer over a block table that is wider than its sequences need. All tables then have the
    greatest width, and there are programs of more sizes instead.
    """
    ladder: Ladder | None = None
    """None means what suits most models, see `parts`."""

    def __post_init__(self) -> None:
        if self.sizes and (self.sizes[0] < 1 or sorted(set(self.sizes)) != [*self.sizes] or self.tiles != (1, 1)):
            raise ConfigError(
                f"CallShapes with sizes need sizes >= 1 that rise, and tiles=(1, 1); got sizes={self.sizes}, "
                f"tiles={self.tiles}."
            )

    @cached_property
    def compiled(self) -> bool:
        """Whether the library compiles a program for each shape of any call."""
        return self.few == "all"

    @property
    def parts(self) -> Ladder:
        """The ladder: quarters for single tokens where tables have one width, else powers of two, as each width is a
        program more."""
        return self.ladder or ((4, 2) if self.any_width else (1, 1))

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """`tiles`, and the sizes between them where a step may choose."""
        first, last = self.tiles
        return self.tiles if self.few != "none" else (first, *(t for t in (2, 8) if t < last), last)

    # ---- steps -------------------------------------------------------------------------------------------------

    def step(
        self,
        real: StepShape,
        *,
        longest: int,
        rows: int,
        blocks: int,
        state: bool = False,
        scored: bool = False,
        ahead: bool = False,
    ) -> StepShape | None:
        """The shape that a step is padded to; None means it is not padded.

        real: the step's own shape. longest: tokens of the longest row. rows, blocks: the most there can be. state: rows
        keep a `State`, so all have `longest` tokens, and padding inside a row would change it. scored: outputs of more
        than the last tokens are wanted. ahead: rows have one token and proposals behind it, of all of which outputs are
        wanted; such a step has the shape of one of as many rows with one token.
        """
        decode = longest == 1 or ahead
        if not (self.compiled or (longest == 1 and self.few == "decode")):
            return self._filled(real, longest if state else None)
        if self.sizes:
            each = longest if state else 1
            n = next(size for size in self.sizes if size * each >= real.tokens)
            return fixed(n * each, n, blocks, 1)
        tile = self.tiles[not decode]
        if state:
            rows = row_bucket(real.rows, rows)
            tokens = rows * longest
        elif decode:
            tokens = self.decode_rows(real.tokens)
            rows = tokens = tokens if real.tokens > max(2, rows) else min(tokens, max(2, rows))
        else:
            tokens = self.prompt_tokens(real.tokens)
        width = blocks if self.any_width else min(next_power(real.blocks, 4), blocks)
        return fixed(tokens, rows, width, tile, tokens if scored or real.outputs > rows else rows)

    @cached_property
    def exact(self) -> bool:
        """Whether no step is ever padded."""
        return self.few == "none" and self.multiple == 1

    def _filled(self, real: StepShape, each: int | None) -> StepShape | None:
        """Tokens, rows and outputs, rounded up to multiples. each: tokens of every row, if that number is fixed."""
        if (many := self.multiple) == 1:
            return None
        rows, tokens, outputs = (-(-n // many) * many for n in (real.rows, real.tokens, max(real.outputs, 1)))
        return real._replace(
            tokens=tokens if each is None else rows * each,
            rows=rows,
            tiles=max(real.tiles, rows) if real.tile == 1 else real.tiles,
            outputs=outputs,
        )

    def decode_rows(self, n: int) -> int:
        """Padded number of rows of a step of single tokens, n of which are real."""
        size = size_bucket(n, self.parts[0])
        if self.any_width:
            return size
        return 2 if n <= 2 else max(8, size)  # not 1: XLA on the CPU then copies the whole cache

    def prompt_tokens(self, n: int) -> int:
        """Padded number of tokens of a step with prompts, n of which are real."""
        return max(2 * self.tiles[1], size_bucket(n, self.parts[1]))

    def programs(self, rows: Iterable[int], tokens: Iterable[int]) -> int:
        """Number of different shapes for steps with these numbers of rows and of tokens, at one width."""
        return len({self.decode_rows(n) for n in rows}) + len({self.prompt_tokens(n) for n in tokens})

    # ---- other calls -------------------------------------------------------------------------------------------

    def rows(self, n: int, most: int) -> int:
        """Padded number of rows of a call with n real ones, at most `most`."""
        return row_bucket(n, most) if self.compiled else n

    def length(self, n: int) -> int:
        """Padded length of whole prompts that are computed side by side, the longest of which has n tokens."""
        return max(16, 1 << (n - 1).bit_length()) if self.compiled else n

    def list_length(self, n: int) -> int:
        """Padded length of a list that goes with each row, the longest of which has n numbers."""
        return next_power(n, 16) if self.compiled else n


def fixed(tokens: int, rows: int, blocks: int, tile: int, outputs: int | None = None) -> StepShape:
    """The shape that holds any step with at most these tokens and rows. outputs: None means as many as rows."""
    tiles = max(tokens, rows) if tile == 1 else tokens // tile + rows
    return StepShape(tokens, rows, blocks, tiles, tile, rows if outputs is None else outputs)


def size_bucket(n: int, parts: int) -> int:
    """The next larger size on the ladder: powers of two, and `parts` equal steps between two of them, from four on."""
    size = 1 << (n - 1).bit_length()
    step = max(4, size // (2 * parts))
    return min(size, -(-n // step) * step)


def row_bucket(n: int, most: int) -> int:
    """2, or the next power of two from 8 on, at most `most`. Not 1: XLA on the CPU then copies the whole cache."""
    return min(max(most, 2), 2 if n <= 2 else max(8, 1 << (n - 1).bit_length()))


def next_power(n: int, least: int) -> int:
    """The next of `least`, 4 * `least`, 16 * `least`, ..."""
    size = least
    while size < n:
        size *= 4
    return size


def size_for(left: int, sizes: tuple[int, ...]) -> int:
    """The size of the next call when this many tokens are left: the largest that becomes more than half full, else the
    first.
    """
    return max(n for n in sizes if n == sizes[0] or 2 * left > n)
