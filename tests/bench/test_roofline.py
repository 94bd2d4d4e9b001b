"""The bound, by hand; and that measured ceilings are numbers."""

import pytest

from benchmarks.bench import roofline, work
from benchmarks.bench.roofline import Ceilings, bound
from hibachi.backend.discover import resolve
from hibachi.llm.model.describe import describe
from hibachi.llm.model.files import TINY
from hibachi.testing.bench.work import TimedRequest

ARCH = describe(TINY).arch
BODY = 4 * (256 * 64 * (4 + 2 * 2) + 4 * 64 * 256 + 3 * 256 * 640)  # qkv, o, gate, up, down of four layers
HEAD = 2048 * 256
KV = 2 * 4 * 2 * 64  # numbers of a token in the cache


def test_one_stream_reads_the_weights_for_each_token():
    limits = Ceilings(bandwidth=1e9, products={1: 1e15})  # reading is all that counts
    found = bound(ARCH, [TimedRequest(0, 0.0, [5] * 10, 4)], limits, "bfloat16", 1)
    weights = 2 * (BODY + HEAD) / 1e9
    cached = 2 * KV * (11 + 12 + 13) / 1e9
    assert found.steps == 3 and found.prefill == pytest.approx(weights)
    assert found.seconds == pytest.approx(4 * weights + cached)
    assert found.tokens_per_second == pytest.approx(4 / found.seconds)


def test_many_rows_are_bound_by_products():
    limits = Ceilings(bandwidth=1e18, products={1: 1e9, 64: 1e10})  # the best rate counts
    found = bound(ARCH, [TimedRequest(i, 0.0, [5] * 7, 2) for i in range(3)], limits, "float32", 64)
    assert found.prefill == pytest.approx((2 * BODY * 21 + 2 * HEAD * 3) / 1e10)
    assert found.seconds == pytest.approx(found.prefill + 2 * 3 * (BODY + HEAD) / 1e10)


def test_rows_that_do_not_fit_wait():
    limits = Ceilings(bandwidth=1e9, products={1: 1e15})
    requests = [TimedRequest(i, 0.0, [5] * 4, 3) for i in range(4)]
    assert [bound(ARCH, requests, limits, "float32", rows).steps for rows in (4, 2, 1)] == [2, 4, 8]


def test_a_shared_beginning_is_computed_once_or_not_at_all():
    limits = Ceilings(bandwidth=1e18, products={1: 1e10})
    requests = work.make("W2", 2048, requests=8)
    off, cold, warm = (
        bound(ARCH, requests, limits, "float32", 8, shared=shared, known=known).prefill
        for shared, known in ((0, 0), (512, 0), (512, 512))
    )
    each = 2 * BODY * 512 / 1e10
    assert off - cold == pytest.approx(7 * each) and cold - warm == pytest.approx(each)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_ceilings_are_measured(library, monkeypatch):
    monkeypatch.setattr(roofline, "_SECONDS", 0.02)
    monkeypatch.setattr(roofline, "_READ", 1 << 22)
    monkeypatch.setattr(roofline, "_COLD", 1 << 20)
    found = roofline.measure(resolve(library), "float32", (256, 64))
    assert found.bandwidth > 1e7 and list(found.products) == [1, 16, 64, 256]
    assert min(found.products.values()) > 1e5


def test_weights_of_eight_bits_are_half_of_what_is_read():
    limits = Ceilings(bandwidth=1e9, products={1: 1e15})
    requests = [TimedRequest(0, 0.0, [5] * 10, 4)]
    found = bound(ARCH, requests, limits, "bfloat16", 1, weights="int8")
    cached = 2 * KV * (11 + 12 + 13) / 1e9  # keys and values stay as they are
    assert found.seconds == pytest.approx(4 * (BODY + HEAD) / 1e9 + cached)
