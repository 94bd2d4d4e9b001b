"""A conversation whose last message goes on: rendered up to the end of its content, as transformers does it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("minijinja")

from hibachi.llm.chatformat.history import CUT_SHOWN, rendered
from hibachi.llm.chatformat.messages import IMAGE
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai.conversation import check_values, conversation, refusing
from hibachi.llm.tokenizers.chat import render_chat

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
TURNS = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<end>\n{% endfor %}"
KEEPS = TURNS + "{% if add_generation_prompt %}<a>{% endif %}"
STRIPS = KEEPS.replace("m.content", "m.content | trim")
USER = {"role": "user", "content": "Go on: end"}


def opened(template, content, **variables):
    def render(messages, **more):
        return render_chat(template, messages, **more)

    messages = [USER, {"role": "assistant", "content": content}]
    with refusing():
        return rendered(render, messages, {"add_generation_prompt": False, **variables}, open_end=True)


HEAD = "<user>\nGo on: end<end>\n<assistant>\n"


@pytest.mark.parametrize(
    "content, kept, stripped",
    [
        ("Once", "Once", "Once"),
        ("Once upon ", "Once upon ", "Once upon"),
        (" Once\n\n", " Once\n\n", "Once"),
        ("", "", ""),
        ("end", "end", "end"),  # which stands behind it as well
        ("<", "<", "<"),
        ("Go on: end", "Go on: end", "Go on: end"),  # and in front of it
        ("{{ x }}", "{{ x }}", "{{ x }}"),
        ("é 猫\t", "é 猫\t", "é 猫"),
    ],
)
def test_the_text_ends_with_the_content(content, kept, stripped):
    assert opened(KEEPS, content) == HEAD + kept
    assert opened(STRIPS, content) == HEAD + stripped


def test_a_template_that_takes_the_blanks_of_nothing_but_blanks():
    assert opened(KEEPS, " \n") == HEAD + " \n"
    assert opened(STRIPS, " \n") == opened(STRIPS, "\n") == HEAD  # the line break in front is the template's own


def test_what_the_template_does_not_show_is_refused_by_name():
    for template in (KEEPS.replace("m.content", "m.content | upper"), "{{ messages[0].content }}"):
        with pytest.raises(Refused) as caught:
            opened(template, "Once")
        assert caught.value.param == "continue_final_message" and caught.value.status == 400


@pytest.mark.parametrize("content", [None, 7])
def test_there_must_be_a_content(content):
    with pytest.raises(Refused, match="continue_final_message needs a last message with a content"):
        opened(KEEPS, content)


@pytest.mark.parametrize("name", sorted(p.stem for p in TEMPLATES.glob("*.jinja")))
def test_templates_of_models(name):
    """Nothing stands behind the content: no end of the turn, and no beginning of another."""
    template = (TEMPLATES / f"{name}.jinja").read_text()
    found = opened(template, "Once upon a time", bos_token="<s>", eos_token="</s>")
    assert found.endswith("Once upon a time") and "Go on: end" in found


@pytest.mark.parametrize("field", ["tools", "documents"])
def test_what_a_template_does_not_look_at_is_refused(field):
    """As its sender would expect that the model sees it."""
    looks = "{% for m in messages %}{{ m.content }}{% endfor %}{{ " + field + " | tojson if " + field + " }}"

    def shown(template):
        with refusing():
            return rendered(lambda m, **v: render_chat(template, m, **v), [USER], {field: [{"text": "a"}]})

    assert '"text"' in shown(looks)
    with pytest.raises(Refused) as caught:
        shown(KEEPS)
    assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")


def calls(n, arguments="{}"):
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"c{i}", "function": function} for i in range(n)],
    }


def test_as_many_messages_as_are_served_are_taken():
    assert len(conversation([USER] * 7, 7)) == 7
    assert len(conversation([calls(7)], 7)[0]["tool_calls"]) == 7
    with pytest.raises(Refused, match="messages has 8 entries; at most 7 are served"):
        conversation([USER] * 8, 7)


def test_calls_of_all_messages_are_bounded():
    with pytest.raises(Refused, match="messages has 4098 tool_calls; at most 4096 are served"):
        conversation([calls(2049), calls(2049)], 4096)
    with pytest.raises(Refused) as found:
        conversation([USER, calls(1, '{"a": [' + "1," * (1 << 18))], 4096)
    assert found.value.param == "messages[1].tool_calls[0].function.arguments"
    with pytest.raises(Refused) as found:
        conversation([calls(3, '{"a": [' + "1," * 200_000 + "1]}")], 4096)
    assert found.value.param == "messages[0].tool_calls[2].function.arguments"


FUNCTION = {"name": "f", "arguments": '{"n": 1}'}
CALL = {"id": "c0", "type": "function", "function": FUNCTION}
PLACE = "messages[2].tool_calls[1]"


def called(call, **more):
    return [USER, {"role": "user", "content": "b"}, {"role": "assistant", "content": None, "tool_calls": [CALL, call]}]


@pytest.mark.parametrize(
    ("call", "param", "words"),
    [
        (7, PLACE, "must be a call"),
        ({**CALL, "id": 7}, f"{PLACE}.id", "must be a text; got 7"),
        ({**CALL, "type": "custom", "custom": {"name": "f"}}, f"{PLACE}.type", "is not supported as 'custom'"),
        ({"id": "c"}, f"{PLACE}.function", "must be an object with name and arguments"),
        ({**CALL, "function": {"arguments": "{}"}}, f"{PLACE}.function.name", "must be the name of a function"),
        ({**CALL, "function": {**FUNCTION, "name": ""}}, f"{PLACE}.function.name", "must be the name of a function"),
    ],
)
def test_what_is_wrong_with_a_call_is_said_of_its_place(call, param, words):
    with pytest.raises(Refused) as found:
        conversation(called(call), 4096)
    assert found.value.param == param and words in str(found.value), str(found.value)
    assert str(found.value).startswith(f"{param} ") and len(str(found.value)) < 400
    assert found.value.code == ("unsupported_parameter" if param.endswith("type") else "invalid_value")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": "a", "tool_calls": "f()"}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": "a", "tool_calls": {"0": CALL}}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": None, "function_call": FUNCTION}, "messages[1].function_call"),
        ({"content": "a"}, "messages[1].role"),
    ],
)
def test_what_is_wrong_with_a_message_is_said_of_its_place(message, param):
    with pytest.raises(Refused) as found:
        conversation([USER, message], 4096)
    assert found.value.param == param


@pytest.mark.parametrize("arguments", ["", "{}", "null", " {} ", None, {}])
def test_no_arguments_in_many_ways(arguments):
    function = {"name": "f"} if arguments is None else {"name": "f", "arguments": arguments}
    given = [{"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": function}]}]
    [message] = conversation(given, 4096)
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_what_is_null_or_empty_is_not_there():
    for more in ({"tool_calls": None}, {"tool_calls": []}, {"function_call": None}):
        assert conversation([{**USER, **more}], 4096)[0]["content"] == "Go on: end"


def test_an_answer_without_a_content_says_nothing():
    for more in ({}, {"tool_calls": []}, {"reasoning_content": "So."}):
        assert conversation([USER, {"role": "assistant", **more}, USER], 4096)[1]["content"] == ""


def test_an_image_in_a_result_is_told():
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    given = [USER, calls(1), {"role": "tool", "tool_call_id": "c0", "content": parts}]
    assert conversation(given, 4096)[2]["content"] == f"a\n{IMAGE}"


def test_a_call_that_was_cut_off_is_left_out_unless_it_has_a_result():
    cut = {**CALL, "id": "c1", "incomplete": True, "function": {"name": "f", "arguments": '{"n' + "n" * CUT_SHOWN}}
    assert conversation(called(cut), 4096)[2]["tool_calls"][0]["id"] == "c0"
    assert len(conversation(called(cut), 4096)[2]["tool_calls"]) == 1
    alone = conversation([USER, {"role": "assistant", "content": None, "tool_calls": [cut]}, USER], 4096)
    assert alone[1] == {"role": "assistant", "content": ""}
    answered = [*called(cut), {"role": "tool", "tool_call_id": "c1", "content": "x"}]
    shown = conversation(answered, 4096)  # a client has made it, and the model is told what came of that
    assert [c["function"]["arguments"] for c in shown[2]["tool_calls"]] == [
        {"n": 1},
        '{"n'.ljust(CUT_SHOWN, "n"),
    ] and shown[3:] == answered[3:]
    with pytest.raises(Refused) as found:
        conversation([*answered, {"role": "tool", "tool_call_id": "c2", "content": "x"}], 4096)
    assert found.value.param == "messages[4].tool_call_id"
    whole = conversation([*answered, *called(CALL | {"id": "c1"}), answered[-1]], 4096)
    assert whole[-1]["tool_call_id"] == "c1"  # which has been made by then
    for id in ([], {}, 7, None):
        odd = conversation([USER, {"role": "assistant", "tool_calls": [{**cut, "id": id}]}, USER], 4096)
        assert odd[1] == {"role": "assistant", "content": ""}
    bad = {**CALL, "function": {"name": "", "arguments": "x"}}
    with pytest.raises(Refused) as found:
        conversation([{"role": "assistant", "content": None, "tool_calls": [cut, bad]}], 4096)
    assert found.value.param == "messages[0].tool_calls[1].function.name"  # as it was sent


def test_tools_are_bounded():
    check_values([{"enum": list(range(500_000))}])
    with pytest.raises(Refused, match="tools has more than 524288 commas and brackets"):
        check_values([{"enum": list(range(530_000))}])


def test_results_of_many_calls_in_any_order():
    results = [{"role": "tool", "content": "x", "tool_call_id": f"c{i}"} for i in reversed(range(4000))]
    assert conversation([calls(4000), *results], 4096)[1:] == results
    unnamed = [{"role": "tool", "content": "x"}] * 2
    named = conversation([calls(4), results[-3], *unnamed], 4096)[-2:]
    assert [m["tool_call_id"] for m in named] == ["c0", "c1"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_that_is_no_text_is_refused(name):
    with pytest.raises(Refused, match="must be a text; got 7") as caught:
        conversation([USER, {"role": "assistant", "content": "a", name: 7}], 9)
    assert (caught.value.param, caught.value.code) == (f"messages[1].{name}", "invalid_type")


WRONG = [1, None, "a", [], {}, {"function": None}, {"function": "look"}, {"function": {}}, {"function": {"name": 1}}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_is_no_call_is_refused_by_its_place(wrong):
    """Whatever a format would make of it."""
    place = "messages[1].tool_calls"
    with pytest.raises(Refused) as found:
        conversation([USER, {**calls(1), "tool_calls": [*calls(1)["tool_calls"], wrong]}], 4096)
    assert found.value.param.startswith(f"{place}[1]") and found.value.status == 400
    if not isinstance(wrong, list) and wrong is not None:
        with pytest.raises(Refused) as found:
            conversation([USER, {**calls(1), "tool_calls": wrong}], 4096)
        assert found.value.param == place
