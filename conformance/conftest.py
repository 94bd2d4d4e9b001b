import pytest

from .serving import Serving


@pytest.fixture
def serve(backend):
    with Serving(backend) as serving:
        yield serving
