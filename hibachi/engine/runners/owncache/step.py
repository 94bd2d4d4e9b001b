"""Calls of a model with a cache of its own, by rows: of requests, of trials, and of `hibachi verify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.engine.kinds import takes_lengths
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.depth import DepthCalls, depth_of
from hibachi.engine.runners.extra_inputs import ENCODED, KEEP, Arguments, ExtraInputs, parameters_of
from hibachi.engine.runners.owncache.encoder import Encoded
from hibachi.engine.runners.owncache.layout import Layout, layout_of
from hibachi.engine.runners.owncache.rows import RowPasts
from hibachi.engine.runners.runner import check_output
from hibachi.engine.runners.tokentable import TokenKind
from hibachi.errors import ConfigError, InvalidModelOutput


class OwnStep:
    """Calls `step` with tokens, lengths and a past, and with what else it takes.

    with_lengths: it takes lengths. keeps: it takes how many logits are wanted of each row, of its last tokens. layout:
    of its pasts. encoded: what is kept of `encode`; None means it has none. depth: what makes logits of its outputs.
    """

    backend: ArrayBackend
    with_lengths: bool
    keeps: bool
    layout: Layout
    encoded: Encoded | None
    depth: DepthCalls | None

    def __init__(
        self,
        model: Any,
        beside: ExtraInputs,
        backend: ArrayBackend,
        kind: TokenKind,
        vocab: int | None,
        examples: Sequence[HostArray],
        call: Callable[..., Any],
    ) -> None:
        """kind: of the tokens. vocab: size of the logits; None means tokens come out. examples: prompts, of whose
        tokens those for trials are drawn. call: calls a method of the model. Raises ConfigError, and what the model
        raises where it is called on a few tokens, to see its past.
        """
        self._step, self.backend, self._kind, self._vocab, self._call = model.step, backend, kind, vocab, call
        self.name: str = f"{type(model).__name__}.step"
        self.with_lengths = takes_lengths(model, ModelKind.OWN_CACHE)
        self.depth = None if vocab is None else depth_of(model, backend)
        self.keeps = vocab is not None and self.depth is None and KEEP in parameters_of(model.step)
        self._shape = kind.shape if vocab is None else (*kind.shape, vocab)
        self._beside, self._arguments = beside, Arguments(model.step, beside)
        self._examples, self._random = np.concatenate(examples).astype(kind.dtype), np.random.default_rng(0)
        self.encoded = None
        if callable(encode := getattr(model, "encode", None)):
            if ENCODED not in self._arguments.names:
                raise ConfigError(
                    f"{self.name} must take what `encode` makes: expected a parameter `{ENCODED}`; got none."
                )
            self.encoded = Encoded(encode, backend, beside, type(model).__name__, call)
        self.layout = layout_of(model.past, self._first, backend, self.name)

    @property
    def names(self) -> frozenset[str]:
        """What it takes beside tokens, lengths and past."""
        return self._arguments.names

    @property
    def comparable(self) -> bool:
        """Whether outputs are numbers that differ by rounding only; of ids, one that is almost as likely may come."""
        return self._vocab is not None or self._kind.dtype.kind == "f"

    def example(self, *shape: int) -> HostArray:
        """Tokens for a trial."""
        found: HostArray = self._random.choice(self._examples, shape)  # of its first axis
        return found

    def _first(self, rows: int, tokens: int) -> Any:
        return self.called(self.example(rows, tokens), np.full(rows, tokens, np.int32), None)[1]

    def called(
        self, tokens: HostArray, lengths: HostArray, past: Any, rows: Any = None, encoded: Any = None, keep: int = 1
    ) -> tuple[Any, Any]:
        """rows: of whom the call is; None means of no request. encoded: of these rows; None means an example. keep: how
        many logits of each row, where it `keeps`.
        """
        put, named = self.backend.put, dict[str, Any]()
        if self._arguments.names:
            nobody = self._beside.nobody(len(tokens)) if rows is None else rows
            found = self._arguments.of(nobody, lengths, tokens.shape[1])
            named = {name: put(array) for name, array in found.items()}
        if self.encoded is not None:
            named[ENCODED] = self.encoded.tried([0] * len(tokens)) if encoded is None else encoded
        if self.keeps:
            named[KEEP] = keep
        arguments = (put(tokens), put(lengths), past) if self.with_lengths else (put(tokens), past)
        answer = self._call(self._step, *arguments, **named)
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            raise InvalidModelOutput(
                f"{self.name} must return a pair (logits, past); got {type(answer).__qualname__}. Return both."
            )
        return answer[0], answer[1]

    def checked(self, out: Any, rows: int, keep: int = 1) -> Array:
        """The output of a call of so many rows; if it keeps several of each, one row's after another's. Raises
        InvalidModelOutput.
        """
        if self.depth is not None:
            return self.depth.given(out, rows, self.name)
        kind = self._kind.dtype.kind if self._vocab is None else "logits"
        if not self.keeps:
            return check_output(out, self.backend, (rows, *self._shape), self.name, kind=kind)
        out = check_output(out, self.backend, (rows, keep, *self._shape), self.name, kind=kind)
        return self.backend.xp.reshape(out, (rows * keep, *self._shape))

    def compared(self, out: Any, tokens: HostArray) -> Array:
        """What trials compare of an output: logits. tokens [rows, q, *tok]: of the call."""
        return out if self.depth is None else self.depth.forced(out, tokens[:, -1])


class SteppedRows(RowPasts):
    """Rows that are stepped together or alone, each from the past that it is in. width: see `RowPasts`."""

    def __init__(self, step: OwnStep, width: Callable[[int], int] = lambda n: n) -> None:
        super().__init__(step.layout, width)
        self._step = step

    def advance(
        self,
        rows: Sequence[int],
        start: Sequence[int],
        tokens: HostArray,
        whose: Any = None,
        encoded: Any = None,
        keep: int = 1,
    ) -> Array:
        """Compute q new tokens [size, q, *tok] of these rows [n] from positions `start` on, and of filler rows after
        them; returns the outputs, [size * keep, ...].

        whose: rows of requests [size] that inputs are taken of; None means of none: what was encoded is the example of
        each row's number, and what is returned is to be compared. encoded, keep: see `OwnStep.called`. If it raises,
        the rows are in no past any more: the model may write into the one that it is given.
        """
        step, layout, (size, q) = self._step, self._layout, tokens.shape[:2]
        if whose is None and step.encoded is not None:
            encoded = step.encoded.tried(rows)
        ends = [n + q for n in start]
        before = self.gathered([*rows], [*start], size) if start[0] else None
        self.forget(rows)
        lengths = np.array(ends + ends[-1:] * (size - len(ends)), np.int32)
        out, tree = step.called(tokens, lengths, None if before is None else before.tree, whose, encoded, keep)
        out = step.checked(out, size, keep)
        after = layout.taken(tree, before, rows, ends, size, q)
        del tree, before  # what they hold on to goes array by array
        self.of |= dict.fromkeys(rows, layout.widened(after, self._width(max(ends))))
        return step.compared(out, tokens) if whose is None else out
