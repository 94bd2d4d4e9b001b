"""What guides a request: the protocol of a matcher, and of what makes matchers for one vocabulary.

A package offers its own by an entry point of the group `hibachi.guides`: a callable that takes a `Vocabulary` and
returns a `Guides`. The variable HIBACHI_GUIDES names it; "llguidance" is ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hibachi.errors import InvalidRequest
from hibachi.structured import StructuredOutputs

MOST_KEYWORDS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """What the tokens of a model stand for.

    tokens: bytes of each id; b"" for an id that stands for nothing. special: ids of special tokens, whose bytes are
    their names, such as b"<|im_end|>". eos_ids: tokens that end a text. texts: False means the tokens are no text, so
    only grammars over ids can guide.
    """

    tokens: Sequence[bytes]
    special: frozenset[int] = frozenset()
    eos_ids: tuple[int, ...] = ()
    texts: bool = True


@dataclass(frozen=True, slots=True)
class Grammar:
    """A form that was checked, in the notation of the `Guides` that has checked it. It goes through pipes.

    source: the grammar. seconds: what compiling it took. begun: tokens that stand for what the prompt has written of
    the answer; a guide has seen them.
    """

    source: str
    seconds: float = 0.0
    begun: tuple[int, ...] = ()


class FormRefused(InvalidRequest):
    """A form that cannot be served. keyword: what it is about, such as "oneOf" of a JSON schema; or None."""

    def __init__(self, message: str, keyword: str | None = None) -> None:
        super().__init__(message)
        self.keyword = keyword


class Counted:
    """What was checked. checks: forms that were new. hits: others. refused: how many, by keyword; "" for those that are
    about none, "other" for what came after `MOST_KEYWORDS` different ones.
    """

    def __init__(self) -> None:
        self.checks = self.hits = 0
        self.refused: Counter[str] = Counter()

    def note(self, verdict: Grammar | FormRefused) -> None:
        self.checks += 1
        if isinstance(verdict, FormRefused):
            name = verdict.keyword or ""
            self.refused[name if name in self.refused or len(self.refused) < MOST_KEYWORDS else "other"] += 1


class GuideFailed(Exception):
    """A grammar cannot go on: it has become too complex, or a token came that it forbids."""


class Guide(Protocol):
    """What may come next in one request. It belongs to this request alone, and is used by one thread at a time."""

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens have come. Raises GuideFailed."""
        ...

    def take_back(self, n: int) -> None:
        """The last n tokens have not come. Raises GuideFailed."""
        ...

    @property
    def complete(self) -> bool:
        """Nothing but an end token may come."""
        ...

    def forced(self, most: int) -> tuple[list[int], int]:
        """The tokens that come next where nothing else may, at most this many; and how many of them are certain.

        Behind those, only the text is: the same text in other tokens may come as well.
        """
        ...

    def fork(self) -> Guide:
        """A new guide of the same grammar, fed with the tokens so far. It shares nothing with this one, limits least of
        all.
        """
        ...


class GuideMaker(Protocol):
    """Makes guides, and the masks of several in one call. Callable from any thread."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, as far as they are among the masks: those that do not end a request may not come."""
        ...

    def compile(self, grammar: Grammar) -> Guide:
        """A new guide, ready for its first mask. Raises GuideFailed."""
        ...

    def masks(self, guides: Sequence[Guide], bits: Any) -> list[GuideFailed | None]:
        """Fill bits, uint32 [n, ceil(vocab_size / 32)], for n guides: bit t % 32 of word t // 32 says whether token t
        may come. End tokens are among them where the grammar may end. Returns what failed, by place.
        """
        ...


class Guides(GuideMaker, Protocol):
    """Makes guides for one vocabulary. An attribute `counted`, if there is one, is a `Counted`."""

    def check(self, form: StructuredOutputs) -> Grammar:
        """Check a form, within bounds of time and memory. Raises InvalidRequest, which
        names what it cannot do, and has the path ("structured_outputs", KIND) (see `InvalidRequest.at`).
        """
        ...

    def knows(self, form: StructuredOutputs) -> bool:
        """Whether `check` answers at once."""
        ...

    def close(self) -> None:
        """Release processes and threads."""
        ...
