"""Counting the tokens of reasoning."""

from __future__ import annotations

from random import Random

import pytest

from hibachi.llm.chatformat.format import THINK, ChatFormat, Thinking
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.chatformat.templates.known import KNOWN
from hibachi.llm.dialects.thought import Thought

from ..tools.made import BOX, FORMATS, pieces_of
from ..tools.test_parser import CALL, text_with_markers

PLAIN = AnswerReader(ChatFormat(None, THINK), thinking=Thinking.MAY)
HARMONY = [
    *("<|channel|>", "analysis", "<|message|>", "Let", " me", "<|end|>"),
    *("<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Hi"),
]


def count(reader, tokens, each=None):
    """Tokens of reasoning, counted at the end, or whenever `each` more have come."""
    thought = Thought(reader, lambda i: tokens[i].encode())
    for upto in range(0, len(tokens), each) if each else ():
        thought.upto(range(upto))
    return thought.upto(range(len(tokens)))


@pytest.mark.parametrize("blanks", [0, 1, 500])
def test_blanks_before_reasoning_count(blanks):
    assert count(PLAIN, ["\n" * 8] * blanks + ["<thi", "nk>", "a", "</think>", "b"]) == blanks + 4


def test_blanks_are_not_kept_without_end():
    """So many are said, as the parser waits no longer."""
    tokens = ["\n" * 8] * 20_000 + ["<think>", "a", "</think>"]
    thought = Thought(PLAIN, lambda i: tokens[i].encode())
    assert thought.upto(range(len(tokens))) == 0
    assert PLAIN.read("".join(tokens), False).reasoning is None


@pytest.mark.parametrize(
    ("name", "tokens", "expected"),
    [
        ("gpt_oss", HARMONY, 6),
        ("gpt_oss", [*HARMONY[8:], "<|end|>", *HARMONY[6:8], *HARMONY], 8),  # behind what is said
        ("muse", [KNOWN["muse"].reasoning.begin.removeprefix(KNOWN["muse"].prompted), "x", "y", "<|eom|>", "Hi"], 4),
    ],
)
def test_a_beginning_that_the_prompt_may_have_written(name, tokens, expected):
    reader = AnswerReader(KNOWN[name], thinking=Thinking.MAY)
    assert reader.read("".join(tokens), False).reasoning
    assert {count(reader, tokens, each) for each in (None, 1, 3)} == {expected}


@pytest.mark.parametrize(
    ("tokens", "thinking", "expected"),
    [
        (["<think>", "a", "</think>", "\n", "<think>", "b", "c", "</think>", "hi"], Thinking.MAY, 7),
        (["a", "</think>", "<think>", "b"], Thinking.OPEN, 4),
        ([CALL, "<think>", "b", "</think>", "hi", "<think>"], Thinking.MAY, 3),
        (["a", "</think>", "hi"], Thinking.MAY, 0),
        (["<think>", "a", "</think>"], Thinking.NONE, 0),
        (["hi", "<think>", "a"], Thinking.MAY, 0),
        (["<think>a</think>", "hi"], Thinking.MAY, 1),
        (["<think>", *["a"] * 500, "</think>", *["hi"] * 500], Thinking.MAY, 502),
    ],
)
def test_every_part_that_is_read_as_reasoning_counts(tokens, thinking, expected):
    reader = AnswerReader(FORMATS["hermes"], BOX, thinking)
    assert {count(reader, tokens, each) for each in (None, 1, 3)} == {expected}


@pytest.mark.parametrize("name", ["hermes", "named", "channels"])
def test_counting_agrees_with_what_is_read(name):
    random = Random(name)
    for _ in range(60):
        text = text_with_markers(random, FORMATS[name]) + random.choice(["", "<think>b</think>" + CALL])
        reader = AnswerReader(FORMATS[name], BOX, random.choice(list(Thinking)))
        tokens = pieces_of(random, text, 3) if text else []
        found = count(reader, tokens)
        assert found == count(reader, tokens, 1)
        letters, reasoned = count(reader, text), reader.read(text, False).reasoning
        assert letters >= len((reasoned or "").replace("\n", "")), text
        assert reasoned is None or found > 0, text
