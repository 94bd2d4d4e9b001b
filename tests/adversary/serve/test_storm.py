"""Some seconds of the storm. `make soak` runs it for ten minutes."""

import os

import pytest

for name in ("starlette", "uvicorn", "msgspec", "prometheus_client"):
    pytest.importorskip(name)

from .storm import storm  # noqa: E402

SECONDS = 12.0
SEED = int(os.environ.get("HIBACHI_FUZZ_SEED", "0"))


def test_the_storm():
    report = storm(SEED, SECONDS)
    print(report)
    assert report.good, "\n".join(
        [f"python -m tests.adversary.serve.storm --seed {SEED}", report.short(), *report.wrong]
    )
