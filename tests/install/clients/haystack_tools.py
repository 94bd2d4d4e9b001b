"""haystack: its agent with a tool, whole and streamed, by the generator of chats and by that of /v1/responses."""

from asked import asked, base, greedy, say
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from person import Person, fields
from weather import NEXT, ONE, SYSTEM, THINK, TWO, WHO, done, get_weather, tiny

said = {}
tool = create_tool_from_function(get_weather)


def made(kind, url, **kwargs):
    own = {"api_key": Secret.from_token("none"), "api_base_url": url, "max_retries": 0, "model": "tiny"}
    return kind(**own, generation_kwargs={"temperature": 0, **kwargs})


for way, kind in (("", OpenAIChatGenerator), (" responses", OpenAIResponsesChatGenerator)):
    agent = Agent(chat_generator=made(kind, base), tools=[tool], system_prompt=SYSTEM)

    def ask(messages, agent=agent, **more):
        return agent.run(messages=messages, **more)["messages"]

    for name, more in (("", {}), ("_streamed", {"streaming_callback": lambda piece: None})):
        messages = ask([ChatMessage.from_user(ONE)], **more)
        said[f"tool{way}{name}"] = done(messages[-1].text)
        after = ask([*messages, ChatMessage.from_user(NEXT)], **more)
        said[f"turn{way}{name}"] = done(after[-1].text)
        said[f"parallel{way}{name}"] = done(ask([ChatMessage.from_user(TWO)], **more)[-1].text)
        messages = ask([ChatMessage.from_user(THINK)], **more)
        if way:
            shown = {"reasoning": next(m.reasoning.reasoning_text for m in messages if m.reasoning)}
            said[f"think{way}{name}"] = done(messages[-1].text, **shown)
        else:  # its generator of chats leaves reasoning out
            said[f"unshown{name}"] = done(messages[-1].text)

(reply,) = made(OpenAIResponsesChatGenerator, base, text_format=Person).run([ChatMessage.from_user(WHO)])["replies"]
said["typed responses"] = fields(Person.model_validate_json(reply.text))

# Demanded of a model that knows nothing of tools: what comes is what the schema says.
messages = [ChatMessage.from_user(asked["messages"][1]["content"])]


def person(name: str) -> str:
    """Say your name."""
    return name


model = made(OpenAIChatGenerator, tiny, tool_choice="required", **greedy)
(reply,) = model.run(messages, tools=[create_tool_from_function(person)])["replies"]
said["name"] = sorted(reply.tool_calls[0].arguments)
say(**said)
