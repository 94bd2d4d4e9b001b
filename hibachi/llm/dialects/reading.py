"""Turns requests into checked token ids. Beside an event loop, long texts are read in threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hibachi.errors import PromptTooLong
from hibachi.llm.chatformat.templates.choosing import Parsers
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai.parse import Asked
from hibachi.llm.dialects.openai.talk import ChatTalk
from hibachi.llm.dialects.tokenizing import Tokenizing
from hibachi.llm.dialects.truncation import Truncation
from hibachi.llm.tokenizers.prompts import Prompts


class Reading:
    """Reads prompts for one model. vocab_size: None means any id is a token. chat_template: the name of one of the
    model's, or Jinja source; None means the model's own. longest: tokens of a prompt; None means what the context
    leaves. parsers: how the format of tool calls and reasoning is chosen.
    """

    def __init__(
        self,
        prompts: Prompts,
        vocab_size: int | None,
        chat_template: str | None = None,
        longest: int | None = None,
        parsers: Parsers | None = None,
    ) -> None:
        self.longest = longest
        self.prompts: Prompts = prompts
        self.vocab_size: int | None = vocab_size
        self._tokenizing = Tokenizing()
        self.talk: ChatTalk = ChatTalk(prompts.tokenizer, chat_template, parsers)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        size = self.vocab_size
        if ids and size is not None and not (min(ids) >= 0 and max(ids) < size):
            raise Refused(
                f"{param}: token ids must be from 0 to {size - 1}; got {min(ids)} to {max(ids)}.",
                param=param,
                code="invalid_value",
            )

    def check_length(self, ids: Sequence[int], limit: int | None) -> None:
        """Raise PromptTooLong for a prompt that does not fit, or not with the new tokens that were asked for."""
        longest, n = self.prompts.context, len(ids)
        if self.longest is not None and n > self.longest:
            raise PromptTooLong(f"The prompt has {n} tokens; at most {self.longest} are taken. Shorten it.")
        if n >= longest:
            raise PromptTooLong(
                f"The prompt has {n} tokens, and this model's context holds {longest}, at least one of them new. "
                f"Shorten it."
            )
        if limit is not None and n + limit > longest:
            raise PromptTooLong.at(
                ("max_tokens",),
                f" is {limit} and the prompt has {n} tokens, and this model's context holds {longest}. Ask for at most "
                f"{longest - n}.",
            )

    # ---- beside an event loop ------------------------------------------------------------------------------------

    async def encode(
        self,
        prompts: Sequence[Any],
        param: str,
        tenant: str = "",
        *,
        special: bool = True,
        truncation: Truncation | None = None,
    ) -> list[list[int]]:
        """Token ids of prompts, none of them too long. Raises Refused, InvalidRequest or PromptTooLong."""
        self._check(prompts, param, truncation)
        found = await self.tokens(_texts(prompts), special, tenant)
        return self._kept(_filled(prompts, found, param), truncation)

    async def tokens(self, texts: Sequence[str], special: bool, tenant: str = "") -> list[list[int]]:
        """Token ids of texts of any length. Raises Refused if too much is being read already, InvalidRequest."""
        return await self._tokenizing.run(sum(map(len, texts)), partial(self._cut, texts, special), tenant)

    async def predicted(self, text: str, tenant: str = "") -> list[int]:
        """Token ids of a text that an answer may be; what cannot fit into the context is cut off. Raises Refused if too
        much is being read already, InvalidRequest.
        """
        return await self._tokenizing.run(len(text), partial(self.prompts.predicted, text), tenant)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tenant: str = "",
        *,
        open_end: bool = False,
    ) -> list[int]:
        """Token ids of a conversation that is not too long. open_end: its last message goes on. Raises Refused,
        InvalidRequest or PromptTooLong.
        """
        text = await self.prompt_text(messages, variables, tenant, open_end=open_end)
        [ids] = await self.tokens([text], False, tenant)
        return _said(ids)

    async def prompt_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        tenant: str = "",
        *,
        open_end: bool = False,
    ) -> str:
        """The text that `render` tokenizes. Raises as it does."""
        self.talk.check()
        rendering = partial(self.talk.prompt_text, messages, variables, open_end=open_end)
        text = await self._tokenizing.aside(rendering, tenant)
        self.prompts.check_text(text)
        return text

    async def spans(self, text: str, special: bool, tenant: str = "") -> list[tuple[int, int, int]]:
        """`tokens` of one text, each as id, begin and end in the text, in characters."""
        spans = self.prompts.tokenizer.spans
        return await self._tokenizing.run(len(text), lambda: spans(text, add_special_tokens=special), tenant)

    async def chat(self, asked: Asked, tenant: str = "") -> list[int]:
        """Token ids of the prompt of a chat, not too long. What is found out about its answer is noted in `asked`, see
        `Talk.prompt`. Raises Refused, InvalidRequest or PromptTooLong.
        """
        self.talk.check()
        text = await self._tokenizing.aside(partial(self.talk.prompt, asked), tenant)
        self._check_text(text, asked.truncation)
        return self._chat(await self.tokens([text], asked.special, tenant), asked)

    def _chat(self, ids: list[list[int]], asked: Asked) -> list[int]:
        return self._kept([_said(own) for own in ids], asked.truncation)[0]

    # ---- here and now, where nobody else waits -------------------------------------------------------------------

    def encode_now(
        self, prompts: Sequence[Any], param: str, *, special: bool = True, truncation: Truncation | None = None
    ) -> list[list[int]]:
        """As `encode`."""
        self._check(prompts, param, truncation)
        return self._kept(_filled(prompts, self._cut(_texts(prompts), special), param), truncation)

    def chat_now(self, asked: Asked, variables: Mapping[str, Any] | None = None) -> list[int]:
        """As `chat`. variables: further ones for the template."""
        self.talk.check()
        text = self.talk.prompt(asked, variables)
        self._check_text(text, asked.truncation)
        return self._chat(self._cut([text], asked.special), asked)

    # ---- what both do --------------------------------------------------------------------------------------------

    def _check(self, prompts: Sequence[Any], param: str, truncation: Truncation | None) -> None:
        """Check all prompts before any is read."""
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_text(prompt, truncation)
            else:
                if truncation is None:
                    self.check_length(prompt, None)
                self.check_ids(prompt, param)

    def _check_text(self, text: str, truncation: Truncation | None) -> None:
        if truncation is None:
            self.prompts.check_text(text)
        else:
            self.prompts.check_size(text)

    def _kept(self, ids: list[list[int]], truncation: Truncation | None) -> list[list[int]]:
        if truncation is None:
            return ids
        return [truncation.cut(own, self.prompts.context, self.longest) for own in ids]

    def _cut(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        return [self.prompts.tokenizer.encode(text, add_special_tokens=special) for text in texts]


def _texts(prompts: Sequence[Any]) -> list[str]:
    return [p for p in prompts if isinstance(p, str)]


def _filled(prompts: Sequence[Any], found: Sequence[list[int]], param: str) -> list[list[int]]:
    """The ids of all prompts. found: of the prompts that are texts. Raises Refused if any is empty."""
    next_ = iter(found)
    ids = [next(next_) if isinstance(p, str) else list(p) for p in prompts]
    if not all(ids):
        raise Refused(f"{param} is empty: it must hold at least one token.", param=param, code="empty_string")
    return ids


def _said(ids: list[int]) -> list[int]:
    if not ids:
        raise Refused("The conversation is empty.", param="messages", code="empty_array")
    return ids
