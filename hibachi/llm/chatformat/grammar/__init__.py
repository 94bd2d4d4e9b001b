"""Writes the grammar that an answer with tools must keep to."""
