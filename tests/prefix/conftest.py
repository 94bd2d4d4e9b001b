"""Fixtures of the prefix's tests."""

import pytest

from hibachi import LLM

from ..engine.conftest import no_thread_is_left  # noqa: F401


@pytest.fixture(scope="module")
def tiny():
    with LLM("tiny") as llm:
        llm.generate("A")  # its thread was there before any test
        yield llm
