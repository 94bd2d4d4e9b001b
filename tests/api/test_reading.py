"""Prompts and conversations become ids that were checked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hibachi.errors import InvalidRequest, PromptTooLong
from hibachi.llm.dialects.chat import Conversation, FormChecks
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.reading import Reading
from hibachi.llm.dialects.steps import run
from hibachi.llm.dialects.truncation import Truncation
from hibachi.llm.tokenizers.prompts import TextPrompts
from hibachi.request import SamplingParams


class Letters:
    """A token for each letter, and 99 in front where special tokens are added."""

    chat_templates = ()

    guarded = bare = staticmethod(str)

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


def read(reading, name, *args, **kwargs):
    if name == "chat":
        return run(reading.chat(*args, SamplingParams(), FormChecks(lambda params: None, ()))).ids
    return run(getattr(reading, name)(*args, **kwargs))


def reading(template="", context=8):
    return Reading(TextPrompts(Letters(), context), 100, template)


def talk(*messages, special=False, open_end=False, truncation=None, **variables):
    """A conversation of messages, each a role and a content."""
    messages = [{"role": role, "content": content} for role, content in messages]
    return Conversation(messages, variables, special=special, open_end=open_end, truncation=truncation)


def of(text):
    return [ord(c) % 99 for c in text]


def test_prompts_become_ids_in_their_order():
    mixed = ["ab", (7, 8), "c"]
    assert read(reading(), "encode", mixed, "prompt") == [[99, *of("ab")], [7, 8], [99, *of("c")]]
    assert read(reading(), "encode", mixed, "prompt", special=False) == [of("ab"), [7, 8], of("c")]


@pytest.mark.parametrize(
    "prompts, error, message",
    [
        (["ab", [7, 100]], Refused, "input: token ids must be from 0 to 99; got 7 to 100."),
        ([[-1]], Refused, "input: token ids must be from 0 to 99; got -1 to -1."),
        (
            [[7] * 8],
            PromptTooLong,
            "This model's maximum context length is 8 tokens. However, you requested at least",
        ),
        (
            ["a" * 9],
            PromptTooLong,
            "This model's maximum context length is 8 tokens. However, the text has 9",
        ),
        (["ab", ""], Refused, "input is empty: it must hold at least one token."),
        (["a\0"], InvalidRequest, "no NUL"),
    ],
)
def test_what_is_wrong_with_a_prompt(prompts, error, message):
    with pytest.raises(error) as e:
        read(reading(), "encode", prompts, "input", special=False)
    assert str(e.value).startswith(message)


def test_all_prompts_are_checked_before_any_is_read():
    with pytest.raises(PromptTooLong):
        read(reading(), "encode", ["a\0", [7] * 8], "prompt")


def test_a_conversation_becomes_ids():
    theirs = {"chat_template": "theirs", "messages": "theirs"}  # which are not for a sender to say
    asked = replace(talk(("user", "ab"), ("assistant", None)), variables={"end": "e", **theirs})
    assert read(reading("t"), "chat", asked) == of("abet")
    with pytest.raises(Refused, match="The conversation is empty"):
        read(reading(""), "chat", talk(("user", "")))
    with pytest.raises(PromptTooLong, match="9 characters"):
        read(reading("t"), "chat", talk(("user", "a" * 8)))


def test_a_model_without_a_template_has_no_conversations():
    with pytest.raises(Refused, match="no chat template") as e:
        read(reading(None), "chat", talk(("user", "a")))
    assert (e.value.param, e.value.code) == ("messages", "no_chat_template")


def test_what_is_too_long_may_be_cut():
    """truncate_prompt_tokens: of what is to be cut the text may be longer than the context."""
    last = Truncation(3)
    assert read(reading(), "encode", ["abcdefghijkl", list(range(20))], "prompt", truncation=last) == [
        of("jkl"),
        [17, 18, 19],
    ]
    assert read(reading(), "encode", ["abcd"], "prompt", truncation=Truncation(3, first=True)) == [[99, *of("ab")]]
    fitting = Truncation(None, new=5)
    assert read(reading(), "encode", ["abcdefgh"], "prompt", truncation=fitting) == [of("fgh")]
    limited = Reading(TextPrompts(Letters(), 8), 100, "", 2)
    assert read(limited, "encode", ["abcdefgh"], "prompt", truncation=Truncation(None)) == [of("gh")]
    long = "user", "abcdefghijkl"
    assert read(reading(), "chat", talk(long, truncation=last)) == of("jkl")
    for name, given in (("encode", (["abcdefghijkl"], "prompt")), ("chat", (talk(long),))):
        with pytest.raises(PromptTooLong):
            read(reading(), name, *given)
    with pytest.raises(Refused, match="token ids must be from 0 to 99"):
        read(reading(), "encode", [[*range(20), 100, 1, 2, 3]], "prompt", truncation=last)
    with pytest.raises(PromptTooLong, match="are cut into tokens"):
        read(reading(), "encode", ["a" * (2**20 + 1)], "prompt", truncation=last)
    with pytest.raises(Refused, match="is empty"):
        read(reading(), "encode", [""], "prompt", special=False, truncation=last)


def test_special_tokens_of_a_conversation():
    assert read(reading(), "chat", talk(("user", "ab"))) == of("ab")
    assert read(reading(), "chat", talk(("user", "ab"), special=True)) == [99, *of("ab")]


def test_a_conversation_that_goes_on():
    begun = "assistant", "ab"
    assert read(reading(), "chat", talk(begun, end=".", open_end=True)) == of("ab")
    assert read(reading(), "chat", talk(begun, end=".")) == of("ab.")


def test_a_conversation_is_only_cut_into_tokens():
    begun = "assistant", "ab"
    assert read(reading("t"), "render", talk(begun, end=".")) == of("ab.t")
    assert read(reading(), "render", talk(begun, end=".", open_end=True)) == of("ab")
    with pytest.raises(Refused, match="The conversation is empty"):
        read(reading(), "render", talk(("user", "")))
    with pytest.raises(PromptTooLong, match="9 characters"):
        read(reading("t"), "render", talk(("user", "a" * 8)))
    with pytest.raises(Refused, match="no chat template"):
        read(reading(None), "render", talk(begun))
