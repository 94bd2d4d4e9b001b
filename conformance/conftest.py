import pytest

from hibachi import UnsupportedOperation

from .nine import Nine
from .serving import Serving


@pytest.fixture
def serve(backend):
    with Serving(backend) as serving:
        yield serving


@pytest.fixture
def nine(serve):
    return Nine(serve)


def pytest_collection_modifyitems(config, items):
    """Only backends that have invariant kernels are asked about them."""
    asking = [item for item in items if item.path.stem == "test_deterministic"]
    journal = config.pluginmanager.get_plugin("hibachi-journal")  # where each step of `hibachi conformance` is noted
    has = {}
    for item in asking:
        backend = item.callspec.params["backend"]
        if id(backend) not in has:
            if journal is not None:
                journal.loading(dict(item.user_properties)["promise"]["backend"])
            has[id(backend)] = _invariant(backend)
    gone = [item for item in asking if not has[id(item.callspec.params["backend"])]]
    if gone:
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=gone)


def _invariant(backend):
    try:
        backend.invariant()
    except UnsupportedOperation:
        return False
    except Exception:
        return True  # the test will say why
    return True
