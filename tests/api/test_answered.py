"""Bodies of each dialect, answered by a model that says what it is told: whole and streamed, it is the same."""

from __future__ import annotations

import json

import pytest

from hibachi.llm.chatformat.templates.choosing import Parsers

from ..serve.saying import CALL, OTHER, THINKS, THOUGHT, told
from .answering import saying

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS = {
    "chat": [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}],
    "message": [{"name": "look", "input_schema": PARAMETERS}],
    "response": [{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": None}],
}
EVERYTHING = THOUGHT + "I look.\n" + CALL + "\n" + OTHER
GREEDY = {"temperature": 0}
THINKING = {"thinking": {"type": "adaptive"}}


def body_of(kind, text, most=400):
    """A body whose answer is this text, at most so many letters of it."""
    if kind == "response":
        return {"input": told(text), "max_output_tokens": most, **GREEDY}
    more = {"model": "m", **THINKING} if kind == "message" else {"request_id": "it"} if kind == "chat" else {}
    return {"messages": told(text), "max_tokens": most, **GREEDY, **more}


@pytest.fixture(scope="module")
def says(tmp_path_factory):
    with saying(tmp_path_factory.mktemp("says")) as found:
        yield found


# ---- what clients make of a stream -----------------------------------------------------------------------------------


def of_chat(chunks):
    """By choice: the message, and why it ended."""
    found = {}
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        message, reasons = found.setdefault(choice["index"], ({"role": None, "content": "", "refusal": None}, []))
        delta = choice["delta"]
        message["role"] = delta.get("role") or message["role"]
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                continue
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if call.get("incomplete"):
                calls[call["index"]]["incomplete"] = True
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    for message, _ in found.values():
        message["content"] = message["content"] if message["content"] or "tool_calls" not in message else None
    return [(message, *reasons) for _, (message, reasons) in sorted(found.items())]


def of_message(events):
    first, *middle, delta, stop = [e for e in events if e["type"] != "ping"]
    assert (first["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    message, texts = first["message"], []
    for e in middle:
        if e["type"] == "content_block_start":
            assert e["index"] == len(message["content"])
            message["content"].append(e["content_block"])
            texts = []
        elif e["type"] == "content_block_delta":
            kind, text = e["delta"].values()
            if kind == "signature_delta":
                message["content"][-1]["signature"] = text
            else:
                texts.append(text)
        else:
            block, text = message["content"][e["index"]], "".join(texts)
            if block["type"] != "tool_use":
                block[block["type"]] = text
            elif e.get("incomplete"):
                block["incomplete"] = True
            else:
                block["input"] = json.loads(text)
    return {**message, **delta["delta"], "usage": delta["usage"]}


def without(node):
    """Without what differs each time: ids, times, and what was found in the cache."""
    if isinstance(node, list):
        return [without(each) for each in node]
    if not isinstance(node, dict):
        return node
    mine = {"id", "call_id", "created_at", "completed_at", "input_tokens_details", "prompt_tokens_details"}
    return {name: without(value) for name, value in node.items() if name not in mine}


def asked(host, kind, **body):
    """A whole answer, which the end of a stream equals."""
    whole, events = host.whole(kind, **body), host.events(kind, **body)
    if kind == "chat":
        assert of_chat(events) == [(c["message"], c["finish_reason"]) for c in whole["choices"]]
    elif kind == "message":
        assert without(of_message(events)) == without(whole)
    else:
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        assert without(events[-1]["response"]) == without(whole)
    return whole


def parts(kind, answer):
    """What is thought, said and called, in every dialect alike; a call that is not whole has no arguments."""
    if kind == "chat":
        message = answer["choices"][0]["message"]
        thought, said = message.get("reasoning_content"), message["content"]
        calls = [c["function"]["arguments"] for c in message.get("tool_calls", ()) if "incomplete" not in c]
        found = [("thought", thought)] * bool(thought) + [("said", said)] * bool(said)
        return found + [("called", json.loads(arguments)) for arguments in calls]
    if kind == "message":
        names = {"thinking": "thought", "text": "said", "tool_use": "called"}
        blocks = [b for b in answer["content"] if "incomplete" not in b]
        return [(names[b["type"]], b.get("input", b.get("text", b.get("thinking")))) for b in blocks]
    names = {"reasoning": "thought", "message": "said", "function_call": "called"}
    found = []
    for item in answer["output"]:
        text = item.get("arguments") or "".join(part["text"] for part in item.get("content", ()))
        if names[item["type"]] != "called":
            found.append((names[item["type"]], text))
        elif item["status"] == "completed":
            found.append(("called", json.loads(text)))
    return [(name, what) for name, what in found if what != ""]


# ---- thoughts, words and calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOOLS)
def test_thoughts_words_and_calls(says, kind):
    answer = asked(says, kind, **body_of(kind, EVERYTHING), tools=TOOLS[kind])
    calls = [("called", {"at": 'the "sun"\n猫'}), ("called", {"at": ""})]
    assert parts(kind, answer) == [("thought", "Let me see."), ("said", "I look."), *calls]


@pytest.mark.parametrize("kind", TOOLS)
def test_answers_that_are_cut_off_anywhere(says, kind):
    """Nothing that was not said, and no call that was not whole."""
    *_, whole = [parts(kind, says.whole(kind, **body_of(kind, EVERYTHING), tools=TOOLS[kind]))]
    for most in (3, 14, len(THOUGHT) + 3, len(THOUGHT) + 12, len(THOUGHT) + 60, len(EVERYTHING.encode()) - 14):
        answer = asked(says, kind, **body_of(kind, EVERYTHING, most), tools=TOOLS[kind])
        for (name, what), (same, all_) in zip(parts(kind, answer), whole, strict=False):
            assert name == same and (what == all_ or (name != "called" and all_.startswith(what.strip())))
        why = {
            "chat": lambda a: a["choices"][0]["finish_reason"] == "length",
            "message": lambda a: a["stop_reason"] == "max_tokens",
            "response": lambda a: a["incomplete_details"] == {"reason": "max_output_tokens"},
        }
        assert why[kind](answer), most


def test_the_shapes_of_a_call(says, described):
    """Each dialect's own."""
    text = CALL
    message = asked(says, "chat", **body_of("chat", text), tools=TOOLS["chat"])["choices"][0]
    [call] = message["message"]["tool_calls"]
    assert message["finish_reason"] == "tool_calls" and message["message"]["content"] is None
    assert call.keys() == {"id", "type", "function"} and call["id"].startswith("call_") and len(call["id"]) == 29
    first, *rest = says.events("chat", **body_of("chat", text), tools=TOOLS["chat"])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [c["choices"][0]["delta"] for c in rest]
    begun, *more = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert begun["index"] == 0 and begun["function"] == {"name": "look", "arguments": ""}
    assert "".join(each["function"]["arguments"] for each in more) == call["function"]["arguments"]  # busy: in one
    assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in more)
    assert deltas[-1] == {}
    answer = asked(says, "message", **body_of("message", text), tools=TOOLS["message"])
    assert answer["stop_reason"] == "tool_use" and answer["content"][0]["id"].startswith("toolu_")
    response = asked(says, "response", **body_of("response", EVERYTHING), tools=TOOLS["response"])
    described("Response", response)
    for event in says.events("response", **body_of("response", EVERYTHING), tools=TOOLS["response"]):
        described("ResponseStreamEvent", event)
    assert {item["status"] for item in response["output"]} == {"completed"} == {response["status"]}
    assert response["usage"]["output_tokens"] == len(EVERYTHING.encode())  # a letter is a token
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len(THOUGHT.strip())}


def test_without_tools_a_call_is_what_is_said(says):
    for kind, none in (("chat", "none"), ("message", {"type": "none"}), ("response", "none")):
        for more in ({}, {"tools": TOOLS[kind], "tool_choice": none}):
            assert parts(kind, asked(says, kind, **body_of(kind, CALL), **more)) == [("said", CALL)]


def test_a_call_that_nobody_can_read_is_marked(says):
    """The grammar of its tool allows such numbers, as JSON does."""
    given = '<tool_call>\n{"name": "look", "arguments": {"at": 1e999}}\n</tool_call>'
    look = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "number"}}}}
    [call] = asked(says, "message", **body_of("message", given), tools=[look])["content"]
    assert call["input"] == {} and call["incomplete"] is True


