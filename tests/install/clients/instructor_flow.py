"""instructor, in the mode that asks for JSON in words."""

import instructor
from asked import base, say, user
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str


client = instructor.from_openai(OpenAI(base_url=base, api_key="none"), mode=instructor.Mode.MD_JSON)
found = client.chat.completions.create(
    model="tiny", messages=[{"role": "user", "content": user}], response_model=Person, max_retries=1
)
say(found=found.model_dump())
