"""pydantic-ai: the server is given the schema (NativeOutput), or the model is told of it (PromptedOutput)."""

import asyncio

from asked import base, greedy, say, system, talks, user
from person import Person, fields
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def found(url, output):
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, system_prompt=system, model_settings=greedy, output_type=output, retries=0)
    done = await agent.run(user)
    async with agent.run_stream(user) as stream:
        streamed = await stream.get_output()
    return fields(done.output), fields(streamed)


async def main():
    schema, schema_streamed = await found(base, NativeOutput(Person))
    object_, object_streamed = await found(talks, PromptedOutput(Person))
    say(schema=schema, schema_streamed=schema_streamed, object=object_, object_streamed=object_streamed)


asyncio.run(main())
