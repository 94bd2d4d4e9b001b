import pytest

from . import made


@pytest.fixture(scope="session")
def tiny():
    setting = made.Setting(made.tiny())
    yield setting
    setting.guides.close()
