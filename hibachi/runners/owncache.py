"""Runner for models that keep a cache of their own: `step(tokens, lengths, past) -> (logits, past)`.

The rows that decode lie in one past, which the model gets back as it returned it while no row comes or goes. A row that
comes is computed in a past of its own and then joined to the others; one that goes is cut out. The new tokens of a call
are as many for each row, so nothing is padded but the past.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from hibachi.errors import ConfigError, InvalidModelOutput, NotDeterministic, text_of
from hibachi.phases import phase
from hibachi.plan.scheduler import Scheduler
from hibachi.plan.sequence import Seq
from hibachi.plan.step import StepPlan
from hibachi.runners.beside import ENCODED, Arguments, Beside, declared_by, wanted
from hibachi.runners.encoded import Encoded
from hibachi.runners.faults import drop_frames, is_signal
from hibachi.runners.heads import Sampled, Tokens
from hibachi.runners.meters import Tally
from hibachi.runners.owntrial import Trial, apart, largest
from hibachi.runners.pasts import Layout, Past, layout_of
from hibachi.runners.prefixes import Prefixes
from hibachi.runners.rowpasts import RowPasts
from hibachi.runners.runner import BaseRunner, Outcome, Part, check_output, isolate
from hibachi.runners.tokentable import Kind, Tables
from hibachi.runners.trial import telling
from hibachi.tensor.array_backend import Array, ArrayBackend, HostArray
from hibachi.tensor.layout import OwnCache

log: logging.Logger = logging.getLogger("hibachi.engine")
ALIKE = 0.05  # of the largest logit: what those of a model that goes on from a past may differ by, in any dtype


class OwnCacheRunner(BaseRunner):
    """Computes rows with pasts that the model makes.

    apart: each row is computed by itself, its prompt in one call and then token by token, whatever the plan says. So no
    bit depends on other rows, on chunks, or on whether it was preempted.
    """

    backend: ArrayBackend
    tables: Tables
    layout: Layout
    head: Sampled | Tokens
    apart: bool = False
    deterministic: bool = False

    def __init__(
        self,
        model: Any,
        backend: ArrayBackend,
        tables: Tables,
        rows: int,
        head: Sampled | Tokens,
        kind: Kind,
        tally: Tally,
        examples: Sequence[HostArray],
        beside: Beside,
    ) -> None:
        """rows: the most there may be at once. kind: of the tokens. examples: prompts, of whose tokens those for trials
        are drawn.

        Raises ConfigError.
        """
        super().__init__(backend, tables)
        self.tally = tally
        self._rows, self.head, self._kind = rows, head, kind
        self.name: str = head.name
        self._step: Any = model.step
        self._with_lengths = takes_own_lengths(model)
        self._beside, self._arguments = beside, Arguments(model.step, beside)
        self._encoded: Encoded | None = None
        self._seqs: dict[int, Seq] = {}
        self._most, self._chunk = 2**31, 2**31
        self._template: Past | None = None  # of pasts that begin with a prefix; None means that none does
        self._prefixes: Prefixes | None = None
        self._examples, self._random = np.concatenate(examples).astype(kind.dtype), np.random.default_rng(0)

        def first(rows: int, tokens: int) -> Any:
            return self.called(self.example(rows, tokens), np.full(rows, tokens, np.int32), None)[1]

        spec = model.past
        assert isinstance(spec, OwnCache)
        try:
            with backend.guard():
                if callable(encode := getattr(model, "encode", None)):
                    if ENCODED not in self._arguments.names:
                        raise ConfigError(
                            f"{self.name} must take what `encode` makes: expected a parameter `{ENCODED}`; got none."
                        )
                    self._encoded = Encoded(encode, backend, beside, type(model).__name__, self._theirs_called)
                self.layout = layout_of(spec, first, backend, self.name)
                self._pasts = RowPasts(self.layout, self._width)
                self._try_going_on(self.example(2, 4))
        except ConfigError:
            raise
        except Exception as e:
            raise ConfigError(
                f"{self.name} failed when it was tried on a few tokens, to see its past: {text_of(e).rstrip('.')}. The "
                f"attribute `example_prompts` of a model names prompts of ids that it can be tried on."
            ) from e

    def example(self, *shape: int) -> HostArray:
        """Tokens for a trial."""
        found: HostArray = self._random.choice(self._examples, shape)  # of its first axis
        return found

    def _try_going_on(self, ids: HostArray) -> None:
        """Check that the model goes on from the past that it is given, beside a row of another length. ids: [2, 4].
        Raises ConfigError.
        """
        rows = [ids[:1], ids[1:, self._with_lengths :]]  # the second is shorter
        want, parts = [], []
        for i, row in enumerate(rows):
            n = row.shape[1]
            want.append(self._output(self.called(row, np.array([n], np.int32), None, trial=[i])[0], 1))
            _, tree = self.called(row[:, :-1], np.array([n - 1], np.int32), None, trial=[i])
            parts.append(self.layout.taken(tree, None, [i], [n - 1], 1, n - 1))
        given = self.layout.joined([self.layout.part(part, [0], 3) for part in reversed(parts)])
        ends = [row.shape[1] for row in reversed(rows)]
        out, tree = self.called(ids[::-1, 3:], np.array(ends, np.int32), given.tree, trial=[1, 0])
        self.layout.taken(tree, given, [1, 0], ends, 2, 1)
        got = self._output(out, 2)
        if isinstance(self.head, Tokens) and self._kind.dtype.kind != "f":
            return  # a token that is almost as likely may come
        far = apart(got[::-1], np.concatenate(want))
        if far > ALIKE * largest(np.concatenate(want)):
            raise ConfigError(
                f"{self.name} must go on from the past that it is given, which is padded on the left for shorter rows: "
                f"expected the outputs that it returns for a few tokens at once, after all but the last and then the "
                f"last beside another row; got others, by up to {far:.3g}. Pass `past` on to the network, make "
                f"positions and a mask from `lengths`, and switch off dropout (`.eval()`)."
            )

    def _output(self, out: Any, rows: int) -> HostArray:
        return self.backend.get(self.backend.float32(self._checked(out, rows)))

    def _checked(self, out: Any, rows: int) -> Array:
        """The output of a call of so many rows. Raises InvalidModelOutput."""
        if isinstance(self.head, Sampled):
            return check_output(out, self.backend, (rows, *self.head.sampler.shape), self.name, kind="logits")
        return check_output(out, self.backend, (rows, *self._kind.shape), self.name, kind=self._kind.dtype.kind)

    def bound(self, positions: int, chunk: int) -> None:
        """positions: the most that a past may have, padding included. chunk: tokens of a row that a call may have."""
        self._most, self._chunk = positions, chunk

    # ---- requests ----------------------------------------------------------------------------------------------

    @override
    def admit(self, seq: Seq) -> None:
        self._keep()
        super().admit(seq)
        self._beside.admit(seq.owner)
        self.head.admit(seq.owner)
        self._forget([seq.row], encoded=True)
        self._seqs[seq.row] = seq

    @override
    def suspend(self, seq: Seq, row: int) -> None:
        self._keep()
        super().suspend(seq, row)
        self._forget([row], encoded=True)

    @override
    def adopt(self, scheduler: Scheduler) -> None:
        self._pasts.of.clear()
        self._seqs.clear()
        if scheduler.copies and scheduler.pool and self._template:
            self._prefixes = Prefixes(self.layout, self._template, scheduler.pool, scheduler.copies)

    @override
    def rebuild(self, *, keep: bool) -> None:
        self._pasts.of.clear()
        if self._prefixes is not None:
            self._prefixes.clear()

    @override
    def idle(self) -> None:
        self._keep()
        self._forget([row for row, seq in self._seqs.items() if seq.row != row], encoded=True)
        if self._prefixes is not None:
            self._prefixes.drop()

    def _keep(self) -> None:
        """Keep what is wanted of the rows that have gone, before their pasts do."""
        if self._prefixes is not None:
            self._prefixes.keep_left(self._pasts.of, self._seqs)

    def _forget(self, rows: Sequence[int], encoded: bool = False) -> None:
        """encoded: also what is kept of the request's inputs."""
        self._pasts.forget(rows)
        if encoded and self._encoded is not None:
            self._encoded.forget(rows)

    # ---- the promise -------------------------------------------------------------------------------------------

    def decide(self, deterministic: bool | None) -> None:
        """Try whether rows may share calls without changing bits. deterministic: True means that each row is computed
        by itself if they may not; None means that they share calls then, which the log says; False tries nothing.
        """
        if deterministic is False:
            return
        why, short = "", "who shares a call changes its bits"
        if not self._with_lengths:
            why = short = "rows of one length only share a call, which is not tried"
        try:
            if not why:
                with phase("trying whether requests can share calls"), telling(self.name):
                    self.selfcheck()
        except BaseException as e:
            if is_signal(e):
                raise
            why = text_of(e)
            if not isinstance(e, NotDeterministic):
                short = f"it failed when it was tried: {why}"
            drop_frames(e)
        self.apart, self.deterministic = bool(deterministic and why), bool(deterministic or not why)
        if self.apart:
            log.warning("%s computes each row by itself: %s", self.name, why)
        elif why:
            log.warning("deterministic=False for %s, as %s", self.name, short)

    def selfcheck(self) -> int:
        """Compute a few texts alone, and beside others and in chunks; returns how many outputs agreed in every bit.
        Raises NotDeterministic, and what the model raises.
        """
        return self._trial().run()

    def _trial(self) -> Trial:
        return Trial(self.called, self.layout, self.example)

    def try_copies(self) -> bool:
        """Whether a row may begin with a copy of what others have computed; the log says so if it may not."""
        why = ""
        if place := self.layout.uncut:
            why = f"the array {place} of its past is a state"
        elif self.apart:
            why = "each row is computed by itself"
        elif of_each := self._arguments.names & {"prompt_len", "seed"}:
            why = f"its past may depend on what each request has of its own: {', '.join(sorted(of_each))}"
        else:
            floats = isinstance(self.head, Sampled) or self._kind.dtype.kind == "f"
            try:
                self._template, why = self._trial().copied(ALIKE if floats else 0, bits=self.deterministic)
            except Exception as e:
                why = f"a trial of it raised {text_of(e)}"
                drop_frames(e)
        if why:
            log.info("%s: no request begins with what others have computed, as %s", self.name, why)
        return not why

    # ---- a step ------------------------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> Outcome:
        self._keep()
        if self._prefixes is not None:
            self._prefixes.begin(plan.copies, self._pasts.of, self._width)
        self.idle()
        outcome = Outcome([], {})
        for idx in self._calls(plan):
            outcome += isolate(lambda idx: self._forward(plan, idx), idx, self.backend, self.theirs)
        return outcome

    def _calls(self, plan: StepPlan) -> Iterator[Any]:
        """Which rows of a step share a call: [n] places in the plan each."""
        if self.apart:
            for i in np.flatnonzero(plan.emit).tolist():
                yield np.array([i])
            return
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, (start, q) in enumerate(zip(plan.start.tolist(), plan.q.tolist(), strict=True)):
            groups.setdefault((q, start if not self._with_lengths else min(start, 1)), []).append(i)
        for group in groups.values():
            yield from self._fitting(np.array(group), plan.end)

    def _fitting(self, idx: Any, end: Any) -> Iterator[Any]:
        """Rows in as many parts as memory wants, those of like length together."""
        if len(idx) * int(end[idx].max()) <= self._most or len(idx) == 1:
            yield idx
            return
        order = idx[np.argsort(end[idx], kind="stable")]
        half = len(order) // 2
        for part in (order[:half], order[half:]):
            yield from self._fitting(np.sort(part), end)

    def _forward(self, plan: StepPlan, idx: Any) -> Part:
        rows, emit = plan.rows[idx], plan.emit[idx]
        with self.backend.guard():
            if self.apart:
                out = self._alone(int(rows[0]), plan.seqs[int(idx[0])].prompt_len, int(plan.end[idx[0]]))
            else:
                self._catch_up(rows, plan.start[idx])
                out = self._advance(rows, plan.start[idx], int(plan.q[idx[0]]))
            wanted = np.flatnonzero(emit)
            if not len(wanted):
                return Part(idx[emit], np.zeros(0, np.int32), None, np.zeros(0, bool))
            if len(wanted) < len(rows):
                if isinstance(self.head, Sampled):
                    out = self.head.sampler.rows(out, wanted)
                else:
                    out = self.backend.take(out, self.backend.put(wanted.astype(np.int32)))
            return self.head.part(plan, idx[emit], out, out.shape[0])

    def _alone(self, row: int, prompt: int, end: int) -> Array:
        """The logits of a row after its first `end` tokens, in calls that depend on nothing but the row."""
        past = self._pasts.of.get(row)
        have = 0 if past is None else past.counts[past.place(row)]
        if have not in range(prompt, end):
            self._forget([row])
            have, out = prompt, self._advance(np.array([row]), np.zeros(1, np.int32), prompt)
        for at in range(have, end):
            out = self._advance(np.array([row]), np.array([at], np.int32), 1)
        return out

    def _catch_up(self, rows: Any, start: Any) -> None:
        """Compute again what is not there: of a row whose past a failed step has taken along."""
        for row, n in zip(rows.tolist(), start.tolist(), strict=True):
            past = self._pasts.of.get(row)
            if n and (past is None or past.counts[past.place(row)] != n):
                self._forget([row])
                for at in range(0, n, self._chunk):
                    self._advance(np.array([row]), np.array([at], np.int32), min(self._chunk, n - at))

    def _advance(self, rows: Any, start: Any, q: int) -> Array:
        """Compute q tokens of each row; returns the logits after them, [m >= n, vocab]."""
        out: Array = None
        for piece in _pieces(q) if self.backend.shapes.compiled else [q]:
            out = self._piece(rows, start, piece)
            start = start + piece
        return out

    def _piece(self, rows: Any, start: Any, q: int) -> Array:
        n, ends = len(rows), start + q
        size = self.backend.shapes.rows(n, self._rows)
        before = self._pasts.gathered(rows.tolist(), start.tolist(), size) if int(start[0]) else None
        self._forget(rows.tolist())  # until it has succeeded: the model may write into the past that it is given
        filled = np.pad(rows, (0, size - n), mode="edge")
        lengths = np.pad(ends, (0, size - n), mode="edge").astype(np.int32)
        each = np.repeat(np.arange(size), q)
        positions = np.repeat(lengths - q, q) + np.tile(np.arange(q), size)
        table = self.tables.at(rows[0])
        tokens = table.packed(filled, lengths - q, np.full(size, q), each, positions)
        tokens = tokens.reshape(size, q, *tokens.shape[1:])
        wide = 0 if before is None else before.width
        self.tally.call(size * q, n * q, (size, q, wide) if self.backend.shapes.compiled else None)
        encoded = None if self._encoded is None else self._encoded.of(rows.tolist(), size)
        out, past = self.called(tokens, lengths, None if before is None else before.tree, filled, encoded)
        out = self._checked(out, size)
        after = self.layout.taken(past, before, rows.tolist(), ends.tolist(), size, q)
        width = self._width(int(ends.max()))
        if width != after.width:
            after = self.layout.part(after, range(size), width)
        for row in rows.tolist():
            self._pasts.of[row] = after
        return out

    def _width(self, longest: int) -> int:
        return self.backend.shapes.length(longest)

    def called(
        self,
        tokens: HostArray,
        lengths: HostArray,
        past: Any,
        rows: Any = None,
        encoded: Any = None,
        *,
        trial: Sequence[int] = (),
    ) -> tuple[Any, Any]:
        """rows: of whom the call is; None means of no request, for a trial. encoded: of these rows. trial: numbers of
        the examples that rows of a trial have.
        """
        put, named = self.backend.put, dict[str, Any]()
        if self._arguments:
            nobody = self._beside.nobody(len(tokens)) if rows is None else rows
            found = self._arguments.of(nobody, lengths, tokens.shape[1])
            named = {name: put(array) for name, array in found.items()}
        if self._encoded is not None:
            named[ENCODED] = self._encoded.tried(trial or [0] * len(tokens)) if rows is None else encoded
        arguments = (put(tokens), put(lengths), past) if self._with_lengths else (put(tokens), past)
        found = self._theirs_called(self._step, *arguments, **named)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise InvalidModelOutput(
                f"{self.name} must return a pair (logits, past); got {type(found).__qualname__}. Return both."
            )
        return found[0], found[1]

    def _theirs_called(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with self.tally, self.theirs:
            return method(*arguments, **named)


def takes_own_lengths(model: Any) -> bool:
    """Whether `step` takes the number of tokens of each row: a parameter `lengths`, or three of any names. Without it,
    rows of one length share a call.
    """
    try:
        parameters = inspect.signature(model.step).parameters
    except (TypeError, ValueError):  # compiled code need not tell
        return True
    named = wanted(model.step, declared_by(model))
    needed = [p for p in parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return "lengths" in parameters or len([p for p in needed if p.name not in named]) == 3


def _pieces(n: int) -> list[int]:
    """Powers of two that add up to n, the largest first: few shapes."""
    return [1 << i for i in reversed(range(n.bit_length())) if n >> i & 1]
