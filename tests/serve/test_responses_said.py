"""Responses of a model that reasons and calls, as it is told to: items, whole and streamed, and the turn after them."""

from __future__ import annotations

import json

import pytest

from .saying import CALL, OTHER, THOUGHT, saying

URL = "/v1/responses"
LOOK = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    "strict": None,
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    with saying(tmp_path_factory.mktemp("says")) as found:
        yield found


def say(text):
    return {"role": "user", "content": f"Say \x01{text}\x02"}


@pytest.fixture(scope="module")
def ask(here, described):
    """ask(items, **fields): a response; its stream ends with the same, and tells it in deltas."""

    def call(items, **fields):
        body = {"input": items, "temperature": 0, "max_output_tokens": 400, **fields}
        answer = here.post(URL, body)
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        described("Response", whole)
        events = [e.partition("\ndata: ")[2] for e in here.post(URL, {**body, "stream": True}).text.split("\n\n")]
        events = [json.loads(e) for e in events if e]
        for event in events:
            described("ResponseStreamEvent", event)
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        told = {}
        for e in events:
            if e["type"].endswith(".delta"):
                told[e["output_index"]] = told.get(e["output_index"], "") + e["delta"]
        last = events[-1]["response"]
        assert said(last) == said(whole)
        assert [text for *_, text in said(whole)] == [told.get(i, "") for i in range(len(whole["output"]))]
        for one in (last, whole):
            one["usage"].pop("input_tokens_details")
        assert (last["status"], last["usage"]) == (whole["status"], whole["usage"])
        return whole

    return call


def said(response):
    """Its items: type, status and text."""
    return [
        (item["type"], item["status"], item.get("arguments") or (item.get("content") or item["summary"])[0]["text"])
        for item in response["output"]
    ]


def test_thoughts_words_and_calls(ask):
    text = THOUGHT + "I look.\n" + CALL + "\n" + OTHER
    told = ask([say(text)], tools=[LOOK])
    assert told["status"] == "completed"
    assert said(told) == [
        ("reasoning", "completed", "Let me see."),
        ("message", "completed", "I look."),
        ("function_call", "completed", '{"at": "the \\"sun\\"\\n猫"}'),
        ("function_call", "completed", '{"at": ""}'),
    ]
    assert told["output"][0]["summary"] == []
    calls = told["output"][2:]
    assert [call["name"] for call in calls] == ["look", "look"]
    assert len({call["call_id"] for call in calls}) == 2 and all(c["call_id"].startswith("call_") for c in calls)
    used = told["usage"]
    assert used["output_tokens"] == len(text.encode())  # a letter is a token
    assert used["output_tokens_details"] == {"reasoning_tokens": len(THOUGHT.strip())}


def test_the_turn_after_them(ask, here):
    """By its id, by references and sent whole, it is the same prompt, and that of the chat."""
    items = [say(THOUGHT + "I look.\n" + CALL)]
    first = ask(items, tools=[LOOK], instructions="Look well.")
    call = first["output"][-1]
    more = [{"type": "function_call_output", "call_id": call["call_id"], "output": "It shines."}, say("It does.")]
    by_id = ask(more, previous_response_id=first["id"], tools=[LOOK])
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    by_reference = ask([*items, *references, *more], tools=[LOOK])
    whole = ask([*items, *first["output"], *more], tools=[LOOK], store=False)
    assert said(by_id) == said(by_reference) == said(whole) == [("message", "completed", "It does.")]
    function = {"name": "look", "arguments": call["arguments"]}
    messages = [
        *items,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Let me see.",
            "tool_calls": [{"id": call["call_id"], "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call["call_id"], "content": "It shines."},
        more[1],
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": LOOK["parameters"]}}]
    chat = here.post("/v1/chat/completions", {"messages": messages, "tools": tools, "temperature": 0}).json()
    used = [r["usage"]["input_tokens"] for r in (by_id, by_reference, whole)]
    assert used == [chat["usage"]["prompt_tokens"]] * 3


@pytest.mark.parametrize(
    ("tokens", "items"),
    [
        (12, [("reasoning", "incomplete", "Let")]),
        (len(THOUGHT) + 3, [("reasoning", "completed", "Let me see."), ("message", "incomplete", "I l")]),
        (
            len(THOUGHT) + 8 + 52,
            [
                ("reasoning", "completed", "Let me see."),
                ("message", "completed", "I look."),
                ("function_call", "incomplete", '{"at": "'),
            ],
        ),
    ],
)
def test_answers_that_are_cut_off(ask, tokens, items):
    told = ask([say(THOUGHT + "I look.\n" + CALL)], tools=[LOOK], max_output_tokens=tokens)
    assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(kind, status) for kind, status, _ in said(told)] == [(kind, status) for kind, status, _ in items]
    assert all(
        wanted.startswith(text) or text.startswith(wanted)
        for (*_, text), (*_, wanted) in zip(said(told), items, strict=True)
    )
    assert ask([say("On.")], previous_response_id=told["id"])["status"] == "completed"
