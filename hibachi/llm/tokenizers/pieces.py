"""From ids to text, id by id: one way for each kind of decoder that tokenizers have.

- Byte level (GPT-2, Llama 3, Qwen): a token is some bytes of UTF-8.
- Pieces of text (SentencePiece: Llama 2, Gemma, Mistral): a token is text, or one byte, written <0x41>.
- Any other: the last few ids are decoded again and again.

The first two look tokens up in a table that is made once for a tokenizer. All of them give exactly the text of all ids,
as `Tokenizer.decode` does, and a token costs the same anywhere in it.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias

Decode: TypeAlias = Callable[[list[int]], str]


class Text(Protocol):
    """The pieces of `push` and `flush`, joined, are the text of all ids. None of them ends inside a character."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


def texts(decoder: Any, tokens: Mapping[int, str], decode: Decode) -> Callable[[Sequence[int]], Text]:
    """How to begin a text that goes on after some ids.

    decoder: the part "decoder" of a tokenizer.json. tokens: id -> token, without those that have no text. decode: ids
    -> text.
    """
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = [s["type"] for s in steps]
    if kinds == ["ByteLevel"]:
        table = {i: _whole(_bytes(t)) for i, t in tokens.items()}
        return lambda after: ByteLevelText(table, after)
    if kinds == ["Metaspace"]:
        mark, drops = steps[0]["replacement"], steps[0]["prepend_scheme"] != "never"
        pieces: dict[int, str | int] = {i: t.replace(mark, " ") for i, t in tokens.items()}
        first = {i: t.replace(mark, "") for i, t in tokens.items() if mark in t} if drops else {}
        return lambda after: PieceText(pieces, after, first=first)
    if (rules := _rules(steps)) is not None:
        replace, fallback, strip = rules
        pieces = {i: _piece(t, replace, fallback) for i, t in tokens.items()}
        return lambda after: PieceText(pieces, after, strip=strip)
    return lambda after: AnyText(decode, tokens, after)


def raw_bytes(decoder: Any, token: str) -> bytes:
    """What a token stands for by itself, inside a text: perhaps a part of a character. decoder: as for `texts`."""
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = [s["type"] for s in steps]
    if kinds == ["ByteLevel"]:
        return _bytes(token)
    if kinds == ["Metaspace"]:
        return token.replace(steps[0]["replacement"], " ").encode()
    replace, fallback, _ = _rules(steps) or ([], False, ("", 0))
    piece = _piece(token, replace, fallback)
    return bytes([piece]) if isinstance(piece, int) else piece.encode()


# ---- byte level ------------------------------------------------------------------------------------------------------


def byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level token, as GPT-2 has it: letter -> byte.

    A byte that prints in Latin-1 is its own letter, the others are the letters from U+0100 on (Radford et al. 2019).
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printing]
    return {chr(b): b for b in printing} | {chr(0x100 + i): b for i, b in enumerate(others)}


_LETTERS = byte_letters()


def _bytes(token: str) -> bytes:
    """What a byte-level token stands for; one with another letter was added later and is text itself."""
    try:
        return bytes([_LETTERS[letter] for letter in token])
    except KeyError:
        return token.encode()


