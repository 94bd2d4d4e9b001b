"""dspy: its language model of chats and of texts. It puts a frame around a text, so this one must only be there."""

import dspy
from asked import asked, base, greedy, say

common = {"model": "openai/tiny", "api_base": base, "api_key": "none", "cache": False, **greedy}
(chat,) = dspy.LM(**common)(messages=asked["messages"])
(text,) = dspy.LM(**common, model_type="text")(asked["prompt"])
several = dspy.LM(**common | {"temperature": 1.0}, n=3)(messages=asked["messages"])
assert len(several) == 3, several
assert text
say(chat=chat)
