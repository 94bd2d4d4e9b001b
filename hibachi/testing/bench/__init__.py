"""Measuring: a server under load, what the steps of an engine cost."""
