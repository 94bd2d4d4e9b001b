"""Texts that no model would write on purpose: time is linear, memory bounded, and nothing raises."""

import json
import tracemalloc
from random import Random
from time import process_time

import pytest

from hibachi.llm.chatformat.format import Thinking
from hibachi.llm.chatformat.reading.parser import Parser
from hibachi.llm.chatformat.reading.whole import read
from hibachi.llm.chatformat.tools import ToolCall
from hibachi.llm.chatformat.write import written

from .made import BOX, FORMATS, FULL

every_format = pytest.mark.parametrize("name", FORMATS)


def openings(format):
    """Beginnings of calls: up to the name, up to the arguments, into a string."""
    text = written(format.tools, [ToolCall("f", '{"city": "Paris", "b": {"x": [1]}}', "abcdefghi")])
    text = text.removeprefix(format.prompted)
    return [
        text[: text.index("f") + 1],
        text[: text.index("city")],
        text[: text.index("ris")],
        text[: text.index("x") + 1],
    ]


def hostile(format, length):
    marker = format.tools.marker
    call = openings(format)
    for text in (marker, "<", " ", "\n", "\\", "{", '"', marker + " ", *call, format.tools.end, "<think>", "</think>"):
        yield text * (length // max(len(text), 1))
    for text in call:
        for rest in ("[", "{", '{"a":', "(", "'", '"', "\\", " ", "9", "x=", "<", FULL):
            yield text + rest * (length // len(rest))


def cost(format, text, size):
    """Seconds for each character of a text in pieces."""
    start = process_time()
    parser = Parser(format, BOX, Thinking.MAY)
    for at in range(0, len(text), size):
        parser.feed(text[at : at + size])
    parser.end()
    return (process_time() - start) / max(len(text), 1000)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "length"), [(1, 8_000), (10**6, 100_000)])
@every_format
def test_time_is_linear(name, size, length):
    """A square of the length would cost a character milliseconds."""
    for text in hostile(FORMATS[name], length):
        assert cost(FORMATS[name], text, size) < 100e-6, (text[:100], len(text))


@pytest.mark.slow
@every_format
def test_memory_is_bounded(name):
    """All but values that are no strings, which must be whole before they are given on."""
    format = FORMATS[name]
    for text in hostile(format, 30_000):
        parser = Parser(format, BOX, Thinking.MAY)
        tracemalloc.start()
        for at in range(0, len(text), 100):
            parser.feed(text[at : at + 100])
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert held < 300_000, (text[:100], held)


@every_format
def test_short_hostile_texts_raise_nothing(name):
    random, format = Random(name), FORMATS[name]
    alphabet = [
        *FULL,
        *openings(format),
        format.tools.marker,
        format.tools.end,
        "null",
        "True",
        "1e",
        "\\u12",
        "\\ud83d",
        "<![CDATA[",
    ]
    for _ in range(100):
        text = random.choice(openings(format)) + "".join(random.choice(alphabet) for _ in range(30))
        for call in read(format, BOX, random.choice(list(Thinking)), text, random.random() < 0.5).calls:
            assert not call.complete or isinstance(json.loads(call.arguments), dict), text


@pytest.mark.parametrize("deep", [100, 10_000])
def test_brackets_within_brackets(deep):
    values = "[" * deep + "]" * deep
    for name in ("hermes", "python", "quoted"):
        text = written(FORMATS[name].tools, [ToolCall("f", '{"a": 1}')]).replace("1", values)
        answer = read(FORMATS[name], BOX, Thinking.NONE, text)
        assert answer.calls[0].arguments == '{"a": ' + values + "}"
        assert answer.calls[0].complete
