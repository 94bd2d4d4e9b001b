"""dspy: Predict and ReAct, by its language model of chats and by that of /v1/responses, and its own function calling."""

import dspy
from weather import ONE, TWO, WHO, base, done, get_weather, say

said = {}
common = {"api_base": base, "api_key": "none", "cache": False, "temperature": 0, "num_retries": 0}
for way, more in (("", {}), (" responses", {"model_type": "responses"})):
    lm = dspy.LM("openai/tiny", **common, **more)
    (said["says" + way],) = [text["text"] if isinstance(text, dict) else text for text in lm(WHO)]
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        signature = dspy.Signature("question: str, tools: list[dspy.Tool] -> calls: dspy.ToolCalls")
        found = dspy.Predict(signature)(question=TWO, tools=[dspy.Tool(get_weather)])
        said["calls" + way] = [{"name": call.name, "args": call.args} for call in found.calls.tool_calls]
say(**said)
