"""llama-index's OpenAILike as a model that calls functions: its agent, whole and streamed, predict_and_call, and
as_structured_llm, which demands a call.
"""

import asyncio

from asked import asked
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike
from person import Person, fields
from weather import NEXT, ONE, SYSTEM, TWO, WHO, base, done, get_weather, greedy, say, tiny

own = {"model": "tiny", "api_key": "none", "max_retries": 0, "context_window": 4096, "temperature": 0}
calling = {"is_chat_model": True, "is_function_calling_model": True}
model = OpenAILike(api_base=base, **own, **calling)
said = {}


async def ask(agent, question, context):
    handler = agent.run(question, ctx=context)
    pieces = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)]
    found = await handler
    assert not agent.streaming or "".join(pieces).endswith(str(found))
    return done(str(found))


async def main():
    for name, streaming in (("", False), ("_streamed", True)):
        agent = FunctionAgent(tools=[get_weather], llm=model, system_prompt=SYSTEM, streaming=streaming)
        context = Context(agent)
        said["tool" + name] = await ask(agent, ONE, context)
        said["turn" + name] = await ask(agent, NEXT, context)
        said["parallel" + name] = await ask(agent, TWO, Context(agent))


def tell(name, model, question):
    messages = [ChatMessage(role="user", content=question)]
    typed = model.as_structured_llm(Person)
    said[name] = fields(typed.chat(messages).raw)
    *_, last = typed.stream_chat(messages)
    said[f"{name}_streamed"] = last.raw.model_dump()
    said[f"{name} predicted"] = fields(model.structured_predict(Person, PromptTemplate(question)))


asyncio.run(main())
tool = FunctionTool.from_defaults(get_weather)
model.predict_and_call([tool], ONE)
said["called"] = done(None)
tell("typed", model, WHO)
# Of a model that knows nothing of tools: what comes is what the schema says.
tell(
    "demanded",
    OpenAILike(api_base=tiny, max_tokens=greedy["max_tokens"], **own, **calling),
    asked["messages"][1]["content"],
)
say(**said)