def test_what_must_come_comes_behind_thoughts(says):
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"enum": ["yes", "no"]}}}
    for fields in ({"response_format": form}, {"response_format": form, "tools": TOOLS["chat"]}):
        answer = asked(says, "chat", **body_of("chat", THOUGHT + '"yes"'), **fields)
        assert parts("chat", answer) == [("thought", "Let me see."), ("said", '"yes"')]
    answer = asked(says, "chat", **body_of("chat", THOUGHT + CALL), tools=TOOLS["chat"], tool_choice="required")
    assert [name for name, _ in parts("chat", answer)] == ["thought", "called"]


@pytest.mark.parametrize(
    ("kind", "param"),
    [
        ("chat", "tools[0].function.parameters"),
        ("message", "tools[0].input_schema"),
        ("response", "tools[0].parameters"),
    ],
)
def test_a_schema_that_cannot_be_is_told_of_its_tool(says, kind, param):
    wrong = {"properties": {"a": {"type": "no"}}}
    tool = json.loads(json.dumps(TOOLS[kind][0]).replace(json.dumps(PARAMETERS), json.dumps(wrong)))
    tool.get("function", tool)["strict"] = True
    assert says.refused(kind, **body_of(kind, "a"), tools=[tool]).param == param


STUBBORN = THINKS.replace("enable_thinking is false", "false")  # its model thinks, whatever it is told


