"""What hibachi promises, one test each; `hibachi conformance --backend NAME` runs them on any backend.

A test's name is its promise. Docstrings may name facts H-01 to H-46 of the Rust crate that we follow.
"""
