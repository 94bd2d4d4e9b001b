"""Guides for the grammars of formats: a vocabulary of bytes and marks, texts cut into it, answers drawn at random."""

import json
import random
import re
from functools import cache

import pytest

from hibachi.engine.guide.protocol import GuideFailed
from hibachi.llm.chatformat.format import CallArguments, CallBegun, CallEnded, Said, Thinking
from hibachi.llm.chatformat.grammar.answer import unchecked_form
from hibachi.llm.chatformat.reading.parser import Parser
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.chatformat.tools import Toolbox

from ..guide import made
from .formats import ENDS, PLAIN_ADDED, SPECIAL, TOOLS, chat

WORDS = ('": ', '"}', '", "', "</", "paramet", "er>", "',", "', ", '{"', "call>", "<tool", "e>x", '("', "=", "ab")
ADDED = [*SPECIAL, *ENDS, *PLAIN_ADDED, *WORDS]
IDS = {text: 256 + i for i, text in enumerate(ADDED)}
END_IDS = tuple(IDS[text] for text in ENDS)
SPECIAL_IDS = frozenset(IDS[text] for text in (*SPECIAL, *ENDS))
FIND = re.compile(f"({'|'.join(re.escape(t) for t in sorted((*SPECIAL, *ENDS), key=len, reverse=True))})")


@cache
def setting():
    return made.Setting(made.of_bytes([text.encode() for text in ADDED], special=SPECIAL_IDS, ends=END_IDS))


def special(text):
    """As `Tokenizer.split_special`."""
    return [IDS[part] if FIND.fullmatch(part) else part for part in FIND.split(text) if part]


def ids(text):
    """As a model would write it: special tokens as such."""
    return [i for part in special(text) for i in ([part] if isinstance(part, int) else setting().cut(part))]


def grammar(name, mode="required", thinking=Thinking.NONE, answer=None, tools=TOOLS, reasoning=None, **more):
    toolbox = Toolbox(tools, mode, **more)
    return unchecked_form(
        AnswerReader(chat(name, reasoning), toolbox, thinking), answer, special, ids=SPECIAL_IDS, ends=END_IDS
    )


def guide_of(found):
    return setting().guide(grammar=found.text)


def walked(found, text):
    """What becomes of a text: "ends", "goes on", or what is left where a token may not come."""
    guide = guide_of(found)
    given = ids(text) if isinstance(text, str) else text
    for at, token in enumerate(given):
        try:
            guide.advance([token])
        except GuideFailed:
            left = b"".join(setting().vocabulary.tokens[i] for i in given[at:])
            return f"refused: {left.decode(errors='replace')}"
    return "ends" if guide.may_end else "goes on"


def drawn(found, seed, marks=(), most=300):
    """A random answer under the masks; None if it has no end by `most` tokens. marks: texts that come now and then."""
    rng, guide, out = random.Random(seed), guide_of(found), []
    while len(out) < most and not guide.complete:
        allowed = setting().allowed(guide)
        if allowed & {*END_IDS} and rng.random() < (0.5 if len(allowed) < 150 else 0.05):
            break
        options = sorted(allowed - {*END_IDS})
        if marks and len(options) > 150 and rng.random() < 0.2 and (come := begun(guide, ids(rng.choice(marks)))):
            out += come
            continue
        words, letters = [i for i in options if i >= 256], [i for i in options if 32 <= i < 127]
        r = rng.random()
        out.append(rng.choice(words if words and r < 0.3 else letters if letters and r < 0.8 else options))
        guide.advance(out[-1:])
    else:
        if not guide.complete:
            return None
    return b"".join(setting().vocabulary.tokens[i] for i in out).decode(errors="replace")


def begun(guide, text):
    """As much of a text as may come."""
    for n, token in enumerate(text):
        try:
            guide.advance([token])
        except GuideFailed:
            return text[:n]
    return text


class Read:
    """What a parser makes of an answer."""

    def __init__(self, name, text, mode="required", thinking=Thinking.NONE, tools=TOOLS, reasoning=None):
        parser = Parser(chat(name, reasoning), Toolbox(tools, mode), thinking)
        self.calls, self.said, self.complete = [], "", 0
        for event in [*parser.feed(text), *parser.end()]:
            match event:
                case CallBegun():
                    self.calls.append([event.name, ""])
                case CallArguments():
                    self.calls[event.number][1] += event.text
                case CallEnded():
                    self.complete += event.complete
                case Said():
                    self.said += event.text
        self.schemas = {tool.name: tool.parameters for tool in tools}

    def check(self):
        """All calls are whole, and keep to the schemas of their tools."""
        validator = pytest.importorskip("jsonschema").Draft202012Validator
        assert self.complete == len(self.calls)
        for name, arguments in self.calls:
            validator(self.schemas[name]).validate(json.loads(arguments))
