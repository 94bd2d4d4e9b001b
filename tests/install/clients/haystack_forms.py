"""haystack: a generator of chats with a type, whole, and with a schema, streamed."""

import json

from asked import base, greedy, say, system, talks, user
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret
from person import Person

messages = [ChatMessage.from_system(system), ChatMessage.from_user(user)]
named = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema(), "strict": True}}


def found(form, url=base, **more):
    own = {"api_key": Secret.from_token("none"), "api_base_url": url, "max_retries": 0}
    model = OpenAIChatGenerator(model="tiny", generation_kwargs={**greedy, "response_format": form}, **own)
    (reply,) = model.run(messages, **more)["replies"]
    assert reply.meta["finish_reason"] == "stop"
    return json.loads(reply.text)


say(
    schema=found(Person),
    schema_as_mapping=found(named),
    schema_streamed=found(named, streaming_callback=lambda _: None),
    object=found({"type": "json_object"}, talks),
)
