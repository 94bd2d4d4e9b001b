"""How many proposals a step computes: costs are learned from steps that run, and guesses are taken where they pay."""

import random

import numpy as np
import pytest

from hibachi.engine.speculation.howmany import (
    AGE,
    HIGHEST,
    HOLDS,
    PRIOR,
    START,
    STAY,
    TRIALS,
    Costs,
    HowMany,
    Records,
    best,
)

# Seconds of a step of so many tokens, bfloat16 on one thread of a CPU.
CPU = {1: 0.0102, 4: 0.0114, 8: 0.015, 16: 0.026, 64: 0.1, 640: 1.0}
SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
PLENTY = 10**6


def on_a_cpu(tokens):
    return np.interp(tokens, list(CPU), list(CPU.values()))


def noted(*steps):
    costs = Costs()
    for tokens, seconds in steps:
        for _ in range(TRIALS):
            costs.note(tokens, seconds)
    return costs


def knowing(sizes=SIZES):
    out = HowMany()
    out.costs = noted(*((t, float(on_a_cpu(t))) for t in sizes))
    return out


# ---- the gain --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch, gain", [(1, 3.0), (2, 2.0), (4, 1.4), (8, 1.0), (16, 1.0), (32, 1.0)])
def test_what_guesses_that_are_right_in_four_of_five_cases_gain_on_a_cpu(batch, gain):
    assert best(batch, [8] * batch, [0.8] * batch, on_a_cpu, PLENTY)[1] == pytest.approx(gain, abs=0.15)
    found = knowing().choose(batch, [8] * batch, [0.8] * batch, PLENTY)
    assert (sum(found) > 0) == (batch < 8)


def by_hand(tokens, taken, rates):
    """Expected tokens per second if row i takes taken[i]."""
    more = sum(rate**j for n, rate in zip(taken, rates, strict=True) for j in range(1, n + 1))
    return (tokens + more) / on_a_cpu(tokens + sum(taken))


def test_the_best_set_is_the_best_of_all_sets():
    draw = random.Random(0)
    for _ in range(30):
        counts = [draw.randint(0, 4) for _ in range(3)]
        rates = [draw.uniform(0.05, 0.95) for _ in range(3)]
        tokens, budget = draw.randint(3, 9), draw.randint(0, 9)
        found, gain = best(tokens, counts, rates, on_a_cpu, budget)
        sets = [[a, b, c] for a in range(counts[0] + 1) for b in range(counts[1] + 1) for c in range(counts[2] + 1)]
        speeds = [by_hand(tokens, taken, rates) for taken in sets if sum(taken) <= budget]
        assert sum(found) <= budget
        assert by_hand(tokens, found, rates) == pytest.approx(max(speeds))
        assert gain == pytest.approx(max(speeds) / by_hand(tokens, [0, 0, 0], rates))


def test_the_row_with_the_better_record_has_more():
    few, many, none = knowing().choose(3, [8, 8, 8], [0.8, 0.95, 0.05], PLENTY)
    assert 0 < few < many and none == 0


def test_nothing_to_choose_from_is_nothing():
    assert best(4, [0, 0], [0.5, 0.5], on_a_cpu, PLENTY) == ([0, 0], 1.0)
    assert knowing().choose(4, [], [], PLENTY) == []
    assert knowing().choose(4, [0, 0], [0.5, 0.5], PLENTY) == [0, 0]


# ---- costs -----------------------------------------------------------------------------------------------------------


def test_between_known_sizes_the_cost_is_linear():
    costs = noted((4, 4.0), (8, 8.0))
    assert costs.predict([4, 5, 6, 8]).tolist() == [4.0, 5.0, 6.0, 8.0]
    assert costs.predict(1) == 4.0


def test_a_size_is_known_after_some_steps():
    costs = Costs()
    for _ in range(TRIALS):
        assert not costs.knows(5)
        costs.note(5, 1.0)
    assert costs.knows(5) and costs.knows(6)  # which are one size
    assert not costs.knows(4) and not costs.knows(7)


def test_beyond_known_sizes_it_grows_slowly_to_twice_the_tokens_and_then_with_the_tokens():
    assert noted((4, 1.0)).predict([4, 8, 16, 80]) == pytest.approx([1, 1, 2, 10], rel=1e-3)
    assert noted((2, 1.0), (4, 1.5)).predict([8, 16]) == pytest.approx([2.5, 5.0], rel=1e-3)
    assert noted((2, 3.0), (4, 1.5)).predict([8, 16]) == pytest.approx([1.5, 3.0], rel=1e-3)  # no slope that sinks
    assert noted((1, 1.0), (512, 50.0)).predict([2, 512]) == pytest.approx([1.0, 50.0])
    assert noted((1, 9.0), (512, 9.0)).predict([1, 2, 100, 512]).tolist() == [9.0] * 4


def test_a_step_that_took_long_once_says_nothing():
    costs = noted((1, 1.0))
    costs.note(1, 100.0)
    assert costs.predict(1) == 1.0
    first = Costs()
    for seconds in (30.0, 1.0, 1.0):  # the first one compiles
        first.note(1, seconds)
    assert first.predict(1) == 1.0


def test_what_changes_for_good_is_learned():
    costs = noted((1, 1.0))
    for _ in range(40):
        costs.note(1, 2.0)
    assert costs.predict(1) == 2.0


def test_a_size_that_did_not_run_for_long_is_forgotten():
    costs = noted((1, 1.0), (8, 2.0))
    for _ in range(AGE):
        assert costs.knows(8)
        costs.note(1, 1.0)
    costs.note(1, 1.0)
    assert not costs.knows(8)
    costs.note(8, 5.0)
    assert not costs.knows(8)  # what was measured then counts no more


