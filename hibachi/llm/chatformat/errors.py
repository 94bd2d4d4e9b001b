"""What is wrong with a field of a chat."""

from __future__ import annotations

from typing import Self

from hibachi.errors import FieldPath, InvalidRequest

UNSUPPORTED = "unsupported_parameter"


class BadField(InvalidRequest):
    """A field of a chat that cannot be served. code: why, in the words of OpenAI's API."""

    code: str

    @classmethod
    def at(cls, path: FieldPath, *words: str | FieldPath, code: str = "invalid_value") -> Self:
        return cls.about(path, path, *words, code=code)

    @classmethod
    def about(cls, path: FieldPath, *words: str | FieldPath, code: str = "invalid_value") -> Self:
        error = super().about(path, *words)
        error.code = code
        return error


class TemplateFailed(InvalidRequest):
    """What a chat template says of a conversation, or why it could not be rendered."""
