"""Engines side by side, the steps of one, and pictures of what came out: `python -m benchmarks.bench --help`."""
