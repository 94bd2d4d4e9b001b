"""How cost grows: cliffs that are there are found, and none that are not."""

from benchmarks.bench.growth import Point, cliffs, measure
from hibachi import LLM


def rows(times, context=128):
    return [Point(n, context, seconds) for n, seconds in times.items()]


def contexts(times, rows=4):
    return [Point(rows, c, seconds) for c, seconds in times.items()]


def test_smooth_growth_has_no_cliff():
    linear = {n: 0.010 + 0.001 * n for n in (1, 2, 4, 5, 8, 9, 16, 17, 64, 256)}
    assert not cliffs(rows(linear))
    assert not cliffs(contexts({c: 0.010 + 1e-5 * c for c in (128, 256, 512, 1024, 4096)}))
    assert not cliffs(contexts({c: 0.010 for c in (128, 256, 512)}))
    assert not cliffs([])


def test_rows_that_are_padded_to_the_next_bucket():
    [cliff] = cliffs(rows({15: 0.015, 16: 0.016, 17: 0.032, 32: 0.032}))
    assert (cliff.along, cliff.before.rows, cliff.after.rows) == ("rows", 16, 17)
    assert "16 -> 17 rows at context 128: 1,000 -> 531 tokens/s" in str(cliff)
    assert not cliffs(rows({16: 0.016, 17: 0.0205}))  # 17 % less


def test_a_context_from_which_on_all_is_slower():
    [cliff] = cliffs(contexts({128: 0.010, 256: 0.011, 512: 0.013, 1024: 0.034, 2048: 0.060}))
    assert cliff.before.context == 512 and cliff.after.context == 1024
    assert "2.00 times" in str(cliff)
    [cliff] = cliffs(contexts({128: 0.010, 256: 0.025}))  # 0.020 would be in proportion
    assert cliff.after.context == 256


def test_the_engine_is_measured_where_it_has_room():
    seen = []
    with LLM("tiny", max_num_seqs=4, max_model_len=100) as llm:
        found = measure(
            llm.engine, 2048, rows=(1, 2, 4, 8), contexts=(16, 64, 512), new_tokens=6, rounds=1, told=seen.append
        )
        assert not measure(llm.engine, 2048, rows=(8,), contexts=(16,))
    assert {(p.rows, p.context) for p in found} == {(1, 16), (2, 16), (4, 16), (1, 64), (4, 64)}
    assert seen == found and all(p.seconds > 0 and p.tokens_per_second == p.rows / p.seconds for p in found)
