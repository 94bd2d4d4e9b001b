"""Does a model compute in our engine what it computes by itself? Asked once, when it is loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.backend.layout import StepInputs
from hibachi_torch.transformers_attention import CannotRun

BLOCK = 4  # positions in a cache block of the check
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest relative difference: rounding stays far below, a layer that forgets or sees too much does not."""


def check(model: Any, longest: int = 12) -> float:
    """Two short prompts, in chunks and mixed with decoding, against the module's own eager forward pass.

    Returns the largest relative difference of the logits of a token. Raises CannotRun if it is more than rounding.
    """
    b, n = model.backend, min(longest, model.max_model_len)
    cut = max(1, n // 2)
    texts = [some_tokens(n, model.vocab_size, seed=1), some_tokens(cut, model.vocab_size, seed=2)]
    steps = [{0: (0, cut)}, {0: (cut, n - 1), 1: (0, cut - 1)}, {0: (n - 1, n), 1: (cut - 1, cut)}]
    if n < 4:  # too short to be cut
        steps = [{0: (0, n), 1: (0, cut)}]
    blocks = 2 * -(-n // BLOCK) + 1
    cache = [
        b.make_cache(layer, blocks=blocks, block_size=BLOCK, rows=2, dtype=model.dtype) for layer in model.cache_spec()
    ]
    got: list[list[Any]] = [[], []]
    for rows in steps:
        logits, cache = model.step(model.params, cache, packed(b, texts, rows))
        for row, part in zip(rows, logits.split([end - start for start, end in rows.values()]), strict=True):
            got[row].append(part)
    own = [model.alone(b.put(t)) for t in texts]
    worst = float(torch.cat([difference(torch.cat(ours), theirs) for ours, theirs in zip(got, own, strict=True)]).max())
    if not worst <= TOLERANCE[model.dtype]:  # NaN is refused as well
        raise CannotRun(
            f"its logits in the paged engine differ from its own by {worst:.1e} of their size on a short prompt (at "
            f"most {TOLERANCE[model.dtype]:.0e} is rounding in {model.dtype})"
        )
    return worst


def difference(a: Any, b: Any) -> torch.Tensor:
    """The relative difference of each token's logits [T], apart from a constant that softmax takes away."""
    a, b = (t - t.mean(-1, keepdim=True) for t in (a, b))
    gap, size = (a - b).norm(dim=-1), b.norm(dim=-1)
    return torch.where(gap == 0, gap, gap / size)


def some_tokens(n: int, vocab_size: int, *, seed: int) -> HostArray:
    """Ids from the lower half of the vocabulary: placeholders for images and the like stand at its end."""
    return np.random.default_rng(seed).integers(max(1, vocab_size // 2), size=n)


def packed(b: ArrayBackend, texts: list[HostArray], rows: dict[int, tuple[int, int]]) -> StepInputs[Any]:
    """The inputs of a step over tokens start to end of each row's text; an output is wanted of every token."""
    width = -(-max(map(len, texts)) // BLOCK)
    table = np.stack([1 + row * width + np.arange(width) for row in rows])
    start, end = (np.array(bounds) for bounds in zip(*rows.values(), strict=True))
    q, n = end - start, len(rows)
    cu_q = np.concatenate([[0], np.cumsum(q)])
    seg = np.repeat(np.arange(n), q)
    offset = np.arange(cu_q[-1]) - cu_q[seg]
    pos, tile = start[seg] + offset, int(q.max())
    tile_of = seg * tile + offset
    tile_q = np.zeros(n * tile, np.int32)
    tile_q[tile_of] = np.arange(cu_q[-1])
    arrays = StepInputs(
        tok=np.concatenate([texts[row][lo:hi] for row, (lo, hi) in rows.items()]),
        pos=pos,
        slot=table[seg, pos // BLOCK] * BLOCK + pos % BLOCK,
        seg=seg,
        row=np.array(list(rows)),
        start=start,
        kv_len=end,
        cu_q=cu_q,
        block_table=table,
        last=np.arange(cu_q[-1]),
        tile_q=tile_q.reshape(n, tile),
        tile_row=np.arange(n),
        tile_of=tile_of,
    )
    given = {name: a for name in StepInputs.__slots__ if (a := getattr(arrays, name)) is not None}
    return StepInputs(**{name: b.put(a.astype(np.int32)) for name, a in given.items()})
