"""anthropic: tools, whole and streamed, by hand and by its own loop; a type; counting; models."""

import asyncio

from anthropic import Anthropic, AsyncAnthropic, beta_tool
from asked import asked, base, say
from person import Person, fields
from weather import FUNCTION, NEXT, ONE, SYSTEM, THINK, TWO, WHO, done, get_weather, own, tiny

client = Anthropic(base_url=base.removesuffix("/v1"), **own)
other = Anthropic(base_url=tiny.removesuffix("/v1"), **own)
common = {"model": "tiny", "max_tokens": 1000, "extra_body": {"temperature": 0}}  # it knows no temperature
tools = [{**{k: FUNCTION[k] for k in ("name", "description")}, "input_schema": FUNCTION["parameters"]}]
said = {}


def whole(**asking):
    return client.messages.create(**common, **asking)


def streamed(**asking):
    with client.messages.stream(**common, **asking) as stream:
        pieces = "".join(stream.text_stream)
        found = stream.get_final_message()
    assert pieces == "".join(block.text for block in found.content if block.type == "text")
    return found


def run(ask, question, messages=None, **more):
    """Until there are no more calls."""
    messages = [] if messages is None else messages
    messages.append({"role": "user", "content": question})
    thoughts = ""
    while True:
        found = ask(system=SYSTEM, messages=messages, tools=tools, **more)
        assert found.usage.input_tokens > 0 < found.usage.output_tokens
        messages.append({"role": "assistant", "content": found.content})
        thoughts = thoughts or "".join(block.thinking for block in found.content if block.type == "thinking")
        calls = [block for block in found.content if block.type == "tool_use"]
        assert found.stop_reason == ("tool_use" if calls else "end_turn")
        if not calls:
            text = "".join(block.text for block in found.content if block.type == "text")
            return done(text, **({"reasoning": thoughts} if thoughts else {}))
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)} for call in calls
        ]
        messages.append({"role": "user", "content": results})


for name, ask in (("", whole), ("_streamed", streamed)):
    talk = []
    said["tool" + name] = run(ask, ONE, talk)
    said["turn" + name] = run(ask, NEXT, talk)
    said["parallel" + name] = run(ask, TWO)
    said["think" + name] = run(ask, THINK, thinking={"type": "enabled", "budget_tokens": 1024})
    said["unshown" + name] = run(ask, THINK)

weather = beta_tool(get_weather)
asking = {**common, "messages": [{"role": "user", "content": TWO}], "tools": [weather]}
said["parallel runner"] = done(client.beta.messages.tool_runner(**asking).until_done().content[-1].text)
runner = client.beta.messages.tool_runner(**asking, stream=True)
for stream in runner:
    found = stream.get_final_message()
said["parallel runner_streamed"] = done(found.content[-1].text)

# Demanded of a model that knows nothing of tools: what comes is what the schema says.
person = {"name": "Person", "description": "Who somebody is.", "input_schema": Person.model_json_schema()}
asking = {**common, "max_tokens": asked["max_tokens"], "messages": asked["messages"][1:], "tools": [person]}
for name, choice in (("any", {"type": "any"}), ("named", {"type": "tool", "name": "Person"})):
    (block,) = other.messages.create(**asking, tool_choice=choice).content
    said["demanded " + name] = fields(Person.model_validate(block.input))
    with other.messages.stream(**asking, tool_choice=choice) as stream:
        (block,) = stream.get_final_message().content
    said[f"demanded {name}_streamed"] = fields(Person.model_validate(block.input))

asking = {**common, "messages": [{"role": "user", "content": WHO}]}
said["typed"] = fields(client.messages.parse(**asking, output_format=Person).parsed_output)
with client.messages.stream(**asking, output_format=Person) as stream:
    said["typed_streamed"] = fields(stream.get_final_message().parsed_output)

counted = client.messages.count_tokens(model="tiny", system=SYSTEM, messages=asking["messages"], tools=tools)
found = client.messages.create(**asking, system=SYSTEM, tools=tools)
assert counted.input_tokens == found.usage.input_tokens
(model,) = client.models.list().data
assert model.id == "tiny" and client.models.retrieve("tiny").type == "model"
try:
    client.messages.create(**{**asking, "model": "other"})
except Exception as e:
    assert type(e).__name__ == "NotFoundError", e


async def main():
    async with AsyncAnthropic(base_url=base.removesuffix("/v1"), **own) as client:
        asking = {**common, "messages": [{"role": "user", "content": ONE}], "tools": tools}
        async with client.messages.stream(**asking) as stream:
            (block,) = (await stream.get_final_message()).content
        assert block.input == {"city": "Paris"}


asyncio.run(main())
say(**said)
