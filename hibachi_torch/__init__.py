"""PyTorch, as a hibachi backend."""

from hibachi_torch.backend import TorchBackend as TorchBackend
