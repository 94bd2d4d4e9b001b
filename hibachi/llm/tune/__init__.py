"""Kernels are chosen by timing them."""
