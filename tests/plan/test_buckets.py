"""Sizes that steps are padded to: large enough, few, and never far above what is needed."""

import pytest

from hibachi.plan.buckets import decode_rows, programs, prompt_tokens, size_bucket, width_bucket


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
    assert [decode_rows(n, (1, 1), any_width=False) for n in (1, 2, 3, 8, 9)] == [2, 2, 8, 8, 16]
    assert [decode_rows(n, (1, 1), any_width=True) for n in (1, 2, 3, 9)] == [1, 2, 4, 16]
    assert [prompt_tokens(n, (4, 2), 32) for n in (3, 64, 65, 97, 129)] == [64, 64, 96, 128, 192]
    assert [width_bucket(n, 50) for n in (1, 4, 5, 17)] == [4, 4, 16, 50]


def test_programs_are_counted_once_each():
    assert programs((1, 1), range(1, 65), range(33, 513), 32, any_width=True) == 7 + 4
    assert programs((4, 2), range(1, 65), range(33, 513), 32, any_width=True) == 14 + 7
