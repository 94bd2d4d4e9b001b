"""The tokenizer in the metadata of a GGUF file, built for the library tokenizers.

A file holds the vocabulary, and merges or scores; how text is cut before that is only named (`tokenizer.ggml.pre`). The
patterns below are those of the tokenizer.json files that the names stand for, as listed in llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hibachi.errors import InvalidModelFiles, UnknownArchitecture
from hibachi.model.extras import need, panicked
from hibachi.model.gguf.file import Metadata
from hibachi.model.text.merges import cuts
from hibachi.model.text.patterns import GPT4O, LLAMA3, QWEN2, TEKKEN


class Pieces(NamedTuple):
    """What a `hibachi.model.text.Tokenizer` is made of, by the names of its arguments.

    raw: a tokenizers.Tokenizer. special: texts such as bos_token and eos_token. chat_template: Jinja source, or None.
    """

    raw: Any
    special: dict[str, str]
    chat_template: str | None


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
_PADDING = re.compile(r"\[PAD\d+\]")  # llama.cpp's filling of ids without a token
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}

# ---- cutting text, for byte-level vocabularies ---------------------------------------------------------------------


class _Cut(NamedTuple):
    """patterns: text is split at their matches, one after the other; none: GPT-2's pattern, which the library has.

    digits: each by itself; thousands: in threes; punctuation: apart from words. nfc: text is normalised first. whole:
    a word that is a token is not merged from its parts. bos: texts begin with the bos token, unless the file says no.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    thousands: bool = False
    punctuation: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False

    def steps(self, library: Any) -> Any:
        """As a pre-tokenizer of the library."""
        pre = library.pre_tokenizers
        digits = [pre.Digits(individual_digits=True)] if self.digits else []
        split = [pre.Split(library.Regex(p), behavior="isolated") for p in self.patterns]
        to_bytes = pre.ByteLevel(add_prefix_space=False, use_regex=not self.patterns)
        if self.punctuation:  # Falcon
            threes = [pre.Digits(individual_digits=False), pre.Split(library.Regex("[0-9][0-9][0-9]"), "isolated")]
            last = threes if self.thousands else digits
            return pre.Sequence([pre.Punctuation(behavior="contiguous"), to_bytes, *last])
        return pre.Sequence([*digits, *split, to_bytes])


