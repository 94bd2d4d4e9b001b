"""Vocabularies, texts cut into their tokens, and masks as sets, for the tests of guides."""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

import hibachi
from hibachi.engine.guide.llg import LlguidanceGuides
from hibachi.engine.guide.protocol import Grammar, Guide, GuideFailed, Vocabulary
from hibachi.llm.tokenizers import Tokenizer
from hibachi.structured import StructuredOutputs

TINY = Path(hibachi.__file__).parent / "llm" / "data" / "tiny"


@cache
def tiny() -> Vocabulary:
    """The shipped model's: 2048 tokens, all bytes among them; 0 ends."""
    tokenizer = Tokenizer.load(TINY)
    ids = range(tokenizer.vocab_size)
    special = frozenset(i for i in ids if tokenizer.is_silent(i))
    return Vocabulary([tokenizer.token_bytes(i) for i in ids], special, (0,))


def of_bytes(more: Sequence[bytes] = (), special: Iterable[int] = (), ends: tuple[int, ...] = ()) -> Vocabulary:
    """Ids 0 to 255 are bytes; further ones follow."""
    return Vocabulary([bytes([i]) for i in range(256)] + list(more), frozenset(special), ends)


def cut(vocabulary: Vocabulary, text: str) -> list[int]:
    """Ids of a text, the longest token first."""
    ids = {t: i for i, t in enumerate(vocabulary.tokens) if i not in vocabulary.special and i not in vocabulary.eos_ids}
    longest, data, found = max(map(len, ids)), text.encode(), []
    while data:
        n = next(n for n in range(min(longest, len(data)), 0, -1) if data[:n] in ids)
        found.append(ids[data[:n]])
        data = data[n:]
    return found


class Setting:
    """Guides for a vocabulary, with shorter words for what tests ask."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary, self.guides = vocabulary, LlguidanceGuides(vocabulary)
        self.ends = set(vocabulary.eos_ids)

    def check(self, **form) -> Grammar:
        return self.guides.check(StructuredOutputs(**form))

    def guide(self, **form) -> Guide:
        return self.guides.compile(self.check(**form))

    def cut(self, text: str) -> list[int]:
        return cut(self.vocabulary, text)

    def masks(self, *guides: Guide) -> np.ndarray:
        """Booleans [n, V]."""
        size = len(self.vocabulary.tokens)
        bits = np.full((len(guides), -(-size // 32)), 0xAAAAAAAA, np.uint32)
        failed = [f for f in self.guides.masks(guides, bits) if f]
        if failed:
            raise failed[0]
        every = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
        assert not every[:, size:].any()
        return every[:, :size].astype(bool)

    def allowed(self, guide: Guide) -> set[int]:
        return set(np.flatnonzero(self.masks(guide)[0]).tolist())

    def fits(self, guide: Guide, text: str) -> bool:
        """May the guide's answer go on with this text and end? The guide stays as it is."""
        ids = self.cut(text)
        try:
            guide.advance(ids)
        except GuideFailed:
            return False
        ends = guide.complete or bool(self.allowed(guide) & self.ends)
        guide.take_back(len(ids))
        return ends

    def texts(self, guide: Guide) -> set[str]:
        return {self.vocabulary.tokens[i].decode(errors="replace") for i in self.allowed(guide) - self.ends}
