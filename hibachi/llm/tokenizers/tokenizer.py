"""The tokenizer of a model: text to ids and back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hibachi.common.installed import need
from hibachi.errors import InvalidModelFiles, InvalidRequest, panicked, text_of
from hibachi.llm.model.fields import read_json
from hibachi.llm.tokenizers import bytelevel
from hibachi.llm.tokenizers.chat import choose_template, read_templates, render_chat
from hibachi.llm.tokenizers.guarded import MARK, Guard
from hibachi.llm.tokenizers.ids import check_ids, read_unique
from hibachi.llm.tokenizers.longest import Bound, find_bound
from hibachi.llm.tokenizers.pieces import Text, raw_bytes, texts
from hibachi.llm.tokenizers.rules import check_rules
from hibachi.llm.tokenizers.sentencepiece import read_sentencepiece
from hibachi.llm.tokenizers.special import add_special_tokens

MOST_SHOWING = 8  # tables of texts for special tokens that are shown
BEHIND = "\ufdd1"  # a token of a copy of the tokenizer, which stands for any that is special
AT_ONCE = 4096  # characters, of which others wait for a millisecond or two


class Tokenizer:
    """The tokenizer of a model, run by the library tokenizers.

    It gives the ids and texts that transformers 5 gives, special tokens included, with three exceptions. A
    tokenizer.json counts as it stands, where some classes there put their own parts in place of the file's. Ids are
    never drawn. clean_up_tokenization_spaces is not followed: it is false by default and ignored for BPE there, as it
    corrupts text.

    raw: a `tokenizers.Tokenizer`; what it has from training is switched off: truncation, padding, and drawing one of
    several ways to cut a text. special: texts such as bos_token and eos_token, for chat templates. chat_template: Jinja
    source, several by name, or None. whole: a pre-tokenizer that is written in Python leaves out no text. rowless: id
    -> text of tokens for which the model has no row; a text with one is refused.
    """

    special: dict[str, str]

    def __init__(
        self,
        raw: Any,
        *,
        special: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        whole: bool = False,
        rowless: Mapping[int, str] | None = None,
    ) -> None:
        raw.no_truncation()  # some files carry settings from training
        raw.no_padding()
        for name in ("dropout", "alpha", "nbest_size"):  # of BPE and of Unigram: ids that are drawn
            if getattr(raw.model, name, None) is not None:
                setattr(raw.model, name, None)
        self._raw, self.special, self._whole, self._rowless = raw, dict(special or {}), whole, dict(rowless or {})
        named = chat_template if isinstance(chat_template, Mapping) else {"default": chat_template}
        self.chat_templates: dict[str, str] = {name: source for name, source in named.items() if source is not None}
        self._showing: dict[frozenset[int], Callable[[Sequence[int]], Text]] = {}
        # Tokens are special by their text, so asking is the only way; without the decoder, as some fail on no text.
        decoder, raw.decoder = raw.decoder, None
        self._special = {i for i in raw.get_added_tokens_decoder() if not raw.decode([i])}
        raw.decoder = decoder

    @classmethod
    def load(cls, path: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
        """From a model directory, and what it says about special tokens and chat templates.

        The first that is there: tokenizer.json; GPT-2's vocab.json and merges.txt, or encoder.json and vocab.bpe; a
        SentencePiece model, tokenizer.model.
        vocab_size: of the model. Added tokens may have ids beyond it, as published files have: they cannot come. Raises
        InvalidModelFiles, also for other tokens beyond it; MissingExtra.
        """
        path = Path(path)
        config_file = path / "tokenizer_config.json"
        config = read_json(config_file) if config_file.exists() else {}
        file = path
        try:
            raw, file, defaults, whole = _read(path, config)
            flags = file.name != "tokenizer.json"
            special = add_special_tokens(raw, path, {**defaults, **config}, rows=vocab_size, flags=flags)
            rows = 2**32 if vocab_size is None else vocab_size
            beyond = {i: text for text, i in raw.get_vocab(with_added_tokens=True).items() if i >= rows}
            templates = read_templates(path, config)
            tokenizer = cls(raw, special=special, chat_template=templates, whole=whole, rowless=beyond)
            around = {i for i in raw.encode("").ids if i >= rows}
        except BaseException as e:
            if not (panicked(e) or isinstance(e, InvalidRequest) or type(e) is Exception):  # which the library raises
                raise
            raise InvalidModelFiles(f"{file} cannot be used: {e}. Copy or download the file again.") from e
        if needed := (beyond.keys() - raw.get_added_tokens_decoder().keys()) | around:
            raise InvalidModelFiles(
                f"{file} and config.json do not belong together: expected ids below vocab_size {vocab_size}, but for "
                f"added tokens that stand around no text; got {max(needed)} for "
                f"{beyond.get(max(needed), 'no token')!r:.80}. Take both from one download."
            )
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return 1 + max(self._raw.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def eos_id(self) -> int | None:
        """The id of the eos_token that the files name; None if there is none that the model can give."""
        i: int | None = self._raw.token_to_id(self.special.get("eos_token", ""))
        return None if i in self._rowless else i

    @property
    def chat_template(self) -> str | None:
        """The template for a conversation without tools; None if there is none."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens are added as the file says; not for a rendered chat, which has its own.

        Raises InvalidRequest for what is no text, for one that the tokenizer's own rules cannot be applied to, and for
        one with a token that the model has no row for.
        """
        if self._has_marks(text):
            return [i for i, _, _ in self._around_marks(text, add_special_tokens)]
        ids: list[int] = self._encoded(text, add_special_tokens).ids
        return ids

    def spans(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """`encode`, each id with the characters that it stands for: (id, begin, end); (id, 0, 0) for an added one.

        Several ids that share a character all stand for the whole of it. Characters are counted in `bare(text)`.
        """
        if self._has_marks(text):
            return self._around_marks(text, add_special_tokens)
        found = self._encoded(text, add_special_tokens)
        return [(i, begin, end) for i, (begin, end) in zip(found.ids, found.offsets, strict=True)]

    def guarded(self, text: str) -> str:
        """A text in which names of special tokens are text as any: `encode` gives them as such."""
        return self._guard.guarded(text)

    def bare(self, text: str) -> str:
        """A text without what `guarded` has marked."""
        return self._guard.bare(text)

    @cached_property
    def _guard(self) -> Guard:
        return Guard([name for i in self._special if (name := self._raw.id_to_token(i))])

    def _has_marks(self, text: str) -> bool:
        return isinstance(text, str) and MARK in text and self._guard.bare(text) != text

    def _around_marks(self, text: str, special: bool) -> list[tuple[int, int, int]]:
        """`spans` of a text with marks: its special tokens, and what stands between them."""
        found = [(i, 0, 0) for i in self._encoded("", special).ids]
        at = 0
        for part in self.split_special(text):
            if isinstance(part, int):
                size = len(self._raw.id_to_token(part))
                found.append((part, at, at + size))
            else:
                own, first = self._guard.bare(part), at == 0
                # Behind another token: at the beginning of a text some tokenizers put a space.
                cut = self._cut(own if first else BEHIND + own, False, self._plain)
                ids, shift = map(self._raw.token_to_id, cut.tokens), at - (0 if first else len(BEHIND))
                spans = [(i, b + shift, e + shift) for i, (b, e) in zip(ids, cut.offsets, strict=True)]
                found += spans if first else spans[1:]
                size = len(own)
            at += size
        self._check_rows(i for i, _, _ in found)
        return found

    @cached_property
    def _plain(self) -> Any:
        """The library's tokenizer, for which names of special tokens are text. Made when a text first has some."""
        raw = self._raw
        plain = type(raw)(raw.model)
        for name in ("normalizer", "pre_tokenizer"):
            if (step := getattr(raw, name)) is not None:
                setattr(plain, name, step)
        added = raw.get_added_tokens_decoder().values()
        plain.add_tokens([token for token in added if not token.special] + [BEHIND])
        return plain

    def _encoded(self, text: str, special: bool) -> Any:
        found = self._cut(text, special, self._raw)
        self._check_rows(found.ids)
        return found

    def _check_rows(self, ids: Iterable[int]) -> None:
        if self._rowless and (odd := next((i for i in ids if i in self._rowless), None)) is not None:
            raise InvalidRequest(
                f"The text holds {self._rowless[odd]!r:.80}, which is token {odd} of the tokenizer; the model has no "
                f"row for that one. Leave it out."
            )

    def _cut(self, text: str, special: bool, raw: Any) -> Any:
        try:
            if len(text) <= AT_ONCE:
                return raw.encode(text, add_special_tokens=special)
            # The library holds Python's lock for all of `encode`, and not for this.
            return raw.encode_batch([text], add_special_tokens=special)[0]
        except TypeError as e:  # the library says so for lone surrogates as well
            raise InvalidRequest(
                f"A prompt must be a string of valid Unicode; got {type(text).__name__} {text!r:.80}. "
                f"Pass token ids, or decode bytes first, for example with errors='replace'."
            ) from e
        except BaseException as e:
            if not (panicked(e) or isinstance(e, Exception)):
                raise
            raise InvalidRequest(f"The tokenizer cannot encode this prompt: {text_of(e)}. Pass token ids.") from e

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; ids without a token have none. Bytes that are not UTF-8 become U+FFFD.

        Raises InvalidModelFiles for a tokenizer whose own rules fail on them.
        """
        hidden = self._special if skip_special_tokens else ()
        said = [i for i in map(int, ids) if i not in hidden and self._raw.id_to_token(i) is not None]
        if not said:  # the library fails on nothing where its decoder strips the end of a text
            return ""
        try:
            text: str = self._raw.decode(said, skip_special_tokens=skip_special_tokens)
            return text
        except BaseException as e:
            if not panicked(e):
                raise
            raise InvalidModelFiles(f"The model's tokenizer cannot decode its own tokens: {e}. Mend its file.") from e

    @property
    def longest_token(self) -> int | None:
        """Bytes of UTF-8 that one token stands for at most, so that a text of more than `longest_token * n` bytes has
        more than n tokens. None means there is no such number, as any amount of text may be left out."""
        bound = self._bound
        return None if bound is None or bound.dropped else bound.longest

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `encode` gives at least, without tokenizing; 0 where nothing can be said.

        It says more than `longest_token`, as it knows the bytes that have no token here, such as U+0004 in SmolLM2.
        """
        if self._bound is None:
            return 0
        data = text.encode(errors="replace").translate(None, self._bound.dropped)
        return -(-len(data) // self._bound.longest)

    @cached_property
    def _bound(self) -> Bound | None:
        return find_bound(self._raw, whole=self._whole)

    spells = True
    """Whether `token_bytes` says exactly which bytes a token stands for."""

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._special)

    def is_silent(self, token: int) -> bool:
        """Does `decode` leave this id out: a special token, or no token at all?"""
        return token in self._special or self._raw.id_to_token(token) is None

    def token_bytes(self, token: int) -> bytes:
        """What an id stands for by itself, inside a text: perhaps a part of a character. b"" if there is no such id."""
        text = self._raw.id_to_token(token)
        if text is None:
            return b""
        return text.encode() if token in self._special else raw_bytes(self._decoder, text)

    @cached_property
    def _decoder(self) -> Any:
        """The part "decoder" of a tokenizer.json."""
        decoder = self._raw.decoder
        return json.loads(decoder.__getstate__()) if decoder is not None else None

    @cached_property
    def text_after(self) -> Callable[[Sequence[int]], Text]:
        """Text id by id, behind some ids; see `Detokenizer`."""
        tokens = self._raw.get_vocab(with_added_tokens=True)
        spoken = {i: t for t, i in tokens.items() if i not in self._special}
        return texts(self._decoder, spoken, self.decode)

    @cached_property
    def full_text_after(self) -> Callable[[Sequence[int]], Text]:
        """`text_after` that shows special tokens, as `decode` does without skip_special_tokens."""
        tokens = {i: t for t, i in self._raw.get_vocab(with_added_tokens=True).items()}
        return texts(self._decoder, tokens, partial(self.decode, skip_special_tokens=False))

    def text_showing(self, shown: frozenset[int]) -> Callable[[Sequence[int]], Text]:
        """`text_after` that shows these special tokens. It takes some milliseconds where they were not shown before."""
        found = self._showing.get(shown)
        if found is None:
            hidden = self._special - shown
            tokens = {i: t for t, i in self._raw.get_vocab(with_added_tokens=True).items() if i not in hidden}

            def decode(ids: Iterable[int]) -> str:
                return self.decode((i for i in ids if i not in hidden), skip_special_tokens=False)

            if len(self._showing) >= MOST_SHOWING:
                self._showing.clear()
            found = self._showing[shown] = texts(self._decoder, tokens, decode)
        return found

    def split_special(self, text: str) -> list[str | int]:
        """A text cut at its special tokens: texts, and ids of special tokens. None of the texts is empty."""
        names = self._special_names
        if names is None:
            return [text] if text else []
        found, ids = names
        return [ids.get(part, part) for part in found.split(text) if part]

    @cached_property
    def _special_names(self) -> tuple[re.Pattern[str], dict[str, int]] | None:
        """What finds them, the longest first as the library does, and their ids."""
        ids = {name: i for i in self._special - self._rowless.keys() if (name := self._raw.id_to_token(i))}
        if not ids:
            return None
        return re.compile(f"({'|'.join(re.escape(n) for n in sorted(ids, key=len, reverse=True))})"), ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """`render_chat` with this model's template and special tokens; encode it without adding special tokens.

        chat_template: the name of one of the model's templates, or another template; None means "tool_use" if there are
        tools and it has one of that name, else "default".
        Raises InvalidRequest if the model has no such template.
        """
        template = choose_template(self.chat_templates, chat_template, tools=variables.get("tools") is not None)
        variables = {**self.special, **variables}
        return render_chat(template, messages, add_generation_prompt=add_generation_prompt, **variables)


