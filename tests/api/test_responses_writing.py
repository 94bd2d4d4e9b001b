"""Responses: the events of a stream, in their order, and the whole answer; against OpenAI's description of both."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("msgspec")

import msgspec

from hibachi.errors import EngineClosed
from hibachi.llm.chatformat.format import PLAIN, CallArguments, CallBegun, CallEnded, Reasoned, Said
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai.answers import TokenTexts
from hibachi.llm.dialects.openai.parse import ParsedRequest
from hibachi.llm.dialects.openai.writing import Signature
from hibachi.llm.dialects.responses.bodies import ReasoningAsked, ResponsesBody
from hibachi.llm.dialects.responses.writing import ResponsesWriter
from hibachi.llm.textstream import Choice, Piece
from hibachi.request import Finish, SamplingParams, Terms

WORDS = TokenTexts(lambda i: b"<%d>" % i, lambda ids: "".join(f"<{i}>" for i in ids))
CALL = [CallBegun(0, "weather"), CallArguments(0, '{"city": '), CallArguments(0, '"Paris"}'), CallEnded(0)]
SECOND = [CallBegun(1, "time", "nineletts"), CallArguments(1, "{}"), CallEnded(1)]
# What the model says, a list of events for each piece of text; whether max_tokens ends it; and the items of it.
SAID = {
    "text": ([[Said("Hel")], [Said("lo"), Said(".")]], False, ["message completed Hello."]),
    "nothing": ([], False, ["message completed "]),
    "cut": ([[Said("Hel")]], True, ["message incomplete Hel"]),
    "thought": (
        [[Reasoned("I ")], [Reasoned("see.")], [], [Said("Yes")]],
        False,
        ["reasoning completed I see.", "message completed Yes"],
    ),
    "thought, cut": ([[Reasoned("I ")]], True, ["reasoning incomplete I "]),
    "call": ([[CALL[0]], [CALL[1]], CALL[2:]], False, ['function_call completed weather {"city": "Paris"}']),
    "calls at once": (
        [[Reasoned("I"), Said("Let me look."), *CALL, *SECOND, Said("Done?")]],
        False,
        [
            "reasoning completed I",
            "message completed Let me look.",
            'function_call completed weather {"city": "Paris"}',
            "function_call completed time {}",
            "message completed Done?",
        ],
    ),
    "call, cut": (
        [[Said("Well")], CALL[:2], [CallEnded(0, complete=False)]],
        True,
        ["message completed Well", 'function_call incomplete weather {"city": '],
    ),
}


class Parser:
    """Gives what is to be said for each piece, whatever its text is."""

    def __init__(self, said):
        self._said, self.reasoning = iter(said), False

    def feed(self, text):
        events = next(self._said)
        for event in events:
            self.reasoning = isinstance(event, Reasoned)
        return events

    def end(self, cut=False):
        assert next(self._said, None) is None
        return []


def writer_of(said, cut=False, *, ids=(7, 8), logprobs=None, keep=None, **fields):
    reader = SimpleNamespace(
        parser=lambda: Parser(said), format=PLAIN, call_id=lambda answer, choice, number: f"call_{number}"
    )
    asked = ParsedRequest(SamplingParams(), Terms(), stream=True, usage=False, usage_always=False, token_ids=False)
    asked.reader, asked.logprobs = reader, logprobs
    body, by = ResponsesBody(input="a", **fields), Signature("m", WORDS, id="r", created=3)
    writer = ResponsesWriter(asked, by, body, server="abcdefgh", keeps=True, keep=keep)
    tokens = [i for n in range(len(said)) for i in (20 + n,)]
    scores = [{i: -1.0, 3: -0.5} for i in tokens] if logprobs is not None else None
    finish = Finish.LENGTH if cut else Finish.STOP
    choice = SimpleNamespace(
        index=0, token_ids=tokens, finish_reason=finish, stopped_by=None, tokens=SimpleNamespace(reused=1)
    )
    whole = Choice(0, "text", tokens, finish, scores)
    stream = SimpleNamespace(
        choices=[choice],
        tokens=choice.tokens,
        completion=lambda: SimpleNamespace(choices=[whole], prompt_logprobs=None),
    )
    writer.streams, writer.ids = [stream], [list(ids)]
    pieces = [Piece(f"t{n}", [i], 0, scores and [scores[n]]) for n, i in enumerate(tokens)]
    return writer, pieces, choice


def streamed(*args, **more):
    """The data of all events."""
    writer, pieces, choice = writer_of(*args, **more)
    chunks = [*writer.opening(), *(c for p in pieces for c in writer.piece(p)), *writer.end(choice)]
    return read(writer, chunks)


def read(writer, chunks):
    found = []
    for frame in (writer.frame(chunk).decode() for chunk in chunks):
        name, data, end = frame.split("\n", 2)
        assert (name[:7], data[:6], end) == ("event: ", "data: ", "\n")
        found.append(json.loads(data[6:]))
        assert name[7:] == found[-1]["type"]
    return found


def built(events):
    """What a client makes of a stream: the response of its last event, after every rule of the order was seen."""
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    assert all(e["response"]["status"] == "in_progress" and not e["response"]["output"] for e in events[:2])
    items, open_, part, done = [], None, None, None
    for e in events[2:-1]:
        kind, at = e["type"].removeprefix("response."), e["output_index"]
        if kind == "output_item.added":
            assert open_ is None and at == len(items) and e["item"]["status"] == "in_progress"
            open_, text = e["item"], ""
            assert (open_.get("arguments", ""), open_.get("content", [])) == ("", [])
            continue
        assert at == len(items) and e.get("item_id", open_["id"]) == open_["id"]
        call = open_["type"] == "function_call"
        assert e.get("content_index", 0) == e.get("summary_index", 0) == 0  # one part of an item
        if kind.startswith("reasoning_summary"):
            assert open_["type"] == "reasoning" and "content" not in open_ and e["summary_index"] == 0
        if kind in ("content_part.added", "reasoning_summary_part.added"):
            assert not call and part is None and e["part"]["text"] == ""
            part = e["part"]
        elif kind.endswith(".delta"):
            assert done is None and (call or part is not None) and (e["delta"] or kind == "output_text.delta")
            text += e["delta"]
        elif kind == "output_item.done":
            assert done == text and part is None
            assert {**open_, "status": 0} == {**e["item"], "status": 0, **{n: open_[n] for n in FULL & open_.keys()}}
            said = text_of(e["item"])
            assert said == text
            items.append(e["item"])
            open_ = done = None
        elif kind in ("content_part.done", "reasoning_summary_part.done"):
            assert part["type"] == e["part"]["type"] and done == e["part"]["text"]
            part = None
        else:
            assert kind in DONE
            assert done is None
            done = e["arguments"] if call else e["text"]
    assert open_ is None
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == items
    return last


FULL = {"arguments", "content", "summary"}
DONE = ("output_text.done", "reasoning_text.done", "reasoning_summary_text.done", "function_call_arguments.done")


def text_of(item):
    """Of any item; what is thought stands in one place only."""
    if item["type"] == "function_call":
        return item["arguments"]
    [part] = [*item.get("content", ()), *item.get("summary", ())]
    return part["text"]


def shown(response):
    """Its items in words."""
    found = []
    for item in response["output"]:
        named = [item["name"]] if "name" in item else []
        found.append(" ".join([item["type"], item["status"], *named, text_of(item)]))
    return found


SUMS = (None, {"summary": "auto"}, {"summary": "detailed"}, {"generate_summary": "concise"})


@pytest.mark.parametrize("reasoning", SUMS)
@pytest.mark.parametrize("name", SAID)
def test_events_come_in_their_order_and_are_as_openai_describes_them(name, reasoning, described):
    said, cut, items = SAID[name]
    events = streamed(said, cut, reasoning=reasoning and ReasoningAsked(**reasoning))
    for event in events:
        described("ResponseStreamEvent", event)
    response = built(events)
    assert shown(response) == items
    assert response["status"] == ("incomplete" if cut else "completed")
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    assert len({item["id"] for item in response["output"]}) == len(items)
    assert all("_abcdefgh_" in item["id"] for item in response["output"])
    kinds = {e["type"] for e in events if "reasoning" in e["type"]}
    assert all(("summary" in kind) is (reasoning is not None) for kind in kinds)
    for item in response["output"]:
        if item["type"] == "reasoning":
            assert bool(item["summary"]) is ("content" not in item) is (reasoning is not None)
    if reasoning is not None:
        ends = [e.get("status") for e in events if e["type"] == "response.reasoning_summary_part.done"]
        assert ends == [{"incomplete": "incomplete"}.get(i.split()[1]) for i in items if i.startswith("reasoning")]


@pytest.mark.parametrize("reasoning", [None, ReasoningAsked(summary="auto")])
@pytest.mark.parametrize("logprobs", [0, None])
@pytest.mark.parametrize("name", SAID)
def test_a_whole_answer_is_what_a_stream_ends_with(name, logprobs, reasoning, described):
    said, cut, _ = SAID[name]
    end = built(streamed(said, cut, logprobs=logprobs, reasoning=reasoning))
    if logprobs is None and len(said) != 1:  # then all of its text is read at once
        said = [[event for events in said for event in events]]
    writer, pieces, _ = writer_of(said, cut, logprobs=logprobs, reasoning=reasoning)
    assert writer.each is (logprobs is not None)
    writer.came(pieces)
    whole = json.loads(msgspec.json.encode(writer.whole()))
    described("Response", whole)
    for one in (whole, end):
        one.pop("completed_at")
        one.pop("usage")
    assert whole == end


def test_log_probabilities_are_those_of_the_text(described):
    """Of a token whose text was held back, with the text that comes next; of reasoning and of calls there are none."""
    said = [[Reasoned("I")], [Said("a")], [], [Said("bc")], CALL, [Said("d")]]
    events = streamed(said, logprobs=1)
    for event in events:
        described("ResponseStreamEvent", event)
    deltas = [[s["token"] for s in e["logprobs"]] for e in events if e["type"] == "response.output_text.delta"]
    assert deltas == [["<21>"], ["<22>", "<23>"], ["<25>"]]
    parts = [item["content"][0] for item in built(events)["output"] if item["type"] == "message"]
    assert [[s["token"] for s in part["logprobs"]] for part in parts] == [["<21>", "<22>", "<23>"], ["<25>"]]
    assert parts[1]["logprobs"][0] == {
        "token": "<25>",
        "logprob": -1.0,
        "bytes": list(b"<25>"),
        "top_logprobs": [{"token": "<3>", "logprob": -0.5, "bytes": list(b"<3>")}],
    }
    writer, pieces, _ = writer_of(said, logprobs=1)
    writer.came(pieces)
    whole = json.loads(msgspec.json.encode(writer.whole()))
    assert [item for item in whole["output"] if item["type"] == "message"] == [
        item for item in built(events)["output"] if item["type"] == "message"
    ]


def test_calls_and_tools_of_a_namespace_name_it(described):
    tool = {"type": "function", "name": "weather"}
    space = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [tool]}
    events = streamed([[CallBegun(0, "crm__weather"), *CALL[1:], *SECOND]], tools=[{**tool, "name": "time"}, space])
    for event in events:
        described("ResponseStreamEvent", event)
    begun = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    response = built(events)
    for items in (begun, response["output"]):
        assert [(item.get("namespace"), item["name"]) for item in items] == [("crm", "weather"), (None, "time")]
    alone, told = response["tools"]
    assert (alone["name"], told["name"], told["description"]) == ("time", "crm", "Customers.")
    assert [(t["type"], t["name"]) for t in told["tools"]] == [("function", "weather")]


@pytest.mark.parametrize(
    ("status", "code"), [(503, "server_error"), (429, "rate_limit_exceeded"), (408, "server_error")]
)
def test_a_response_that_fails_says_so_at_its_end(status, code, described):
    """With the items that there are; the one that was growing is incomplete."""
    kept = []
    writer, pieces, _ = writer_of([[Reasoned("I"), Said("He")], []], keep=kept.append)
    chunks = [*writer.opening(), *writer.piece(pieces[0]), *writer.failed(Refused("It broke.", status=status), "r")]
    *_, last = events = read(writer, chunks)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    described("ResponseStreamEvent", last)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": code, "message": "It broke."}
    assert shown(last["response"]) == ["reasoning completed I", "message incomplete He"]
    assert not kept


def test_an_error_before_a_response_has_begun_is_an_event_of_its_own(described):
    writer, _, _ = writer_of([])
    [event] = read(writer, [writer.failed(Refused("No.", param="input", code="context_length_exceeded"), "r")])
    described("ResponseStreamEvent", event)
    told = {
        "type": "error",
        "sequence_number": 0,
        "code": "context_length_exceeded",
        "message": "No.",
        "param": "input",
    }
    assert event == told


def test_what_was_cut_off_has_no_end():
    kept = []
    writer, _, choice = writer_of([[Said("a")]], keep=kept.append)
    choice.finish_reason = Finish.CLOSED
    with pytest.raises(EngineClosed):
        writer.end(choice)
    assert not kept


def test_a_response_is_kept_before_its_client_is_told_of_the_end():
    kept = []
    writer, pieces, choice = writer_of([[Said("a")]], keep=kept.append)
    writer.piece(pieces[0])
    assert not kept
    *_, last = writer.end(choice)
    assert kept == [last.response] and last.response.store
