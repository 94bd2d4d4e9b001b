"""openai-agents by its model of chats: to that of /v1/responses an answer that max_tokens cuts off is an error."""

import asyncio

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from asked import base, greedy, say, system, user
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

set_tracing_disabled(True)
model = OpenAIChatCompletionsModel("tiny", AsyncOpenAI(base_url=base, api_key="none"))
settings = ModelSettings(**greedy, include_usage=True)
agent = Agent("brief", instructions=system, model=model, model_settings=settings)


async def main():
    done = await Runner.run(agent, user)
    stream = Runner.run_streamed(agent, user)
    events = [e.data async for e in stream.stream_events() if e.type == "raw_response_event"]
    pieces = [data.delta for data in events if isinstance(data, ResponseTextDeltaEvent)]
    tokens = stream.context_wrapper.usage.output_tokens
    say(chat=done.final_output, chat_streamed="".join(pieces), chat_tokens=tokens)


asyncio.run(main())
