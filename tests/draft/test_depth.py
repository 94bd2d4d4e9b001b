"""How many guesses a draft model makes: its own time counts, none are made where none pay, and it finds out again."""

import random

import pytest

from hibachi.engine.speculation.howmany import PROBE, SAVED, TRIALS, Depth, HowMany, deepest

MAIN, DRAFT = 1e-3, 1e-4  # seconds of a step


def knowing(main=lambda tokens: MAIN, draft=lambda tokens: DRAFT, how=None):
    how = how or HowMany()
    depth = Depth(how)
    for size in (1, 2, 3, 4, 6, 8, 16, 32, 64):
        for _ in range(TRIALS):
            how.costs.note(size, main(size))
            depth.costs.note(size, draft(size))
    return depth


def by_hand(tokens, rates, goes, k, main, draft, lack):
    made = sum(goes**j for j in range(1, k + 1)) * len(rates)
    right = sum((r * goes) ** j for r in rates for j in range(1, k + 1))
    return (tokens + right) / (main(tokens + made) + draft(lack) + (k - 1) * draft(len(rates))) * main(tokens) / tokens


@pytest.mark.parametrize("rates", [[0.9], [0.5, 0.8], [0.3] * 4])
@pytest.mark.parametrize("goes", [1.0, 0.8])
def test_the_best_number_is_that_of_the_definition(rates, goes):
    def main(tokens):
        return MAIN * (1 + 0.05 * tokens)

    def draft(tokens):
        return DRAFT * (1 + 0.1 * tokens)

    n = len(rates)
    each = [by_hand(n, rates, goes, k, main, draft, n + 2) for k in range(1, 9)]
    k, gain = deepest(n, rates, goes, 8, main, draft, n + 2)
    assert each[k - 1] == max(each) == pytest.approx(gain)


def test_its_own_time_counts():
    assert knowing().choose([1], [0.8], [8])[0] >= 4
    assert 1 <= knowing(draft=lambda tokens: 3e-4).choose([1], [0.8], [8])[0] <= 3
    assert knowing(draft=lambda tokens: 2e-3).choose([1], [0.8], [8]) == [0]
    assert knowing().choose([1], [0.02], [8]) == [0]


def test_what_it_is_not_sure_of_it_does_not_guess_so_longer_ones_are_rarer():
    depth = knowing()
    before = depth.choose([1], [0.9], [8])[0]
    for _ in range(300):
        depth.note(4, 1)
    assert depth.choose([1], [0.9], [8])[0] < before


def test_none_before_the_main_models_steps_are_known_and_then_at_once():
    how = HowMany()
    depth = Depth(how)
    assert depth.choose([5], [0.6], [4]) == [0]
    for _ in range(TRIALS):
        how.costs.note(1, MAIN)
    assert depth.choose([5], [0.6], [4])[0] >= 1


def test_rows_that_get_none_are_left_out():
    depth = knowing()
    found = depth.choose([1, 0, 1], [0.9, 0.9, 0.9], [8, 8, 2])
    assert found[1] == 0 and found[0] > found[2] == 2
    assert depth.choose([0, 0], [0.9, 0.9], [8, 8]) == [0, 0]


def test_a_long_prompt_is_paid_over_several_steps():
    depth = knowing(draft=lambda tokens: DRAFT * (1 + 0.1 * tokens))
    assert depth.choose([60], [0.8], [8])[0] >= 2


def test_where_none_pay_it_is_tried_within_a_hundredth_of_the_time_and_found_when_it_does():
    how, spent, tried = HowMany(), 0.0, set()
    depth = knowing(how=how)
    for _ in range(3000):
        asked = depth.choose([4, 4, 4], [0.02] * 3, [8] * 3)
        assert sorted(asked) in ([0, 0, 0], [0, 0, 1])
        if any(asked):
            spent += depth.costs.expect(4)
            tried.add(asked.index(1))
        depth.took(MAIN)
    assert 0.5 * PROBE * 3 <= spent <= PROBE * 3 + SAVED
    assert tried == {0, 1, 2}

    dice = random.Random(0)
    for _ in range(3000):  # from now on four of five guesses are right
        if depth.choose([4], [how.records.rate("a")], [8])[0]:
            how.records.note("a", 1, int(dice.random() < 0.8))
        depth.took(MAIN)
    assert depth.choose([1], [how.records.rate("a")], [8])[0] > 1


def simulated(depth, asking, steps=4000):
    """How many steps with guesses there were, and the time of all tokens as a share of that without any. asking:
    seconds that a guess takes in truth.
    """
    dice, time, tokens, some = random.Random(1), 0.0, 0, 0
    for _ in range(steps):
        [k] = depth.choose([1], [0.8], [8])
        right = 0
        while right < k and dice.random() < 0.8:
            right += 1
        time += MAIN + k * asking
        tokens += 1 + right
        some += k > 0
        depth.took(MAIN, k * asking, 1 + right)
    return some, time / (tokens * MAIN)


def test_guesses_that_bring_what_was_expected_go_on_but_for_a_step_in_16():
    some, share = simulated(knowing(), DRAFT)
    assert 0.93 * 4000 <= some <= 0.94 * 4000 and share < 0.5


def test_guesses_that_bring_less_than_expected_are_soon_over():
    """Whatever the reason: what is measured of their parts leaves something out."""
    some, share = simulated(knowing(), 10 * DRAFT)
    assert 20 < some < 100 and 1.0 < share < 1.03
    some, share = simulated(knowing(), 4.5 * DRAFT)  # as expected they are worth 2.6 times as much
    assert share < 1.02


def test_a_step_that_is_held_up_is_no_proof():
    depth, dice = knowing(), random.Random(2)
    for _ in range(2000):
        [k] = depth.choose([1], [0.8], [8])
        depth.took(MAIN * (50 if dice.random() < 0.02 else 1), k * DRAFT, 1 + 3 * (k > 0))
    assert sum(depth.choose([1], [0.8], [8])[0] > 0 for _ in range(100)) > 90
