"""pydantic-ai: an agent with text as its output, whole and streamed."""

import asyncio

from asked import base, greedy, say, system, user
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=base, api_key="none"))
agent = Agent(model, system_prompt=system, model_settings=greedy)


async def main():
    done = await agent.run(user)
    async with agent.run_stream(user) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        tokens = stream.usage.output_tokens
    say(chat=done.output, chat_streamed="".join(pieces), chat_tokens=tokens)


asyncio.run(main())
