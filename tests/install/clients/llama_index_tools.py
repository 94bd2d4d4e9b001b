"""llama-index's OpenAILike and OpenAILikeResponses as models that call functions: their agent, whole and streamed,
predict_and_call, and as_structured_llm, which demands a call or a form.
"""

import asyncio

from asked import asked, base, greedy, say
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from person import Person, fields
from weather import NEXT, ONE, SYSTEM, TWO, WHO, done, get_weather, tiny

own = {"model": "tiny", "api_key": "none", "max_retries": 0, "context_window": 4096, "temperature": 0}
calling = {"is_function_calling_model": True}
said = {}


async def ask(agent, question, memory):
    handler = agent.run(question, memory=memory)
    pieces = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)]
    found = await handler
    assert not agent.streaming or "".join(pieces).endswith(str(found))
    return done(str(found))


async def run(model, way):
    for name, streaming in (("", False), ("_streamed", True)):
        agent = FunctionAgent(tools=[get_weather], llm=model, system_prompt=SYSTEM, streaming=streaming)
        memory = ChatMemoryBuffer.from_defaults()
        said[f"tool{way}{name}"] = await ask(agent, ONE, memory)
        said[f"turn{way}{name}"] = await ask(agent, NEXT, memory)
        said[f"parallel{way}{name}"] = await ask(agent, TWO, ChatMemoryBuffer.from_defaults())


def tell(name, model, question):
    messages = [ChatMessage(role="user", content=question)]
    typed = model.as_structured_llm(Person)
    said[name] = fields(typed.chat(messages).raw)
    if isinstance(model, OpenAILike):  # the other makes nothing of the calls in a stream
        *_, last = typed.stream_chat(messages)
        said[name.replace("demanded", "partly") + "_streamed"] = last.raw.model_dump()
    said[f"{name} predicted"] = fields(model.structured_predict(Person, PromptTemplate(question)))


for way, kind, more in (
    ("", OpenAILike, {"is_chat_model": True, "max_tokens": greedy["max_tokens"]}),
    (" responses", OpenAILikeResponses, {"max_output_tokens": greedy["max_tokens"]}),
):
    model = kind(api_base=base, **own, **calling, **more)
    asyncio.run(run(model, way))
    tool = FunctionTool.from_defaults(get_weather)
    model.predict_and_call([tool], ONE)
    said["called" + way] = done(None)
    tell("typed" + way, model, WHO)
    # Of a model that knows nothing of tools: what comes is what the schema says.
    tell("demanded" + way, kind(api_base=tiny, **own, **calling, **more), asked["messages"][1]["content"])
say(**said)
