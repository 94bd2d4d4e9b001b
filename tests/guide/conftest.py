"""Fixtures of the engine's tests."""

from ..engine.conftest import eager_switching, no_thread_is_left, serve  # noqa: F401
