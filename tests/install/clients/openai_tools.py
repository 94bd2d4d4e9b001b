"""The official client: tools by /v1/chat/completions and by /v1/responses, in each way that it has."""

import asyncio
import json

from asked import asked, base, greedy, say
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from person import Person, fields
from weather import FUNCTION, NEXT, ONE, SYSTEM, THINK, TWO, WHO, done, get_weather, own, tiny

client, other = OpenAI(base_url=base, **own), OpenAI(base_url=tiny, **own)
tools = [{"type": "function", "function": FUNCTION}]
flat = [{"type": "function", **FUNCTION, "strict": True}]
person = pydantic_function_tool(Person)
said = {}


def whole(messages, **more):
    return client.chat.completions.create(model="tiny", messages=messages, temperature=0, **more)


def streamed(messages, **more):
    with client.chat.completions.stream(model="tiny", messages=messages, temperature=0, **more) as stream:
        events = [event.type for event in stream]
        found = stream.get_final_completion()
    calls = found.choices[0].message.tool_calls or []
    assert events.count("tool_calls.function.arguments.done") == len(calls)
    return found


def run(ask, question, messages=None):
    """Until there are no more calls."""
    messages = messages if messages is not None else [{"role": "system", "content": SYSTEM}]
    messages.append({"role": "user", "content": question})
    thoughts = ""
    while True:
        (choice,) = ask(messages, tools=tools).choices
        message = choice.message
        thoughts = thoughts or getattr(message, "reasoning_content", None) or ""
        messages.append(message.model_dump(exclude_unset=True))
        assert choice.finish_reason == ("tool_calls" if message.tool_calls else "stop")
        if not message.tool_calls:
            return done(message.content, **({"reasoning": thoughts} if thoughts else {}))
        assert not message.content
        for call in message.tool_calls:
            told = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})


for name, ask in (("", whole), ("_streamed", streamed)):
    talk = []
    said["tool" + name] = run(ask, ONE, talk)
    said["turn" + name] = run(ask, NEXT, talk)
    said["parallel" + name] = run(ask, TWO)
    said["think" + name] = run(ask, THINK)

# Demanded of a model that knows nothing of tools: what comes is what the schema says.
asking = {"model": "tiny", "messages": asked["messages"], **greedy, "tools": [person], "parallel_tool_calls": False}
named = {"type": "function", "function": {"name": "Person"}}
allowed = {"mode": "required", "tools": [named]}
for name, choice in (
    ("required", "required"),
    ("named", named),
    ("allowed", {"type": "allowed_tools", "allowed_tools": allowed}),
):
    parsed = other.chat.completions.parse(**asking, tool_choice=choice)
    (call,) = parsed.choices[0].message.tool_calls
    assert parsed.choices[0].finish_reason == "tool_calls"
    said["demanded " + name] = fields(call.function.parsed_arguments)
    with other.chat.completions.stream(**asking, tool_choice=choice) as stream:
        (call,) = stream.until_done().get_final_completion().choices[0].message.tool_calls
    said[f"demanded {name}_streamed"] = fields(call.function.parsed_arguments)
assert not whole([{"role": "user", "content": ONE}], tools=tools, tool_choice="none").choices[0].message.tool_calls


# ---- /v1/responses


def respond(**more):
    return client.responses.create(model="tiny", instructions=SYSTEM, temperature=0, tools=flat, **more)


def respond_streamed(**more):
    with client.responses.stream(model="tiny", instructions=SYSTEM, temperature=0, tools=flat, **more) as stream:
        numbers = [event.sequence_number for event in stream]
        assert numbers == list(range(len(numbers)))
        return stream.get_final_response()


def run_response(ask, question, *, stored, before=None):
    """stored: the server keeps what was said."""
    given = list(before or []) if not stored else []
    given.append({"role": "user", "content": question})
    more = {"previous_response_id": before} if stored and before else {} if stored else {"store": False}
    thoughts = ""
    while True:
        found = ask(input=given, **more)
        assert found.status == "completed", found
        for item in found.output:
            if item.type == "reasoning":
                thoughts = thoughts or "".join(part.text for part in [*(item.content or []), *item.summary])
        calls = [item for item in found.output if item.type == "function_call"]
        results = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": get_weather(**json.loads(call.arguments)),
            }
            for call in calls
        ]
        if stored:
            more, given = {"previous_response_id": found.id}, results
        else:
            given += [item.model_dump(exclude_unset=True) for item in found.output] + results
        if not calls:
            return done(found.output_text, **({"reasoning": thoughts} if thoughts else {})), found.id, given


for name, ask in (("", respond), ("_streamed", respond_streamed)):
    for stored in (True, False):
        way = " responses" + (" stored" if stored else "") + name
        said["tool" + way], id_, given = run_response(ask, ONE, stored=stored)
        said["turn" + way], _, _ = run_response(ask, NEXT, stored=stored, before=id_ if stored else given)
        said["parallel" + way], _, _ = run_response(ask, TWO, stored=stored)
        said["think" + way], _, _ = run_response(ask, THINK, stored=stored)

asking = {"model": "tiny", "input": WHO, "temperature": 0, "text_format": Person}
said["typed responses"] = fields(client.responses.parse(**asking).output_parsed)
with client.responses.stream(**asking) as stream:
    said["typed responses_streamed"] = fields(stream.until_done().get_final_response().output_parsed)

asking = {"model": "tiny", "input": asked["messages"], "temperature": 0, "max_output_tokens": asked["max_tokens"]}
asking |= {"tools": [{"type": "function", **person["function"]}], "parallel_tool_calls": False}
for name, choice in (("required", "required"), ("named", {"type": "function", "name": "Person"})):
    (call,) = other.responses.create(**asking, tool_choice=choice).output
    said[f"demanded {name} responses"] = fields(Person.model_validate_json(call.arguments))
    with other.responses.stream(**asking, tool_choice=choice) as stream:
        (call,) = stream.until_done().get_final_response().output
    said[f"demanded {name} responses_streamed"] = fields(Person.model_validate_json(call.arguments))

kept = client.responses.create(model="tiny", input=WHO, temperature=0)
assert client.responses.retrieve(kept.id).output_text == kept.output_text
(item,) = client.responses.input_items.list(kept.id).data
assert item.content[0].text == WHO
client.responses.delete(kept.id)
try:
    client.responses.retrieve(kept.id)
except Exception as e:
    assert type(e).__name__ == "NotFoundError", e
else:
    raise AssertionError("It was deleted.")


async def main():
    async with AsyncOpenAI(base_url=base, **own) as client:
        asking = {"model": "tiny", "temperature": 0}
        chat = {**asking, "messages": [{"role": "user", "content": ONE}], "tools": tools}
        async with client.chat.completions.stream(**chat) as stream:
            found = await stream.get_final_completion()
        (call,) = found.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        async with client.responses.stream(**asking, input=ONE, tools=flat) as stream:
            (item,) = (await stream.get_final_response()).output
        assert json.loads(item.arguments) == {"city": "Paris"}


asyncio.run(main())
say(**said)
