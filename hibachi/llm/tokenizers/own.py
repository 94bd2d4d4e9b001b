"""Tokenizers of models that have no files: one of the user's own, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hibachi.errors import ConfigError, InvalidRequest
from hibachi.llm.tokenizers.chat import choose_template, render_chat
from hibachi.llm.tokenizers.pieces import AnyText, Text


class _EveryId(Mapping[int, str]):
    """Holds every id."""

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: int) -> str:
        return ""

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


class OwnTokenizer:
    """Any object with `encode(text) -> ids` and `decode(ids) -> text`; perhaps a `chat_template`, Jinja source,
    `longest_token`, the bytes of text that one token stands for at most, and `token_bytes(id) -> bytes`, what a token
    stands for inside a text, so that the form of answers can be prescribed.

    Raises ConfigError if it lacks one of the methods.
    """

    def __init__(self, own: Any) -> None:
        for name in ("encode", "decode"):
            if not callable(getattr(own, name, None)):
                raise ConfigError(
                    f"A tokenizer has encode(text) -> ids and decode(ids) -> text; {type(own).__name__} has no {name}."
                )
        self._own = own
        template = getattr(own, "chat_template", None)
        self.chat_templates: dict[str, str] = {} if template is None else {"default": template}

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @property
    def longest_token(self) -> int | None:
        """What the object itself says it is, see `Tokenizer`: a positive integer; else None."""
        own = getattr(self._own, "longest_token", None)
        return own if isinstance(own, int) and own > 0 else None

    def fewest_tokens(self, text: str) -> int:
        longest = self.longest_token
        return 0 if longest is None else -(-len(text.encode(errors="replace")) // longest)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            return [int(i) for i in self._own.encode(text)]
        except Exception as e:  # the user's code; a letter that it does not know, for example
            raise InvalidRequest(f"The tokenizer cannot encode this prompt: {type(e).__name__}: {e}.") from e

    def spans(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """As `Tokenizer.spans`; where an id stands is not known, which (id, 0, 0) says."""
        return [(i, 0, 0) for i in self.encode(text)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        ids = [int(i) for i in ids]
        return str(self._own.decode(ids)) if ids else ""

    def is_silent(self, token: int) -> bool:
        return False

    @property
    def spells(self) -> bool:
        """Does it say which bytes a token stands for? `decode` alone loses blanks and halves of characters."""
        return callable(getattr(self._own, "token_bytes", None))

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int) -> bytes:
        return bytes(self._own.token_bytes(token)) if self.spells else self.decode([token]).encode()

    @property
    def text_after(self) -> Callable[[Sequence[int]], Text]:
        return lambda after: AnyText(self.decode, _EveryId(), after)

    @property
    def full_text_after(self) -> Callable[[Sequence[int]], Text]:
        """The same: what its `decode` leaves out is not known."""
        return self.text_after

    def text_showing(self, shown: frozenset[int]) -> Callable[[Sequence[int]], Text]:
        """The same."""
        return self.text_after

    def split_special(self, text: str) -> list[str | int]:
        """The whole text: which tokens are special is not known."""
        return [text] if text else []

    def guarded(self, text: str) -> str:
        """The same: likewise."""
        return text

    bare = guarded

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        template = choose_template(self.chat_templates, chat_template, tools=variables.get("tools") is not None)
        return render_chat(template, messages, add_generation_prompt=add_generation_prompt, **variables)


class _Silence:
    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class NoTokenizer:
    """Stands for the tokenizer of a model without one: prompts and answers are token ids, and every text is empty.

    why: what was looked for, where the model comes from files.
    """

    def __init__(self, why: str = "") -> None:
        self.why = why

    chat_templates: Mapping[str, str] = {}
    chat_template = None
    longest_token = None

    eos_id = None

    def fewest_tokens(self, text: str) -> int:
        return 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        why, mend = "", ""
        if self.why:
            why = f" ({self.why})"
            mend = " If it has one of another kind: AutoTokenizer.from_pretrained(path).save_pretrained(path)."
        raise InvalidRequest(
            f"This model has no tokenizer{why}, so a prompt must be a list of token ids; got a text.{mend}"
        )

    def spans(self, text: str, *, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        return [(i, 0, 0) for i in self.encode(text)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    spells = False
    special_ids: frozenset[int] = frozenset()

    def is_silent(self, token: int) -> bool:
        return True

    def token_bytes(self, token: int) -> bytes:
        return b""

    @property
    def text_after(self) -> Callable[[Sequence[int]], Text]:
        return lambda after: _Silence()

    @property
    def full_text_after(self) -> Callable[[Sequence[int]], Text]:
        return self.text_after

    def text_showing(self, shown: frozenset[int]) -> Callable[[Sequence[int]], Text]:
        return self.text_after

    def split_special(self, text: str) -> list[str | int]:
        return [text] if text else []

    def guarded(self, text: str) -> str:
        return text

    bare = guarded

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        raise InvalidRequest(
            "This model has no tokenizer and no chat template: expected a prompt of token ids (over HTTP at "
            "/v1/completions); got messages."
        )
