"""llama-index's OpenAILike as a model that calls functions: its agent, whole and streamed, predict_and_call, and
as_structured_llm, which demands a call.
"""

import asyncio

from asked import asked, base, greedy, say
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from person import Person, fields
from weather import NEXT, ONE, SYSTEM, TWO, WHO, done, get_weather, tiny

own = {"model": "tiny", "api_key": "none", "max_retries": 0, "context_window": 4096, "temperature": 0}
calling = {"is_chat_model": True, "is_function_calling_model": True}
model = OpenAILike(api_base=base, **own, **calling)
said = {}


async def ask(agent, question, memory):
    handler = agent.run(question, memory=memory)
    pieces = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)]
    found = await handler
    assert not agent.streaming or "".join(pieces).endswith(str(found))
    return done(str(found))


async def main():
    for name, streaming in (("", False), ("_streamed", True)):
        agent = FunctionAgent(tools=[get_weather], llm=model, system_prompt=SYSTEM, streaming=streaming)
        memory = ChatMemoryBuffer.from_defaults()
        said["tool" + name] = await ask(agent, ONE, memory)
        said["turn" + name] = await ask(agent, NEXT, memory)
        said["parallel" + name] = await ask(agent, TWO, ChatMemoryBuffer.from_defaults())


def tell(name, model, question):
    messages = [ChatMessage(role="user", content=question)]
    typed = model.as_structured_llm(Person)
    said[name] = fields(typed.chat(messages).raw)
    *_, last = typed.stream_chat(messages)
    said[("partly" if name == "demanded" else name) + "_streamed"] = last.raw.model_dump()
    said[f"{name} predicted"] = fields(model.structured_predict(Person, PromptTemplate(question)))


asyncio.run(main())
tool = FunctionTool.from_defaults(get_weather)
model.predict_and_call([tool], ONE)
said["called"] = done(None)
tell("typed", model, WHO)
# Of a model that knows nothing of tools: what comes is what the schema says.
model = OpenAILike(api_base=tiny, max_tokens=greedy["max_tokens"], **own, **calling)
tell("demanded", model, asked["messages"][1]["content"])
say(**said)