NAMES = "tokenizer.json, vocab.json with merges.txt, encoder.json with vocab.bpe, tokenizer.model"


def has_tokenizer(path: Path) -> bool:
    """Does a folder hold a file that `Tokenizer.load` reads?"""
    sets = (("tokenizer.json",), *bytelevel.NAMES, ("tokenizer.model",))
    return any(all(os.path.lexists(path / name) for name in names) for names in sets)  # a link to nothing is damage


def _read(path: Path, config: Mapping[str, Any]) -> tuple[Any, Path, Mapping[str, str], bool]:
    """The `tokenizers.Tokenizer` of a folder, its file, the special tokens that it has unless the config says, and
    whether what we wrote of it leaves out no text."""
    library = need("tokenizers", "Text")
    file = path / "tokenizer.json"
    if file.exists():
        return _read_tokenizer_json(library, file), file, {}, True
    for vocab, merges in bytelevel.NAMES:
        if (path / vocab).exists() and (path / merges).exists():
            raw, special = bytelevel.read_byte_level(path / vocab, path / merges, config)
            return raw, path / vocab, special, True
    file = path / "tokenizer.model"
    if file.exists():
        prefix, legacy = config.get("add_prefix_space"), config.get("legacy") is True
        model = read_sentencepiece(file)
        return model.tokenizer(dummy_prefix=prefix, every_part=legacy), file, model.names, model.keeps_all
    raise InvalidModelFiles(
        f"{path} has none of {NAMES}. Models with another tokenizer get one from transformers: "
        f"AutoTokenizer.from_pretrained(path).save_pretrained(path)."
    )


def _read_tokenizer_json(library: Any, file: Path) -> Any:
    content = read_unique(file)
    check_rules(file, content)
    model = content.get("model")
    if isinstance(model, dict) and isinstance(model.get("vocab"), dict):
        check_ids(file, model["vocab"])
    try:
        raw = library.Tokenizer.from_file(str(file))
    except BaseException as e:
        if not (panicked(e) or isinstance(e, Exception)):  # the library raises Exception itself
            raise
        raise InvalidModelFiles(f"{file} cannot be read: {e}. Copy or download the file again.") from e
    for token in content.get("added_tokens") or []:
        text, i = token["content"], token["id"]
        if raw.token_to_id(text) != i:
            raise InvalidModelFiles(
                f"{file}: expected an id of its own for every token; got {i} for the added token {text!r:.80}, and "
                f"{raw.token_to_id(text)} for it or {raw.id_to_token(i)!r:.80} at {i} as well. Download it again."
            )
    return raw
