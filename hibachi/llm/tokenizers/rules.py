"""Checks the rules of a tokenizer.json before any of them is run: how much longer they can make a text.

A tokenizer.json comes with a model, from anywhere, and the library tokenizers runs it in this process. Nine rules that
make ten letters of one ask for all memory there is, and a regular expression may try for ever. So growth is computed
from the file, and rules whose cost the file does not tell are first tried in a process of their own.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unicodedata import normalize

from hibachi.errors import InvalidModelFiles
from hibachi.llm.tokenizers import patterns
from hibachi.llm.tokenizers.charsmap import Charsmap
from hibachi.llm.tokenizers.merges import LONGEST
from hibachi.llm.tokenizers.sandbox import try_rules

_MOST_GROWTH = 8  # times as many characters; real files put a mark in front, and one for a space
_MOST_RULES = 1000
_MOST_ADDED = 1 << 16  # tokens that are found as a whole, and 32 characters for each
_MOST_WORD, _MOST_AFFIX, _MOST_AROUND = 1000, 64, 64

_LISTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
_FORMS = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3}  # characters that Unicode makes of one
_QUIET = {"Strip", "StripAccents", "Nmt", "Fuse", "ByteFallback"}
_CUTS = {"Digits", "Punctuation", "Split", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"}
_CUTS |= {"UnicodeScripts", "FixedLength"}
_JOINS = {"WordPiece", "BPEDecoder", "CTC"}  # perhaps with a space for each token

_ATOM = r"(?:[^\\^$|?*+()\[\]{}]|\\[sSdDwWntr]|\\[^\w\s]|\\[pP]\{\w+\}|\[[^\[\]\\]+\])"
_PLAIN = re.compile(rf"(?:{_ATOM})*{_ATOM}(?:\+|\{{[1-9]\d?,?\}})?")
"""Letters or classes of them one after the other, the last perhaps repeated: they match something, and in one pass."""


class _Fault(InvalidModelFiles):
    """What is wrong with a rule."""


def check_rules(file: Path, content: Mapping[str, Any]) -> None:
    """Raises InvalidModelFiles for a tokenizer.json whose rules could make a prompt much longer, or take for ever.

    content: of the file. What is no valid tokenizer.json at all is left to the library, which refuses it.
    """
    try:
        _check_vocabulary(content)
        _check_around(content.get("post_processor"))
        text, tokens = _Growth(), _Growth()
        for growth, part in ((text, "normalizer"), (text, "pre_tokenizer"), (tokens, "decoder")):
            for where, rule in rules(part, content):
                growth.apply(where, rule)
    except _Fault as e:
        raise InvalidModelFiles(f"{file}: {e}. Mend the file, or take another one.") from None
    if untold := [*text.untold, *tokens.untold]:
        why = try_rules({part: content.get(part) for part in _LISTS}, "\n".join(untold))
        if why is not None:
            raise InvalidModelFiles(f"{file}: its rules were tried on some texts: {why}. Mend the file.")


def rules(part: str, content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where it is, rule) of a normalizer, a pre-tokenizer or a decoder, in the order in which they are applied."""
    left, count = [(part, content.get(part))], 0
    while left:
        where, rule = left.pop()
        if not isinstance(rule, Mapping):
            continue
        inner = rule.get(_LISTS[part])
        if rule.get("type") == "Sequence" and isinstance(inner, list):
            left += [(f"{where}.{_LISTS[part]}[{i}]", each) for i, each in enumerate(inner)][::-1]
            continue
        count += 1
        if count > _MOST_RULES:
            raise _Fault(f"{part} has more than {_MOST_RULES} rules")
        yield where, rule


