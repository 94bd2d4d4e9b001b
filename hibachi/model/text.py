"""Text in and out: tokenizer, text as it is generated, chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hibachi.errors import InvalidModelFiles, InvalidRequest
from hibachi.model.arch import read_json
from hibachi.model.extras import need


class Tokenizer:
    """The tokenizer of a model: its `tokenizer.json`, run by the library tokenizers.

    special: texts such as bos_token and eos_token, for chat templates. chat_template: Jinja source, or None.
    """

    def __init__(self, raw: Any, *, special: Mapping[str, str] | None = None, chat_template: str | None = None) -> None:
        raw.no_truncation()  # some files carry settings from training
        raw.no_padding()
        self._raw, self.special, self.chat_template = raw, dict(special or {}), chat_template
        self._silent = {i for i, t in raw.get_added_tokens_decoder().items() if t.special}

    @classmethod
    def load(cls, path: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
        """From a model directory: tokenizer.json, and if they are there tokenizer_config.json and chat_template.jinja.

        vocab_size: of the model; every id of the tokenizer must be below it. Raises InvalidModelFiles, MissingExtra.
        """
        library, path = need("tokenizers", "Text"), Path(path)
        file = path / "tokenizer.json"
        if not file.exists():
            raise InvalidModelFiles(
                f"{file} is missing. Models with an older tokenizer get one from transformers: "
                f"AutoTokenizer.from_pretrained(path).save_pretrained(path)."
            )
        try:
            raw = library.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises Exception itself
            raise InvalidModelFiles(f"{file} cannot be read: {e}. Copy or download the file again.") from e
        config_file, template_file = path / "tokenizer_config.json", path / "chat_template.jinja"
        config = read_json(config_file) if config_file.exists() else {}
        template = config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {t["name"]: t["template"] for t in template}.get("default")
        if template_file.exists():
            template = template_file.read_text(encoding="utf-8")
        names = {name: _content(config.get(name)) for name in config if name.endswith("_token")}
        tokenizer = cls(raw, special={n: t for n, t in names.items() if t is not None}, chat_template=template)
        if vocab_size is not None and tokenizer.vocab_size > vocab_size:
            raise InvalidModelFiles(
                f"{file} and config.json do not belong together: expected ids below vocab_size {vocab_size}; got ids "
                f"up to {tokenizer.vocab_size - 1}. Take both from one download."
            )
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""
        return 1 + max(self._raw.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens are added as the file says; not for a rendered chat, which has its own."""
        try:
            return self._raw.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as e:  # the library says so for lone surrogates as well
            raise InvalidRequest(
                f"A prompt must be a string of valid Unicode; got {type(text).__name__} {text!r:.80}. "
                f"Pass token ids, or decode bytes first, for example with errors='replace'."
            ) from e

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; ids without a token have none. Bytes that are not UTF-8 become U+FFFD."""
        return self._raw.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def is_silent(self, token: int) -> bool:
        """Does `decode` leave this id out: a special token, or no token at all?"""
        return token in self._silent or self._raw.id_to_token(token) is None

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """`render_chat` with this model's template and special tokens; encode it without adding special tokens.

        Raises InvalidRequest if the model has no template.
        """
        if self.chat_template is None:
            raise InvalidRequest(
                "This model has no chat template: expected chat_template.jinja, or chat_template in "
                "tokenizer_config.json. Send plain text to it, or add a template to its directory."
            )
        variables = {**self.special, **variables}
        return render_chat(self.chat_template, messages, add_generation_prompt=add_generation_prompt, **variables)


def _content(token: Any) -> str | None:
    """Text of a token in tokenizer_config.json: a string, an object with its content, or null."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


