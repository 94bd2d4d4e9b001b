"""PyTorch, as a hibachi backend."""

from hibachi_torch import variants
from hibachi_torch.backend import TorchBackend as TorchBackend
from hibachi_torch.modules import invariant as invariant

TorchBackend.variants = variants  # the classes import the one that they inherit from, and it asks here for them
