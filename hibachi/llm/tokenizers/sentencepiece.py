"""SentencePiece's `tokenizer.model`, as a tokenizer of the library tokenizers.

The file is a protocol buffer, see sentencepiece_model.proto in SentencePiece (Kudo and Richardson 2018); we read the
few fields that matter. Both kinds of model are read, BPE and unigram, with or without bytes for what has no piece.
Ids are those of SentencePiece itself, with two exceptions, both out of reach for a vocabulary that was trained: two
merges of equal rank that overlap, and sums of scores that differ in the last bits of a float32.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from hibachi.common.installed import need
from hibachi.errors import InvalidModelFiles
from hibachi.llm.tokenizers.charsmap import Charsmap
from hibachi.llm.tokenizers.merges import LONGEST, cuts

_MOST, _MOST_PIECES = 1 << 24, 1 << 20  # bytes of a file, and its pieces; 256k have 5 million
SPACE = "▁"  # U+2581, how pieces write a space


class PieceKind(IntEnum):
    """What a piece is."""

    NORMAL = 1
    UNKNOWN = 2  # stands for what has no piece
    CONTROL = 3  # never matches text, such as <s>
    USER_DEFINED = 4  # always one token
    UNUSED = 5
    BYTE = 6  # <0x41>


@dataclass(slots=True)
class SentencePiece:
    """What a `tokenizer.model` says. Defaults are those of the format."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    unigram: bool = True
    byte_fallback: bool = False
    dummy_prefix: bool = True
    """A space is put in front of a text, so that its first word looks like the others."""
    remove_extra_spaces: bool = True
    """Spaces at both ends are dropped, and several become one."""
    escape_spaces: bool = True
    charsmap: bytes = b""
    """What characters are replaced by, see `Charsmap`."""
    names: dict[str, str] = field(default_factory=dict)
    """Pieces with a role: bos_token, eos_token, unk_token, pad_token, as far as they are in the vocabulary."""
    where: str = field(default="tokenizer.model", compare=False)
    """Its file, for messages."""

    @property
    def keeps_all(self) -> bool:
        """No character of a text is left out before it is cut into pieces."""
        return not self.charsmap and not self.remove_extra_spaces

    def check(self) -> None:
        """Raises InvalidModelFiles for a vocabulary that cannot be used."""
        twice = [p for p, n in Counter(self.pieces).items() if n > 1]
        unknown = self.kinds.count(PieceKind.UNKNOWN)
        rows = zip(self.pieces, self.scores, self.kinds, strict=True)
        bad = next((i for i, (p, s, _) in enumerate(rows) if not 0 < len(p) <= LONGEST or not math.isfinite(s)), None)
        wrong = None
        if twice:
            wrong = f"expected every piece once; {', '.join(map(repr, sorted(twice)[:5]))} has several ids"
        elif unknown != 1:
            wrong = f"expected one piece of type UNKNOWN; got {unknown}"
        elif bad is not None:
            wrong = (
                f"expected pieces of 1 to {LONGEST} characters with finite scores; piece {bad} is "
                f"{self.pieces[bad]!r:.40} with {self.scores[bad]}"
            )
        elif PieceKind.UNUSED in self.kinds or set(self.kinds) - set(PieceKind):
            wrong = f"expected pieces of the types 1 to 4 and 6; got {sorted(set(self.kinds))}"
        elif self.byte_fallback and (missing := {f"<0x{b:02X}>" for b in range(256)} - set(self.pieces)):
            wrong = f"byte_fallback needs a piece for every byte; {len(missing)} are missing, such as {min(missing)}"
        if wrong is not None:
            raise InvalidModelFiles(f"{self.where}: {wrong}. Copy or download the file again.")

    def tokenizer(self, *, dummy_prefix: bool | None = None, every_part: bool = False) -> Any:
        """As a `tokenizers.Tokenizer`; its decoder gives U+FFFD for every byte of a run of bytes that is not UTF-8.

        dummy_prefix: instead of what the file says. every_part: with special tokens in a text, put a space in front of
        each part between them, not only of the first. Raises MissingExtra.
        """
        library = need("tokenizers", "Text")
        prefix = self.dummy_prefix if dummy_prefix is None else dummy_prefix
        raw = library.Tokenizer(self._unigram(library.models) if self.unigram else self._bpe(library.models))
        added = [
            library.AddedToken(p, special=k != PieceKind.USER_DEFINED, normalized=False)
            for p, k in zip(self.pieces, self.kinds, strict=True)
            if k in (PieceKind.UNKNOWN, PieceKind.CONTROL, PieceKind.USER_DEFINED)
        ]
        raw.add_tokens(added)
        cut = _Cut(self, prefix, every_part, library.NormalizedString)
        raw.pre_tokenizer = library.pre_tokenizers.PreTokenizer.custom(cut)
        decoders = library.decoders
        steps = [decoders.Replace(SPACE, " ")]
        if self.byte_fallback:
            steps.append(decoders.ByteFallback())
        steps.append(decoders.Fuse())
        if prefix or self.remove_extra_spaces:
            steps.append(decoders.Strip(" ", 2**16 if self.remove_extra_spaces else 1, 0))
        raw.decoder = decoders.Sequence(steps)
        return raw

    def _unigram(self, models: Any) -> Any:
        vocab = list(zip(self.pieces, self.scores, strict=True))
        return models.Unigram(vocab, self.kinds.index(PieceKind.UNKNOWN), self.byte_fallback)

    def _bpe(self, models: Any) -> Any:
        """SentencePiece merges the two neighbours whose union has the best score: so the pairs are ranked by that."""
        text = {p: i for i, p in enumerate(self.pieces) if self.kinds[i] == PieceKind.NORMAL}
        ways = ((text[p], p, at) for p, at in cuts(text, self.where))
        pairs = sorted((-self.scores[i], i, -at, (p[:at], p[at:])) for i, p, at in ways)
        return models.BPE(
            {p: i for i, p in enumerate(self.pieces)},
            [pair for *_, pair in pairs],
            unk_token=self.pieces[self.kinds.index(PieceKind.UNKNOWN)],
            fuse_unk=True,
            byte_fallback=self.byte_fallback,
        )


