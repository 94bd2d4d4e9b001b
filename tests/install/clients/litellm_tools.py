"""litellm: tools, a type and reasoning, whole and streamed, of chats, of /v1/messages as anthropic/MODEL, and of
/v1/responses.
"""

import json

import litellm
from asked import asked, base, greedy, say
from person import Person, fields
from weather import FUNCTION, NEXT, ONE, SYSTEM, THINK, TWO, WHO, done, get_weather, tiny

tools = [{"type": "function", "function": FUNCTION}]
own = {"api_key": "none", "max_retries": 0}
said = {}


def whole(**asking):
    return litellm.completion(**own, **asking)


def streamed(**asking):
    chunks = list(litellm.completion(**own, **asking, stream=True, stream_options={"include_usage": True}))
    return litellm.stream_chunk_builder(chunks, messages=asking["messages"])


def run(ask, model, url, question, messages=None, **more):
    """Until there are no more calls."""
    messages = [{"role": "system", "content": SYSTEM}] if messages is None else messages
    messages.append({"role": "user", "content": question})
    thoughts = ""
    while True:
        found = ask(model=model, api_base=url, messages=messages, tools=tools, temperature=0, max_tokens=1000, **more)
        assert found.usage.prompt_tokens > 0 < found.usage.completion_tokens
        message = found.choices[0].message
        messages.append(message.model_dump())
        thoughts = thoughts or getattr(message, "reasoning_content", None)
        if not message.tool_calls:
            assert found.choices[0].finish_reason == "stop"
            return done(message.content, **({"reasoning": thoughts} if thoughts else {}))
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


person = {"name": "Person", "description": "Who somebody is.", "parameters": Person.model_json_schema()}
thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "allowed_openai_params": ["thinking"]}
for way, model, (url, other), more in (
    ("", "openai/tiny", (base, tiny), {}),
    (" messages", "anthropic/tiny", (base.removesuffix("/v1"), tiny.removesuffix("/v1")), thinking),
):
    for name, ask in (("", whole), ("_streamed", streamed)):
        talk = []
        said[f"tool{way}{name}"] = run(ask, model, url, ONE, talk)
        said[f"turn{way}{name}"] = run(ask, model, url, NEXT, talk)
        said[f"parallel{way}{name}"] = run(ask, model, url, TWO)
        said[f"think{way}{name}"] = run(ask, model, url, THINK, **more)
        who = {"model": model, "api_base": url, "messages": [{"role": "user", "content": WHO}], "max_tokens": 1000}
        said[f"typed{way}{name}"] = fields(
            Person.model_validate_json(ask(**who, response_format=Person).choices[0].message.content)
        )
        # Demanded of a model that knows nothing of tools: what comes is what the schema says.
        asking = {"model": model, "api_base": other, "messages": asked["messages"], **greedy}
        demanded = (
            ask(**asking, tools=[{"type": "function", "function": person}], tool_choice="required").choices[0].message
        )
        said[f"demanded{way}{name}"] = fields(Person.model_validate_json(demanded.tool_calls[0].function.arguments))


def response(**asking):
    return litellm.responses(model="openai/tiny", api_base=base, **own, **asking)


def response_streamed(**asking):
    *_, last = litellm.responses(model="openai/tiny", api_base=base, **own, **asking, stream=True)
    assert last.type == "response.completed"
    return last.response


def go_on(ask, question, previous=None):
    """Until there are no more calls. What came, and the id of the last response."""
    given, thoughts = [{"role": "user", "content": question}], ""
    while True:
        found = ask(input=given, tools=[{"type": "function", **FUNCTION}], previous_response_id=previous, temperature=0)
        calls = [item for item in found.output if item.type == "function_call"]
        thoughts = thoughts or "".join(item.content[0].text for item in found.output if item.type == "reasoning")
        if not calls:
            (message,) = (item for item in found.output if item.type == "message")
            return done(message.content[0].text, **({"reasoning": thoughts} if thoughts else {})), found.id
        previous = found.id
        given = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": get_weather(**json.loads(call.arguments)),
            }
            for call in calls
        ]


for name, ask in (("", response), ("_streamed", response_streamed)):
    said[f"tool responses{name}"], last = go_on(ask, ONE)
    said[f"turn responses{name}"], _ = go_on(ask, NEXT, last)
    said[f"parallel responses{name}"], _ = go_on(ask, TWO)
    said[f"think responses{name}"], _ = go_on(ask, THINK)
say(**said)
