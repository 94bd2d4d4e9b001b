"""What agents are asked, and the tool that they have, for the model in plans.py."""

from asked import asked

SYSTEM = "Be brief."
ONE, TWO = "What is the weather in Paris?", "What is the weather in Paris and Oslo?"
NEXT, THINK, WHO = "And in Lima?", "Please think: what is the weather in Paris?", "Who are you?"
WEATHER = {"Paris": "sunny in Paris", "Oslo": "rainy in Oslo", "Lima": "windy in Lima"}
FUNCTION = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Its name", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
tiny = asked["tiny"] + "/v1"  # of a model that knows no tools
own = {"api_key": "none", "max_retries": 0}
_called = []


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name
    """
    _called.append(city)
    return WEATHER[city]


def done(text, **more):
    """What has come of a question: which places were asked for since the last one, and what was said in the end."""
    found = {"called": sorted(_called), "text": text, **more}
    _called.clear()
    return found
