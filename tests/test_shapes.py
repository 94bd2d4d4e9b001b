"""CallShapes that calls are padded to: large enough, few, and never far above what is needed."""

from dataclasses import replace

import pytest

from hibachi.common.shapes import CallShapes, StepShape, fixed, next_power, row_bucket, size_bucket
from hibachi.errors import ConfigError

ALL = CallShapes(few="all")
WIDE = CallShapes(few="all", any_width=True)
MOST = {"rows": 16, "blocks": 50}


@pytest.mark.parametrize("parts, most", [(1, 2.0), (2, 1.5), (4, 1.25), (8, 1.125)])
def test_a_bucket_holds_what_it_must_and_little_more(parts, most):
    for n in range(1, 2000):
        size = size_bucket(n, parts)
        assert n <= size and size_bucket(size, parts) == size
        assert size <= size_bucket(n + 1, parts)
        assert size < n * most + 4  # steps are never shorter than four


def test_sizes_by_hand():
    assert sorted({size_bucket(n, 4) for n in range(1, 65)}) == [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert sorted({size_bucket(n, 2) for n in range(1, 129)}) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert [ALL.decode_rows(n) for n in (1, 2, 3, 8, 9)] == [2, 2, 8, 8, 16]
    assert [replace(WIDE, ladder=(1, 1)).decode_rows(n) for n in (1, 2, 3, 9)] == [1, 2, 4, 16]
    assert [WIDE.prompt_tokens(n) for n in (3, 64, 65, 97, 129)] == [64, 64, 96, 128, 192]
    assert [next_power(n, 4) for n in (1, 4, 5, 17)] == [4, 4, 16, 64]
    assert [row_bucket(n, 20) for n in (1, 2, 3, 9, 17)] == [2, 2, 8, 16, 20] and row_bucket(1, 1) == 2


def test_programs_are_counted_once_each():
    rows, tokens = range(1, 65), range(33, 513)
    assert replace(WIDE, ladder=(1, 1)).programs(rows, tokens) == 7 + 4
    assert WIDE.programs(rows, tokens) == 14 + 7


def test_the_ladder_follows_the_width_unless_it_is_said():
    assert ALL.parts == (1, 1) and WIDE.parts == (4, 2) and replace(WIDE, ladder=(2, 1)).parts == (2, 1)


# ---- steps -----------------------------------------------------------------------------------------------------------

DECODE = StepShape(tokens=3, rows=3, blocks=5, tiles=3, tile=1, outputs=2)
PROMPTS = StepShape(tokens=70, rows=3, blocks=5, tiles=4, tile=32, outputs=1)


def test_where_any_shape_will_do_steps_stay_as_they_are():
    assert (
        CallShapes().step(DECODE, longest=1, **MOST) is None and CallShapes().step(PROMPTS, longest=40, **MOST) is None
    )


def test_multiples_of_tokens_rows_and_outputs():
    many = CallShapes(multiple=4)
    assert many.step(DECODE, longest=1, **MOST) == StepShape(4, 4, 5, 4, 1, 4)
    assert many.step(PROMPTS, longest=40, **MOST) == StepShape(72, 4, 5, 4, 32, 4)
    assert many.step(DECODE._replace(outputs=0), longest=1, **MOST).outputs == 4  # a library may refuse none at all
    states = PROMPTS._replace(tokens=30)
    assert many.step(states, longest=10, state=True, **MOST)[:2] == (40, 4)  # padding inside a row would change it


def test_single_tokens_alone_come_in_few_shapes():
    some = CallShapes(few="decode")
    assert some.step(DECODE, longest=1, **MOST) == fixed(8, 8, 16, 1)
    assert some.step(PROMPTS, longest=40, **MOST) is None and not some.compiled
    assert some.rows(3, 16) == 3 and some.length(17) == 17 and some.list_length(5) == 5


def test_all_steps_come_in_few_shapes():
    assert ALL.step(DECODE, longest=1, **MOST) == fixed(8, 8, 16, 1)
    assert ALL.step(PROMPTS, longest=40, **MOST) == fixed(128, 16, 16, 32)  # rows: as many as there may be
    assert ALL.step(PROMPTS, longest=40, scored=True, **MOST).outputs == 128
    assert ALL.step(PROMPTS._replace(tokens=30), longest=10, state=True, **MOST) == fixed(80, 8, 16, 32)
    assert WIDE.step(DECODE, longest=1, **MOST) == fixed(4, 4, 50, 1)
    assert ALL.step(DECODE, longest=1, rows=3, blocks=7) == fixed(3, 3, 7, 1)  # never more than there may be
    assert ALL.step(DECODE._replace(rows=1, tokens=1), longest=1, rows=1, blocks=7).rows == 2
    assert ALL.rows(3, 16) == 8 and ALL.length(17) == 32 and ALL.length(3) == 16 and ALL.list_length(17) == 64


def test_steps_of_fixed_sizes():
    sizes = CallShapes(few="all", multiple=8, sizes=(8, 32), tiles=(1, 1))
    assert sizes.step(DECODE, longest=1, **MOST) == fixed(8, 8, 50, 1)
    assert sizes.step(PROMPTS._replace(tokens=9, tile=1), longest=9, **MOST) == fixed(32, 32, 50, 1)


@pytest.mark.parametrize(
    "wrong", [{"sizes": (32, 8)}, {"sizes": (8, 8)}, {"sizes": (0, 8)}, {"sizes": (8,), "tiles": (1, 32)}]
)
def test_sizes_that_cannot_be_kept_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"sizes >= 1 that rise, and tiles=\(1, 1\); got"):
        CallShapes(**{"few": "all", "tiles": (1, 1)} | wrong)
