"""Formats of calls as models write them, and tools, for the tests of grammars."""

from hibachi.llm.chatformat.format import (
    HERMES,
    THINK,
    ChatFormat,
    Python,
    Quoted,
    ReasoningFormat,
    Slot,
    Tagged,
    ToolFormat,
)
from hibachi.llm.chatformat.tools import Tool

NAME, ARGUMENTS, ID, NUMBER, TAG = Slot.NAME, Slot.ARGUMENTS, Slot.ID, Slot.NUMBER, Slot.TAG

FORMATS = {
    "hermes": HERMES,
    "list": ToolFormat(
        call=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, ', "id": "', ID, '"}'),
        marker="[TOOL_CALLS]",
        begin="[TOOL_CALLS][",
        between=", ",
        end="]",
        id="nine letters",
    ),
    "named": ToolFormat(call=("[TOOL_CALLS]", NAME, "[ARGS]", ARGUMENTS), marker="[TOOL_CALLS]"),
    "alone": ToolFormat(
        call=('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"), marker='{"name": "', alone=True, most=1
    ),
    "wrapped": ToolFormat(
        call=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"),
        marker="<tool_calls>",
        begin="\n<tool_calls>[",
        between=", ",
        end="]</tool_calls>\n",
    ),
    "numbered": ToolFormat(
        call=("<|call|>functions.", NAME, ":", NUMBER, "<|args|>", ARGUMENTS, "<|/call|>"),
        marker="<|calls|>",
        begin="<|calls|>",
        end="<|/calls|>",
    ),
    "headed": ToolFormat(
        call=(
            "<|start|>assistant to=functions.",
            NAME,
            "<|channel|>commentary ",
            TAG,
            "<|message|>",
            ARGUMENTS,
            "<|over|>",
        ),
        marker="<|start|>assistant to=functions.",
        most=1,
    ),
    "tagged": ToolFormat(
        call=("<tool_call>\n<function=", NAME, ">\n", ARGUMENTS, "</function>\n</tool_call>"),
        marker="<tool_call>",
        between="\n",
        arguments=Tagged("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "keyed": ToolFormat(
        call=("<tool_call>", NAME, "\n", ARGUMENTS, "\n</tool_call>"),
        marker="<tool_call>",
        between="\n",
        arguments=Tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", between="\n"),
    ),
    "typed": ToolFormat(
        call=('<|open|>call tool="', NAME, '" index="', NUMBER, '"<|sep|>', ARGUMENTS, "<|close|>call<|sep|>"),
        marker="<|open|>tools<|sep|>",
        begin="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|>",
        first_number=1,
        arguments=Tagged(
            '<|open|>argument key="',
            '"<|sep|>',
            "<|close|>argument<|sep|>",
            kinds={k: f'" type="{k}"<|sep|>' for k in ("string", "number", "boolean", "object", "array", "null")},
        ),
    ),
    "nested": ToolFormat(
        call=('<|mini|><invoke name="', NAME, '">', ARGUMENTS, "<|mini|></invoke>\n"),
        marker="<|mini|><tool_call>",
        begin="<|mini|><tool_call>\n",
        end="<|mini|></tool_call>",
        arguments=Tagged("<|mini|><", ">", "<|mini|></{key}>", item="item"),
    ),
    "cdata": ToolFormat(
        call=('<function name="', NAME, '">', ARGUMENTS, "</function>"),
        marker='<function name="',
        between="\n",
        arguments=Tagged('<param name="', '">', "</param>", cdata=True),
    ),
    "python": ToolFormat(
        call=(NAME, "(", ARGUMENTS, ")"),
        marker="<|calls|>",
        begin="<|calls|>[",
        between=", ",
        end="]<|/calls|>",
        arguments=Python(),
    ),
    "quoted": ToolFormat(
        call=("<|call|>call:", NAME, ARGUMENTS, "<|/call|>"),
        marker="<|call|>",
        arguments=Quoted('<|"|>'),
    ),
    "quoted text": ToolFormat(call=("<c>call:", NAME, ARGUMENTS, "</c>"), marker="<c>", arguments=Quoted("<'>")),
}
PROMPTED = {"headed": "<|start|>assistant"}
MARKS = """[TOOL_CALLS] [ARGS] <|calls|> <|/calls|> <|call|> <|/call|> <|args|> <|start|> <|channel|> <|message|>
<|end|> <|open|> <|close|> <|sep|> <|mini|> <|"|> <|think|> <|/think|> <|other|>"""
SPECIAL = tuple(MARKS.split())
PLAIN_ADDED = ("<tool_call>", "</tool_call>")  # tokens that were added and are no special ones
ENDS = ("<|over|>", "<|eos|>")

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "integer", "minimum": 1, "maximum": 40},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city"],
    },
)
DEEP = Tool(
    "get",
    {
        "type": "object",
        "properties": {
            "what": {"$ref": "#/$defs/what"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
            "on": {"type": "boolean"},
            "size": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 9}, {"type": "null"}]},
        },
        "required": ["what", "on"],
        "$defs": {
            "what": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 4}},
                "required": ["a"],
                "additionalProperties": False,
            }
        },
    },
)
NOW = Tool("now", {})
CODE = Tool(
    "code",
    {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$", "maxLength": 6},
            "as": {"type": ["string", "null"], "enum": ["x", "null!", None]},
            "n": {"type": ["string", "integer"], "maxLength": 3},
        },
        "required": ["id", "n"],
    },
)
TOOLS = (WEATHER, DEEP, NOW, CODE)


REASONING = {
    "text": THINK,
    "special": ReasoningFormat("<|think|>", "<|/think|>"),
    "headed": ReasoningFormat("<|start|>assistant<|channel|>analysis<|message|>", "<|end|>"),
}


def chat(name: str, reasoning: ReasoningFormat | None = None) -> ChatFormat:
    return ChatFormat(FORMATS[name], reasoning, prompted=PROMPTED.get(name, ""))
