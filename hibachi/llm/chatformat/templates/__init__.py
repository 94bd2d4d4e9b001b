"""Finds how a chat template writes calls and reasoning: derived from probes, or a record by name."""