def test_thoughts_that_are_not_wanted_are_not_told(says, tmp_path):
    text = THOUGHT + "It is bright."
    [choice] = asked(says, "chat", **body_of("chat", text), include_reasoning=False)["choices"]
    assert choice["message"] == {"role": "assistant", "content": "It is bright.", "refusal": None}
    with saying(tmp_path, STUBBORN) as stubborn:
        for thinking in (None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
            body = {**body_of("message", text), "thinking": thinking}
            assert parts("message", asked(stubborn, "message", **body)) == [("said", "It is bright.")]


FIELDS = [
    (Parsers(fields=("reasoning",)), {"reasoning": "Let me see.", "content": "It."}),
    (Parsers(fields=("reasoning_content", "reasoning")), {"reasoning": "Let me see.", "content": "It."}),
    (Parsers(reasoning="none"), {"content": THOUGHT + "It."}),
    (Parsers("hermes", "deepseek_r1"), {"reasoning_content": "Let me see.", "content": "It."}),
]


@pytest.mark.parametrize("parsers, expected", FIELDS, ids=["other name", "both names", "none", "named"])
def test_what_the_operator_says(tmp_path, parsers, expected):
    with saying(tmp_path, parsers=parsers) as host:
        message = asked(host, "chat", **body_of("chat", THOUGHT + "It."))["choices"][0]["message"]
    assert {name: message[name] for name in expected} == expected
    named = {name for name in ("reasoning", "reasoning_content") if name in message}
    assert named == (set() if parsers.reasoning == "none" else set(parsers.fields))


# ---- figures, and what else is told ----------------------------------------------------------------------------------


def test_tokens_of_thoughts_are_counted(says):
    def details(text, **fields):
        return says.whole("chat", **body_of("chat", text), **fields)["usage"]["completion_tokens_details"]

    count = {"reasoning_tokens": len(THOUGHT.rstrip())}
    assert details(THOUGHT + "It.") == details(THOUGHT + "It.", include_reasoning=False) == count
    assert details("It.") == {"reasoning_tokens": 0}
    body = {**body_of("chat", THOUGHT), "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    first, *_, last = says.events("chat", **body, stream=True)
    assert last["usage"]["completion_tokens_details"] == count and last["choices"] == []
    assert first["usage"]["completion_tokens"] <= last["usage"]["completion_tokens"]
    used = says.whole("message", **body_of("message", THOUGHT + "It."))["usage"]
    assert 0 < used["output_tokens_details"]["thinking_tokens"] < used["output_tokens"]


@pytest.mark.parametrize("named", [False, True])
def test_log_probabilities_and_ids_come_whether_their_tokens_say_something_or_not(says, named):
    fields = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": named}
    body = {**body_of("chat", EVERYTHING), **fields, "tools": TOOLS["chat"]}
    [whole] = says.whole("chat", **body)["choices"]
    scores, ids = [], []
    for choice in (c for chunk in says.events("chat", **body) for c in chunk["choices"]):
        scores += choice["logprobs"]["content"] if choice["logprobs"] else []
        ids += choice.get("token_ids", [])
    assert ids == whole["token_ids"] and scores == whole["logprobs"]["content"] and len(ids) == len(scores) > 20
    assert all((s["token"] == f"token_id:{i}") is named for s, i in zip(scores, ids, strict=True))


def test_log_probabilities_of_a_response_are_of_its_words(says):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    [part] = asked(says, "response", **body_of("response", THOUGHT + "Hi."), **fields)["output"][1]["content"]
    assert "".join(score["token"] for score in part["logprobs"]).strip() == "Hi."


def test_what_stopped_a_text(says):
    for more, reason, stop in (
        ({"stop": ["no such text", "b"]}, "stop", "b"),
        ({"stop_token_ids": [ord("c")]}, "stop", ord("c")),
        ({"max_tokens": 3}, "length", None),
        ({}, "stop", None),
    ):
        body = {**body_of("chat", "abcd"), **more}
        [choice] = asked(says, "chat", **body)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
        told = [c for chunk in says.events("chat", **body) for c in chunk["choices"]]
        assert [c.get("stop_reason", "none") for c in told] == ["none"] * (len(told) - 1) + [stop]
    answer = asked(says, "message", **body_of("message", "abcd"), stop_sequences=["§", "c"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "c")
    assert parts("message", answer) == [("said", "ab")]
    assert asked(says, "response", **body_of("response", "abcd"), stop="c")["status"] == "completed"


@pytest.mark.parametrize(
    "said, more, new",
    [
        ("", {"max_tokens": 1}, 1),  # the end token alone, as where a harness scores a continuation
        ("é!", {}, 4),
        ("é!", {"max_tokens": 2}, 2),
        ("abcd", {"stop": ["c"]}, 3),
        ("abcd", {"stop": ["bcx"], "max_tokens": 3}, 3),
        ("abcd", {"stop_token_ids": [ord("b")]}, 2),
        ("abcd", {"stop_token_ids": [ord("b")], "include_stop_str_in_output": True}, 2),
        ("ab", {"n": 2}, 3),
    ],
)
def test_lists_have_an_entry_for_each_token_and_places_in_the_text(says, said, more, new):
    """Those of the end token and of tokens without text as well, whole and streamed."""
    body = {"prompt": f"\x01{said}\x02\x03", "logprobs": 1, "max_tokens": 9, **GREEDY, **more}
    whole = says.whole("completion", **body)
    chunks = says.events("completion", **body, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == new * more.get("n", 1)
    for choice in whole["choices"]:
        lists, offsets = choice["logprobs"], choice["logprobs"]["text_offset"]
        assert {len(each) for each in lists.values()} == {new}
        assert offsets == sorted(offsets) and offsets[-1] <= len(choice["text"])
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in parts) == choice["text"]
        for name, each in lists.items():
            assert [x for c in parts for x in (c["logprobs"] or {}).get(name, ())] == each, name


@pytest.mark.parametrize("kind", TOOLS)
def test_stop_strings_end_what_is_said_and_nothing_else(says, kind):
    """A blank line, as harnesses send it, stands in the thoughts, behind them and in a call."""
    name = "stop_sequences" if kind == "message" else "stop"
    thought = "<think>\nRestate.\n\nQuestion: what?\n</think>\n\n"
    call = CALL.replace("sun", "Question: \\n")
    body = body_of(kind, f"{thought}It is 4.\n{call}")
    plain = parts(kind, asked(says, kind, **body, tools=TOOLS[kind]))
    stops = ["\n\n", "Question:", "</think>", "<tool_call>", "look"]
    assert [name for name, _ in plain] == ["thought", "said", "called"]
    assert parts(kind, asked(says, kind, **body, tools=TOOLS[kind], **{name: stops})) == plain
    answer = asked(says, kind, **body, tools=TOOLS[kind], **{name: [*stops, "is"]})
    assert [(name, what.strip()) for name, what in parts(kind, answer)] == [plain[0], ("said", "It")]


def test_an_answer_that_is_begun_goes_on_and_may_be_echoed(says):
    begun = [*told("It is so."), {"role": "assistant", "content": "It"}]
    plain = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False, "n": 2}
    plain |= {**GREEDY, "max_tokens": 3}
    texts = [
        [c["message"]["content"] for c in asked(says, "chat", **plain, echo=echo)["choices"]] for echo in (False, True)
    ]
    assert texts[1] == ["It" + text for text in texts[0]] and len(texts[0]) == 2
    answer = asked(says, "message", **{**body_of("message", ""), "messages": begun, "max_tokens": 3})
    assert "".join(text for _, text in parts("message", answer)) == texts[0][0]


FORM = {
    "type": "object",
    "properties": {"ab": {"enum": [1, 2]}, "c": {"type": "string", "maxLength": 3}},
    "required": ["ab", "c"],
    "additionalProperties": False,
}
BEGUN = ["{", '{"a', '{"ab": ', '{\n  "ab" : 1,\n  "c": "x\\"', '{"ab":2,"c":"']


@pytest.mark.parametrize("thought", ["", "<think>\nHm.\n</think>\n\n"])
@pytest.mark.parametrize("content", BEGUN)
def test_a_form_goes_on_behind_what_is_begun(says, thought, content):
    begun = [*told("It is so."), {"role": "assistant", "content": thought + content}]
    more = {"messages": begun, "max_tokens": 60, **GREEDY}
    chat = {**more, "continue_final_message": True, "add_generation_prompt": False}
    chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "it", "schema": FORM}}
    message = {**more, "model": "m", "output_config": {"format": {"type": "json_schema", "schema": FORM}}}
    for kind, body in (("chat", chat), ("message", message)):
        answer = asked(says, kind, **body)
        said = answer["choices"][0]["message"]["content"] if kind == "chat" else answer["content"][0]["text"]
        found = json.loads(content + said)
        assert list(found) == ["ab", "c"] and found["ab"] in (1, 2) and len(found["c"]) <= 3
    tools = asked(says, "chat", **chat, tools=TOOLS["chat"])["choices"][0]["message"]
    assert json.loads(content + tools["content"])["ab"] in (1, 2)


