"""What level 0 showed its model last, kept where the model computes: the next step adds a token to it."""

from __future__ import annotations

from typing import Any, NamedTuple

from hibachi.plan.sequence import Seq
from hibachi.tensor.array_backend import Array, ArrayBackend


class Shown(NamedTuple):
    """tokens: [B, S + 1, *tok], of our own: what a call was shown and what it returned. lengths [B]: before that."""

    tokens: Array
    lengths: Any


class Grown:
    """Spares copies from the host, where the device has memory of its own and calls of any width.

    The host keeps all tokens as well, for stop tokens, and for rows that come, go or compute again. Memory: that of the
    inputs of one step, as long as the engine lives.
    """

    def __init__(self, backend: ArrayBackend, *, useful: bool) -> None:
        """useful: the model's outputs are its tokens."""
        self._backend = backend
        self.useful: bool = useful and backend.asynchronous and not backend.shapes.compiled
        self._last: dict[tuple[int, ...], Shown] = {}  # by who shared the call
        self._now: dict[tuple[int, ...], Shown] = {}

    def begin(self) -> None:
        """A step begins: what is older than the last one is dropped."""
        self._last, self._now = self._now, {}

    def clear(self) -> None:
        """The device lost what it held, or other requests have the same numbers."""
        self._last, self._now = {}, {}

    def tokens(self, seqs: list[Seq], lengths: Any, width: int) -> Array | None:
        """[B, width, *tok], padded on the left, to be read only. None: the host must put them together.

        seqs: of the first rows; the others are fill. lengths [B]: with the new token.
        """
        last = self._last.get(_key(seqs))
        if last is None or len(last.lengths) != len(lengths) or (lengths != last.lengths + 1).any():
            return None
        extra = int(last.tokens.shape[1]) - width
        if extra < 0:  # wider rows would need padding
            return None
        return last.tokens[:, extra:, ...] if extra else last.tokens

    def keep(self, seqs: list[Seq], shown: Array, out: Array, lengths: Any) -> None:
        """The model has answered. shown [B, S, *tok]: a copy that it had no access to; out: [B, *tok]."""
        if self.useful and out.dtype == shown.dtype:
            tokens = self._backend.cat([shown, self._backend.unsqueeze(out, 1)], 1)
            self._now[_key(seqs)] = Shown(tokens, lengths)


def _key(seqs: list[Seq]) -> tuple[int, ...]:
    return tuple(seq.number for seq in seqs)
