"""`benchmarks/million.py` with fewer requests: long lives of engines with all that can happen."""

import pytest

from benchmarks.million import main


@pytest.mark.slow
def test_fifty_thousand_requests_break_nothing():
    total = main(requests=50_000, size=5_000, every=50, seed=1_000)
    assert total["violations"] == 0 and total["requests"] == 50_000
    rare = "preemptions", "hits", "evictions", "cancelled", "error", "late", "refused", "rollback", "cache lost"
    assert all(total[kind] > 100 for kind in (*rare, "proposed", "accepted")), total