@pytest.mark.parametrize("content", ["Sure: ", "{ab", '{"ab": 3', '{"ab": 1, "c": "wxyz', '{"ab": 1, "c": "x"} '])
def test_a_beginning_that_no_form_has_is_refused(says, content):
    begun = [*told("It is so."), {"role": "assistant", "content": content}]
    body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 9}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": FORM}}
    error = says.refused("chat", **body, response_format=form)
    assert (error.status, error.param) == (400, "messages") and "cannot be continued in the form" in str(error)
    form["json_schema"]["schema"] = {"not": {}}
    assert "`not` is not supported" in str(says.refused("chat", **body, response_format=form))
    assert says.whole("chat", **body)["choices"]


# ---- prompts ---------------------------------------------------------------------------------------------------------


def prompt(host, **body):
    found = host.whole("chat", max_tokens=1, return_token_ids=True, **GREEDY, **body)
    return bytes(found["prompt_token_ids"]).decode()


def test_effort_is_shown_where_the_template_reads_it(says, tmp_path, caplog):
    assert "EFFORT high" in prompt(says, messages=told("a"), reasoning_effort="high")
    assert prompt(says, messages=told("a"), reasoning_effort="none").endswith("<think>\n\n</think>\n\n")
    used = [
        says.whole("message", **body_of("message", "so"), output_config=effort and {"effort": effort})["usage"]
        for effort in (None, "low", "max")
    ]
    plain, low, most = (u["input_tokens"] + u["cache_read_input_tokens"] for u in used)
    assert (low - plain, most - low) == (len("EFFORT low"), len("high") - len("low"))
    body = body_of("response", "a")
    low, plain = (says.whole("response", **body, reasoning=r) for r in ({"effort": "low"}, None))
    assert low["usage"]["input_tokens"] - plain["usage"]["input_tokens"] == len("EFFORT low")
    silent = THINKS.replace("{% if reasoning_effort is defined %}EFFORT {{ reasoning_effort }}{% endif %}", "")
    with saying(tmp_path, silent) as host:  # where it does not, an effort is a wish
        assert parts("chat", asked(host, "chat", **body_of("chat", "a"), reasoning_effort="low"))
        assert parts("response", asked(host, "response", **body, reasoning={"effort": "low"}))
        assert parts("message", asked(host, "message", **body_of("message", "a"), output_config={"effort": "low"}))
    assert [r.message for r in caplog.records if "reasoning_effort" in r.message] == [
        "reasoning_effort 'low' has no effect: this model's chat template has no such setting, only a switch, which "
        "'none' turns off"
    ]


