import pytest

pytest.importorskip("msgspec")
