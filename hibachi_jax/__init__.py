"""JAX, as a hibachi backend."""

from hibachi_jax.backend import JaxBackend as JaxBackend
