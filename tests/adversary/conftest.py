"""The engines of these tests are closed after each, whatever happens, and leave no thread behind."""

from ..engine.conftest import no_thread_is_left, serve  # noqa: F401  # fixtures
