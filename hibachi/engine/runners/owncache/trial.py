"""A trial of a model with a cache of its own: a few texts alone, in company and in chunks, from a copy of a prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hibachi.backend.array_backend import HostArray
from hibachi.engine.runners.owncache.layout import Layout, Past
from hibachi.errors import ConfigError, NotDeterministic

PROMPT = 7  # tokens of the prompts, the shortest; each of the others has one more
TRIAL_ROWS = 4
TRIAL_NEW = 3
COMMON = 4  # tokens with which two of them begin


def apart(one: HostArray, other: HostArray) -> float:
    """The largest difference; what is -inf in both is alike."""
    differ = one != other
    return float(np.abs(one[differ] - other[differ]).max()) if differ.any() else 0.0


def largest(array: HostArray) -> float:
    """The largest of the finite numbers, without their signs."""
    finite = np.isfinite(array)
    return float(np.abs(array[finite]).max()) if finite.any() else 0.0


class OwnCacheTrial:
    """Computes a few texts alone, and in company with chunks, and compares every bit of the outputs.

    called: (tokens, lengths, past, trial) calls the model; trial: the numbers of the texts of its rows, so that each
    gets the same inputs in every call. draw: n tokens. whole: prompts come whole.
    """

    def __init__(
        self, called: Callable[..., Any], layout: Layout, draw: Callable[[int], HostArray], *, whole: bool = False
    ) -> None:
        self._called, self._layout, self._backend, self._whole = called, layout, layout.backend, whole
        self._texts = [draw(PROMPT + i + TRIAL_NEW) for i in range(TRIAL_ROWS)]

    def run(self, alike: float) -> int:
        """Returns how many outputs were compared. Raises NotDeterministic, ConfigError where they differ by more than
        `alike` of the largest, and what the model raises."""
        with self._backend.guard():
            alone = [self._alone(text) for text in self._texts]
            beside = self._beside()
        for i, (one, other) in enumerate(zip(alone, beside, strict=True)):
            if not apart(one, other) <= alike * largest(one):  # (NaN is far)
                raise ConfigError(
                    f"{self._layout.name} must return the same outputs whoever shares the call: expected those of a "
                    f"text of {len(self._texts[i])} tokens alone, within rounding; in company they differ by up to "
                    f"{apart(one, other):.2g}. Hide what stands before a shorter row by a mask made from `lengths`, or "
                    f"leave `lengths` out, so that rows of one length only share a call; `hibachi verify` says more."
                )
            if not np.array_equal(one, other):
                raise NotDeterministic(
                    f"{self._layout.name} does not compute the same bits whatever shares the batch: expected equal "
                    f"logits for a text of {len(self._texts[i])} tokens, alone and in company; they differ by up to "
                    f"{apart(one, other):.1e}. Pass deterministic=True, which computes each row by "
                    f"itself, or deterministic=False."
                )
        return sum(len(one) for one in alone)

    def _call(
        self, tokens: Any, ends: Sequence[int], before: Past | None, rows: Sequence[int], keep: int = 1
    ) -> tuple[Any, Past]:
        n, q = tokens.shape[:2]
        tree = None if before is None else before.tree
        out, tree = self._called(tokens, np.array(ends, np.int32), tree, trial=rows, keep=keep)
        past = self._layout.taken(tree, before, rows, ends, n, q)
        return self._backend.get(out), past

    def copied(self, far: float, *, bits: bool) -> tuple[Past, str]:
        """Computes a text that begins like another, alone and from a copy of what that one has in common with it:
        (a template of pasts, why nothing may be copied; "" means that it may). Raises what the model raises.

        far: of the largest output, what others may differ by. bits: no bit may differ.
        """
        layout, (text, other) = self._layout, self._texts[:2]
        with self._backend.guard():
            _, past = self._call(np.concatenate([text[:COMMON], other[COMMON:-2]])[None], [len(other) - 2], None, [0])
            _, past = self._call(other[None, -2:-1], [len(other) - 1], past, [0])
            template, half = layout.template(past), COMMON // 2
            blocks = [layout.cut(past, 0, at, at + half) for at in (0, half)]
            begun = layout.begun(template, blocks, 0, COMMON, COMMON)
            want, got = self._alone(text), self._alone(text, begun)
        if not apart(got, want) <= far * largest(want):  # (NaN is far)
            return template, "its past has more in it than positions: a copy of the first few goes on otherwise"
        return template, "a copy changes its bits" if bits and not np.array_equal(got, want) else ""

    def shortened(self, far: float) -> tuple[str, bool]:
        """Computes a text along proposals, two of which are wrong: (why that cannot be, or "", whether no bit differs).
        Raises what the model raises. far: as in `copied`.
        """
        (one, other), same = self._texts[:2], True
        for text, wrong in ((one, other), (other, one)):
            prompt = len(text) - TRIAL_NEW
            with self._backend.guard():
                _, past = self._call(text[None, :prompt], [prompt], None, [0])
                tried = np.concatenate([text[prompt : prompt + 1], wrong[:2]])
                ahead, past = self._call(tried[None], [prompt + 3], past, [0], keep=3)
                past = self._layout.shortened(past, [0], 2)
                out, _ = self._call(text[None, prompt + 1 : prompt + 2], [prompt + 2], past, [0])
                want = self._alone(text)[1:3].reshape(2, -1)
            got = np.stack([ahead[0, 0], out[0].reshape(-1)])
            if not apart(got, want) <= far * largest(want):  # (NaN is far)
                return "its past cannot be cut: it goes on otherwise once tokens were taken back", False
            same &= np.array_equal(got, want)
        return "", same

    def _alone(self, text: HostArray, past: Past | None = None) -> HostArray:
        prompt, begin = len(text) - TRIAL_NEW, 0 if past is None else past.width
        out, past = self._call(text[None, begin:prompt], [prompt], past, [0])
        found = [out[0]]
        for at in range(prompt, len(text)):
            out, past = self._call(text[None, at : at + 1], [at + 1], past, [0])
            found.append(out[0])
        return np.array(found)

    def _beside(self) -> list[HostArray]:
        parts, found = list[Past](), list[list[HostArray]]()
        for row, text in enumerate(self._texts):
            prompt = len(text) - TRIAL_NEW
            cut, past = 0 if self._whole else prompt // 2, None
            if cut:
                _, past = self._call(text[None, :cut], [cut], None, [row])
            out, past = self._call(text[None, cut:prompt], [prompt], past, [row])
            parts.append(past)
            found.append([out[0]])
        width = max(past.width for past in parts)
        together = self._layout.joined([self._layout.part(past, [0], width) for past in parts])
        for step in range(TRIAL_NEW):
            ends = [len(text) - TRIAL_NEW + step + 1 for text in self._texts]
            tokens = np.array([[text[end - 1]] for text, end in zip(self._texts, ends, strict=True)])
            out, together = self._call(tokens, ends, together, range(len(ends)))
            for each, logits in zip(found, out, strict=True):
                each.append(logits)
        return [np.array(each) for each in found]