def _whole(piece: bytes) -> str | bytes:
    """As text, if it is whole characters."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece


class ByteLevelText:
    """Bytes become characters as soon as they are whole; what is not UTF-8 becomes U+FFFD."""

    __slots__ = ("_rest", "_table")

    def __init__(self, table: Mapping[int, str | bytes], after: Sequence[int] = ()) -> None:
        self._table = table
        self._rest = b""  # the beginning of a character
        for i in _last(after, table, 4):
            self.push(i)

    def push(self, token: int) -> str:
        piece = self._table.get(token)
        if isinstance(piece, str):
            if not self._rest:
                return piece
            piece = piece.encode()
        elif piece is None:
            return ""
        piece = self._rest + piece
        text, used = utf_8_decode(piece, "replace", False)
        self._rest = piece[used:]
        return text

    def flush(self) -> str:
        text = self._rest.decode(errors="replace")
        self._rest = b""
        return text


# ---- pieces of text --------------------------------------------------------------------------------------------------


_BYTE = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>", re.ASCII)


def _rules(steps: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, str]], bool, tuple[str, int]] | None:
    """Replacements, whether there are bytes, and what to strip in front; None means these steps are something else."""
    left = list(steps)
    replace = []
    while left and left[0]["type"] == "Replace" and "String" in left[0]["pattern"]:
        replace.append((left[0]["pattern"]["String"], left[0]["content"]))
        del left[0]
    fallback = bool(left) and left[0]["type"] == "ByteFallback"
    del left[: int(fallback)]
    strip = ("", 0)
    if left and left[0]["type"] == "Fuse":
        del left[0]
        if left and left[0]["type"] == "Strip" and not left[0]["stop"]:
            strip = left[0]["content"], left[0]["start"]
            del left[0]
    return None if left or not steps else (replace, fallback, strip)


def _piece(token: str, replace: Iterable[tuple[str, str]], fallback: bool) -> str | int:
    """The text of a token, or its byte."""
    for old, new in replace:
        token = token.replace(old, new)
    byte = _BYTE.fullmatch(token) if fallback else None
    return int(byte[1], 16) if byte else token


class PieceText:
    """A token is text or a byte. A run of bytes is UTF-8 as a whole, or else one U+FFFD for each of them.

    So a run is held back until it ends, or cannot be UTF-8 any more.
    first: other texts of some tokens, at the beginning. strip: a character, and how many of it are dropped there.
    """

    __slots__ = ("_first", "_rest", "_run", "_size", "_space", "_spoilt", "_table", "to_drop")

    def __init__(
        self,
        table: Mapping[int, str | int],
        after: Sequence[int] = (),
        *,
        first: Mapping[int, str] | None = None,
        strip: tuple[str, int] = ("", 0),
    ) -> None:
        self._table, self._space = table, strip[0]
        self._first = None if any(i in table for i in after) else first
        self.to_drop: int = _still_to_drop(table, after, strip) if len(after) else strip[1]
        self._run: list[str] = []  # the characters of a run of bytes
        self._rest = b""  # and the beginning of the next one
        self._size = 0  # how many bytes those are
        self._spoilt = False
        for piece in (table[i] for i in _last(after, table, 3)):
            data = self._rest + bytes((piece,)) if isinstance(piece, int) else b""
            self._rest = data[utf_8_decode(data, "replace", False)[1] :]

    def push(self, token: int) -> str:
        piece = self._table.get(token)
        if piece is None:
            return ""
        if isinstance(piece, int):
            text = self._byte(piece)
        else:
            text = piece
            if self._first is not None:
                text, self._first = self._first.get(token, text), None
            if self._run or self._rest or self._spoilt:
                text = self._end() + text
        return self._strip(text) if self.to_drop else text

    def flush(self) -> str:
        text = self._end()
        return self._strip(text) if self.to_drop else text

    def _byte(self, byte: int) -> str:
        """Take a byte of a run; what comes out is U+FFFD."""
        if self._spoilt:
            return "\ufffd"
        self._size += 1
        data = self._rest + bytes((byte,))
        try:
            text, used = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            size = self._size
            self._end()
            self._spoilt = True
            return "\ufffd" * size
        self._rest = data[used:]
        if text:
            self._run.append(text)
        return ""

    def _end(self) -> str:
        """The text of the run, which is over."""
        text = "\ufffd" * self._size if self._rest else "".join(self._run)
        self._run, self._rest, self._size, self._spoilt = [], b"", 0, False
        return text

    def _strip(self, piece: str) -> str:
        text = piece.lstrip(self._space)
        dropped = min(len(piece) - len(text), self.to_drop)
        self.to_drop = 0 if text else self.to_drop - dropped
        return piece[dropped:]


def _still_to_drop(table: Mapping[int, str | int], ids: Iterable[int], strip: tuple[str, int]) -> int:
    """How many characters may still be dropped in front, behind these ids."""
    text = PieceText(table, strip=strip)
    for i in ids:
        text.push(i)
        if not text.to_drop:
            return 0
    text.flush()
    return text.to_drop


def _last(ids: Sequence[int], table: Mapping[int, Any], count: int) -> list[int]:
    """The last of the ids that have a text."""
    return list(islice((i for i in reversed(ids) if i in table), count))[::-1]


# ---- any decoder -----------------------------------------------------------------------------------------------------


class AnyText:
    """Decodes the ids since the last but one complete piece: older ones are context, which some decoders look at.

    While bytes of a character are missing, decoding gives U+FFFD, which is held back.
    """

    _PENDING = 7  # U+FFFDs that may still change: up to 3 bytes of a character, behind one of 4 that is context
    _WINDOW = 32  # ids kept if no piece is ever complete; more than the 3 * _PENDING that those may come from

    __slots__ = ("_context", "_decode", "_ids", "_sent", "_tokens")

    def __init__(self, decode: Decode, tokens: Mapping[int, str], after: Sequence[int] = ()) -> None:
        self._decode, self._tokens = decode, tokens
        self._ids = self._last_character(after)
        self._context = len(self._ids)  # how many of the ids are context
        self._sent = len(decode(self._ids))  # characters of their text that went out

    def push(self, token: int) -> str:
        if token not in self._tokens:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        end = max(len(text.rstrip("\ufffd")), len(text) - self._PENDING)
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        if piece and end == len(text):
            self._forget(self._context, text)
            self._context = len(self._ids)
        elif len(self._ids) > 2 * self._WINDOW:
            self._forget(len(self._ids) - self._WINDOW, text)
            self._context = 0
        return piece

    def flush(self) -> str:
        rest = self._decode(self._ids)[self._sent :]
        self._ids, self._context, self._sent = [], 0, 0
        return rest

    def _last_character(self, ids: Sequence[int]) -> list[int]:
        """The fewest of the last ids that end in whole characters; none if there are no such."""
        tail = _last(ids[-self._WINDOW :], self._tokens, 4)  # a character has at most 4 bytes
        some = (tail[-n:] for n in range(1, len(tail) + 1))
        return next((few for few in some if "\ufffd" not in self._decode(few)), [])

    def _forget(self, count: int, text: str) -> None:
        """Drop the first of the ids, whose text this is; what was not sent stays unsent."""
        unsent = len(text) - self._sent
        self._ids = self._ids[count:]
        self._sent = max(0, len(self._decode(self._ids)) - unsent)
