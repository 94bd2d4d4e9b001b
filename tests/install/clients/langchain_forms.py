"""langchain-openai: with_structured_output, in its methods json_schema (whole and streamed) and json_mode."""

from asked import asked, base, greedy, say, talks
from langchain_openai import ChatOpenAI
from person import Person, fields

messages = [(m["role"], m["content"]) for m in asked["messages"]]


def model(url, **how):
    return ChatOpenAI(model="tiny", base_url=url, api_key="none", max_retries=0, **greedy).with_structured_output(**how)


typed, mapped = model(base, schema=Person), model(base, schema=Person.model_json_schema(), method="json_schema")
first = fields(typed.invoke(messages))
*_, last = typed.stream(messages)
say(
    schema=first,
    schema_streamed=fields(last),
    schema_as_mapping=mapped.invoke(messages),
    object=fields(model(talks, schema=Person, method="json_mode").invoke(messages)),
)
