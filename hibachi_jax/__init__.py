"""JAX, as a hibachi backend."""

from importlib.util import find_spec as _find_spec

if _find_spec("hibachi") is None:  # its name on an index is a stranger's
    raise ModuleNotFoundError(
        "hibachi_jax needs hibachi itself, from the same checkout or the same wheels: pip install '.[jax]' there.",
        name="hibachi",
    )

from hibachi_jax import variants
from hibachi_jax.backend import JaxBackend as JaxBackend

JaxBackend.variants = variants  # the classes import the one that they inherit from, and it asks here for them
