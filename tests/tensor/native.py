"""Whether a backend's native kernels can be tried here."""

import pytest


def skip_without(compiled):
    """Skip a whole file where nothing can be compiled. Kernels that a compiler refuses are a failure, not a lack."""
    why = compiled.why_missing()
    assert why is None or "do not compile" not in why, why
    if why:
        pytest.skip(why, allow_module_level=True)
