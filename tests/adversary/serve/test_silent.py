"""Nothing silent: conversations with tools, fields that would change nothing, and what is refused by name."""

import json
import logging
import time
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec import convert

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.history import rendered
from hibachi.llm.chatformat.messages import plain_messages
from hibachi.llm.chatformat.once import Once
from hibachi.llm.chatformat.talk import Talk
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.messages.bodies import CountBody
from hibachi.llm.dialects.messages.parse import chat_of
from hibachi.llm.dialects.openai import parse as asking
from hibachi.llm.dialects.openai.bodies import Bounds, ChatBody, read
from hibachi.llm.dialects.openai.conversation import conversation, refusing
from hibachi.llm.dialects.responses.bodies import ResponsesBody
from hibachi.llm.dialects.responses.parse import as_chat, own_items
from hibachi.llm.tokenizers.chat import render_chat
from hibachi.request import SamplingParams

from ...serve.conftest import ENGINES, site
from .conftest import CHATML

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def history(arguments='{"city": "Paris", "days": [1, 2]}', content=None, call="call_1"):
    """As OpenAI's client sends it back."""
    function = {"name": "get_weather", "arguments": arguments}
    return [
        {"role": "user", "content": "Weather in Paris?"},
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"id": call, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call, "content": "18 C"},
    ]


class Template:
    """What of a tokenizer a conversation needs."""

    special_ids = frozenset()

    def __init__(self, template):
        self.chat_templates = {"default": template}

    def render_chat(self, messages, **variables):
        return render_chat(self.chat_templates["default"], messages, **variables)

    guarded = bare = staticmethod(str)

    def split_special(self, text):
        return [text]


def text_of(template, messages, **variables):
    body = json.dumps({"messages": messages, **variables}).encode()
    asked = asking.chat(read(ChatBody, body), SamplingParams(), Bounds())

    def render(given, **more):
        return render_chat(template, given, bos_token="<s>", eos_token="</s>", **more)

    with refusing():
        return rendered(render, asked.chat.messages, asked.chat.variables)


# ---- tool history (findings 12 and 13, D1) ---------------------------------------------------------------------------

# How templates of common models write a call, each in a line.
CALLS = {
    "as JSON": "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}",
    "arguments as JSON": "{{ c.function.name }}{{ c.function.arguments | tojson }}",
    "pair by pair": "{% for k, v in c.function.arguments | items %}<{{ k }}={{ v }}>{% endfor %}",
    "in place": '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
}
MANY = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}\n{% endfor %}"
)


@pytest.mark.parametrize("how", CALLS)
def test_12_arguments_are_objects_in_a_template(how):
    text = text_of(MANY.replace("CALL", CALLS[how]), history())
    assert '\\"' not in text and "Paris" in text
    if "JSON" in how or "place" in how:
        assert '{"city":"Paris","days":[1,2]}' in text.replace(" ", "")


TOOLED = "{{ tools | tojson }}" + CHATML.replace("{{ m.content }}", "{{ m.content }}CALL")
SHOWS = {
    "as a text": "{{ a if a is string else a | tojson }}",
    "as JSON": "{{ a | tojson }}",
    "pair by pair": "{% for k, v in a | items %}<{{ k }}={{ v }}>{% endfor %}",
}


def prompts_of(how, arguments):
    """Of a conversation with these arguments of a call: by chats, responses, messages, and in Python."""
    call = "call_1"
    loop = (
        "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}[{{ c.function.name }} SHOWN]{% endfor %}"
    )
    talk = Talk(Template(TOOLED.replace("CALL", loop.replace("SHOWN", SHOWS[how]))))
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "function_call", "call_id": call, "name": "get_weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": call, "output": "18 C"},
    ]
    used = {"type": "tool_use", "id": call, "name": "get_weather", "input": arguments}
    blocks = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": "18 C"}]},
    ]
    body = ResponsesBody(input=items)
    sent = [
        history(arguments),
        as_chat(body, own_items(body, Bounds())).messages,
        chat_of(convert({"model": "m", "messages": blocks}, CountBody)).messages,
    ]
    tools = {"tools": [TOOL]}
    found = [talk.prompt_text(conversation(messages, 10), tools) for messages in sent]
    return [*found, talk.prompt_text(plain_messages(history(arguments)), tools)]


BROKEN = ["not JSON", '{"city": "Par', "[1]", '"x"', "7", "[" * 100_000, '{"a":' * 5000, [1], "{'city': 1}"]


@pytest.mark.parametrize("arguments", BROKEN, ids=lambda a: str(a)[:9])
@pytest.mark.parametrize("how", SHOWS)
def test_12_arguments_that_are_no_object_are_shown_as_a_text_or_as_none(how, arguments, caplog, monkeypatch):
    monkeypatch.setattr("hibachi.llm.chatformat.history._once", Once(logging.getLogger("hibachi.chat")))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    expected = {"as a text": text, "as JSON": json.dumps(text), "pair by pair": ""}[how]
    for prompt in prompts_of(how, arguments):
        assert f"[get_weather {expected}]" in prompt and "18 C" in prompt
    [warned] = caplog.records
    assert "arguments of an earlier call of 'get_weather' are no JSON object" in warned.getMessage()
    assert len(warned.getMessage()) < 600


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', json.dumps('{"city": "Paris"}'), {"city": "Paris"}])
def test_12_arguments_that_are_an_object_are_one_also_where_they_were_encoded_twice(arguments):
    for how, expected in (("as a text", '{"city": "Paris"}'), ("pair by pair", "<city=Paris>")):
        assert all(f"[get_weather {expected}]" in prompt for prompt in prompts_of(how, arguments))


