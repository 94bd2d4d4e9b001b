"""langchain, langchain-openai and langchain-anthropic: agents, whole and streamed, by chats, by /v1/responses and by
/v1/messages; with_structured_output as a call; a call that is demanded.
"""

from asked import asked, base, greedy, say
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from person import Person, fields
from weather import NEXT, ONE, SYSTEM, TWO, WHO, done, get_weather, tiny

said = {}
openai = {"model": "tiny", "api_key": "none", "max_retries": 0, "temperature": 0}


def tell(way, model):
    agent = create_agent(model, tools=[tool(get_weather)], system_prompt=SYSTEM)

    def whole(messages):
        return agent.invoke({"messages": messages})["messages"]

    def streamed(messages):
        parts = agent.stream({"messages": messages}, stream_mode=["values", "messages"])
        return [part for mode, part in parts if mode == "values"][-1]["messages"]

    for name, ask in (("", whole), ("_streamed", streamed)):
        messages = ask([("user", ONE)])
        said[f"tool{way}{name}"] = done(messages[-1].text)
        said[f"turn{way}{name}"] = done(ask([*messages, ("user", NEXT)])[-1].text)
        said[f"parallel{way}{name}"] = done(ask([("user", TWO)])[-1].text)
    agent = create_agent(model, tools=[tool(get_weather)], response_format=Person)
    said[f"typed after a tool{way}"] = fields(agent.invoke({"messages": [("user", ONE)]})["structured_response"])
    done("")
    typed = model.with_structured_output(Person, method="function_calling")
    said[f"typed{way}"] = fields(typed.invoke(WHO))
    *_, last = typed.stream(WHO)
    said[f"typed{way}_streamed"] = fields(last)


tell("", ChatOpenAI(**openai, base_url=base))
tell(" responses", ChatOpenAI(**openai, base_url=base, use_responses_api=True))
tell(" anthropic", ChatAnthropic(**openai, max_tokens=1000, base_url=base.removesuffix("/v1")))

# Demanded of a model that knows nothing of tools: what comes is what the schema says.
messages = [(m["role"], m["content"]) for m in asked["messages"]]
model = ChatOpenAI(**openai, max_tokens=greedy["max_tokens"], base_url=tiny)
for name, how in (
    ("named", {"tool_choice": "Person"}),
    ("required", {"tool_choice": "any"}),
    ("strict", {"tool_choice": "Person", "strict": True}),
):
    bound = model.bind_tools([Person], parallel_tool_calls=False, **how)
    (call,) = bound.invoke(messages).tool_calls
    said[f"demanded {name}"] = fields(Person(**call["args"]))
    pieces = None
    for piece in bound.stream(messages):
        pieces = piece if pieces is None else pieces + piece
    said[f"demanded {name}_streamed"] = fields(Person(**pieces.tool_calls[0]["args"]))
say(**said)
