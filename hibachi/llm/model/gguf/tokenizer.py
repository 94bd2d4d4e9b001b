"""The tokenizer in the metadata of a GGUF file, built for the library tokenizers.

A file holds the vocabulary, and merges or scores; how text is cut before that is only named, see `cuts`.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hibachi.common.installed import need
from hibachi.errors import InvalidModelFiles, UnknownArchitecture, panicked
from hibachi.llm.model.gguf.cuts import CUTS, OLD, Cut
from hibachi.llm.model.gguf.ends import MARKERS, known_ends, special_id
from hibachi.llm.model.gguf.file import Metadata
from hibachi.llm.tokenizers.merges import cuts

log: logging.Logger = logging.getLogger("hibachi.model")


class Pieces(NamedTuple):
    """What a `hibachi.llm.tokenizers.Tokenizer` is made of, by the names of its arguments.

    raw: a tokenizers.Tokenizer. special: texts such as bos_token and eos_token. chat_template: Jinja sources by name.
    """

    raw: Any
    special: dict[str, str]
    chat_template: dict[str, str]


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
_FILLING = re.compile(r"\[PAD\d+\]")  # llama.cpp's, of ids without a token
_PADDING = re.compile(r"\[PAD\d*\]|<pad>|<unused\d*>")
_ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that are no UTF-8, as read_header has them
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}

# ---- building --------------------------------------------------------------------------------------------------------


def read_tokenizer(file: Path, metadata: Metadata) -> Pieces:
    """The tokenizer of a file.

    Raises InvalidModelFiles, UnknownArchitecture for a kind that we do not know, MissingExtra without tokenizers.
    """
    source = _Source(file, metadata)
    build = {"gpt2": _bpe, "gemma4": _bpe, "llama": _sentencepiece}.get(source.text("model", ""))
    if build is None:
        raise UnknownArchitecture(
            f"{file} has a tokenizer of the kind {source.get('model')!r:.100}; known: gpt2 (byte-level BPE), gemma4 "
            f"and llama (SentencePiece). hibachi.load_model(path) loads the model without it; encode and decode "
            f"outside."
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
    return Pieces(raw, special, _templates(source))


def _templates(source: _Source) -> dict[str, str]:
    """The usual one is "default"; others have their name in that of the entry."""
    entry = "tokenizer.chat_template"
    found = {"default": source.metadata.get(entry)}
    found |= {k[len(entry) + 1 :]: v for k, v in source.metadata.items() if k.startswith(f"{entry}.")}
    named = {name: template for name, template in found.items() if isinstance(template, str)}
    for name, template in named.items():
        if _ESCAPED.search(template):
            raise InvalidModelFiles(
                f"{source.file}: the chat template {name!r:.80} must be UTF-8; got other bytes. Convert the model or "
                f"download it again."
            )
    return named


class _Source:
    """The entries of a tokenizer, checked."""

    def __init__(self, file: Path, metadata: Metadata) -> None:
        self.file, self.metadata = file, metadata
        self.tokens: list[str] = self.strings("tokens")
        types = self.get("token_type")
        self.types = [_NORMAL] * len(self.tokens) if types is None else self.numbers("token_type").tolist()
        known = known_ends(metadata, self.tokens) | MARKERS
        self.types = [_CONTROL if t in known else kind for t, kind in zip(self.tokens, self.types, strict=True)]
        self.vocab: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            if not token or (self.types[i] == _UNUSED and _FILLING.fullmatch(token)):
                continue  # nothing that a text can hold: the id stays without a token
            first = self.vocab.setdefault(token, i)
            if first != i and not self.is_silent(i):
                if not self.is_silent(first):  # one of them would have no text if the model says it
                    raise self.wrong("tokens", "all different", f"{token!r:.60} as {first} and {i}")
                self.vocab[token] = i

    def is_silent(self, i: int) -> bool:
        """A token that no text is lost with."""
        return self.types[i] in (_CONTROL, _UNUSED) or _PADDING.fullmatch(self.tokens[i]) is not None

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
        bad = next((i for i, text in enumerate(value) if not text.isascii() and _ESCAPED.search(text)), None)
        if bad is not None:
            raise self.wrong(name, "UTF-8", f"{value[bad].encode(errors='surrogateescape')!r:.80} as number {bad}")
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


def _bpe(library: Any, source: _Source) -> Any:
    """BPE over the letters of bytes, or over characters as SentencePiece has them."""
    kind = "gemma4" if source.text("model", "") == "gemma4" else source.text("pre", "") or "default"
    if kind == "default":
        kind = OLD.get(source.metadata.get("general.architecture", ""), kind)
    cut = CUTS.get(kind)
    if cut is None:
        raise UnknownArchitecture(
            f"{source.file}: its tokenizer cuts text as for {kind!r:.100} (tokenizer.ggml.pre), which is not known; "
            f"known: {', '.join(sorted(CUTS))}. hibachi.load_model(path) loads the model without it; encode and "
            f"decode outside."
        )
    if kind == "default":
        log.warning(
            "%s does not name how its tokenizer cuts text (tokenizer.ggml.pre): some prompts may get other tokens than "
            "the model was trained on. Convert it again, with a recent llama.cpp.",
            source.file,
        )
    if cut.marks:
        return _marked(library, source, source.merges(), cut)
    raw = library.Tokenizer(library.models.BPE(source.vocab, source.merges(), ignore_merges=cut.whole))
    raw.pre_tokenizer = cut.steps(library)
    if cut.nfc:
        raw.normalizer = library.normalizers.NFC()
    raw.decoder = library.decoders.ByteLevel()
    _frame(library, raw, source, cut)
    return raw


def _sentencepiece(library: Any, source: _Source) -> Any:
    merges = _merges(source) if source.get("merges") is None else source.merges()
    return _marked(library, source, merges, Cut(bos=True), prefix=source.flag("add_space_prefix", True))


def _marked(library: Any, source: _Source, merges: list[tuple[str, str]], cut: Cut, *, prefix: bool = False) -> Any:
    """BPE over characters, "▁" for a space, unknown characters byte by byte. prefix: a space in front of a text."""
    raw = library.Tokenizer(
        library.models.BPE(
            source.vocab,
            merges,
            unk_token=source.special("unknown"),
            fuse_unk=True,
            byte_fallback=_BYTE in source.types,
        )
    )
    normal, decode = library.normalizers, library.decoders
    spaces = normal.Replace(" ", "▁")
    raw.normalizer = normal.Sequence([normal.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decode.Replace("▁", " "), decode.ByteFallback(), decode.Fuse()]
    raw.decoder = decode.Sequence([*steps, decode.Strip(" ", 1, 0)] if prefix else steps)
    _frame(library, raw, source, cut)
    return raw


def _merges(source: _Source) -> list[tuple[str, str]]:
    """SentencePiece joins the pair that gives the token of the highest score; so the scores are an order of merges."""
    scores = source.numbers("scores")
    parts = (t for t, i in source.vocab.items() if source.types[i] == _NORMAL)
    order = sorted(parts, key=lambda t: (-scores[source.vocab[t]], source.vocab[t]))
    return [(t[:at], t[at:]) for t, at in cuts(order, str(source.file))]


def _frame(library: Any, raw: Any, source: _Source, cut: Cut) -> None:
    """What is put around a text."""
    texts = {
        "bos": source.special("bos") if cut.always or source.flag("add_bos_token", cut.bos) else None,
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
    name = source.metadata.get("general.name")
    # The spaces behind a token of Phi-3 belong to it, but for these; the file does not say so.
    rstrip = isinstance(name, str) and re.search("phi-?3", name.lower()) is not None
    strips = {t: rstrip and t not in ("<unk>", "<s>", "<|endoftext|>") for t in (*control, *plain)}
    for texts, special, add in ((control, True, raw.add_special_tokens), (plain, False, raw.add_tokens)):
        add([library.AddedToken(t, special=special, normalized=False, rstrip=strips[t]) for t in texts])
