"""Stop strings of a chat: they are looked for in what is said, wherever the text is cut."""

from random import Random

import pytest

from hibachi.llm.chatformat.format import Said, Thinking
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.chatformat.tools import ToolCall
from hibachi.llm.chatformat.write import written
from hibachi.llm.tokenizers.stops import StopStrings

from .made import BOX, FORMATS, calls_of, pieces_of, text_of, toolbox_of

every_format = pytest.mark.parametrize("name", FORMATS)
CALL = ToolCall("get_weather", '{"city": "STOP"}', "abcdefghi")


def answer(format, thought, content, calls):
    """One text; where a call stands alone, nothing is said before it."""
    tools, thinks = format.tools, format.reasoning
    text = thinks.begin + thought + thinks.end
    if content and not (calls and tools.alone):
        text += format.prompted + format.before_said + content + (format.silent[-1] if format.prompted else "")
    return text + (written(tools, calls) if calls else "")


def stopped(reader, pieces, stops, include=False):
    """The text that is let through, and which stop string has ended it."""
    finder = reader.stops(StopStrings(stops, include=include))
    out = []
    for piece in pieces:
        out.append(finder.push(piece))
        if finder.found is not None:
            return "".join(out), finder.found
    out.append(finder.flush())
    return "".join(out), finder.found


def said(format, box, thinking, text):
    """What is said in one piece each, by a parser of its own that gets letter by letter."""
    parser, found, last = AnswerReader(format, box, thinking).parser(), [], False
    for events in [*map(parser.feed, text), parser.end()]:
        for event in events:
            if isinstance(event, Said):
                found[-1:] = [found[-1] + event.text] if last else [*found[-1:], event.text]
            last = isinstance(event, Said)
    return found


@every_format
def test_in_reasoning_and_in_calls_they_are_text(name):
    format = FORMATS[name]
    text = answer(format, "think STOP\n\nmore", "well, ", [CALL])
    reader = AnswerReader(format, BOX, Thinking.MAY)
    for stops in (["STOP"], ["\n\nmore", "STOP"], ["think", '"city"'], [format.reasoning.end.strip()]):
        for pieces in ([text], text):
            assert stopped(reader, pieces, stops) == (text, None)
    out, found = stopped(reader, answer(format, "ell", "well, ", []), ["ell"])
    assert found == "ell" and reader.read(out, True).content == "w"


def test_no_match_spans_what_stands_between_and_nothing_is_held_back_for_it():
    format, text = FORMATS["hermes"], "foo S" + written(FORMATS["hermes"].tools, [CALL]) + "bar TOP"
    reader = AnswerReader(format, BOX, Thinking.MAY)
    for pieces in ([text], text):
        assert stopped(reader, pieces, ["STOP", "oo Sb", "Sb", "S\nb"]) == (text, None)
        out, found = stopped(reader, pieces, ["ar T"])
        assert (text.removeprefix(out), found) == ("ar TOP", "ar T")
    finder = reader.stops(StopStrings(["STOP"]))
    assert finder.push("foo S") == "foo "
    assert (
        finder.push('<tool_call>\n{"name": "f", "arguments": {"a"') == 'S<tool_call>\n{"name": "f", "arguments": {"a"'
    )


@every_format
def test_however_the_text_is_cut_it_ends_where_what_is_said_has_the_string(name):
    random, format, hits = Random(name), FORMATS[name], 0
    for _ in range(60):
        calls = calls_of(random) if random.random() < 0.6 else []
        box = toolbox_of(calls)
        content = text_of(random, 20).strip() or "x"
        text = answer(format, text_of(random, 20).strip(), content, calls)
        reader = AnswerReader(format, box, Thinking.MAY)
        source = random.choice([text, content])
        at = random.randrange(len(source))
        stop = source[at : at + random.randrange(1, 4)]
        whole = stopped(reader, [text], [stop])
        for pieces in (text, *(pieces_of(random, text, n) for n in (2, 5))):
            assert stopped(reader, pieces, [stop]) == whole, (text, stop)
        found = next((i for i, piece in enumerate(said(format, box, Thinking.MAY, text)) if stop in piece), None)
        assert (whole[1] is None) == (found is None), (text, stop)
        if found is None:
            assert whole[0] == text
        else:
            hits += 1
            inside = stopped(reader, text, [stop], include=True)[0]
            assert text.startswith(whole[0]) and inside == whole[0] + stop, (text, stop)
    assert hits > 5
