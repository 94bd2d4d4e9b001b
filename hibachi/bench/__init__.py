"""Measuring engines: how long their steps take."""
