"""Kernels in C++ for the CPU: see `hibachi_jax.native.backend`."""
