"""Kernels in C++ for the CPU, behind a plain C interface: one library for all array libraries."""
