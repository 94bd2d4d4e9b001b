"""Engines side by side: the same work through each, in a process of its own."""
