import gc
import sys
import threading
from contextlib import ExitStack

import pytest

from hibachi import AutoregressiveBatchInference

from .models import PATIENCE, Next, Turnstile


@pytest.fixture
def serve():
    """serve(model, **options): an engine that is closed after the test, whatever happens."""
    with ExitStack() as stack:

        def make(model=None, **options):
            model = Next() if model is None else model
            options = {"max_model_len": 1000, "backend": "numpy"} | options
            if not hasattr(model, "cache_spec"):  # no calls but those of the requests
                options = {"deterministic": False} | options
            engine = stack.enter_context(AutoregressiveBatchInference(model, **options))
            for held in (model, options["backend"]):
                if isinstance(held, Turnstile):
                    stack.callback(held.open)
            return engine

        yield make


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    left = [t for t in set(threading.enumerate()) - before if t.name == "hibachi-engine"]
    if left:
        gc.collect()
    for thread in left:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "an engine's thread outlives its test"


@pytest.fixture
def eager_switching():
    """Threads take turns all the time, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
