"""The official client: a type, any JSON object, and vLLM's fields."""

import asyncio
import json
from typing import Generic, Literal, TypeVar

from asked import asked, base, say, talks
from openai import AsyncOpenAI, OpenAI
from person import Person, fields
from pydantic import BaseModel

chat = {"model": "tiny", "messages": asked["messages"], "temperature": 0, "max_tokens": asked["max_tokens"]}
to_object = {**chat, "response_format": {"type": "json_object"}}
own = {"api_key": "none", "max_retries": 0}
client, other = OpenAI(base_url=base, **own), OpenAI(base_url=talks, **own)
said = {}
T = TypeVar("T")


class Answer(BaseModel, Generic[T]):
    it: T


def parsed(done):
    assert done.choices[0].finish_reason == "stop"
    return fields(done.choices[0].message.parsed)


def pieces(stream):
    for event in stream:
        if event.type == "content.delta":
            yield event.delta


said["schema"] = parsed(client.chat.completions.parse(**chat, response_format=Person))
with client.chat.completions.stream(**chat, response_format=Person) as stream:
    said["schema_streamed"] = json.loads("".join(pieces(stream)))
    assert parsed(stream.get_final_completion()) == said["schema_streamed"]
said["object"] = json.loads(other.chat.completions.create(**to_object).choices[0].message.content)
with other.chat.completions.stream(**to_object) as stream:
    said["object_streamed"] = json.loads("".join(pieces(stream)))


async def main():
    async with AsyncOpenAI(base_url=base, **own) as client, AsyncOpenAI(base_url=talks, **own) as other:
        said["schema_async"] = parsed(await client.chat.completions.parse(**chat, response_format=Person))
        async with client.chat.completions.stream(**chat, response_format=Person) as stream:
            async for _ in stream:
                pass
            said["schema_async_streamed"] = parsed(await stream.get_final_completion())
        found = await other.chat.completions.create(**to_object)
        said["object_async"] = json.loads(found.choices[0].message.content)


asyncio.run(main())


# A name such as "Answer[int]".
generic = client.chat.completions.parse(**chat, response_format=Answer[Literal["yes", "no"]])
said["schema_generic"] = generic.choices[0].message.parsed.model_dump()

# What vLLM's pages show, and what older ones do.
GRAMMAR = """
    root ::= "SELECT " column " FROM " table

    column ::= "name" | "age"
    table ::= "people" | "places"
"""
SHOWN = {
    "choice": ["positive", "negative"],
    "regex": r"\w{1,9}@\w{1,9}\.com\n",
    "json": Person.model_json_schema(),
    "grammar": GRAMMAR,
}
text = {"model": "tiny", "prompt": "An address: ", "temperature": 0, "max_tokens": asked["max_tokens"]}
for name, form in SHOWN.items():
    more = {"stop": ["\n"], "extra_body": {"structured_outputs": {name: form}}}
    said[f"structured_{name}"] = client.chat.completions.create(**chat, **more).choices[0].message.content
    said[f"structured_{name}_text"] = client.completions.create(**text, **more).choices[0].text
    older = {"guided_decoding_backend": "guidance", f"guided_{name}": form}
    found = client.chat.completions.create(**chat, stop=["\n"], extra_body=older)
    said[f"guided_{name}"] = found.choices[0].message.content
say(**said)
