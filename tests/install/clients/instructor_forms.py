"""instructor: a type in its modes JSON_SCHEMA and JSON, whole and streamed, and in MD_JSON, which asks in words."""

import instructor
from asked import base, greedy, say, talks, user
from instructor import Mode
from openai import OpenAI
from person import Person, fields


def asking(url, mode):
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": user}]
    return client.chat.completions, {"model": "tiny", "messages": messages, "response_model": Person, **greedy}


def whole(url, mode):
    client, asked = asking(url, mode)
    return fields(client.create(**asked, max_retries=0))


def streamed(url, mode):
    client, asked = asking(url, mode)
    *_, last = client.create_partial(**asked)
    return last.model_dump()


say(
    schema=whole(base, Mode.JSON_SCHEMA),
    schema_streamed=streamed(base, Mode.JSON_SCHEMA),
    object=whole(talks, Mode.JSON),
    object_streamed=streamed(talks, Mode.JSON),
    words=whole(talks, Mode.MD_JSON),
)
