"""From the times of kernels to those of whole steps, and what padding them costs: how dtypes and ladders are judged.

The times are those that `hibachi.llm.tune.autotune` measures of products and attention, at a few sizes; between two of
these, and beyond the largest, they are taken to lie on a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from hibachi.common.shapes import CallShapes

Times = Mapping[str, Mapping[str, float]]  # operation -> case -> milliseconds
PROMPT = range(33, 513)
COMPILE, SERVED = 5.0, 3600.0
"""A program counts as so many seconds of compiling, in so many seconds of serving."""


def steps(times: Times) -> dict[str, float]:
    """Milliseconds of the products and the attention of whole steps; nothing where one of them was not timed."""
    if not (times.get("linear") and times.get("attention")):
        return {}
    decode, prompt = _decode(times), _prompt(times)
    return {rows_named(n): decode[n] for n in (1, 64)} | {"prompt of 256": prompt[256]}


def padded(times: Times, shapes: CallShapes) -> tuple[dict[str, float], int]:
    """(milliseconds of steps in these shapes, the price of its programs included, by case; how many programs it has).

    In each case all sizes are as likely. Without `any_width` there is a program for each of four widths.
    """
    if not (times.get("linear") and times.get("attention")):
        return {}, 0
    count = shapes.programs(range(1, 65), PROMPT) * (1 if shapes.any_width else 4)
    price = 1 + count * COMPILE / SERVED
    decode, prompt = _decode(times), _prompt(times)
    cases = {
        "1 to 16 rows": _average(decode, map(shapes.decode_rows, range(1, 17))),
        "17 to 64 rows": _average(decode, map(shapes.decode_rows, range(17, 65))),
        "33 to 512 tokens": _average(prompt, map(shapes.prompt_tokens, PROMPT)),
    }
    return {name: ms * price for name, ms in cases.items()}, count


def _decode(times: Times) -> dict[int, float]:
    """By the number of rows, milliseconds of a step in which each computes a token."""
    linear, attention = times["linear"], times["attention"]
    head = {1: linear["head, 1"], 64: linear["head, 64"]}
    return {n: linear[rows_named(n)] + _at(head, n) + attention[f"{n} x 256"] for n in (1, 16, 64)}


def _prompt(times: Times) -> dict[int, float]:
    """By the number of tokens. Attention is taken to grow with them, as if padding were computed like the rest."""
    linear, attention = times["linear"], times["attention"]["prompt of 256"]
    return {n: linear[rows_named(n)] + linear["head, 1"] + attention * n / 256 for n in (16, 64, 256)}


def rows_named(n: int) -> str:
    return f"{n} row{'s' * (n > 1)}"


def _average(known: Mapping[int, float], sizes: Iterable[int]) -> float:
    return float(np.mean([_at(known, n) for n in sizes]))


def _at(known: Mapping[int, float], n: int) -> float:
    """On the lines between the points, and on the last one beyond them; never less for more."""
    sizes, ms = list(known), np.maximum.accumulate(list(known.values()))
    if n <= sizes[-1]:
        return float(np.interp(n, sizes, ms))
    return float(ms[-1] + (ms[-1] - ms[-2]) / (sizes[-1] - sizes[-2]) * (n - sizes[-1]))