_CUTS: Mapping[str, _Cut] = {
    **dict.fromkeys(("gpt-2", "phi-2"), _Cut()),
    **dict.fromkeys(("mpt", "olmo"), _Cut(nfc=True)),  # the tokenizer of GPT-NeoX
    **dict.fromkeys(("smollm", "starcoder", "refact"), _Cut(digits=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _Cut((LLAMA3,), whole=True, bos=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Cut((LLAMA3,))),
    "qwen2": _Cut((QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), _Cut((QWEN2,))),
    "tekken": _Cut((TEKKEN,), whole=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Cut((GPT4O,))),
    "falcon": _Cut(punctuation=True, thousands=True),
    "falcon3": _Cut(punctuation=True, digits=True),
}
"""`tokenizer.ggml.pre` -> how text is cut."""

_OLD = {"gpt2": "gpt-2", "gptneox": "mpt", "mamba": "mpt", "falcon": "falcon", "starcoder2": "starcoder"}
"""Architecture -> what its files mean that do not name it."""


# ---- building --------------------------------------------------------------------------------------------------------


def read_tokenizer(file: Path, metadata: Metadata) -> Pieces:
    """The tokenizer of a file.

    Raises InvalidModelFiles, UnknownArchitecture for a kind that we do not know, MissingExtra without tokenizers.
    """
    source = _Source(file, metadata)
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(source.text("model", ""))
    if build is None:
        raise UnknownArchitecture(
            f"{file} has a tokenizer of the kind {source.get('model')!r:.100}; known: gpt2 (byte-level BPE) and llama "
            f"(SentencePiece). hibachi.load_model(path) loads the model without it; encode and decode outside."
        )
    library = need("tokenizers", "Text")
    try:
        raw = build(library, source)
        _add_tokens(library, raw, source)
    except (InvalidModelFiles, UnknownArchitecture):
        raise
    except BaseException as e:
        if not (panicked(e) or isinstance(e, Exception)):  # the library raises Exception itself
            raise
        raise InvalidModelFiles(f"The tokenizer in {file} cannot be built: {e}. Convert or download it again.") from e
    special = {f"{ours}_token": text for ours, name in _SPECIAL.items() if (text := source.special(name)) is not None}
    template = metadata.get("tokenizer.chat_template")
    return Pieces(raw, special, template if isinstance(template, str) else None)


def special_id(metadata: Metadata, name: str, size: int) -> int | None:
    """The id of bos, eos, unknown, ...; None if there is none below the size of the vocabulary, as in llama.cpp."""
    model = metadata.get("tokenizer.ggml.model")
    usual = {"unknown": 0, "bos": 1, "eos": 2} if isinstance(model, str) and model == "llama" else {}
    i = metadata.get(f"tokenizer.ggml.{name}_token_id", usual.get(name))
    return i if type(i) is int and 0 <= i < size else None


_ENDS = {
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<EOT>",
}


def end_ids(metadata: Metadata, size: int) -> list[int]:
    """The ids that end a text or a turn: those that the file names, and tokens that are known for it, as in llama.cpp.

    Chat models have several, which generation_config.json lists; a GGUF file has one entry, at most two.
    """
    found = [special_id(metadata, name, size) for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, np.ndarray):
        pairs = zip(tokens[:size], types[:size].tolist(), strict=False)
        found += [i for i, (token, kind) in enumerate(pairs) if kind == _CONTROL and token in _ENDS]
    return [i for i in dict.fromkeys(found) if i is not None]


class _Source:
    """The entries of a tokenizer, checked."""

    def __init__(self, file: Path, metadata: Metadata) -> None:
        self.file, self.metadata = file, metadata
        self.tokens: list[str] = self.strings("tokens")
        types = self.get("token_type")
        self.types = [_NORMAL] * len(self.tokens) if types is None else self.numbers("token_type").tolist()
        self.vocab: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            if not token or (self.types[i] == _UNUSED and _PADDING.fullmatch(token)):
                continue  # nothing that a text can hold: the id stays without a token
            if self.vocab.setdefault(token, i) != i:
                raise self.wrong("tokens", "all different", f"{token!r:.60} as {self.vocab[token]} and {i}")

    def get(self, name: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def text(self, name: str, default: str) -> str:
        value = self.get(name)
        return value if isinstance(value, str) else default

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        return value if isinstance(value, bool) else default

    def strings(self, name: str) -> list[str]:
        value = self.get(name)
        if not isinstance(value, list) or not value:
            raise self.wrong(name, "a list of strings", value)
        return value

    def numbers(self, name: str) -> Any:
        """One for each token."""
        value = self.get(name)
        if not isinstance(value, np.ndarray) or len(value) != len(self.tokens):
            raise self.wrong(name, f"{len(self.tokens)} numbers, one for each token", value)
        return value

    def merges(self) -> list[tuple[str, str]]:
        return [(m[:at], m[at + 1 :]) for m in self.strings("merges") if (at := m.find(" ", 1)) > 0]

    def special(self, name: str) -> str | None:
        """The text of a special token; None for one that the vocabulary does not have."""
        i = special_id(self.metadata, name, len(self.tokens))
        return None if i is None else self.tokens[i] or None

    def wrong(self, name: str, expected: str, got: Any) -> InvalidModelFiles:
        got = "no such entry" if got is None else got if isinstance(got, str) else f"{got!r:.100}"
        return InvalidModelFiles(
            f"{self.file}: tokenizer.ggml.{name} must be {expected}; got {got}. Convert or download it again."
        )


def _byte_level(library: Any, source: _Source) -> Any:
    kind = source.text("pre", "default")
    if kind == "default":
        kind = _OLD.get(source.metadata.get("general.architecture", ""), kind)
    cut = _CUTS.get(kind)
    if cut is None:
        raise UnknownArchitecture(
            f"{source.file}: its tokenizer cuts text as for {kind!r:.100} (tokenizer.ggml.pre), which is not known; "
            f"known: {', '.join(sorted(_CUTS))}. hibachi.load_model(path) loads the model without it; encode and "
            f"decode outside."
        )
    raw = library.Tokenizer(library.models.BPE(source.vocab, source.merges(), ignore_merges=cut.whole))
    raw.pre_tokenizer = cut.steps(library)
    if cut.nfc:
        raw.normalizer = library.normalizers.NFC()
    raw.decoder = library.decoders.ByteLevel()
    _frame(library, raw, source, bos=cut.bos)
    return raw


def _sentencepiece(library: Any, source: _Source) -> Any:
    """BPE over characters, "▁" for a space, unknown characters byte by byte."""
    merges = _merges(source) if source.get("merges") is None else source.merges()
    raw = library.Tokenizer(
        library.models.BPE(
            source.vocab,
            merges,
            unk_token=source.special("unknown"),
            fuse_unk=True,
            byte_fallback=_BYTE in source.types,
        )
    )
    prefix = source.flag("add_space_prefix", True)
    normal, decode = library.normalizers, library.decoders
    spaces = normal.Replace(" ", "▁")
    raw.normalizer = normal.Sequence([normal.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decode.Replace("▁", " "), decode.ByteFallback(), decode.Fuse()]
    raw.decoder = decode.Sequence([*steps, decode.Strip(" ", 1, 0)] if prefix else steps)
    _frame(library, raw, source, bos=True)
    return raw


def _merges(source: _Source) -> list[tuple[str, str]]:
    """SentencePiece joins the pair that gives the token of the highest score; so the scores are an order of merges."""
    scores = source.numbers("scores")
    parts = (t for t, i in source.vocab.items() if source.types[i] == _NORMAL)
    order = sorted(parts, key=lambda t: (-scores[source.vocab[t]], source.vocab[t]))
    return [(t[:at], t[at:]) for t, at in cuts(order, str(source.file))]


def _frame(library: Any, raw: Any, source: _Source, *, bos: bool) -> None:
    """What is put around a text."""
    texts = {
        "bos": source.special("bos") if source.flag("add_bos_token", bos) else None,
        "eos": source.special("eos") if source.flag("add_eos_token", False) else None,
    }
    around = {name: text for name, text in texts.items() if text in source.vocab}
    if around:  # by names of ours, as "$A" and the like mean something to the library
        tokens = [{"id": name, "ids": [source.vocab[t]], "tokens": [t]} for name, t in around.items()]
        single = [*(n for n in around if n == "bos"), "$A", *(n for n in around if n == "eos")]
        raw.post_processor = library.processors.TemplateProcessing(single=single, special_tokens=tokens)


def _add_tokens(library: Any, raw: Any, source: _Source) -> None:
    """Tokens that are found in a text as a whole; those of control are special."""
    control = [t for t, i in source.vocab.items() if source.types[i] in (_CONTROL, _UNKNOWN)]
    plain = [t for t, i in source.vocab.items() if source.types[i] == _USER_DEFINED]
    raw.add_special_tokens([library.AddedToken(t, special=True, normalized=False) for t in control])
    raw.add_tokens([library.AddedToken(t, special=False, normalized=False) for t in plain])
