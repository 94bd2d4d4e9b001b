"""Some seconds of the storm. `make soak` runs it for ten minutes."""

import os

from .storm import storm

SEED = int(os.environ.get("HIBACHI_FUZZ_SEED", "0"))


def test_the_storm():
    found = storm(SEED, 12.0)
    assert not found.wrong, f"python -m tests.adversary.serve.storm --seed {SEED}\n" + "\n".join(found.wrong[:20])
    assert found.equal > 5, found.did