def test_the_turn_after_a_call_is_one_prompt_in_every_dialect(says):
    """A response's by its id, by references, and sent whole."""
    items = told(THOUGHT + "I look.\n" + CALL)
    first = asked(says, "response", input=items, tools=TOOLS["response"], instructions="Look well.", **GREEDY)
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "It shines."}
    more = [result, *told("It does.")]
    refers = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    bodies = (
        {"input": more, "previous_response_id": first["id"]},
        {"input": [*items, *refers, *more]},
        {"input": [*items, *first["output"], *more], "store": False},
    )
    used = []
    for body in bodies:
        answer = asked(says, "response", **body, tools=TOOLS["response"], **GREEDY)
        assert parts("response", answer) == [("said", "It does.")]
        used.append(answer["usage"]["input_tokens"])
    function = {"name": "look", "arguments": call["arguments"]}
    turn = {"role": "assistant", "content": "I look.", "reasoning_content": "Let me see."}
    turn["tool_calls"] = [{"id": "a", "type": "function", "function": function}]
    answered = {"role": "tool", "tool_call_id": "a", "content": "It shines."}
    chat = says.whole("chat", messages=[*items, turn, answered, more[1]], tools=TOOLS["chat"], **GREEDY)
    thought = {"type": "thinking", "thinking": "Let me see.", "signature": "s"}
    use = {"type": "tool_use", "id": "a", "name": "look", "input": json.loads(call["arguments"])}
    shines = {"type": "tool_result", "tool_use_id": "a", "content": "It shines."}
    messages = [
        *items,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [shines, {"type": "text", "text": more[1]["content"]}]},
    ]
    body = {"model": "m", "messages": messages, "tools": TOOLS["message"], "max_tokens": 40, **THINKING}
    theirs = says.whole("message", **body)["usage"]
    total = theirs["input_tokens"] + theirs["cache_read_input_tokens"]
    assert used == [chat["usage"]["prompt_tokens"]] * 3 and total == used[0]