class _Growth:
    """How many characters the rules so far make of a text of n characters: at most times * n + more.

    untold: the expressions, and the kinds of rules, of which this cannot be said.
    """

    def __init__(self) -> None:
        self.times, self.more = 1.0, 0.0
        self.untold: list[str] = []
        self._folded = False  # forms of Unicode come to rest, but for characters that replacements put there
        self._lettered = self._mapped = self._cut = False

    def apply(self, where: str, rule: Mapping[str, Any]) -> None:
        """Raises _Fault for a rule with which it is too much."""
        kind = rule.get("type")
        match kind:
            case "Replace":
                self._replace(rule)
            case "Prepend":
                self._put(rule.get("prepend"))
            case "Metaspace":
                self._put(" ")
                self._cut = True
            case "ByteLevel":
                if rule.get("add_prefix_space") is True:
                    self._put(" ")
                self.times *= 2 if self._lettered else 1  # the letters of letters
                self._lettered = self._cut = True
            case "BertNormalizer":
                self.times *= 3  # spaces around Chinese characters
                self._form(_FORMS["NFD"])
            case "Precompiled":
                _check_table(rule)
                self._form(_MOST_AFFIX, always=self._mapped)
                self._mapped = True
            case str() if kind in _FORMS:
                self._form(_FORMS[kind])
            case str() if kind in _CUTS:
                self._cut = True
                self._expression(rule.get("pattern"))
            case str() if kind in _JOINS:
                self.times *= 2
            case str() if kind not in _QUIET:
                self.untold.append(kind)
            case str():
                pass
            case _:
                raise _Fault(f"{where} is a rule without a type: {rule!r:.100}")
        if self.times + self.more > _MOST_GROWTH:
            raise _Fault(
                f"with {where}, {rule!r:.100}, its rules may make a text more than {_MOST_GROWTH} times as long"
            )

    def _form(self, factor: int, *, always: bool = False) -> None:
        """What Unicode makes of a character is not counted the first time: all tokenizers have it."""
        if self._folded or always:
            self.times, self.more = factor * self.times, factor * self.more

    def _put(self, text: Any) -> None:
        """In front of the text, or of each word."""
        if isinstance(text, str):
            self.times, self.more = self.times * (1 + len(text) * self._cut), self.more + len(text)
            self._folded |= _is_folded(text)

    def _replace(self, rule: Mapping[str, Any]) -> None:
        pattern, content = rule.get("pattern"), rule.get("content")
        if not isinstance(pattern, Mapping) or not isinstance(content, str):
            return  # the library refuses it
        least = len(pattern["String"]) if isinstance(pattern.get("String"), str) else int(self._expression(pattern))
        if least:
            factor = max(1.0, len(content) / least)
            self.times, self.more = factor * self.times, factor * self.more
        else:  # it may stand between all characters
            self.times, self.more = self.times * (1 + len(content)), (self.more + 1) * (1 + len(content))
        self._folded |= _is_folded(content)

    def _expression(self, pattern: Any) -> bool:
        """Does it match something, as is plain to see? If not, it must be tried."""
        expression = pattern.get("Regex") if isinstance(pattern, Mapping) else None
        if not isinstance(expression, str) or _PLAIN.fullmatch(expression):
            return True
        if expression not in patterns.EVERY:
            self.untold.append(expression)
        return False


def _is_folded(text: str) -> bool:
    """Has it a character of which a form of Unicode makes several?"""
    return any(len(normalize("NFKD", c.lower())) > 1 for c in text)


def _check_table(rule: Mapping[str, Any]) -> None:
    try:
        Charsmap(b64decode(rule["precompiled_charsmap"]))
    except (KeyError, TypeError, ValueError) as e:  # InvalidModelFiles is one
        raise _Fault(f"precompiled_charsmap cannot be used: {e}") from None


def _check_around(rule: Any) -> None:
    """What is put around a text: a few tokens, and the text itself once."""
    left, texts, tokens = [rule], 0, 0
    while left:
        rule = left.pop()
        if not isinstance(rule, Mapping):
            continue
        left += rule["processors"] if isinstance(rule.get("processors"), list) else []
        known = rule["special_tokens"] if isinstance(rule.get("special_tokens"), Mapping) else {}
        for piece in rule["single"] if isinstance(rule.get("single"), list) else []:
            special = piece.get("SpecialToken") if isinstance(piece, Mapping) else None
            if special is None:
                texts += 1
                continue
            token = known.get(str(special.get("id"))) if isinstance(special, Mapping) else None
            ids = token.get("ids") if isinstance(token, Mapping) else None
            tokens += len(ids) if isinstance(ids, list) else 1
    if texts > 1 or tokens > _MOST_AROUND:
        raise _Fault(
            f"post_processor puts {tokens} tokens around a text, which it repeats {texts} times; expected at most "
            f"{_MOST_AROUND} tokens and the text once"
        )


def _check_vocabulary(content: Mapping[str, Any]) -> None:
    """The sizes in a model by which its time or memory grows."""
    model, added = content.get("model"), content.get("added_tokens")
    if isinstance(added, list):
        texts = [t["content"] for t in added if isinstance(t, Mapping) and isinstance(t.get("content"), str)]
        if len(added) > _MOST_ADDED or sum(map(len, texts)) > 32 * _MOST_ADDED:
            raise _Fault(f"expected at most {_MOST_ADDED} added tokens of 32 characters; got {len(added)}")
    if not isinstance(model, Mapping):
        return
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if isinstance(model.get(name), str) and len(model[name]) > _MOST_AFFIX:
            raise _Fault(f"model.{name} has {len(model[name])} characters; expected at most {_MOST_AFFIX}")
    longest = model.get("max_input_chars_per_word", 0)
    if isinstance(longest, int) and longest > _MOST_WORD:
        raise _Fault(f"model.max_input_chars_per_word is {longest!r:.40}; expected at most {_MOST_WORD}")
    if isinstance(model.get("vocab"), list):  # a unigram model looks at each place for all of them
        pieces = [p[0] for p in model["vocab"] if isinstance(p, list) and p and isinstance(p[0], str)]
        if (size := max(map(len, pieces), default=0)) > LONGEST:
            raise _Fault(f"model.vocab has a piece of {size} characters; expected at most {LONGEST}")
