"""Text of token ids as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hibachi.llm.tokenizers.stops import StopStrings
from hibachi.llm.tokenizers.tokenizer import Tokenizer


class FindsStops(Protocol):
    """As of `StopStrings`."""

    @property
    def found(self) -> str | None: ...

    def push(self, piece: str, /) -> str: ...

    def pass_by(self, piece: str, /) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """Text of token ids as they come: the pieces of `push` and `flush`, joined, are exactly the text of all ids.

    That is `Tokenizer.decode(ids)`. A piece never ends inside a character: what may still change is held back, see
    hibachi/llm/tokenizers/pieces.py. A token costs the same anywhere in a text.

    stop: strings that end the text in front of the one that is complete first; what may become one is held back as
    well. include_stop: the text ends behind it instead. min_tokens: those that are complete with so many tokens do not
    count.
    after: the ids in front, if the text goes on from there: at a beginning some tokenizers drop a space. If they end
    inside a character, that character comes with the token that completes it.
    within: makes of them what looks for them only in parts of the text.
    skip_special: False means special tokens are shown, as `Tokenizer.decode(ids, skip_special_tokens=False)` shows
    them. shown: ids of those that are shown in any case, such as the marks of tool calls.
    """

    __slots__ = ("_early", "_stops", "_text")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: str | Sequence[str] = (),
        *,
        after: Sequence[int] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        within: Callable[[StopStrings], FindsStops] | None = None,
        skip_special: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        stop = (stop,) if isinstance(stop, str) else stop
        if shown and skip_special:
            self._text = tokenizer.text_showing(shown)(after)
        else:
            self._text = (tokenizer.text_after if skip_special else tokenizer.full_text_after)(after)
        stops = StopStrings(stop, include=include_stop) if stop else None
        self._stops: FindsStops | None = within(stops) if stops and within else stops
        self._early = min_tokens

    @property
    def stopped(self) -> bool:
        """Has a stop string ended the text? Nothing comes after that."""
        return self.stop is not None

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the text."""
        return None if self._stops is None else self._stops.found

    def push(self, token: int) -> str:
        """The text that this token completes; often "" for a part of a character."""
        stops = self._stops
        if stops is None:
            return self._text.push(token)
        if stops.found is not None:
            return ""
        piece = self._text.push(token)
        if self._early:
            self._early -= 1
            return stops.pass_by(piece) if piece else ""
        return stops.push(piece) if piece else ""

    def flush(self) -> str:
        """What was held back, at the end of the ids."""
        stops = self._stops
        if stops is None:
            return self._text.flush()
        if stops.found is not None:
            return ""
        text = stops.push(self._text.flush())
        return text if stops.found is not None else text + stops.flush()
