"""dspy: Predict and ReAct by its language model of chats and by that of /v1/responses; its own function calling."""

import dspy
from asked import greedy
from weather import ONE, WHO, base, done, get_weather, say

said = {}
