"""Measuring: engines side by side (engines/), one engine's steps (steps/), a server under load (load/)."""
