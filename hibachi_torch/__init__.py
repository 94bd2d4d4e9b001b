"""PyTorch, as a hibachi backend."""

from importlib.util import find_spec as _find_spec

if _find_spec("hibachi") is None:  # its name on an index is a stranger's
    raise ModuleNotFoundError(
        "hibachi_torch needs hibachi itself, from the same checkout or the same wheels: pip install '.[torch]' there.",
        name="hibachi",
    )

from hibachi_torch import variants
from hibachi_torch.backend import TorchBackend as TorchBackend
from hibachi_torch.modules import invariant as invariant

TorchBackend.variants = variants  # the classes import the one that they inherit from, and it asks here for them
