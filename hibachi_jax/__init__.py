"""JAX, as a hibachi backend."""

from hibachi_jax import variants
from hibachi_jax.backend import JaxBackend as JaxBackend

JaxBackend.variants = variants  # the classes import the one that they inherit from, and it asks here for them
