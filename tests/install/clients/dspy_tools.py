"""dspy: Predict with its own function calling, where it is told that the model takes tools, by each of the three APIs;
and its language model itself, by chats and by /v1/responses, with tools.
"""

import json

import dspy
from asked import base, say
from weather import FUNCTION, TWO, WHO, get_weather

lm15, said = dspy.lm15, {}
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
# Where it knows that a model takes tools: of chats it can be told so. Of responses it cannot (it reads what it sends
# them by the provider's OpenAIResponsesCompat as if that was of chats), so the model itself says so.
access = lm15.AccessPolicy("hibachi", base_url=base)
ours = lm15.ProviderDefinition.chat(access, compat=lm15.OpenAIChatCompat())
lm15.register_provider(ours, supports=lm15.ModelSupport(function_calling=True))


class Takes(dspy.LM):
    supports_function_calling = True


for way, lm in (
    ("", dspy.LM("hibachi/tiny", **common)),
    (" responses", Takes("openai/tiny", **common, model_type="responses")),
):
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        found = dspy.Predict(Calling)(question=TWO, tools=[dspy.Tool(get_weather)])
    said[f"calls predicted{way}"] = [{"name": call.name, "args": call.args} for call in found.calls.tool_calls]
say(**said)
