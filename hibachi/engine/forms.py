"""The guides of an engine: made when a request first asks for a form, from what its tokenizer says of each token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from hibachi.engine.guide.find import guides_for
from hibachi.engine.guide.protocol import Counted, Grammar, Guides, Vocabulary
from hibachi.errors import UnsupportedOperation
from hibachi.request import SamplingParams
from hibachi.structured import StructuredOutputs


def own_vocabulary(model: Any, eos_ids: Sequence[int] = ()) -> Vocabulary:
    """What a model's tokens stand for by its own attribute `tokenizer`: texts, if that has `token_bytes`."""
    size = getattr(model, "vocab_size", None) or 0
    spell = getattr(getattr(model, "tokenizer", None), "token_bytes", None)
    if not callable(spell):
        return vocabulary_of(None, size, eos_ids)
    return Vocabulary([bytes(spell(i)) for i in range(size)], eos_ids=tuple(eos_ids))


def vocabulary_of(tokenizer: Any, size: int, eos_ids: Sequence[int]) -> Vocabulary:
    """What `size` tokens stand for. tokenizer: of `hibachi.llm.tokenizers`; None gives a vocabulary without texts, and
    so does one that does not spell its tokens.
    """
    if not getattr(tokenizer, "spells", False):
        return Vocabulary([b""] * size, eos_ids=tuple(eos_ids), texts=False)
    tokens = [bytes(tokenizer.token_bytes(i)) for i in range(size)]
    return Vocabulary(tokens, frozenset(i for i in tokenizer.special_ids if i < size), tuple(eos_ids))


class Forms:
    """The guides of one engine. vocabulary: makes its vocabulary; None means that its outputs cannot be guided."""

    vocabulary: Callable[[], Vocabulary] | None

    def __init__(self, vocabulary: Callable[[], Vocabulary] | None = None) -> None:
        self.vocabulary = vocabulary
        self._guides: Guides | None = None
        self._making = threading.Lock()

    @property
    def guides(self) -> Guides | None:
        """None where there is no vocabulary. The first call takes about half a second. Raises MissingExtra."""
        if self._guides is None and self.vocabulary is not None:
            with self._making:
                if self._guides is None:
                    self._guides = guides_for(self.vocabulary())
        return self._guides

    def knows(self, params: SamplingParams) -> bool:
        """Whether `check` answers at once."""
        form = params.structured_outputs
        return self._guides is not None and isinstance(form, StructuredOutputs) and self._guides.knows(form)

    def check(self, params: SamplingParams | None) -> Grammar | None:
        """The grammar of the form that parameters ask for; None if they ask for none. Whoever asks waits, two seconds
        at most where a form is new. Raises InvalidRequest, UnsupportedOperation, MissingExtra.
        """
        form = None if params is None else params.structured_outputs
        if form is None:
            return None
        if (guides := self.guides) is None:
            raise UnsupportedOperation(
                "structured_outputs needs a model that returns logits of single ids; this one returns something else. "
                "Leave it out."
            )
        assert isinstance(form, StructuredOutputs)
        grammar = guides.check(form)
        if form.begun and not grammar.begun:
            raise UnsupportedOperation(
                "structured_outputs.begun is not supported by the guides that HIBACHI_GUIDES names."
            )
        return grammar

    @property
    def counted(self) -> Counted:
        """What was checked so far; not the work of guides that do not count."""
        found: Counted = getattr(self._guides, "counted", None) or Counted()
        return found

    def close(self) -> None:
        with self._making:
            if self._guides is not None:
                self._guides.close()
