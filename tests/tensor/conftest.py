"""What the tests of kernels share."""

import pytest


@pytest.fixture(params=(1, 2), ids=lambda n: f"{n}thread")
def threads(request):
    """How many threads kernels and PyTorch have."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