class _Cut:
    """SentencePiece's normalisation, as a pre-tokenizer: only there the library says which part of a text it is."""

    def __init__(self, model: SentencePiece, prefix: bool, every_part: bool, string: Callable[[str], Any]) -> None:
        self._prefix, self._every_part, self._string = prefix, every_part, string
        self._remove_extra = model.remove_extra_spaces
        self._space = SPACE if model.escape_spaces else " "
        self._charsmap = Charsmap(model.charsmap) if model.charsmap else None
        # To the library, the text of any piece of a unigram model is that piece, even of one that text must not match:
        # cut it, behind its first letter.
        hidden = defaultdict(list)
        for piece, kind in zip(model.pieces, model.kinds, strict=True):
            if model.unigram and kind in (PieceKind.UNKNOWN, PieceKind.CONTROL, PieceKind.BYTE):
                hidden[piece[0]].append(re.escape(piece[1:]))
        cuts = (f"(?<={re.escape(first)})(?={'|'.join(rest)})" for first, rest in hidden.items())
        self._hidden = re.compile("|".join(cuts) or "(?!)")

    def pre_tokenize(self, text: Any) -> None:
        last = len(text.get_splits()) - 1
        text.split(lambda part, string: self._words(str(string.normalized), part == 0, part == last))

    def _words(self, text: str, first: bool, last: bool) -> list[Any]:
        text = self._normalise(text, first, last)
        return [self._string(word) for word in self._hidden.split(text)] if text else []

    def _normalise(self, text: str, first: bool, last: bool) -> str:
        if self._charsmap is not None:
            text = self._charsmap(text)
        if self._remove_extra:
            text = re.sub(" +", " ", text)
            text = text.lstrip(" ") if first else text
        if text and self._prefix and (first or self._every_part):
            text = " " + text
        text = text.replace(" ", self._space)
        return text.rstrip(self._space) if self._remove_extra and last else text


# ---- the file --------------------------------------------------------------------------------------------------------


def read_sentencepiece(path: Path) -> SentencePiece:
    """A `tokenizer.model`. Raises InvalidModelFiles."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST:
            raise ValueError(f"expected a file of at most {_MOST} bytes")
        model = _parse(path.read_bytes())
    except (OSError, ValueError, struct.error) as e:  # ValueError: UnicodeDecodeError as well
        raise InvalidModelFiles(
            f"{path} cannot be read as a SentencePiece model: {e}. Copy or download the file again."
        ) from e
    model.where = str(path)
    model.check()
    return model


def _parse(data: bytes) -> SentencePiece:
    model = SentencePiece()
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_message(value)))
            if len(model.pieces) == _MOST_PIECES:
                raise ValueError(f"more than {_MOST_PIECES} pieces")
            model.pieces.append(_text(piece.get(1, b"")))
            model.scores.append(struct.unpack("<f", _message(piece.get(2, b"\0\0\0\0")))[0])
            model.kinds.append(_number(piece.get(3, PieceKind.NORMAL)))
        elif number == 2:
            trainer = dict(_fields(_message(value)))
            algorithm = _number(trainer.get(3, 1))
            if algorithm not in (1, 2):
                raise ValueError(f"model_type {algorithm}; expected 1 (unigram) or 2 (BPE)")
            model.unigram = algorithm == 1
            if _number(trainer.get(24, 0)):
                raise ValueError("treat_whitespace_as_suffix; expected spaces in front of words")
            model.byte_fallback = bool(_number(trainer.get(35, 0)))
            for at, role in enumerate(roles, 45):
                roles[role] = _text(trainer[at]) if at in trainer else roles[role]
        elif number == 3:
            normalizer = dict(_fields(_message(value)))
            model.charsmap = bytes(_message(normalizer.get(2, b"")))
            model.dummy_prefix = bool(_number(normalizer.get(3, 1)))
            model.remove_extra_spaces = bool(_number(normalizer.get(4, 1)))
            model.escape_spaces = bool(_number(normalizer.get(5, 1)))
        elif number == 5 and dict(_fields(_message(value))).get(2):
            raise ValueError("a denormalizer; expected none")
    if not model.pieces:
        raise ValueError("no pieces")
    have = set(model.pieces)
    model.names = {role: piece for role, piece in roles.items() if piece in have}
    return model


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a protocol buffer message; fixed numbers come as their bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(data, at)
        if size is None:
            raise ValueError(f"no such wire type: {wire}")
        if at + size > len(data):
            raise ValueError(f"a field of {size} bytes goes beyond the end")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number is too long")


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field has the wrong type")
    return value


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a field has the wrong type")
    return int(value)


def _text(value: int | bytes) -> str:
    return _message(value).decode()
