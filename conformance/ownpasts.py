"""Models with a cache of their own that note what they are given, and what it is held against."""

from __future__ import annotations

from typing import Any

import numpy as np

from hibachi import Input, OwnCache
from hibachi.testing.toys import SURE, VOCAB, SumOwn, SumTokens, Toy, expected, one_hot

LONG = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # sum 36
PROMPTS = [1, 2], LONG, [6], [4, 3, 1], [2, 5, 1]  # no two begin alike; of few lengths, as some libraries compile each
ODD = np.array([np.nan, np.inf, -0.0, 1.2e-38, 3.4e38], np.float32)
ONE = 0x3F800000  # the bits of 1.0


def bits(array: np.ndarray) -> np.ndarray:
    """What is to be equal where NaN is equal to itself, and -0.0 is not to 0.0."""
    return np.ascontiguousarray(array).view(f"u{array.itemsize}") if array.dtype.kind == "f" else array


def sequences(prompts: Any, n: int) -> list[list[int]]:
    """Each prompt with n tokens after it."""
    return [[*prompt, *expected(prompt, n)] for prompt in prompts]


class Marked(SumOwn):
    """Marks each position of its past with numbers that nobody else has, and knows them again.

    wrong: what was not as it should be. kept: (array, its copy on the host) of all that it returned.
    """

    def __init__(self, backend: Any, new_only: bool = False) -> None:
        super().__init__(backend, new_only)
        self.wrong: list[str] = []
        self.kept: list[tuple[Any, np.ndarray]] = []
        self._marks: dict[tuple[int, ...], np.ndarray] = {}
        self._next = 0
        self._right: list[list[int]] = []

    def watch(self, right: list[list[int]]) -> None:
        """From now on rows are the beginnings of these."""
        self._right = right

    def step(self, tokens: Any, lengths: Any, past: Any) -> tuple[Any, Any]:
        get = self.backend.get
        logits, new = super().step(tokens, lengths, None if past is None else {"layers": [(past["sum"],)]})
        host, ends = get(tokens), get(lengths).tolist()
        rows, q = host.shape
        seen = host[:, :0] if past is None else get(past["sum"])[:, 0, :]
        before = np.zeros((rows, 0, 2), np.float32) if past is None else get(past["marks"][0])
        marks, done = self._fresh(rows, q), list[list[int]]()
        for i, end in enumerate(ends):
            begin = seen.shape[1] - (end - q)  # before it there is padding
            sequence = [int(token) for token in (*seen[i, begin:], *host[i])]
            if sequence not in done:  # else it fills up the call
                self._check(sequence, end - q, before[i, begin:])
                self._marks[(*sequence,)] = np.concatenate([before[i, begin:], marks[i]])
                done.append(sequence)
        whole = native = self.backend.put(marks)
        if past is not None and not self.new_only:
            whole = self.backend.xp.concat([past["marks"][0], native], axis=1)
        (array,) = new["layers"][0]
        self.kept += [(each, get(each).copy()) for each in (whole, array)] if self._right else []
        return logits, {"marks": [whole], "sum": array}

    def _fresh(self, rows: int, q: int) -> np.ndarray:
        """float32 [rows, q, 2]: a number of its own, and an odd one."""
        n = rows * q
        numbers = np.arange(ONE + self._next, ONE + self._next + n, dtype=np.int32).view(np.float32)
        self._next += n
        return np.stack([numbers, np.resize(ODD, n)], axis=1).reshape(rows, q, 2)

    def _check(self, sequence: list[int], had: int, marks: np.ndarray) -> None:
        if self._right and not any(right[: len(sequence)] == sequence for right in self._right):
            self.wrong.append(f"a row of {sequence}, {had} of them in its past: nobody's tokens")
        elif had and self._right and not self._same(marks, sequence[:had]):
            self.wrong.append(f"the past of {sequence[:had]} is not what was returned for it")

    def _same(self, marks: np.ndarray, sequence: list[int]) -> bool:
        known = self._marks.get((*sequence,))
        return known is not None and np.array_equal(bits(marks), bits(known))


class Encoding(Toy):
    """The next token is one more than the sum of the source and of all before.

    encoded: the shape of each source. shown: of each row of a call, the source and where it is, [2, width].
    """

    vocab_size, max_model_len, past = VOCAB, 64, OwnCache()
    inputs = {"source": Input((None,), "int32")}  # noqa: RUF012 (nothing changes it)

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.encoded: list[tuple[int, ...]] = []
        self.shown: list[np.ndarray] = []
        self._inner = SumTokens(backend)

    def encode(self, source: Any) -> dict[str, Any]:
        self.encoded.append(tuple(source.shape))
        return {"values": self.backend.float32(source) + 0, "all": [self.backend.xp.ones_like(source)]}

    def step(self, tokens: Any, lengths: Any, past: Any, encoded: Any) -> tuple[Any, Any]:
        b, xp = self.backend, self.backend.xp
        self.shown += [*np.stack([b.get(encoded["values"]), b.get(encoded["all"][0])], axis=1)]
        whole = tokens if past is None else xp.concat([past, tokens], axis=1)
        return b.program(_after)(self._inner.forward(whole, lengths), encoded["values"]), tokens


def _after(backend: Any, tokens: Any, values: Any) -> Any:
    after = backend.float32(tokens) + backend.xp.sum(values, axis=1)
    return one_hot(backend, after % VOCAB) * SURE