def test_a_response_that_was_cut_off_is_gone_on_from(says):
    first = asked(says, "response", **body_of("response", EVERYTHING, len(THOUGHT) + 60), tools=TOOLS["response"])
    assert first["output"][-1]["status"] == "incomplete"
    again = asked(says, "response", **body_of("response", "On."), previous_response_id=first["id"])
    assert parts("response", again) == [("said", "On.")]


def test_the_oldest_turns_are_left_out_where_it_is_asked_for(says):
    turns = [t for n in range(60) for t in (*told(f"{n}" * 40), {"role": "assistant", "content": "-" * 9})]
    items = [{"role": "developer", "content": "Be brief."}, *turns, *told("Last?")]
    body = {"input": items, "max_output_tokens": 9, **GREEDY}
    assert says.refused("response", **body).code == "context_length_exceeded"
    kept = asked(says, "response", **body, truncation="auto")
    assert kept["truncation"] == "auto" and parts("response", kept) == [("said", "Last?")]
    assert 4096 - 9 >= kept["usage"]["input_tokens"] > 3900
    long = {"input": [*told("a"), *told("b" * 5000)], "truncation": "auto", **GREEDY}
    assert says.refused("response", **long).code == "context_length_exceeded"


def test_max_tokens_of_a_message_is_what_it_has_at_most(says):
    """It must be sent, and clients send as much as a large model makes: what the context leaves is the end, then."""
    answer = asked(says, "message", **body_of("message", "x" * 3000, 100_000))
    assert answer["stop_reason"] in ("model_context_window_exceeded", "end_turn")
    assert says.refused("message", **body_of("message", "x" * 5000)).code == "context_length_exceeded"
