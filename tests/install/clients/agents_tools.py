"""openai-agents: agents with a tool and with a type, whole and streamed, by its default, which speaks to /v1/responses,
and by its model of chats.
"""

import asyncio
import json
from typing import Annotated, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import asked, base, greedy, say
from openai import AsyncOpenAI
from person import Person, fields
from pydantic import Field
from weather import NEXT, ONE, SYSTEM, TWO, WHO, done, get_weather, own, tiny

set_tracing_disabled(True)
said = {}


async def whole(agent, given, **more):
    return await Runner.run(agent, given, **more)


async def streamed(agent, given, **more):
    run = Runner.run_streamed(agent, given, **more)
    async for _ in run.stream_events():
        pass
    return run


async def tell(way, model):
    settings = ModelSettings(temperature=0)
    tools = [function_tool(get_weather)]
    agent = Agent("brief", instructions=SYSTEM, model=model, model_settings=settings, tools=tools)
    typed = Agent("typed", model=model, model_settings=settings, tools=tools, output_type=Person)
    for name, ask in (("", whole), ("_streamed", streamed)):
        run = await ask(agent, ONE)
        said[f"tool{way}{name}"] = done(run.final_output)
        next_ = [*run.to_input_list(), {"role": "user", "content": NEXT}]
        said[f"turn{way}{name}"] = done((await ask(agent, next_)).final_output)
        if "responses" in way:
            more = {"previous_response_id": run.last_response_id}
            said[f"turn{way} stored{name}"] = done((await ask(agent, NEXT, **more)).final_output)
        said[f"parallel{way}{name}"] = done((await ask(agent, TWO)).final_output)
        said[f"typed{way}{name}"] = fields((await ask(typed, WHO)).final_output)


async def main():
    client = AsyncOpenAI(base_url=base, **own)
    await tell(" responses", OpenAIResponsesModel("tiny", client))
    await tell("", OpenAIChatCompletionsModel("tiny", client))
    # Demanded of a model that knows nothing of tools: what comes is what the schema says.
    other = AsyncOpenAI(base_url=tiny, **own)
    for way, model in (
        (" responses", OpenAIResponsesModel("tiny", other)),
        ("", OpenAIChatCompletionsModel("tiny", other)),
    ):
        settings = ModelSettings(**greedy, tool_choice="required")
        agent = Agent(
            "demanding",
            model=model,
            model_settings=settings,
            tools=[function_tool(person)],
            tool_use_behavior="stop_on_first_tool",
        )
        for name, ask in (("", whole), ("_streamed", streamed)):
            found = (await ask(agent, asked["messages"][1]["content"])).final_output
            said[f"demanded{way}{name}"] = fields(Person.model_validate_json(found))


def person(
    name: Annotated[str, Field(max_length=12)], mood: Literal["good", "bad"], age: Annotated[int, Field(ge=0, le=120)]
) -> str:
    """Say who you are."""
    return json.dumps({"name": name, "mood": mood, "age": age})


asyncio.run(main())
say(**said)