def test_without_any_size_there_is_no_prediction():
    with pytest.raises(ValueError, match="ask knows"):
        Costs().predict(1)


# ---- records ---------------------------------------------------------------------------------------------------------


def test_a_record_follows_what_was_right():
    records = Records()
    assert records.rate("a") == PRIOR
    for _ in range(50):
        records.note("a", 4, 4)
        records.note("b", 4, 0)
    assert records.rate("a") == HIGHEST
    assert records.rate("b") < 0.05


def test_a_rate_is_that_of_single_proposals():
    records, draw = Records(), random.Random(0)
    seen = []
    for _ in range(3000):
        right = 0
        while right < 4 and draw.random() < 0.7:
            right += 1
        records.note("a", 4, right)
        seen.append(records.rate("a"))
    assert np.mean(seen[100:]) == pytest.approx(0.7, abs=0.02)


def test_a_new_request_begins_with_what_is_common():
    records = Records()
    for key in range(100):
        records.note(key, 2, 0)
    assert records.rate("new") < 0.2
    records.forget(0)
    assert records.rate(0) == records.rate("new")
    records.forget("never seen")


# ---- step by step ----------------------------------------------------------------------------------------------------


def played(how, batch, rate, k=8, steps=600, seed=0, seconds=on_a_cpu, available=1.0):
    """How much faster than without proposals; how many proposals each step had. Times are 5 % off, some steps hang."""
    draw = random.Random(seed)
    tokens, taken_in = 0, []
    took = alone = 0.0
    for _ in range(steps):
        counts = [k if draw.random() < available else 0 for _ in range(batch)]
        rates = [how.records.rate(i) for i in range(batch)]
        taken = how.choose(batch, counts, rates, PLENTY) if how.worth(batch, sum(counts)) else [0] * batch
        time = float(seconds(batch + sum(taken)))
        how.costs.note(batch + sum(taken), time * draw.gauss(1, 0.05) * (10 if draw.random() < 0.01 else 1))
        took, alone, tokens = took + time, alone + float(seconds(batch)), tokens + batch
        for i in range(batch):
            tried, right = max(1, taken[i]), 0
            while right < tried and draw.random() < rate:
                right += 1
            if counts[i]:
                how.records.note(i, tried, right)
            tokens += min(right, taken[i])
        taken_in.append(sum(taken))
    return tokens / took / (batch * steps / alone), taken_in


@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("rate", [0.1, 0.8])
def test_who_knows_nothing_soon_has_almost_the_best_gain(batch, rate):
    most = best(batch, [8] * batch, [rate] * batch, on_a_cpu, PLENTY)[1]
    assert played(HowMany(), batch, rate)[0] > max(0.98, 0.93 * most)


def test_the_first_steps_have_none_and_later_ones_try_little_by_little():
    taken = played(HowMany(), 1, 0.95)[1]
    assert taken[:TRIALS] == [0] * TRIALS
    assert taken[TRIALS] == 1 and max(taken[TRIALS : 3 * TRIALS]) <= 3
    assert max(taken) == 8


def test_a_gain_near_the_limit_changes_nothing():
    how = knowing()

    def some(rate):
        return sum(how.choose(4, [8] * 4, [rate] * 4, PLENTY)) > 0

    near = 0.42
    assert STAY < best(4, [8] * 4, [near] * 4, on_a_cpu, PLENTY)[1] < START
    assert not some(near)
    assert some(0.8) and some(near)
    assert not some(0.2) and not some(near)
    how.choose(4, [0] * 4, [0.0] * 4, PLENTY)  # a step without any proposals says nothing
    assert some(0.8) and how.choose(4, [0] * 4, [0.0] * 4, PLENTY) == [0] * 4 and some(near)


def test_noise_does_not_turn_guesses_on_and_off():
    for batch, rate in ((4, 0.8), (2, 0.4), (8, 0.4)):
        taken = np.array(played(HowMany(), batch, rate)[1][50:]) > 0
        assert int((taken[1:] != taken[:-1]).sum()) <= 1, (batch, rate)


def test_where_a_step_costs_the_same_all_are_taken():
    assert played(HowMany(), 4, 0.9, seconds=lambda tokens: 0.01)[1][-1] == 32


def test_guesses_that_got_better_are_found_again():
    how = knowing()
    assert max(played(how, 1, 0.0)[1][-50:]) == 0
    assert min(played(how, 1, 0.9)[1][-50:]) > 0


def test_it_is_said_beforehand_whether_guesses_could_pay():
    how = knowing()
    assert [batch for batch in (1, 2, 4, 8, 16, 32) if how.worth(batch, 5 * batch)] == [1, 2, 4, 8]
    assert not how.worth(1, 0)
    assert not HowMany().worth(1, 5)  # the first steps are for their cost


def test_no_step_costs_more_than_a_larger_one():
    """Where it seems so, others had the machine when the smaller ones ran."""
    costs = Costs()
    for tokens, seconds in ((1, 5.0), (2, 3.0), (4, 2.0), (8, 4.0)):
        for _ in range(TRIALS):
            costs.note(tokens, seconds)
    assert [costs.predict(n) for n in (1, 2, 4, 6, 8)] == pytest.approx([2, 2, 2, 3, 4])


def test_other_costs_are_seen_within_some_steps():
    how = knowing()
    assert how.worth(1, 4)
    how.costs = noted(*((tokens, float(tokens)) for tokens in (1, 2, 4, 8, 16)))
    assert not all(how.worth(1, 4) for _ in range(HOLDS))
    assert not how.worth(1, 4)
