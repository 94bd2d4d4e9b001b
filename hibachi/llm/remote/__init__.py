"""The engine in another process."""
