"""Kernels in C++ that know no array library, and how a backend compiles them on the machine that runs them."""
