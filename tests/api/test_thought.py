"""Counting the tokens of reasoning."""

from __future__ import annotations

import pytest

from hibachi.api.thought import Thought
from hibachi.tools.format import ReasoningFormat, Thinking


@pytest.mark.parametrize("blanks", [0, 1, 20_000])
def test_blanks_before_reasoning_are_not_kept(blanks):
    tokens = (b"\n" * 8, b"<thi", b"nk>", b"a", b"</think>", b"b")
    thought = Thought(ReasoningFormat("<think>", "</think>"), Thinking.MAY, tokens.__getitem__)
    assert thought.upto([0] * blanks) == 0
    assert len(thought._tail) <= 8
    assert thought.upto([0] * blanks + [1, 2, 3, 4, 5]) == blanks + 4
