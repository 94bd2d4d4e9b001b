"""Chats in Python: what is said, thought and called."""

import json

import pytest

from hibachi import LLM, SamplingParams
from hibachi.errors import ConfigError, InvalidRequest
from hibachi.llm.own import open_texts

from ..serve.saying import SAYS, THINKS, told

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"at": {"enum": ["sun", "sea"]}}, "required": ["at"],
    "additionalProperties": False}}}  # fmt: skip
HI = [{"role": "user", "content": "Hi"}]
GREEDY = SamplingParams(temperature=0, max_tokens=90)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny") as found:
        found.generate("a", SamplingParams(max_tokens=1))  # its thread begins
        yield found


@pytest.fixture(scope="module")
def says(tmp_path_factory):
    """says(text, **options): the answer of a model that says so."""
    file = tmp_path_factory.mktemp("says") / "says.py"
    file.write_text(SAYS)
    with open_texts(f"{file}:Says") as texts:
        texts.generate("a", SamplingParams(max_tokens=1))

        def call(text, **options):
            [done] = texts.chat(told(text), GREEDY.with_(max_tokens=400), chat_template=THINKS, **options)
            return done

        yield call


GENERIC = {"chat_template": CHATML, "tool_call_parser": "generic"}


def test_a_call(llm):
    options = {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False, **GENERIC}
    first, second = llm.chat([HI, HI], [GREEDY, GREEDY.with_(max_tokens=40)], **options)
    [call] = first.tool_calls
    assert call.name == "look" and json.loads(call.arguments)["at"] in ("sun", "sea") and call.complete
    assert first.text == "" and first.reasoning == "" and call.id.startswith("call_")
    assert not second.tool_calls or not second.tool_calls[0].complete
    assert llm.chat(HI, GREEDY, **options)[0].tool_calls == first.tool_calls, "ids too"


def test_the_next_turn(llm):
    [first] = llm.chat(HI, GREEDY, tools=[LOOK], tool_choice="required", parallel_tool_calls=False, **GENERIC)
    message = first.choices[0].message
    assert message["tool_calls"][0]["function"]["name"] == "look" and message["role"] == "assistant"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "bright"}
    [second] = llm.chat([*HI, message, result], GREEDY.with_(max_tokens=4), tools=[LOOK], **GENERIC)
    assert "<tool_response>\nbright" in second.prompt and '{"name": "look"' in second.prompt


def test_thoughts_words_and_calls(says):
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "sun"}}\n</tool_call>'
    done = says(f"<think>\nHm.\n</think>\n\nI look.\n{call}", tools=[LOOK])
    assert (done.reasoning, done.text) == ("Hm.", "I look.")
    assert [(c.name, c.arguments) for c in done.tool_calls] == [("look", '{"at": "sun"}')]
    assert done.choices[0].message["reasoning_content"] == "Hm."
    raw = says("<think>\nHm.\n</think>\n\nWell", reasoning_parser="none")
    assert (raw.reasoning, raw.text) == ("", "<think>\nHm.\n</think>\n\nWell")


def test_what_is_wrong(llm):
    with pytest.raises(InvalidRequest, match="tools is not supported: this model's chat template does not show"):
        llm.chat(HI, GREEDY, tools=[LOOK], chat_template=CHATML, tool_call_parser="hermes")
    with pytest.raises(InvalidRequest, match=r"tools\[1\].function.name is 'look'"):
        llm.chat(HI, GREEDY, tools=[LOOK, LOOK], **GENERIC)
    for option, words in ("tool_call_parser", "auto, generic, apertus"), ("reasoning_parser", "auto, none, apertus"):
        with pytest.raises(ConfigError, match=f"^{option} 'nonsense' is not known: expected one of {words}"):
            llm.chat(HI, GREEDY, chat_template=CHATML, **{option: "nonsense"})


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
SHORT = GREEDY.with_(max_tokens=1)


def test_lists_of_texts_are_one_text(llm):
    [done] = llm.chat([{"role": "user", "content": PARTS}], SHORT, chat_template=CHATML)
    assert done.prompt.startswith("<|im_start|>user\na\nb<|im_end|>")
    system, developer = {"role": "system", "content": tuple(PARTS)}, {"role": "developer", "content": PARTS}
    [done] = llm.chat([system, developer, *HI], SHORT, chat_template=CHATML)
    assert done.prompt.startswith("<|im_start|>system\na\nb\n\na\nb<|im_end|>\n<|im_start|>user\nHi")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"role": "tool", "tool_call_id": "nope", "content": "y"},
            r"\[1\]\.tool_call_id names a call that was not made",
        ),
        ({"role": "tool", "content": "y"}, r"\[1\]\.tool_call_id is missing"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"\[1\]\.content: only parts of text are served"),
        ({"role": "user", "content": {"text": "y"}}, r"\[1\]\.content must be a text or a list of parts"),
        ({"content": "y"}, r"\[1\] has no role"),
    ],
)
def test_what_is_wrong_with_a_message_is_refused_at_the_call(llm, message, words):
    with pytest.raises(InvalidRequest, match="^messages" + words):
        llm.chat([*HI, message], SHORT, **GENERIC)
