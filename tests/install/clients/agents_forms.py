"""openai-agents by its default, which speaks to /v1/responses, with a type as its output."""

import asyncio

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled
from asked import base, greedy, say, system, user
from openai import AsyncOpenAI
from person import Person, fields

set_tracing_disabled(True)
model = OpenAIResponsesModel("tiny", AsyncOpenAI(base_url=base, api_key="none", max_retries=0))
agent = Agent("brief", instructions=system, model=model, model_settings=ModelSettings(**greedy), output_type=Person)


async def main():
    done = await Runner.run(agent, user)
    stream = Runner.run_streamed(agent, user)
    async for _ in stream.stream_events():
        pass
    say(schema=fields(done.final_output), schema_streamed=fields(stream.final_output))


asyncio.run(main())
