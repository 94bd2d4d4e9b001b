"""Formats in the forms that models have, calls and texts of any kind, and events whose neighbours are joined."""

import json
from dataclasses import replace

from hibachi.llm.chatformat.format import (
    HERMES,
    THINK,
    CallArguments,
    ChatFormat,
    Reasoned,
    ReasoningFormat,
    Said,
    Tagged,
    Thinking,
    ToolFormat,
)
from hibachi.llm.chatformat.reading.parser import Parser
from hibachi.llm.chatformat.tools import Tool, Toolbox, ToolCall

from .formats import ARGUMENTS, ID, NAME
from .formats import FORMATS as CALLS

TOOLS = {name: tools for name, tools in CALLS.items() if name not in ("headed", "wrapped", "quoted text")} | {
    "list between tags": ToolFormat(('{"', NAME, '": ', ARGUMENTS, "}"), "<|pre|>", "<|pre|>[", ", ", "]<|suf|>"),
    "fenced": ToolFormat(
        ("<｜call｜>function<｜sep｜>", NAME, "\n```json\n", ARGUMENTS, "\n```<｜end｜>"),
        "<｜calls｜>",
        "<｜calls｜>",
        "\n",
        "<｜/calls｜>",
    ),
    "id first": ToolFormat(
        ('{"tool_call_id": "', ID, '", "tool_name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
        "<|ACTION|>",
        "<|ACTION|>[\n    ",
        ",\n    ",
        "\n]<|END|>",
    ),
    "named twice": ToolFormat(
        (" to=", NAME, '<|message|><calls>\n<invoke name="', NAME, '">\n', ARGUMENTS, "</invoke>\n</calls>"),
        "to=",
        between="<|eom|><|start|>assistant",
        arguments=Tagged('<parameter name="', '">', "</parameter>\n"),
        alone=True,
    ),
    "spelled": replace(CALLS["list"], spellings=(("<|python|>", NAME, "|", ARGUMENTS, "<|eop|>"),)),
}
CHANNELS = ChatFormat(
    ToolFormat(
        ("<|start|>assistant to=functions.", NAME, "<|channel|>commentary json<|message|>", ARGUMENTS, "<|call|>"),
        "<|start|>assistant to=functions.",
        spellings=(
            ("<|start|>assistant<|channel|>commentary to=functions.", NAME, "<|message|>", ARGUMENTS, "<|call|>"),
        ),
    ),
    ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>"),
    before_said="<|channel|>final<|message|>",
    silent=("<|start|>assistant", "<|end|>"),
    prompted="<|start|>assistant",
)
ANSWERS = ChatFormat(HERMES, THINK, silent=("<response>", "</response>"))
FORMATS = {name: ChatFormat(tools, THINK) for name, tools in TOOLS.items()}
FORMATS |= {"channels": CHANNELS, "answers": ANSWERS}

FULL = "a\"'\\\n\t <>&{}[](),:=é你😀👩‍👧\u2028\x07"


def text_of(random, most=12):
    return "".join(random.choice(FULL + "abc def") for _ in range(random.randrange(most)))


def value_of(random, depth=0):
    kind = random.randrange(9 if depth < 3 else 6)
    if kind == 6:
        return [value_of(random, depth + 1) for _ in range(random.randrange(4))]
    if kind >= 7:
        return {
            random.choice(["k", "long key", "x-y", "你"]): value_of(random, depth + 1)
            for _ in range(random.randrange(3))
        }
    simple = [
        None,
        True,
        random.randrange(-99, 99),
        random.choice([0.5, 1e300, -2.0]),
        text_of(random),
        text_of(random),
    ]
    return simple[kind]


def calls_of(random, number=None):
    """Calls with arguments of any kind. Their ids are letters."""
    calls = []
    for i in range(random.randrange(1, 4) if number is None else number):
        keys = random.sample(["city", "n", "flag_2", "x-y", "ort你", "e"], random.randrange(5))
        arguments = {key: value_of(random) for key in keys}
        name = random.choice(["get_weather", "f", "a.b-c2"])
        calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False), "abcdefgh" + "xyz"[i]))
    return calls


def toolbox_of(calls, **fields):
    """Tools that allow exactly the types that calls have; several calls of one name may differ."""
    tools = {}
    for call in calls:
        for name, value in json.loads(call.arguments).items():
            forms = tools.setdefault(call.name, {}).setdefault(name, {"anyOf": []})
            forms["anyOf"].append(schema_of(value))
        tools.setdefault(call.name, {})
    return Toolbox(tuple(Tool(n, {"type": "object", "properties": p}) for n, p in tools.items()), **fields)


def schema_of(value):
    if isinstance(value, dict):
        return {"type": "object", "properties": {key: schema_of(entry) for key, entry in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "items": {"anyOf": [schema_of(entry) for entry in value]} if value else {}}
    types = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return {"type": types[type(value)]}


BOX = Toolbox(
    (Tool("get_weather", {"properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}), Tool("f", {}))
)


def events_of(format, pieces, toolbox=BOX, thinking=Thinking.MAY, cut=False):
    """All events of an answer in pieces, neighbours joined."""
    parser = Parser(format, toolbox, thinking)
    out = []
    for event in (
        event for piece in [*pieces, None] for event in (parser.end(cut) if piece is None else parser.feed(piece))
    ):
        joins = out and type(out[-1]) is type(event) and isinstance(event, (Said, Reasoned, CallArguments))
        if joins:
            out[-1] = replace(event, text=out[-1].text + event.text)
        else:
            out.append(event)
    return out


def pieces_of(random, text, cuts):
    places = sorted(random.randrange(len(text) + 1) for _ in range(cuts))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
