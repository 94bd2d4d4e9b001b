"""Models that do what the user said last, each in the format of a chat template: for `SAY words;;` they say these, and
for `CALL tool key value;;` they call the tool and then say which weather it told. Prompts are lines of JSON in the file
that the variable PROMPTS names.
"""

import json
import os
import re

import numpy as np
from plans import Bytes

ORDER = re.compile(r"(SAY|CALL) (.*?);;")


class Obeys:
    vocab_size, max_model_len, eos_ids = 256, 2**18, (0,)
    deterministic = False
    tokenizer = Bytes()

    def __init__(self):
        self._going = {}  # what is left to say, by the text so far

    def logits(self, tokens, lengths):
        scores = np.zeros((len(lengths), 256), np.float32)
        for row, length in enumerate(lengths):
            text = tokens[row, :length].astype(np.uint8).tobytes()
            rest = self._going.pop(text[:-1], None)
            self._going[text] = rest = self._answer(text.decode(errors="replace")) if rest is None else rest[1:]
            scores[row, [*rest, 0][0]] = 50
        return scores

    def _answer(self, prompt):
        with open(os.environ["PROMPTS"], "a") as file:
            file.write(json.dumps(prompt) + "\n")
        *_, order = ORDER.finditer("SAY nothing;;" + prompt)
        kind, words = order.groups()
        since = prompt[order.end() - len("SAY nothing;;") :]
        if kind == "CALL" and self.result not in since:
            name, key, value = words.split(" ", 2)
            arguments = json.dumps({key: value})
            return self.calls.format(name=name, key=key, value=value, arguments=arguments).encode()
        told = re.findall(r"weather: (\w+)", since)
        return self.says.format(words if kind == "SAY" else f"It is {told[-1]}.").encode()


class GptOss(Obeys):
    result = " to=assistant<|channel|>commentary"
    says = "<|channel|>analysis<|message|>I do.<|end|><|start|>assistant<|channel|>final<|message|>{}"
    calls = (
        "<|channel|>analysis<|message|>I do.<|end|><|start|>assistant to=functions.{name}<|channel|>commentary json"
        "<|message|>{arguments}<|call|>"
    )


class Qwen(Obeys):
    result = "<tool_response>"
    says = "I do.\n</think>\n\n{}"
    calls = (
        "I do.\n</think>\n\n<tool_call>\n<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n"
        "</tool_call>"
    )


class Ministral(Obeys):
    result = "[TOOL_RESULTS]"
    says = "[THINK]I do.[/THINK]{}"
    calls = "[THINK]I do.[/THINK][TOOL_CALLS]{name}[ARGS]{arguments}"
