"""Answers drawn at random under grammars of random tools: each is read as a call that keeps to the tool's schema."""

import json
import random

import pytest

from hibachi.engine.guide.protocol import GuideFailed
from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.format import Tagged, Thinking
from hibachi.llm.chatformat.reading.whole import read
from hibachi.llm.chatformat.tools import Toolbox, ToolCall
from hibachi.llm.chatformat.write import written

from .formats import FORMATS, chat
from .grammars import END_IDS, grammar, guide_of, setting
from .randomtools import RandomTool

CLOSING = {ord(sign) for sign in "\"}]<'>),|"}
LONGEST = 350  # tokens


def drawn(found, rng):
    """A random answer that hurries to its end; None if it has none by then, or if no value satisfies the schema."""
    guide, out = guide_of(found), []
    while not guide.complete:
        try:
            allowed = setting().allowed(guide)
        except GuideFailed:
            return None
        if len(out) == LONGEST or (allowed & {*END_IDS} and rng.random() < 0.5):
            break
        options = sorted(allowed - {*END_IDS})
        closing, words = [i for i in options if i in CLOSING], [i for i in options if i >= 256]
        letters = [i for i in options if 32 <= i < 127]
        r = rng.random()
        hurries = closing and r < 0.25 + len(out) / LONGEST
        chosen = closing if hurries else words if words and r < 0.45 else letters if letters and r < 0.85 else options
        out.append(rng.choice(chosen))
        guide.advance(out[-1:])
    if not guide.may_end:
        return None
    return b"".join(setting().vocabulary.tokens[i] for i in out).decode()


def checked(name, tool, text):
    """What an answer calls the tool with, which keeps to its schema, and is the same when it is written and read again.
    Strings that look like other values are not told apart where strings have no quotes.
    """
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    format, box = chat(name), Toolbox((tool,), "required")
    answer = read(format, box, Thinking.NONE, text)
    [call] = answer.calls
    assert call.complete and call.name == tool.name and not answer.content.strip()
    arguments = json.loads(call.arguments)
    validator(tool.parameters).validate(arguments)
    again = written(format.tools, [ToolCall(tool.name, call.arguments, "abcdefghi")])
    [call] = read(format, box, Thinking.NONE, again).calls
    assert call.complete and (json.loads(call.arguments) == arguments or isinstance(format.tools.arguments, Tagged))


def count_checked(rng, tool, names, answers=1):
    """Draws so many answers in each of the formats. Returns how many there were to be checked."""
    pytest.importorskip("jsonschema")
    count = 0
    for name in names:
        try:
            found = grammar(name, tools=(tool,), parallel=False)
            setting().check(grammar=found.text)
        except InvalidRequest:  # by name, see test_grammar.py
            continue
        for _ in range(answers):
            if (text := drawn(found, rng)) is not None:
                try:
                    checked(name, tool, text)
                except Exception as e:
                    raise AssertionError(f"{name}: {text!r} of {json.dumps(tool.parameters)}") from e
                count += 1
    return count


def check(seed, formats, answers):
    rng = random.Random(seed)
    return count_checked(rng, RandomTool(rng).tool(), rng.sample(sorted(FORMATS), formats), answers)


@pytest.mark.parametrize("part", range(4))
def test_random_answers_keep_to_random_schemas(part):
    assert sum(check(seed, formats=2, answers=1) for seed in range(part * 6, part * 6 + 6)) > 4


def test_many_random_answers_keep_to_random_schemas():
    assert sum(check(seed, formats=4, answers=2) for seed in range(1000, 1400)) > 2000
