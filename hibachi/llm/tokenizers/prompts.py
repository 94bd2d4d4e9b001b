"""Prompts become token ids, and are checked: all of that which needs a tokenizer, and no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hibachi.errors import InvalidRequest, PromptTooLong, shown
from hibachi.request import Prompt

SOMEWHAT_LONG = 16  # characters of a token, on average: texts with more are not read
LEAST_TEXT = 2**20  # characters of a text that is cut into tokens nevertheless


class TextPrompts:
    """The prompts of one model. context: most tokens of a request."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        self.tokenizer: Any = tokenizer
        self.context: int = context

    def spellings(self, word: str) -> set[tuple[int, ...]]:
        """A bad word in tokens: at the beginning of a word, and elsewhere. As in vLLM."""
        texts = word.lstrip(), " " + word.lstrip()
        found = {tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts} - {()}
        if not found:
            raise InvalidRequest.at(
                ("bad_words",), f" must be texts that the tokenizer has tokens for; got {shown(word)}."
            )
        return found

    def given(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt; none if it is given as embeddings."""
        if not isinstance(prompt, Mapping):
            return self.encode(prompt)
        if set(prompt) != {"prompt_embeds"}:
            raise InvalidRequest(
                f'A prompt that is a dictionary must be {{"prompt_embeds": array}}; got the keys {list(prompt)!r:.80}.'
            )
        return []

    def check_text(self, text: str) -> None:
        """Raises PromptTooLong for a text that has more tokens than the context, however it is cut into them.

        To be asked before it is: cutting takes seconds a megabyte, and memory.
        """
        context = self.context
        if len(text) <= context:
            return
        self.check_size(text)
        fewest: int = getattr(self.tokenizer, "fewest_tokens", lambda text: 0)(text)
        if fewest > context:
            raise PromptTooLong(
                f"{most_tokens(context)} However, the text has {len(text)} characters, which are at least {fewest} "
                f"tokens. {input_exceeds(context - 1)} Shorten the text."
            )

    def check_size(self, text: str) -> None:
        """Raises PromptTooLong for a text that is not cut into tokens at all, as that takes memory and time."""
        most = max(self.context * SOMEWHAT_LONG, LEAST_TEXT)
        if len(text) > most:
            raise PromptTooLong(
                f"{most_tokens(self.context)} However, the text has {len(text)} characters, and at most {most} are cut "
                f"into tokens. {input_exceeds(self.context - 1)} Shorten the text."
            )

    def encode(self, prompt: Prompt) -> list[int]:
        ids: Any
        if isinstance(prompt, str):
            self.check_text(prompt)
            ids = self.tokenizer.encode(prompt)
        else:
            ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
            if not _are_ids(ids):
                raise InvalidRequest(f"A prompt must be a text or a list of token ids; got {_shown(prompt)}.")
        if not len(ids):
            raise InvalidRequest(f"A prompt must hold at least one token; got {_shown(prompt)}. Write something in it.")
        return list(map(int, ids))

    def predicted(self, text: str) -> list[int]:
        """The tokens of a text that an output may be. What cannot fit into the context is cut off before it is read.

        Raises InvalidRequest.
        """
        text = text[: self.context * SOMEWHAT_LONG]
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InvalidRequest(
                f"A prediction must be a string of valid Unicode; got {text[e.start]!r} at character {e.start}. Decode "
                f"bytes with errors='replace', for example."
            ) from e
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids[: self.context]

    def joined(self, prompt: Prompt, continuation: Prompt) -> tuple[list[int], list[int]]:
        """The tokens of a prompt and of its continuation."""
        before = self.encode(prompt)
        if isinstance(prompt, str) and isinstance(continuation, str):
            after = self.encode(prompt + continuation)[len(before) :]
        elif isinstance(continuation, str):
            after = self.tokenizer.encode(continuation, add_special_tokens=False)
        else:
            after = self.encode(continuation)
        if not after:
            raise InvalidRequest(f"A continuation must hold at least one token; got {shown(continuation)}.")
        return before, after


def check_fits(n: int, new: int | None, context: int) -> None:
    """Do n tokens of a prompt, and as many new ones as were asked for, fit? Raises PromptTooLong."""
    if n >= context:
        raise PromptTooLong(
            f"{most_tokens(context)} However, you requested at least {n + 1} tokens ({n} in the prompt and one new). "
            f"{input_exceeds(context - 1)} Shorten the prompt."
        )
    if new is not None and n + new > context:
        raise PromptTooLong.at(
            ("max_tokens",),
            f" is {shown(new)}, and the prompt has {n} tokens. {most_tokens(context)} However, you requested {n + new} "
            f"tokens. Ask for at most {context - n} new ones.",
        )


def most_tokens(context: int) -> str:
    """The sentence by which clients know that a conversation must be shortened: LiteLLM, pi-ai and others look for it,
    as vLLM and OpenAI say it. Further ones look for that of `input_exceeds`.
    """
    return f"This model's maximum context length is {context} tokens."


def input_exceeds(most: int) -> str:
    """See `most_tokens`; langchain-openai and LiteLLM look for this one, as OpenAI's responses say it."""
    return f"Input tokens exceed the configured limit of {most} tokens."


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # a list in a list in a list ...
        return f"a {type(value).__qualname__} that cannot be shown"


def listed(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequest(
            f"Expected a prompt (a text or a list of token ids) or a list of prompts; got {_shown(prompts)}."
        )
    prompts = list(prompts)
    return [prompts] if prompts and all(map(is_id, prompts)) else prompts


def is_id(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _are_ids(x: Any) -> bool:
    if type(x) is list and set(map(type, x)) == {int}:  # soon said, also of a long prompt
        return True
    return isinstance(x, Sequence) and not isinstance(x, (bytes, bytearray)) and all(map(is_id, x))


def conversations(messages: Any) -> list[Any]:
    """One conversation or several, as a list."""
    many = [messages] if _is_conversation(messages) else messages
    if not isinstance(many, Sequence) or not all(map(_is_conversation, many)):
        raise InvalidRequest(
            f'A conversation must be a list of messages {{"role": "user", "content": "..."}}; got {_shown(messages)}.'
        )
    return list(many)


def _is_conversation(x: Any) -> bool:
    return isinstance(x, Sequence) and len(x) > 0 and all(isinstance(m, Mapping) for m in x)
