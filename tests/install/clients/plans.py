"""A model that plans: asked about the weather somewhere, it calls the tool that tells it, in Hermes' form and for all
places at once, and then says what it was told; asked who it is, it calls the tool that takes a mood, if there is one,
or says JSON. If the question says "think", it reasons first, and if it still sees that afterwards, says "As I thought".
It knows nothing but the text of its prompt, so what it says shows what was in there. It prefers this, and says
something else only where it must. Another model says the JSON to anything, and a third one nonsense. All have room for
the prompts of programs that write much.
"""

import json
import re
from functools import lru_cache

import numpy as np

PERSON = {"name": "Emma", "mood": "good", "age": 21}
BEFORE, SAID = "Of course! ", json.dumps(PERSON)
THOUGHT = "Let me see."
PLACES = re.compile("Paris|Oslo|Lima")
TURN = "<|im_start|>assistant\n"
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{% endfor %}
    {{- 'Call one as <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' }}
        {%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n' if m.content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def tools_in(prompt):
    """The properties that each tool takes, by its name."""
    lines = prompt.partition("# Tools\n")[2].partition("Call one as")[0].splitlines()
    functions = [json.loads(line)["function"] for line in lines]
    return {f["name"]: (f.get("parameters") or {}).get("properties") or {} for f in functions}


def plans(prompt):
    """What it says to a prompt: the text that it likes best, and then others."""
    tools, results = tools_in(prompt), re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)
    asked = re.findall(r"<\|im_start\|>user\n(?!<tool_response>)(.*?)<\|im_end\|>", prompt, re.DOTALL)
    question = asked[-1] if asked else prompt
    since = prompt[prompt.rfind(question) :]
    weather = [name for name, takes in tools.items() if "city" in takes]
    person = [name for name, takes in tools.items() if "mood" in takes]
    thought = f"<think>\n{THOUGHT}\n</think>\n\n" if "think" in question else ""
    places = PLACES.findall(question)
    if weather and places and "<tool_response>" not in since:
        return [thought + "\n".join(call(weather[0], {"city": place}) for place in places)]
    if person:
        return [thought + call(person[0], PERSON)]
    if results:
        front = "As I thought, it is " if THOUGHT in since else "It is "
        return [thought + front + ", ".join(result.strip('"') for result in results) + ".", thought + SAID]
    return [thought + BEFORE + SAID, thought + SAID]


class Bytes:
    """Tokens are bytes, and 0 is the end."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token):
        return bytes([token]) if token else b""


class Plans:
    vocab_size, max_model_len, eos_ids = 256, 2**18, (0,)  # agents describe many tools, at length
    tokenizer = Bytes()
    turn = TURN.encode()  # what the prompt ends with

    def logits(self, tokens, lengths):
        scores = np.zeros((len(lengths), 256), np.float32)
        for row, length in enumerate(lengths):
            prompt, _, said = tokens[row, :length].astype(np.uint8).tobytes().rpartition(self.turn)
            for worse, text in enumerate(self._plans(prompt)):
                if text.startswith(said):
                    at = [*text, 0][len(said)]
                    scores[row, at] = max(scores[row, at], 50 - 20 * worse)
        return scores

    @staticmethod
    @lru_cache(64)
    def _plans(prompt):
        return [text.encode() for text in plans(prompt.decode(errors="replace"))]


class Talks(Plans):
    """A model that says JSON and, unless it is kept from that, something before: for whatever ends with a line feed."""

    turn = b"\n"

    @staticmethod
    def _plans(prompt):
        return [(BEFORE + SAID).encode(), SAID.encode()]


class Rambles:
    """A model that says nonsense, which ends sooner or later: what comes of it is what it is held to."""

    vocab_size, max_model_len, eos_ids = 256, 65536, (0,)
    tokenizer = Bytes()
    _scores = np.random.default_rng(1).random((997, 256), np.float32)
    _scores[:, list(b'\0"}]')] += 0.4

    def logits(self, tokens, lengths):
        last = tokens[np.arange(len(lengths)), lengths - 1]
        return self._scores[(lengths * 31 + last) % 997]
