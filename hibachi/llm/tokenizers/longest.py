"""How much text one token stands for at most: so that a text can be seen to be too long before it is tokenized.

The bound must hold for every text. So whatever may leave out text without end (spaces at the ends, accents, words that
are not in the vocabulary) means that there is none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from hibachi.llm.tokenizers.pieces import byte_letters
from hibachi.llm.tokenizers.rules import rules

FORMS = {"NFC": 4.0, "NFD": 4.0, "NFKC": 4.0, "NFKD": 4.0, "Lowercase": 4.0}
"""Bytes of a text by bytes of what Unicode makes of it, at most: 3.5 for NFC, where ι is U+1FBE and has two accents, 4
for the compatible ones, where A is U+1D400, 3 for small letters."""
_IN_UTF8 = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 256)}


class Bound(NamedTuple):
    """longest: bytes of text for a token. dropped: bytes that may have none at all, and do not count."""

    longest: int
    dropped: bytes = b""


def find_bound(raw: Any, *, whole: bool = False) -> Bound | None:
    """The bound of a `tokenizers.Tokenizer`; None means nothing can be said. Special tokens around a text are none of
    it.

    whole: a pre-tokenizer that is not the library's own leaves nothing out.
    """
    content = {part: _state(getattr(raw, part)) for part in ("normalizer", "pre_tokenizer", "post_processor")}
    if whole and content["pre_tokenizer"] == {}:
        content["pre_tokenizer"] = None
    shrinks, lettered = _shrinks(content), _letters(content)
    if shrinks is None or lettered is None or not _keeps_the_text(content["post_processor"]):
        return None
    vocab = raw.get_vocab(with_added_tokens=False)
    dropped = _dropped(raw.model, vocab, lettered)
    if dropped is None or (dropped and (content["normalizer"] or shrinks > 1)):
        return None
    sizes = [len(t) if lettered else len(t.encode()) for t in vocab]
    for token in raw.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip:  # with the spaces at its sides, however many
            return None
        text = token.content
        normal = raw.normalizer.normalize_str(text) if token.normalized and raw.normalizer else text
        sizes.append(len(normal.encode()))
    unknown = 1 if lettered else 4  # bytes of a character that is none of them
    return Bound(math.ceil(shrinks * max([*sizes, unknown])), bytes(sorted(dropped)))


def _state(part: Any) -> Any:
    """As a tokenizer.json has it; {} for one that is not the library's own."""
    try:
        return None if part is None else json.loads(part.__getstate__())
    except Exception:  # which the library raises itself
        return {}


def _shrinks(content: Mapping[str, Any]) -> float | None:
    """How many bytes of a text become one byte for the pre-tokenizer, at most; None means any number."""
    times = 1.0
    for _, rule in rules("normalizer", content):
        match rule.get("type"):
            case "Prepend":
                pass
            case "Replace":
                old, new = rule["pattern"].get("String"), rule["content"]
                if not old or not new:
                    return None
                times *= max(1.0, len(old.encode()) / len(new.encode()))
            case kind if kind in FORMS:
                times *= FORMS[kind]
            case _:
                return None
    return times


def _letters(content: Mapping[str, Any]) -> bool | None:
    """Does the model see a letter for each byte? None means the pre-tokenizer may leave something out."""
    lettered = marked = False
    for _, rule in rules("pre_tokenizer", content):
        match rule.get("type"):
            case "ByteLevel" if not (lettered or marked):
                lettered = True
            case "Split" | "Punctuation" if rule.get("behavior") != "Removed":
                pass
            case "Digits" | "UnicodeScripts":
                pass
            case "Metaspace" if not lettered:
                marked = True
            case _:
                return None
    return lettered


def _keeps_the_text(rule: Any) -> bool:
    """Is the text between what is put around it?"""
    if rule is None:
        return True
    match rule.get("type"):
        case "Sequence":
            return all(map(_keeps_the_text, rule["processors"]))
        case "TemplateProcessing":
            return any(piece.get("Sequence", {}).get("id") == "A" for piece in rule["single"])
        case kind:
            return kind in ("ByteLevel", "BertProcessing", "RobertaProcessing")


def _dropped(model: Any, vocab: Mapping[str, int], lettered: bool) -> set[int] | None:
    """Bytes that the model may leave out, or join without end; None means perhaps all."""
    kind = type(model).__name__
    if kind == "Unigram":
        every = json.loads(model.__getstate__()).get("byte_fallback") is True
        return set() if every and _has_bytes(vocab) and not lettered else None
    if kind != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if model.unk_token is not None and not model.fuse_unk:
        return set()
    if lettered:
        return {b for letter, b in byte_letters().items() if letter not in vocab and b in _IN_UTF8}
    return set() if model.byte_fallback and _has_bytes(vocab) else None


def _has_bytes(vocab: Mapping[str, int]) -> bool:
    return all(f"<0x{b:02X}>" in vocab for b in range(256))
