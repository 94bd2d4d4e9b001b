"""`step` of a model that keeps a cache of its own, as it is called; what is tried of it when an engine is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, ArrayBackend, HostArray
from hibachi.backend.layout import OwnCache
from hibachi.engine.kinds import takes_lengths
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.borders import borders_of
from hibachi.engine.runners.calls import Theirs
from hibachi.engine.runners.extra_inputs import ENCODED, KEEP, Arguments, ExtraInputs, parameters_of
from hibachi.engine.runners.heads import ReturnedTokens, Sampled
from hibachi.engine.runners.meters import Tally
from hibachi.engine.runners.owncache.encoder import Encoded
from hibachi.engine.runners.owncache.layout import Layout, Past, layout_of
from hibachi.engine.runners.owncache.trial import apart, largest
from hibachi.engine.runners.runner import check_output
from hibachi.engine.runners.tokentable import TokenKind
from hibachi.errors import ConfigError, InvalidModelOutput, text_of

AHEAD = 4  # tokens with which a border is crossed
MOST_BYTES = 2**23  # of a past that crosses a border in a trial, which takes some ten calls
ALIKE, ALIKE_ROUGH = 1e-3, 0.05  # of the largest output: what those of a model that goes on from a past may differ by


class OwnStep:
    """Calls `step` with tokens, lengths and a past, and with what else it takes.

    with_lengths: it takes lengths. mixes: rows of any length may share a call. parted: why not, though it takes
    lengths. keeps: it takes how many logits are wanted of each row, of its last tokens. layout: of its pasts. encoded:
    what is kept of `encode`; None means it has none. alike: of the largest output, what rounding may change. whole: why
    prompts come whole; "" means that they may come in chunks.
    """

    with_lengths: bool
    mixes: bool
    parted: str
    keeps: bool
    layout: Layout
    encoded: Encoded | None
    alike: float
    whole: str

    def __init__(
        self,
        model: Any,
        backend: ArrayBackend,
        beside: ExtraInputs,
        head: Sampled | ReturnedTokens,
        kind: TokenKind,
        tally: Tally,
        theirs: Theirs,
        examples: Sequence[HostArray],
        longest: int,
    ) -> None:
        """kind: of the tokens. examples: prompts, of whose tokens those for trials are drawn. longest: tokens of a
        request. Raises ConfigError.
        """
        self._backend, self._head, self._kind, self._tally, self._theirs = backend, head, kind, tally, theirs
        self._step: Any = model.step
        self.name: str = head.name
        self.with_lengths = takes_lengths(model, ModelKind.OWN_CACHE)
        self.keeps = isinstance(head, Sampled) and KEEP in parameters_of(model.step)
        self._beside, self._arguments = beside, Arguments(model.step, beside)
        self._examples, self._random = np.concatenate(examples).astype(kind.dtype), np.random.default_rng(0)
        self.encoded = None
        spec = model.past
        assert isinstance(spec, OwnCache)
        try:
            with backend.guard():
                if callable(encode := getattr(model, "encode", None)):
                    if ENCODED not in self._arguments.names:
                        raise ConfigError(
                            f"{self.name} must take what `encode` makes: expected a parameter `{ENCODED}`; got none."
                        )
                    self.encoded = Encoded(encode, backend, beside, type(model).__name__, self._called)
                self.layout = layout_of(spec, self._first, backend, self.name)
                self._try_mixing(self.example(2, 5))
                self.whole = self._why_whole(self.example(1, 7))
                if not self.layout.counts_nothing:
                    self._try_borders(borders_of(model), longest)
        except ConfigError:
            raise
        except Exception as e:
            raise ConfigError(
                f"{self.name} failed when it was tried on a few tokens, to see its past: {text_of(e).rstrip('.')}. The "
                f"attribute `example_prompts` of a model names prompts of ids that it can be tried on."
            ) from e

    @property
    def names(self) -> frozenset[str]:
        """What it takes beside tokens, lengths and past."""
        return self._arguments.names

    @property
    def comparable(self) -> bool:
        """Whether outputs are numbers that differ by rounding only; of ids, one that is almost as likely may come."""
        return isinstance(self._head, Sampled) or self._kind.dtype.kind == "f"

    def _first(self, rows: int, tokens: int) -> Any:
        return self.called(self.example(rows, tokens), np.full(rows, tokens, np.int32), None)[1]

    def example(self, *shape: int) -> HostArray:
        """Tokens for a trial."""
        found: HostArray = self._random.choice(self._examples, shape)  # of its first axis
        return found

    def _try_mixing(self, ids: HostArray) -> None:
        """Check that the model goes on from a past, and find whether rows of any length may share a call: without
        `lengths`, those of states may, where outputs can be compared. ids: [2, 5]. Raises ConfigError.
        """
        self.mixes = self.with_lengths or (self.comparable and self.layout.counts_nothing)
        self.parted, strict = "", not self.mixes or self._backend.shapes.compiled  # which pads rows of one length, too
        try:
            far = self._going_on(ids)
            why = f"a row beside a longer one gets other outputs, by up to {far:.3g}" if far else ""
            why += " (make positions and a mask from `lengths`)" if far else ""
        except Exception as e:
            if strict:
                raise
            why = f"it failed where a row stood beside a longer one: {text_of(e)}"
        if why and not strict:
            self._part(why)
            far = self._going_on(ids)
        if far:
            raise ConfigError(
                f"{self.name} must go on from the past that it is given, which is padded on the left for shorter rows: "
                f"expected the outputs that it returns for a few tokens at once, where the last two come one by one "
                f"beside another row; got others, by up to {far:.3g}. Pass `past` on to the network, make positions "
                f"and a mask from `lengths`, return its rows in the order of `tokens`, in memory that nothing writes "
                f"to later, and switch off dropout (`.eval()`)."
            )

    def _part(self, why: str) -> None:
        self.mixes, self.parted = False, why if self.with_lengths else ""

    def _going_on(self, ids: HostArray) -> float:
        """How far off outputs are where the model goes on from the past that it is given, beside a row of another
        length, and once more from what it returns then; 0 means by rounding. ids: [2, 5]. Raises ConfigError.
        """
        rows = [ids[:1], ids[1:, self.mixes :]]  # the second is shorter
        want, parts = [], []
        for i, row in enumerate(rows):
            n = row.shape[1]
            first = self.called(row, np.array([n], np.int32), None, trial=[i])[0]
            want.append(self._output(first, 1))
            _, tree = self.called(row[:, :-2], np.array([n - 2], np.int32), None, trial=[i])
            parts.append(self.layout.taken(tree, None, [i], [n - 2], 1, n - 2))
        past = self.layout.joined([self.layout.part(part, [0], 3) for part in reversed(parts)])
        self.alike = ALIKE if self.layout.fine(self.checked(first, 1)) else ALIKE_ROUGH
        for left in (2, 1):
            ends = [row.shape[1] - left + 1 for row in reversed(rows)]
            new = ids[::-1, 5 - left : 6 - left]
            out, tree = self.called(new, np.array(ends, np.int32), past.tree, trial=[1, 0])
            past = self.layout.taken(tree, past, [1, 0], ends, 2, 1)
            self.layout.check_constant(tree)
        return self._far(self._output(out, 2)[::-1], np.concatenate(want))

    def _far(self, got: HostArray, want: HostArray) -> float:
        """The largest difference; 0 if it is no more than rounding, or nothing can be compared."""
        far = apart(got, want) if self.comparable else 0.0
        return far if far > self.alike * largest(want) else 0.0

    def _try_borders(self, borders: dict[int, bool], longest: int) -> None:
        """borders: whether each is LongRoPE's. longest: tokens of a request."""
        borders = dict.fromkeys((n for leaf in self.layout.leaves for n in leaf.windows[1:]), False) | borders
        for n, long in sorted(borders.items()):
            if not AHEAD <= n <= longest - AHEAD:
                continue
            if n * self.layout.position_bytes <= MOST_BYTES:
                self._try_border(n)
            elif long:
                why = f"it names {n} as LongRoPE's, too long to be tried, and a longer row changes all of its call"
                self.whole = self.whole or why
                if self.mixes:
                    self._part(why)

    def _try_border(self, n: int) -> None:
        """Whether tokens on both sides of n positions may come at once, and beside a row that has few."""
        few, width = AHEAD + 2, n - AHEAD // 2
        first, ids = self.example(2, few), self.example(2, AHEAD)

        def past(row: int, width: int) -> Past:
            """Few positions, again and again."""
            tree = self.called(first[row : row + 1], np.array([few], np.int32), None, trial=[row])[1]
            return self.layout.repeated(self.layout.taken(tree, None, [row], [few], 1, few), width)

        def after(past: Past, rows: Sequence[int], at_once: int) -> list[HostArray]:
            """Outputs after every so many tokens. The past is taken apart."""
            found, counts = [], past.counts
            for end in range(at_once, AHEAD + 1, at_once):
                ends = [count + end for count in counts]
                new = ids[[*rows], end - at_once : end]
                out, tree = self.called(new, np.array(ends, np.int32), past.tree, trial=rows)
                past = self.layout.taken(tree, past, rows, ends, len(rows), at_once)
                found.append(self._output(out, len(rows)))
            return found

        def odd(got: Callable[[], list[HostArray]], want: HostArray) -> str:
            try:
                far = self._far(np.concatenate(got()), want)
            except Exception as e:
                return f"it failed ({text_of(e)})"
            return f"outputs are others, by up to {far:.3g}," if far else ""

        try:
            alone = after(past(0, width), [0], 1)
        except Exception:  # requests that come so far will get this error
            return
        if not self.whole and (why := odd(lambda: after(past(0, width), [0], AHEAD), alone[-1])):
            self.whole = f"{why} where several tokens cross {n}, which it names"
        if self.mixes:
            short = min(few, width - 1)
            other = after(past(1, short), [1], 1)
            want = np.concatenate([np.concatenate(both) for both in zip(alone, other, strict=True)])
            rows = [past(0, width), self.layout.part(past(1, short), [0], width)]
            if why := odd(lambda: after(self.layout.joined(rows), [0, 1], 1), want):
                self._part(f"{why} for a row beside one longer than {n}, which it names")

    def _why_whole(self, ids: HostArray) -> str:
        """Why no chunk of several tokens may follow a past, as states that start anew with each do not allow it; ""
        means that it may. ids: [1, 7]."""
        want = [self._output(self.called(ids[:, :n], np.array([n], np.int32), None)[0], 1) for n in (6, 7)]
        past, got, begin = None, [], 0
        try:
            for end in (3, 6, 7):
                tree = None if past is None else past.tree
                out, tree = self.called(ids[:, begin:end], np.array([end], np.int32), tree)
                past = self.layout.taken(tree, past, [0], [end], 1, end - begin)
                got.append(self._output(out, 1))
                begin = end
        except Exception as e:
            return f"it failed where several tokens followed a past: {text_of(e)}"
        far = self._far(np.concatenate(got[1:]), np.concatenate(want))
        return f"outputs are others where several tokens follow a past, by up to {far:.3g}" if far else ""

    def _output(self, out: Any, rows: int) -> HostArray:
        return self._backend.get(self._backend.float32(self.checked(out, rows)))

    def checked(self, out: Any, rows: int, keep: int = 1) -> Array:
        """The output of a call of so many rows; if it keeps several of each, one row's after another's. Raises
        InvalidModelOutput.
        """
        if self.keeps:
            assert isinstance(self._head, Sampled)
            shape = self._head.sampler.shape
            out = check_output(out, self._backend, (rows, keep, *shape), self.name, kind="logits")
            return self._backend.xp.reshape(out, (rows * keep, *shape))
        if isinstance(self._head, Sampled):
            return check_output(out, self._backend, (rows, *self._head.sampler.shape), self.name, kind="logits")
        return check_output(out, self._backend, (rows, *self._kind.shape), self.name, kind=self._kind.dtype.kind)

    def called(
        self,
        tokens: HostArray,
        lengths: HostArray,
        past: Any,
        rows: Any = None,
        encoded: Any = None,
        *,
        trial: Sequence[int] = (),
        keep: int = 1,
    ) -> tuple[Any, Any]:
        """rows: of whom the call is; None means of no request, for a trial. encoded: of these rows. trial: numbers of
        the examples that rows of a trial have. keep: how many logits of each row, where it `keeps`.
        """
        put, named = self._backend.put, dict[str, Any]()
        if self._arguments.names:
            nobody = self._beside.nobody(len(tokens)) if rows is None else rows
            found = self._arguments.of(nobody, lengths, tokens.shape[1])
            named = {name: put(array) for name, array in found.items()}
        if self.encoded is not None:
            named[ENCODED] = self.encoded.tried(trial or [0] * len(tokens)) if rows is None else encoded
        if self.keeps:
            named[KEEP] = keep
        arguments = (put(tokens), put(lengths), past) if self.with_lengths else (put(tokens), past)
        found = self._called(self._step, *arguments, **named)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise InvalidModelOutput(
                f"{self.name} must return a pair (logits, past); got {type(found).__qualname__}. Return both."
            )
        return found[0], found[1]

    def _called(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with self._tally, self._theirs:
            return method(*arguments, **named)