@pytest.mark.parametrize("cut", ["\\ud83d", "\\ude00", "\\ud83d\\ud83d\\ude00"])
def test_12_half_of_a_surrogate_pair_that_a_model_wrote_does_not_end_the_conversation(cut):
    whole = json.loads(f'"{cut}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for arguments in (f'{{"city": "A{cut}"}}', json.dumps(f'{{"city": "A{cut}"}}')):
        assert all(f"<city=A{whole}>" in prompt for prompt in prompts_of("pair by pair", arguments))


@pytest.mark.parametrize("piece", ["x", '"', "\\", "{} ", "é"])
def test_12_eight_megabytes_that_are_no_object_are_read_at_once(piece):
    arguments = '{"city": "' + piece * (8_000_000 // len(piece.encode()))
    began = time.process_time()
    with suppress(Refused):  # where it would hold too many values
        conversation(history(arguments), 10)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("calls", [[], None])
def test_12_no_calls_are_left_to_the_template(calls):
    given = {"role": "assistant", "content": "x", "tool_calls": calls}
    assert conversation([given], 10) == [given]


def test_12_what_was_sent_is_not_changed():
    sent = history()
    conversation(sent, 10)
    assert sent == history()


def test_13_a_template_that_adds_texts_takes_null():
    adds = "{% for m in messages %}{{ '<' + m.role + '>' + m['content'] + '|' }}{% endfor %}"
    with pytest.raises(InvalidRequest):
        render_chat(adds, history())
    assert text_of(adds, history()) == "<user>Weather in Paris?|<assistant>|<tool>18 C|"


def test_13_null_is_no_word():
    assert text_of("{% for m in messages %}{{ m.content }}|{% endfor %}", history()) == "Weather in Paris?||18 C|"


# ---- tools that nobody sees (D2) ------------------------------------------------------------------------------------


def test_d2_tools_that_change_nothing_are_refused():
    with pytest.raises(Refused, match="tools is not supported: this model's chat template does not show them") as e:
        text_of(CHATML, [{"role": "user", "content": "x"}], tools=[TOOL])
    assert (e.value.param, e.value.code, e.value.status) == ("tools", "unsupported_parameter", 400)
    assert text_of(CHATML, [{"role": "user", "content": "x"}], tools=[])
    assert text_of(CHATML, [{"role": "user", "content": "x"}], tools=[TOOL], tool_choice="none")
    shown = text_of("{{ tools | tojson }}" + CHATML, [{"role": "user", "content": "x"}], tools=[TOOL])
    assert "get_weather" in shown


TEMPLATES = sorted((Path(__file__).parents[2] / "data" / "chat_templates").glob("*.jinja"))


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda f: f.stem)
def test_d1_templates_of_real_models_take_a_history_with_tools_or_say_so(file):
    template = file.read_text()
    try:
        text = text_of(template, history(), tools=[TOOL])
    except Refused as e:
        assert e.param == "tools"
    except InvalidRequest as e:
        assert "template" in str(e)
    else:
        assert "get_weather" in text and '\\"city' not in text


# ---- over HTTP -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here():
    with ENGINES["child"]("tiny", max_num_seqs=4) as texts, site(texts, chat_template=CHATML) as found:
        yield found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_over_http(here, path):
    more = {"max_tokens": 2} if "chat" in path else {}
    answer = here.post(path, {"messages": history(), **more})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[1].tool_calls"
    answer = here.post(path, {"messages": history(), "tools": [TOOL], **more})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
    assert here.post(path, {"messages": history()[:1], **more}).status_code == 200


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ä", "a\n"])
def test_a_request_id_is_used_or_refused(here, given):
    answer = here.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": given})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "request_id"
    assert here.complete("a", request_id="x" * 128)["id"] == "cmpl-" + "x" * 128


def test_23_answers_have_ids_of_their_own(here):
    sent = [here.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "same"})]
    sent += [here.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "same"})]
    assert [a.headers["x-request-id"] for a in sent] == ["same"] * 2
    assert len({a.json()["id"] for a in sent}) == 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "field, value",
    [(f, v) for f in ("temperature", "repetition_penalty") for v in (1e308, 1e-320, 5e-324, 3.5e38)],
)
def test_30_numbers_at_the_edge_give_no_warnings(here, field, value, recwarn):
    with ENGINES["own"]("tiny", max_num_seqs=2) as texts, site(texts) as own:
        answer = own.post("/v1/completions", {"prompt": "a", "max_tokens": 3, "seed": 1, field: value})
    assert answer.status_code in (200, 400)
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]
