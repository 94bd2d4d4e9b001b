"""Guides by the library llguidance: grammars over bytes, masks over the tokens of a vocabulary."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from time import thread_time
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from hibachi.common.installed import need
from hibachi.engine.guide.checks import MEMORY, SECONDS, Checks
from hibachi.engine.guide.matchers import Matchers, Original
from hibachi.engine.guide.protocol import Counted, FormRefused, Grammar, Guide, GuideFailed, Vocabulary
from hibachi.engine.guide.worker import make_tokenizer
from hibachi.errors import shown
from hibachi.structured import StructuredOutputs

LIMITS = {
    "initial_lexer_fuel": 500_000,
    "max_grammar_size": 200_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 50_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 10_000,
}
AT_ONCE = 256  # tokens that are fed while Python's lock is held: half a millisecond
THREADS = 32
# Real schemas take 2 ms for a token at most. Nothing else bounds it, and the engine waits for it.
SLOW, MOST_SLOW = 0.02, 0.5  # seconds of computing
NO_WAY = "The grammar has come to a point where no token of the model goes on."
COMPLEX = "The grammar has become too complex."


class LlguidanceGuides:
    """Makes guides for one vocabulary. Callable from any thread. Raises MissingExtra without the library."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library = need("llguidance", "structured_outputs", "guided")
        self._vocabulary = vocabulary
        self.size = len(vocabulary.tokens)
        self.eos_ids = tuple(i for i in vocabulary.eos_ids if 0 <= i < self.size)  # others cannot come
        self.others = ~mask_of(self.eos_ids or (self.size,), self.words)
        """A mask of all but the end tokens: uint32 [words]."""
        self._matchers = Matchers()
        self._checks = Checks(self._library, partial(set_up, vocabulary, self.eos_ids))
        self._tokenizer: Any = None
        self._by_bytes: tuple[dict[bytes, int], int] | None = None  # the longest of them
        self._pool: Any = None
        self.forget()
        _living.add(self)

    def forget(self) -> None:
        """The threads are another's: those of the process that we were forked from."""
        self._lock = Lock()
        self._matchers.forget()
        if self._pool is not None:
            _abandoned.append(self._pool)  # to end it would wait for threads that are not here
        self._pool = None

    @property
    def counted(self) -> Counted:
        """What was checked, for metrics."""
        return self._checks.counted

    def check(self, form: StructuredOutputs) -> Grammar:
        """Check a form, in a process with little time and memory, or find its verdict. Raises FormRefused."""
        grammar = self._checks.check(replace(form, begun=""))
        return replace(grammar, begun=self._begun(grammar, form)) if form.begun else grammar

    def knows(self, form: StructuredOutputs) -> bool:
        """Whether `check` answers at once."""
        return self._checks.knows(replace(form, begun=""))

    def _begun(self, grammar: Grammar, form: StructuredOutputs) -> tuple[int, ...]:
        """The tokens of what is written of an answer; names of special tokens may be these. Raises FormRefused."""
        words, special = words_of(self._vocabulary)
        names, text = {words[i]: i for i in special if words[i]}, form.begun.encode()
        parts = re.split(b"(%s)" % b"|".join(map(re.escape, sorted(names, key=len, reverse=True))), text)
        for cut in (parts, [text]) if names else ([text],):
            ids = [i for part in cut for i in ([names[part]] if part in names else self.cut(part, len(part)))]
            with suppress(GuideFailed):
                if b"".join(words[i] for i in ids) == text and not LlguidanceGuide(self, grammar, ids).complete:
                    return tuple(ids)
        raise FormRefused.at(
            ("structured_outputs", "begun"), f": no such answer begins so, or nothing goes on: {shown(form.begun)}."
        )

    def compile(self, grammar: Grammar) -> LlguidanceGuide:
        """A new guide, ready for its first mask. Raises GuideFailed."""
        guide = LlguidanceGuide(self, grammar, grammar.begun)
        guide.bits()
        self.cut(b"", 1)  # its table is made here, beside the steps
        return guide

    def original(self, grammar: Grammar, user: object) -> Original:
        """A matcher that has seen nothing, to copy; nobody else has a copy. Raises GuideFailed."""
        return self._matchers.original(grammar.source, user, self.matcher)

    def matcher(self, grammar: str, most_states: int | None = None) -> Any:
        """A new LLMatcher. Raises GuideFailed."""
        few = {} if most_states is None else {"max_lexer_states": most_states}
        limits = self._library.LLParserLimits(**(LIMITS | few), verbose_errors=False)
        matcher = self._library.LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)
        matcher.consume_tokens([])  # sees whether it may end at once
        raise_error_of(matcher)
        return matcher

    @property
    def tokenizer(self) -> Any:
        """The LLTokenizer, made once: some 0.1 s for 50,000 tokens, in which Python's lock is held."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = make_tokenizer(self._library, *words_of(self._vocabulary), self.eos_ids)
            return self._tokenizer

    def masks(self, guides: Sequence[Guide], bits: Any) -> list[GuideFailed | None]:
        """Fill bits, a C-contiguous uint32 array [n, ceil(vocab_size / 32)], with the masks of n guides, on all cores.

        Returns what failed, by place; what such a row holds means nothing. In a model without end tokens the row of a
        guide that is complete is 0.
        """
        own = [guide for guide in guides if isinstance(guide, LlguidanceGuide)]
        if len(own) != len(guides):
            raise TypeError("LlguidanceGuides fills masks for guides of its own; got others.")
        words = -(-self.size // 32)
        if bits.shape != (len(guides), words) or bits.dtype != np.uint32 or not bits.flags.c_contiguous:
            raise ValueError(
                f"Expected bits as a C-contiguous uint32 array [{len(guides)}, {words}]; got {bits.dtype} {bits.shape}."
            )
        if not own:
            return []
        wide = self.words != words
        filled = np.empty((len(own), self.words), np.uint32) if wide else bits
        self._fill(own, filled)
        failed: list[GuideFailed | None] = [None] * len(own)
        for row, guide in enumerate(own):
            if guide.alone().is_error():
                if guide.start_alone():
                    self._fill([guide], filled[row : row + 1])
                failed[row] = failure_of(guide.alone())
        self._cut(bits, filled if wide else None)
        for row in self._without_ends(own, bits):
            if failed[row] is None and not bits[row].any() and not own[row].complete:
                failed[row] = GuideFailed(NO_WAY)
        return failed

    def cut(self, text: bytes, most: int) -> list[int]:
        """The longest tokens that a text begins with, one after the other, at most this many."""
        if self._by_bytes is None:
            words, special = words_of(self._vocabulary)
            none = {*special, *self.eos_ids}
            named = {t: i for i, t in enumerate(words) if t and i not in none}
            self._by_bytes = named, max(map(len, named), default=0)
        ids, longest = self._by_bytes
        found, at = list[int](), 0
        while at < len(text) and len(found) < most:
            ends = range(min(len(text), at + longest), at, -1)
            end = next((end for end in ends if text[at:end] in ids), None)
            if end is None:
                break
            found.append(ids[text[at:end]])
            at = end
        return found

    def prepare(self, guides: Sequence[Guide]) -> None:
        """Compute the masks of several guides on all cores: asking for them, or for what is forced, is cheap then."""
        own = [guide for guide in guides if isinstance(guide, LlguidanceGuide) and guide.known is None]
        if len(own) > 1:
            filled = np.empty((len(own), self.words), np.uint32)
            self._fill(own, filled)
            for guide, mask in zip(own, filled, strict=True):
                guide.known = mask

    @property
    def words(self) -> int:
        """Of 32 bits, in a mask of the library's."""
        return -(-(self.size + (not self.eos_ids)) // 32)

    def _fill(self, guides: list[LlguidanceGuide], bits: npt.NDArray[np.uint32]) -> None:
        todo = []
        for row, guide in enumerate(guides):
            if guide.known is None:
                todo.append((guide.alone(), row))
            else:
                bits[row] = guide.known
        if len(todo) == 1:
            [(matcher, row)] = todo
            matcher.unsafe_compute_mask_ptr(bits[row].ctypes.data, self.words * 4)
        elif todo:
            self._threads().unsafe_compute_mask_ptr(todo, bits.ctypes.data, self.words * 4, len(bits))

    def _threads(self) -> Any:
        with self._lock:
            if self._pool is None:
                self._pool = self._library.LLExecutor(min(os.cpu_count() or 1, THREADS))
            return self._pool

    def _cut(self, bits: npt.NDArray[np.uint32], filled: npt.NDArray[np.uint32] | None) -> None:
        """Without the token that stands for the end where the model has none."""
        if filled is not None:
            bits[:] = filled[:, : bits.shape[1]]
        elif not self.eos_ids:
            bits[:, -1] &= np.uint32((1 << self.size % 32) - 1)

    def _without_ends(self, guides: Sequence[LlguidanceGuide], bits: npt.NDArray[np.uint32]) -> set[int]:
        """Leave end tokens only where the grammar may end: a range of ids, such as `<[*]>`, may hold them as well.

        Returns the rows that may be 0 since.
        """
        found = set() if self.eos_ids else set(range(len(guides)))
        for end in self.eos_ids:
            word, bit = end // 32, np.uint32(1 << end % 32)
            for row in np.flatnonzero(bits[:, word] & bit).tolist():
                if not guides[row].may_end:
                    bits[row, word] &= ~bit
                    found.add(row)
        return found

    def close(self) -> None:
        """End the processes that check, and the threads."""
        self._checks.stop()
        with self._lock:
            self._pool = None


def mask_of(tokens: Sequence[int], words: int) -> npt.NDArray[np.uint32]:
    """The mask of these tokens alone."""
    mask = np.zeros(words, np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask


def words_of(vocabulary: Vocabulary) -> tuple[list[bytes], list[int]]:
    """The bytes of all tokens, and the ids of those that no text matches."""
    if vocabulary.texts:
        return list(vocabulary.tokens), sorted(vocabulary.special)
    return [b""] * len(vocabulary.tokens), list(range(len(vocabulary.tokens)))


def set_up(vocabulary: Vocabulary, ends: Sequence[int]) -> bytes:
    """The first line for a process that checks forms (hibachi/engine/guide/worker.py)."""
    tokens, special = words_of(vocabulary)
    setup = {
        "tokens": [t.decode("latin-1") for t in tokens],
        "special": special,
        "ends": list(ends),
        "texts": vocabulary.texts,
        "seconds": SECONDS,
        "memory": MEMORY,
        "limits": LIMITS,
    }
    return json.dumps(setup).encode()


class LlguidanceGuide:
    """What may come next in one request. known: its mask, where it was computed before it was asked for."""

    known: npt.NDArray[np.uint32] | None = None
    _ahead: tuple[int, int, npt.NDArray[np.uint32]] | None = None
    """From so many tokens on some are forced; after so many, the mask behind them."""

    def __init__(self, guides: LlguidanceGuides, grammar: Grammar, tokens: Sequence[int] = ()) -> None:
        self._guides, self._grammar = guides, grammar
        self._tokens: list[int] = []
        self._beyond = 0  # end tokens behind the end, which the library does not take
        self._slow = 0.0  # seconds, in calls that took longer than `SLOW`
        self._open = 0  # a word of the mask that had more than end tokens
        self._original: Original | None = guides.original(grammar, self)
        self._matcher = self._original.copy()
        self.advance(tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens have come. Raises GuideFailed; after a token that is forbidden the guide is as before."""
        given, before = list(map(int, tokens)), len(self._tokens)
        self.known = None
        for i in range(0, len(given), AT_ONCE):
            part = given[i : i + AT_ONCE]
            if not self._take(part):
                self.take_back(len(self._tokens) - before)
                raise GuideFailed("A token came that the grammar forbids.")

    def _take(self, tokens: list[int]) -> bool:
        """Were all of them taken?"""
        if min(tokens) < 0 or max(tokens) >= self._guides.size:
            return False
        matcher, began = self._matcher, thread_time()
        n = matcher.try_consume_tokens(tokens) if not self._beyond else 0
        if (took := thread_time() - began) > SLOW:
            self._slow += took
        if matcher.is_error():
            if self.start_alone():
                return self._take(tokens)
            raise_error_of(self._matcher)
        if self._slow > MOST_SLOW:
            raise GuideFailed(COMPLEX)
        self._tokens += tokens[:n]
        if self._ahead is not None and len(self._tokens) == self._ahead[1]:
            self.known = self._ahead[2]
        rest = tokens[n:]
        if not rest:
            return True
        if not matcher.is_stopped() or any(t not in self._guides.eos_ids for t in rest):
            return False
        self._beyond += len(rest)
        self._tokens += rest
        return True

    def take_back(self, n: int) -> None:
        """The last n tokens have not come. Raises GuideFailed."""
        if not 0 <= n <= len(self._tokens):
            raise GuideFailed(f"Expected to take back 0 to {len(self._tokens)} tokens; got {n}.")
        raise_error_of(self._matcher)
        self.known = None
        behind = min(n, self._beyond)
        self._beyond -= behind
        kept = len(self._tokens) - n
        if self._ahead is not None and kept < self._ahead[0]:
            self._ahead = None
        del self._tokens[kept:]
        if n > behind and not self._matcher.rollback(n - behind):
            # Grammars with max_tokens or stop cannot go back.
            self._start(self._original.copy() if self._original else self._guides.matcher(self._grammar.source))

    def _start(self, matcher: Any) -> None:
        """Go on with another matcher, which has seen nothing. Raises GuideFailed."""
        again, self._tokens, self._beyond = self._tokens, [], 0
        self._matcher = matcher
        self.advance(again)

    def start_alone(self) -> bool:
        """Our matcher has failed. If it is not ours alone, go on with one that is.

        Returns whether there is one that has not failed.
        """
        if self._original is None:
            return False
        self._original.worn, self._original = True, None
        try:
            self._start(self._guides.matcher(self._grammar.source))
        except GuideFailed:
            return False
        return True

    @property
    def complete(self) -> bool:
        """Nothing but an end token may come. Where it may end, but need not, that takes a mask to see."""
        matcher = self._matcher
        if matcher.is_error() or matcher.is_stopped():
            return not matcher.is_error()
        if not matcher.is_accepting():
            return False
        try:
            known = self.known = self.bits() if self.known is None else self.known
        except GuideFailed:
            return False
        others = self._guides.others
        if known[self._open] & others[self._open]:  # what could come a token ago mostly still can
            return False
        still = np.flatnonzero(known & others)
        if len(still):
            self._open = int(still[0])
        return not len(still)

    @property
    def may_end(self) -> bool:
        """An end token may come."""
        matcher = self._matcher
        return not matcher.is_error() and bool(matcher.is_stopped() or matcher.is_accepting())

    def forced(self, most: int) -> tuple[list[int], int]:
        """The tokens that come next where nothing else may, at most this many; and how many of them are certain.

        Each certain one costs a mask; the mask behind them is kept. The text behind them is cut into the longest tokens
        that there are, as a model mostly does.
        """
        found, start = list[int](), len(self._tokens)
        while not self.complete:
            if self.known is None:
                self.known = self.bits()
            only = only_bit(self.known)
            if only is None or only >= self._guides.size or only in self._guides.eos_ids or len(found) == most:
                break
            self.advance([only])
            found.append(only)
        sure = len(found)
        if sure < most and not self.complete:
            found += self._guides.cut(self._matcher.compute_ff_bytes(), most - sure)
        if sure:
            behind = self.known
            self.take_back(sure)
            self._ahead = None if behind is None else (start, start + sure, behind)
        return found, sure

    def fork(self) -> LlguidanceGuide:
        """A new guide of the same grammar, fed with the tokens so far.

        It is compiled anew: copies of the library's share their automaton and its limit with the original.
        """
        return LlguidanceGuide(self._guides, self._grammar, self._tokens)

    def bits(self) -> npt.NDArray[np.uint32]:
        """The mask of the library's, with the end token that stands for none: uint32 [words]. Raises GuideFailed."""
        found = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            if self.start_alone():
                found = self._matcher.compute_bitmask()
            raise_error_of(self._matcher)
        return np.frombuffer(found, np.uint32, self._guides.words)

    def alone(self) -> Any:
        """The matcher, for `LlguidanceGuides.masks`."""
        return self._matcher


def only_bit(bits: npt.NDArray[np.uint32]) -> int | None:
    """The place of the only bit that is set; None if there are more or none."""
    words = np.flatnonzero(bits)
    if len(words) != 1 or (word := int(bits[words[0]])) & (word - 1):
        return None
    return int(words[0]) * 32 + word.bit_length() - 1


def failure_of(matcher: Any) -> GuideFailed | None:
    """Of its message only the kind: it may hold what the request has said."""
    if not matcher.is_error():
        return None
    error = matcher.get_error()
    if "NoExtensionBias" in error:
        return GuideFailed(NO_WAY)
    if any(word in error for word in ("doesn't satisfy", "forced bytes", "parser stopped")):
        return GuideFailed("A token came that the grammar forbids.")
    return GuideFailed(COMPLEX)


def raise_error_of(matcher: Any) -> None:
    if (failure := failure_of(matcher)) is not None:
        raise failure


_living: WeakSet[LlguidanceGuides] = WeakSet()
_abandoned: list[Any] = []


def _forget_all() -> None:
    for guides in list(_living):
        guides.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
