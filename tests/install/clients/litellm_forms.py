"""litellm: a type, whole and streamed, and any JSON object."""

import json

import litellm
from asked import asked, base, greedy, say, talks
from person import Person, fields


def found(url, form, **more):
    own = {"model": "openai/tiny", "api_base": url, "api_key": "none", "max_retries": 0, "messages": asked["messages"]}
    return litellm.completion(**own, **greedy, response_format=form, **more)


def whole(done):
    assert done.choices[0].finish_reason == "stop"
    return done.choices[0].message.content


schema = fields(Person.model_validate_json(whole(found(base, Person))))
pieces = [chunk.choices[0].delta.content or "" for chunk in found(base, Person, stream=True)]
say(
    schema=schema,
    schema_streamed=json.loads("".join(pieces)),
    object=json.loads(whole(found(talks, {"type": "json_object"}))),
)
