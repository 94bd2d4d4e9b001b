"""Some of the storm. `python -m tests.router.storm` is all of it."""

import os

import pytest

for name in ("aiohttp", "uvicorn", "msgspec", "prometheus_client"):
    pytest.importorskip(name)

from .storm import command, storm  # noqa: E402

SEED = int(os.environ.get("HIBACHI_FUZZ_SEED", "7"))


def weathered(seed, requests):
    report = storm(seed, requests)
    print(report)
    assert report.good, "\n".join([command(seed, requests), *report.wrong, str(report)])


def test_the_storm(monkeypatch):
    monkeypatch.delenv("UPSTREAMS", raising=False)
    weathered(SEED, 500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [SEED, SEED + 1])
def test_a_long_storm(monkeypatch, seed):
    monkeypatch.delenv("UPSTREAMS", raising=False)
    weathered(seed, 10_000)
