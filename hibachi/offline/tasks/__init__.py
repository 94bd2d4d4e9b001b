"""Kinds of work that compute rows, and how columns are read."""
