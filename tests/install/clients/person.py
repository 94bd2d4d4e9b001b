"""The type that answers must have. Its JSON schema is whatever a client makes of it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """Who somebody is."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12, description="The first name")
    mood: Literal["good", "bad"]
    age: int = Field(ge=0, le=120)


def fields(found):
    """Of a Person, which it must be."""
    assert isinstance(found, Person), found
    return found.model_dump()
