"""Counts the tokens of reasoning."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Final

from hibachi.llm.chatformat.format import Reasoned
from hibachi.llm.chatformat.reading.reader import AnswerReader

AT_ONCE: Final = 64
"""Tokens that are read as one text where that is surely all the same."""


class Thought:
    """Counts the tokens of what the answer's parser reads as reasoning, its markers included. Blanks before a marker
    count where they begin the answer. raw: the bytes of a token.
    """

    def __init__(self, reader: AnswerReader, raw: Callable[[int], bytes]) -> None:
        self._parser, self._raw = reader.parser(), raw
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._seen, self._tokens = 0, 0
        self._held = 0  # tokens that may become the beginning of reasoning

    def upto(self, ids: Sequence[int]) -> int:
        """Tokens of the reasoning among these ids, which begin with those of the call before."""
        while self._seen < len(ids) and self._parser.may_reason:
            texts = [self._decoder.decode(self._raw(token)) for token in ids[self._seen : self._seen + AT_ONCE]]
            whole = "".join(texts)
            if self._parser.plain(whole):  # which changes nothing in the parser
                self._tokens += len(texts) if self._parser.reasoning else 0
            else:
                for text in texts:
                    self._read(text)
            self._seen += len(texts)
        return self._tokens

    def _read(self, text: str) -> None:
        parser = self._parser
        was, held = parser.reasoning, parser.holds
        self._held = self._held + 1 if held else 1
        thought = any(isinstance(event, Reasoned) for event in parser.feed(text))
        if was:
            self._tokens += 1
        elif thought or parser.reasoning:
            self._tokens += self._held
        if was or parser.reasoning:
            self._held = 0