class Detokenizer:
    """Text of token ids as they come: the pieces of `push` and `flush`, joined, are the text of all ids.

    A piece never ends inside a character: while bytes of it are missing, decoding gives U+FFFD, which is held back.
    With `stop` strings the text ends before the one that is complete first; what may become one is held back as well.

    Only the ids since the last but one complete piece are decoded, so that a token costs the same anywhere in a text:
    the older ones are context, as a token's text may depend on being the first. (Tokenizers that fall back to bytes one
    by one decode a run of them as a whole. If such a run turns out not to be UTF-8, what it gave before stays.)

    after: the ids in front, if the text goes on from there: at a beginning some tokenizers drop a space.
    """

    _PENDING = 7  # U+FFFDs that may still change: up to 3 bytes of a character, behind one of 4 that is context
    _WINDOW = 32  # ids kept if no piece is ever complete; more than the 3 * _PENDING that those may come from

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] = (), *, after: Sequence[int] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, (stop,) if isinstance(stop, str) else tuple(stop)
        self._ids = self._last_character(after)
        self._context = len(self._ids)  # how many of the ids are context
        self._sent = len(tokenizer.decode(self._ids))  # characters of their text that went out (or into _held)
        self._held = ""  # text that may become a stop string
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Has a stop string ended the text? Nothing comes after that."""
        return self._stopped

    def push(self, token: int) -> str:
        """The text that this token completes; often "" for a part of a character."""
        if self._stopped or self._tokenizer.is_silent(token):
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        end = max(len(text.rstrip("\ufffd")), len(text) - self._PENDING)
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        if piece and end == len(text):
            self._forget(self._context, text)
            self._context = len(self._ids)
        elif len(self._ids) > 2 * self._WINDOW:
            self._forget(len(self._ids) - self._WINDOW, text)
            self._context = 0
        return self._release(piece)

    def flush(self) -> str:
        """What was held back, at the end of the ids."""
        if self._stopped:
            return ""
        rest = self._tokenizer.decode(self._ids)[self._sent :]
        self._ids, self._context, self._sent = [], 0, 0
        return self._release(rest, last=True)

    def _last_character(self, ids: Sequence[int]) -> list[int]:
        """The fewest of the last ids that end in whole characters; none if there are no such."""
        tail = [i for i in ids[-self._WINDOW :] if not self._tokenizer.is_silent(i)]
        some = (tail[-n:] for n in range(1, min(len(tail), 4) + 1))  # a character has at most 4 bytes
        return next((few for few in some if "\ufffd" not in self._tokenizer.decode(few)), [])

    def _forget(self, count: int, text: str) -> None:
        """Drop the first of the ids, whose text this is; what was not sent stays unsent."""
        unsent = len(text) - self._sent
        self._ids = self._ids[count:]
        self._sent = max(0, len(self._tokenizer.decode(self._ids)) - unsent)

    def _release(self, piece: str, *, last: bool = False) -> str:
        text = self._held + piece
        # The first to be complete wins, not the first to begin: that does not depend on how ids cut the text.
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self._stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = 0 if last else max((_overlap(text, s) for s in self._stop), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in sizes if text.endswith(stop[:n])), 0)


# ---- chat ----------------------------------------------------------------------------------------------------

_FUEL = 10_000_000  # instructions; a message takes about a hundred


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
) -> str:
    """A conversation as the text that the model was trained on: the Jinja `template` with the set-up of transformers.

    messages: [{"role": ..., "content": ...}, ...]. add_generation_prompt: end with the beginning of an answer.
    variables: for the template, such as bos_token or tools. Raises InvalidRequest if the template refuses the
    conversation, InvalidModelFiles if it is not a template, MissingExtra without the library minijinja.
    """
    library = need("minijinja", "Rendering a chat template")
    environment = library.Environment(trim_blocks=True, lstrip_blocks=True, fuel=_FUEL, filters={"tojson": _to_json})
    environment.add_function("raise_exception", _refuse)
    environment.add_function("strftime_now", lambda form: datetime.now().strftime(form))
    # transformers marks the answers in a training text with this block; for a prompt it means nothing.
    template = re.sub(r"(\{%[-+]?\s*)generation(?=\s*[-+]?%\})", r"\1if true", template)
    template = re.sub(r"(\{%[-+]?\s*)endgeneration(?=\s*[-+]?%\})", r"\1endif", template)
    variables = {"tools": None, "documents": None, **variables}  # as transformers: `is not none` must be false
    try:
        return environment.render_str(
            template, messages=messages, add_generation_prompt=add_generation_prompt, **variables
        )
    except library.TemplateError as e:
        if e.kind in ("SyntaxError", "UnknownFilter", "UnknownFunction", "UnknownTest", "UnknownMethod"):
            raise InvalidModelFiles(f"The chat template cannot be run: {e.message}. Mend or replace it.") from e
        raise InvalidRequest(
            f"The chat template does not take this conversation: {e.message}. Expected messages of the form "
            f'{{"role": "user", "content": "..."}} in an order that the model knows.'
        ) from e


def _refuse(message: str) -> None:
    raise InvalidRequest(f"The chat template refuses this conversation: {message}")


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Jinja's filter as transformers defines it: without escapes for HTML."""
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})
