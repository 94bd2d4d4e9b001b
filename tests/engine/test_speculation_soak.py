"""`benchmarks/speculation_soak.py` with fewer requests, and with a planted bug."""

import pytest

from benchmarks.speculation_soak import main
from hibachi.engine.speculation.proposals import Along


@pytest.mark.slow
def test_answers_are_those_without_proposals_here_and_in_another_process(capsys):
    assert main(count=150, seed=1)
    assert "'WRONG': 0" in capsys.readouterr().out


@pytest.mark.slow
def test_it_would_see_a_wrong_proposal_that_is_kept(capsys, monkeypatch):
    draw = Along._draw

    def all_right(self, rows, within):
        part, _ = draw(self, rows, within)
        return part, [j < len(row.guesses) for row, j in zip(rows, within, strict=True)]

    monkeypatch.setattr(Along, "_draw", all_right)
    assert not main(count=20, seed=1)
    assert "WRONG" in capsys.readouterr().out
