"""Offline runs: files of rows in, files of rows out."""
