"""Sizes that steps are padded to, where a library compiles for each shape.

A ladder is two numbers: into how many equal parts it cuts the way from a power of two to the next, for rows that decode
and for the tokens of steps with prompts. (1, 1) are the powers of two: the fewest programs, and up to half of the work
is padding.
"""

from __future__ import annotations

from collections.abc import Iterable

Ladder = tuple[int, int]


def size_bucket(n: int, parts: int) -> int:
    """The next of the sizes: powers of two, and `parts` equal steps from each to the next, of four or more."""
    size = 1 << (n - 1).bit_length()
    step = max(4, size // (2 * parts))
    return min(size, -(-n // step) * step)


def decode_rows(n: int, ladder: Ladder, *, any_width: bool) -> int:
    """Rows of a step of single tokens, n of which are real."""
    size = size_bucket(n, ladder[0])
    if any_width:
        return size
    return 2 if n <= 2 else max(8, size)  # not 1: XLA on the CPU then copies the whole cache


def prompt_tokens(n: int, ladder: Ladder, tile: int) -> int:
    """Tokens of a step with prompts, n of which are real. tile: tokens of a query tile."""
    return max(2 * tile, size_bucket(n, ladder[1]))


def width_bucket(n: int, most: int) -> int:
    """Columns of a block table: the next power of four from 4 on, at most `most`."""
    width = 4
    while width < n:
        width *= 4
    return min(width, most)


def programs(ladder: Ladder, rows: Iterable[int], tokens: Iterable[int], tile: int, *, any_width: bool) -> int:
    """How many shapes there are for steps of so many rows, and of so many tokens."""
    shapes = {decode_rows(n, ladder, any_width=any_width) for n in rows}
    return len(shapes) + len({prompt_tokens(n, ladder, tile) for n in tokens})
