"""`benchmarks/speculation_soak.py` with fewer requests."""

import pytest

from benchmarks.speculation_soak import main


@pytest.mark.slow
def test_answers_are_those_without_proposals_here_and_in_another_process(capsys):
    assert main(count=150, seed=1)
    assert "'WRONG': 0" in capsys.readouterr().out
