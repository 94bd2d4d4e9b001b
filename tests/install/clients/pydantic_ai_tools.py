"""pydantic-ai: agents with a tool and with a type (ToolOutput, its default), whole and streamed, by its models of
chats, of /v1/responses and of /v1/messages.
"""

import asyncio

from asked import asked, base, greedy, say
from person import Person, fields
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from weather import NEXT, ONE, SYSTEM, THINK, TWO, WHO, done, get_weather, tiny

said = {}


def models(url):
    provider = OpenAIProvider(base_url=url, api_key="none")
    anthropic = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="none")
    yield "", OpenAIChatModel("tiny", provider=provider)
    yield " responses", OpenAIResponsesModel("tiny", provider=provider)
    yield " anthropic", AnthropicModel("tiny", provider=anthropic)


def thoughts(messages):
    parts = [part for m in messages if isinstance(m, ModelResponse) for part in m.parts]
    part = next(part for part in parts if isinstance(part, ThinkingPart))
    return part.content or "".join(part.provider_details["raw_content"])


async def tell(way, model):
    settings = {"temperature": 0, "max_tokens": 1000}
    thinking = {"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}} if "anthropic" in way else {}
    agent = Agent(model, instructions=SYSTEM, tools=[get_weather], model_settings=settings, retries=0)

    async def whole(question, **more):
        run = await agent.run(question, **more)
        return run.output, run.all_messages()

    async def streamed(question, **more):
        async with agent.run_stream(question, **more) as run:
            pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
            return "".join(pieces), run.all_messages()

    for name, ask in (("", whole), ("_streamed", streamed)):
        text, messages = await ask(ONE)
        said[f"tool{way}{name}"] = done(text)
        text, _ = await ask(NEXT, message_history=messages)
        said[f"turn{way}{name}"] = done(text)
        said[f"parallel{way}{name}"] = done((await ask(TWO))[0])
        text, messages = await ask(THINK, model_settings={**settings, **thinking})
        said[f"think{way}{name}"] = done(text, reasoning=thoughts(messages))
    typed = Agent(model, tools=[get_weather], output_type=Person, model_settings=settings, retries=0)
    said[f"typed after a tool{way}"] = fields((await typed.run(ONE)).output)
    done("")
    said[f"typed{way}"] = fields((await typed.run(WHO)).output)
    async with typed.run_stream(WHO) as stream:
        said[f"typed{way}_streamed"] = fields(await stream.get_output())


async def main():
    for way, model in models(base):
        await tell(way, model)
    # Demanded of a model that knows nothing of tools: what comes is what the schema says.
    for way, model in models(tiny):
        agent = Agent(model, output_type=Person, model_settings=greedy, retries=0)
        said["demanded" + way] = fields((await agent.run(asked["messages"][1]["content"])).output)
        async with agent.run_stream(asked["messages"][1]["content"]) as stream:
            said[f"demanded{way}_streamed"] = fields(await stream.get_output())


asyncio.run(main())
say(**said)
