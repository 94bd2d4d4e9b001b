import pytest

pytest.importorskip("msgspec")

from ..lib.described import description


@pytest.fixture(scope="session")
def described():
    """described(name, data): checks that OpenAI's document of responses describes it by this name."""
    return description("openai-responses.json")
