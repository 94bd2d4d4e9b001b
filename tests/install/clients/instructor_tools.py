"""instructor: a type as a call, in its modes TOOLS (its default), TOOLS_STRICT, RESPONSES_TOOLS and ANTHROPIC_TOOLS,
whole and streamed; several calls in PARALLEL_TOOLS. Streamed it asks for a type of which anything may be missing.
"""

from collections.abc import Iterable

import instructor
from anthropic import Anthropic
from asked import asked, base, say
from instructor import Mode
from openai import OpenAI
from person import Person, fields
from weather import WHO, own, tiny

said = {}


def clients(url):
    openai, anthropic = OpenAI(base_url=url, **own), Anthropic(base_url=url.removesuffix("/v1"), **own)
    greedy = {"temperature": 0}
    yield "", instructor.from_openai(openai), greedy
    yield " strict", instructor.from_openai(openai, mode=Mode.TOOLS_STRICT), greedy
    yield " responses", instructor.from_openai(openai, mode=Mode.RESPONSES_TOOLS), greedy
    yield " anthropic", instructor.from_anthropic(anthropic), {"max_tokens": 1000, "extra_body": greedy}


def tell(name, url, messages, **more):
    for way, client, needs in clients(url):
        needed = needs | more
        if "responses" in way and "max_tokens" in needed:
            needed["max_output_tokens"] = needed.pop("max_tokens")
        asking = {"model": "tiny", "messages": messages, "response_model": Person, **needed}
        said[name + way] = fields(client.chat.completions.create(**asking, max_retries=0))
        *_, last = client.chat.completions.create_partial(**asking)
        said[(f"partly{way}" if name == "demanded" else f"{name}{way}") + "_streamed"] = last.model_dump()


tell("typed", base, [{"role": "user", "content": WHO}])
# Of a model that knows nothing of tools: what comes is what the schema says.
tell("demanded", tiny, asked["messages"][1:], max_tokens=asked["max_tokens"])
parallel = instructor.from_openai(OpenAI(base_url=base, **own), mode=Mode.PARALLEL_TOOLS)
several = parallel.chat.completions.create(
    model="tiny", messages=[{"role": "user", "content": WHO}], response_model=Iterable[Person], temperature=0
)
said["several"] = [fields(one) for one in several]
say(**said)
