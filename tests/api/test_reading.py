"""Prompts and conversations become ids that were checked: the same beside an event loop as in a plain call."""

from __future__ import annotations

import asyncio

import pytest

from hibachi.api.errors import Refused
from hibachi.api.reading import Reading
from hibachi.api.truncation import Truncation
from hibachi.errors import InvalidRequest, PromptTooLong
from hibachi.model.text.prompts import Prompts


class Letters:
    """A token for each letter, and 99 in front where special tokens are added."""

    chat_templates = ()

    def encode(self, text, add_special_tokens=True):
        if "\0" in text:
            raise InvalidRequest("no NUL")
        return [99] * bool(add_special_tokens) + [ord(c) % 99 for c in text]

    def fewest_tokens(self, text):
        return len(text)

    def render_chat(self, messages, chat_template="own", **variables):
        if any(m["content"] is None for m in messages):
            raise InvalidRequest("no null")
        return "".join(m["content"] for m in messages) + variables.get("end", "") + chat_template


@pytest.fixture(params=["now", "beside a loop"])
def read(request):
    """read(reading, "encode" or "render", ...): by either way."""

    def call(reading, name, *args, **kwargs):
        if request.param == "now":
            return getattr(reading, f"{name}_now")(*args, **kwargs)
        return asyncio.run(getattr(reading, name)(*args, **kwargs))

    return call


def reading(template="", context=8):
    return Reading(Prompts(Letters(), context), 100, template)


def of(text):
    return [ord(c) % 99 for c in text]


def test_prompts_become_ids_in_their_order(read):
    mixed = ["ab", (7, 8), "c"]
    assert read(reading(), "encode", mixed, "prompt") == [[99, *of("ab")], [7, 8], [99, *of("c")]]
    assert read(reading(), "encode", mixed, "prompt", special=False) == [of("ab"), [7, 8], of("c")]


@pytest.mark.parametrize(
    "prompts, error, message",
    [
        (["ab", [7, 100]], Refused, "input: token ids must be from 0 to 99; got 7 to 100."),
        ([[-1]], Refused, "input: token ids must be from 0 to 99; got -1 to -1."),
        ([[7] * 8], PromptTooLong, "The prompt has 8 tokens, and this model's context holds 8"),
        (["a" * 9], PromptTooLong, "The text has 9 characters, and at least 9 tokens"),
        (["ab", ""], Refused, "input is empty: it must hold at least one token."),
        (["a\0"], InvalidRequest, "no NUL"),
    ],
)
def test_what_is_wrong_with_a_prompt(read, prompts, error, message):
    with pytest.raises(error) as e:
        read(reading(), "encode", prompts, "input", special=False)
    assert str(e.value).startswith(message)


def test_all_prompts_are_checked_before_any_is_read(read):
    with pytest.raises(PromptTooLong):
        read(reading(), "encode", ["a\0", [7] * 8], "prompt")


def test_a_conversation_becomes_ids(read):
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": None}]
    variables = {"end": "e", "chat_template": "theirs", "messages": "theirs"}  # these two are not for a sender to say
    assert read(reading("t"), "render", messages, variables) == of("abet")
    messages = [{"role": "user", "content": ""}]
    with pytest.raises(Refused, match="The conversation is empty"):
        read(reading(""), "render", messages, {})
    with pytest.raises(PromptTooLong, match="9 characters"):
        read(reading("t"), "render", [{"role": "user", "content": "a" * 8}], {})


def test_a_model_without_a_template_has_no_conversations(read):
    with pytest.raises(Refused, match="no chat template") as e:
        read(reading(None), "render", [{"role": "user", "content": "a"}], {})
    assert (e.value.param, e.value.code) == ("messages", "no_chat_template")


def test_what_is_too_long_may_be_cut(read):
    """truncate_prompt_tokens: of what is to be cut the text may be longer than the context."""
    last = Truncation(3)
    assert read(reading(), "encode", ["abcdefghijkl", list(range(20))], "prompt", truncation=last) == [
        of("jkl"),
        [17, 18, 19],
    ]
    assert read(reading(), "encode", ["abcd"], "prompt", truncation=Truncation(3, first=True)) == [[99, *of("ab")]]
    fitting = Truncation(None, new=5)
    assert read(reading(), "encode", ["abcdefgh"], "prompt", truncation=fitting) == [of("fgh")]
    limited = Reading(Prompts(Letters(), 8), 100, "", 2)
    assert read(limited, "encode", ["abcdefgh"], "prompt", truncation=Truncation(None)) == [of("gh")]
    chat = [{"role": "user", "content": "abcdefghijkl"}]
    assert read(reading(), "render", chat, {}, truncation=last) == of("jkl")
    for name, given in (("encode", (["abcdefghijkl"], "prompt")), ("render", (chat, {}))):
        with pytest.raises(PromptTooLong):
            read(reading(), name, *given)
    with pytest.raises(Refused, match="token ids must be from 0 to 99"):
        read(reading(), "encode", [[*range(20), 100, 1, 2, 3]], "prompt", truncation=last)
    with pytest.raises(PromptTooLong, match="are cut into tokens"):
        read(reading(), "encode", ["a" * (2**20 + 1)], "prompt", truncation=last)
    with pytest.raises(Refused, match="is empty"):
        read(reading(), "encode", [""], "prompt", special=False, truncation=last)


def test_special_tokens_of_a_conversation(read):
    chat = [{"role": "user", "content": "ab"}]
    assert read(reading(), "render", chat, {}) == of("ab")
    assert read(reading(), "render", chat, {}, special=True) == [99, *of("ab")]


def test_a_conversation_that_goes_on(read):
    chat = [{"role": "assistant", "content": "ab"}]
    assert read(reading(), "render", chat, {"end": "."}, open_end=True) == of("ab")
    assert read(reading(), "render", chat, {"end": "."}) == of("ab.")
