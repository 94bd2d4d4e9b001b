"""Trials of a model with a cache of its own, on a few tokens when an engine is made: whether it goes on from its past,
which rows may share calls, and whether bits differ in company, in chunks or from a copy of a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from hibachi.backend.array_backend import Array, HostArray
from hibachi.engine.runners.extra_inputs import KNOWN
from hibachi.engine.runners.owncache.alike import ALIKE, ALIKE_ROUGH, apart, largest
from hibachi.engine.runners.owncache.layout import Past
from hibachi.engine.runners.owncache.step import OwnStep, SteppedRows
from hibachi.errors import ConfigError, NotDeterministic, text_of

PROMPT = 7  # tokens of the prompts, the shortest; each of the others has one more
TRIAL_ROWS = 4
TRIAL_NEW = 3
COMMON = 4  # tokens with which two of them begin
AHEAD = 4  # tokens with which a border is crossed
MOST_BYTES = 2**23  # of a past that crosses a border in a trial, which takes some ten calls


class OwnCacheTrial:
    """What a few calls of a model show.

    mixes: rows of any length may share a call. parted: why not, though it takes lengths. alike: of the largest output,
    what rounding may change. whole: why prompts come whole; "" means that they may come in chunks.
    """

    mixes: bool
    parted: str
    alike: float
    whole: str

    def __init__(self, step: OwnStep) -> None:
        """Raises ConfigError, and what the model raises."""
        self._step, self._layout, self._backend = step, step.layout, step.backend
        self._try_mixing(step.example(2, 5))
        self.whole = self._why_whole(step.example(1, 7))

    @property
    def _rounding(self) -> float:
        """What outputs may differ by, of the largest; where they cannot be compared, any."""
        return self.alike if self._step.comparable else float("inf")

    # ---- how calls may be made ----------------------------------------------------------------------------------

    def _try_mixing(self, ids: HostArray) -> None:
        """Check that the model goes on from a past, and find whether rows of any length may share a call: without
        `lengths`, those of states may, where outputs can be compared. ids: [2, 5]. Raises ConfigError.
        """
        self.mixes = self._step.with_lengths or (self._step.comparable and self._layout.counts_nothing)
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
                f"{self._step.name} must go on from the past that it is given, which is padded on the left for shorter "
                f"rows: expected the outputs that it returns for a few tokens at once, where the last two come one by "
                f"one beside another row; got others, by up to {far:.3g}. Pass `past` on to the network, make "
                f"positions and a mask from `lengths`, return its rows in the order of `tokens`, in memory that "
                f"nothing writes to later, and switch off dropout (`.eval()`)."
            )

    def _part(self, why: str) -> None:
        self.mixes, self.parted = False, why if self._step.with_lengths else ""

    def _going_on(self, ids: HostArray) -> float:
        """How far off outputs are where the model goes on from the past that it is given, beside a row of another
        length, and once more from what it returns then; 0 means by rounding. ids: [2, 5]. Raises ConfigError.
        """
        rows = [ids[:1], ids[1:, self.mixes :]]  # the second is shorter
        want, stepped = list[HostArray](), SteppedRows(self._step)
        for i, row in enumerate(rows):
            first = SteppedRows(self._step).advance([i], [0], row)
            want.append(self._host(first))
            stepped.advance([i], [0], row[:, :-2])
        self.alike = ALIKE if self._layout.fine(first) else ALIKE_ROUGH
        for left in (2, 1):
            start = [row.shape[1] - left for row in reversed(rows)]
            out = stepped.advance([1, 0], start, ids[::-1, 5 - left : 6 - left])
            self._layout.check_constant(stepped.of[0].tree)
        return self._far(self._host(out)[::-1], np.concatenate(want))

    def _host(self, out: Array) -> HostArray:
        return self._backend.get(self._backend.float32(out))

    def _far(self, got: HostArray, want: HostArray) -> float:
        """The largest difference; 0 if it is no more than rounding, or nothing can be compared."""
        far = apart(got, want) if self._step.comparable else 0.0
        return far if far > self.alike * largest(want) else 0.0

    def cross(self, borders: dict[int, bool], longest: int) -> None:
        """Try lengths at which the model may compute otherwise. borders: whether each is LongRoPE's. longest: tokens of
        a request.
        """
        if self._layout.counts_nothing:
            return
        borders = dict.fromkeys((n for leaf in self._layout.leaves for n in leaf.windows[1:]), False) | borders
        for n, long in sorted(borders.items()):
            if not AHEAD <= n <= longest - AHEAD:
                continue
            if n * self._layout.position_bytes <= MOST_BYTES:
                self._try_border(n)
            elif long:
                why = f"it names {n} as LongRoPE's, too long to be tried, and a longer row changes all of its call"
                self.whole = self.whole or why
                if self.mixes:
                    self._part(why)

    def _try_border(self, n: int) -> None:
        """Whether tokens on both sides of n positions may come at once, and beside a row that has few."""
        few, width = AHEAD + 2, n - AHEAD // 2
        first, ids = self._step.example(2, few), self._step.example(2, AHEAD)

        def after(have: dict[int, int], at_once: int) -> list[HostArray]:
            """Outputs after every so many tokens of rows that have so many positions each: few, again and again."""
            stepped = SteppedRows(self._step)
            for row, positions in have.items():
                stepped.advance([row], [0], first[row : row + 1])
                stepped.of[row] = self._layout.repeated(stepped.of[row], positions)
            return [
                self._host(
                    stepped.advance([*have], [start + at for start in have.values()], ids[[*have], at : at + at_once])
                )
                for at in range(0, AHEAD, at_once)
            ]

        def odd(got: Callable[[], list[HostArray]], want: HostArray) -> str:
            try:
                far = self._far(np.concatenate(got()), want)
            except Exception as e:
                return f"it failed ({text_of(e)})"
            return f"outputs are others, by up to {far:.3g}," if far else ""

        try:
            alone = after({0: width}, 1)
        except Exception:  # requests that come so far will get this error
            return
        if not self.whole and (why := odd(lambda: after({0: width}, AHEAD), alone[-1])):
            self.whole = f"{why} where several tokens cross {n}, which it names"
        if self.mixes:
            short = min(few, width - 1)
            want = np.concatenate([a for both in zip(alone, after({1: short}, 1), strict=True) for a in both])
            if why := odd(lambda: after({0: width, 1: short}, 1), want):
                self._part(f"{why} for a row beside one longer than {n}, which it names")

    def _why_whole(self, ids: HostArray) -> str:
        """Why no chunk of several tokens may follow a past, as states that start anew with each do not allow it; ""
        means that it may. ids: [1, 7]."""
        want = [self._host(SteppedRows(self._step).advance([0], [0], ids[:, :n])) for n in (6, 7)]
        stepped = SteppedRows(self._step)
        try:
            got = [self._host(stepped.advance([0], [at], ids[:, at:end])) for at, end in pairwise((0, 3, 6, 7))]
        except Exception as e:
            return f"it failed where several tokens followed a past: {text_of(e)}"
        far = self._far(np.concatenate(got[1:]), np.concatenate(want))
        return f"outputs are others where several tokens follow a past, by up to {far:.3g}" if far else ""

    # ---- bits ---------------------------------------------------------------------------------------------------

    def _texts(self) -> list[HostArray]:
        return [self._step.example(PROMPT + i + TRIAL_NEW) for i in range(TRIAL_ROWS)]

    def in_company(self) -> int:
        """Computes a few texts alone, and in company with chunks; returns how many outputs were compared. Raises
        NotDeterministic if a bit differs, ConfigError if more than rounding does, and what the model raises.
        """
        texts = self._texts()
        with self._backend.guard():
            alone = [self._alone(row, text) for row, text in enumerate(texts)]
            beside = self._beside(texts)
        for text, one, other in zip(texts, alone, beside, strict=True):
            if not apart(one, other) <= self._rounding * largest(one):  # (NaN is far)
                raise ConfigError(
                    f"{self._layout.name} must return the same outputs whoever shares the call: expected those of a "
                    f"text of {len(text)} tokens alone, within rounding; in company they differ by up to "
                    f"{apart(one, other):.2g}. Hide what stands before a shorter row by a mask made from `lengths`, or "
                    f"leave `lengths` out, so that rows of one length only share a call; `hibachi verify` says more."
                )
            if not np.array_equal(one, other):
                raise NotDeterministic(
                    f"{self._layout.name} does not compute the same bits whatever shares the batch: expected equal "
                    f"logits for a text of {len(text)} tokens, alone and in company; they differ by up to "
                    f"{apart(one, other):.1e}. Pass deterministic=True, which computes each row by "
                    f"itself, or deterministic=False."
                )
        return sum(len(one) for one in alone)

    def copied(self, *, bits: bool) -> tuple[Past, str]:
        """Computes a text that begins like another, alone and from a copy of what that one has in common with it:
        (a template of pasts, why nothing may be copied; "" means that it may). Raises what the model raises.

        bits: no bit may differ.
        """
        layout, (text, other, *_) = self._layout, self._texts()
        far = self.alike if self._step.comparable else 0
        with self._backend.guard():
            stepped, n = SteppedRows(self._step), len(other) - 2
            stepped.advance([0], [0], np.concatenate([text[:COMMON], other[COMMON:n]])[None])
            stepped.advance([0], [n], other[None, n : n + 1])
            past, half = stepped.of[0], COMMON // 2
            template, blocks = layout.template(past), [layout.cut(past, 0, at, at + half) for at in (0, half)]
            begun = layout.begun(template, blocks, 0, COMMON, COMMON)
            want, got = self._alone(0, text), self._alone(0, text, begun)
        if not apart(got, want) <= far * largest(want):  # (NaN is far)
            return template, "its past has more in it than positions: a copy of the first few goes on otherwise"
        return template, "a copy changes its bits" if bits and not np.array_equal(got, want) else ""

    def cannot_copy(self) -> str:
        """Why no row may begin with a copy of what another has computed, as far as that is plain; "" means it may."""
        if place := self._step.layout.uncut:
            return f"the array {place} of its past is a state, or holds the newest positions only"
        if self.whole:
            return "prompts come whole"
        if of_each := self._step.names & {*KNOWN}:
            return f"its past may depend on what each request has of its own: {', '.join(sorted(of_each))}"
        return ""

    def shortened(self) -> tuple[str, bool]:
        """Computes a text along proposals, two of which are wrong: (why that cannot be, or "", whether no bit differs).
        Raises what the model raises.
        """
        one, other, *_ = self._texts()
        same = True
        for text, wrong in ((one, other), (other, one)):
            at, stepped = len(text) - TRIAL_NEW, SteppedRows(self._step)
            with self._backend.guard():
                stepped.advance([0], [0], text[None, :at])
                tried = np.concatenate([text[at : at + 1], wrong[:2]])
                ahead = self._backend.get(stepped.advance([0], [at], tried[None], keep=3))
                stepped.of[0] = self._layout.shortened(stepped.of[0], [0], 2)
                out = self._backend.get(stepped.advance([0], [at + 1], text[None, at + 1 : at + 2]))
                want = self._alone(0, text)[1:3]
            got = np.stack([ahead[0], out[0]])
            if not apart(got, want) <= self.alike * largest(want):  # (NaN is far)
                return "its past cannot be cut: it goes on otherwise once tokens were taken back", False
            same &= np.array_equal(got, want)
        return "", same

    def _alone(self, row: int, text: HostArray, past: Past | None = None) -> HostArray:
        """Outputs after the prompt and each token behind it. past: to begin with."""
        stepped, start, found = SteppedRows(self._step), 0 if past is None else past.width, list[HostArray]()
        if past is not None:
            stepped.of[row] = past
        for end in range(len(text) - TRIAL_NEW, len(text) + 1):
            found.append(self._backend.get(stepped.advance([row], [start], text[None, start:end]))[0])
            start = end
        return np.array(found)

    def _beside(self, texts: Sequence[HostArray]) -> list[HostArray]:
        stepped, everyone, found = SteppedRows(self._step), range(len(texts)), list[list[HostArray]]()
        for row, text in enumerate(texts):
            prompt = len(text) - TRIAL_NEW
            cut = 0 if self.whole else prompt // 2
            if cut:
                stepped.advance([row], [0], text[None, :cut])
            found.append([self._backend.get(stepped.advance([row], [cut], text[None, cut:prompt]))[0]])
        for left in range(TRIAL_NEW, 0, -1):
            start = [len(text) - left for text in texts]
            tokens = np.array([[text[at]] for text, at in zip(texts, start, strict=True)])
            out = self._backend.get(stepped.advance(everyone, start, tokens))
            for each, logits in zip(found, out, strict=True):
                each.append(logits)
        return [np.array(each) for each in found]
