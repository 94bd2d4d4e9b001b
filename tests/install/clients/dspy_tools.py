"""dspy: Predict with its own function calling, where it is told that the model takes tools; and its language model
itself, by chats and by /v1/responses, with tools.
"""

import json

import dspy
from asked import base, say
from weather import FUNCTION, TWO, WHO, get_weather

said = {}
access = dspy.lm15.AccessPolicy("hibachi", base_url=base)
ours = dspy.lm15.ProviderDefinition.chat(access, compat=dspy.lm15.OpenAIChatCompat())
dspy.lm15.register_provider(ours, supports=dspy.lm15.ModelSupport(function_calling=True))
common = {"api_base": base, "api_key": "none", "cache": False, "temperature": 0, "num_retries": 0}


class Calling(dspy.Signature):
    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


for way, kind in (("", "chat"), (" responses", "responses")):
    lm = dspy.LM("openai/tiny", **common, model_type=kind)
    (text,) = lm(WHO)
    said["says" + way] = text["text"] if isinstance(text, dict) else text
    (found,) = lm(TWO, tools=[{"type": "function", "function": FUNCTION}])
    functions = [call["function"] for call in found["tool_calls"]]
    said["calls" + way] = [{"name": f["name"], "args": json.loads(f["arguments"])} for f in functions]
with dspy.context(lm=dspy.LM("hibachi/tiny", **common), adapter=dspy.ChatAdapter(use_native_function_calling=True)):
    found = dspy.Predict(Calling)(question=TWO, tools=[dspy.Tool(get_weather)])
    said["calls predicted"] = [{"name": call.name, "args": call.args} for call in found.calls.tool_calls]
say(**said)
