"""Reduce our own description of our routes to requests that are mostly answered: own_spec.py IN OUT

The bounds are not in the types that it is made of, so that hardly a request with several random fields is right.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from reduce_spec import SMALL as OPENAI
from reduce_spec import TEXT
from tgi_spec import REFUSED
from tgi_spec import SMALL as TGI

IDS = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 2047}, "minItems": 1, "maxItems": 8}
FLAG = {"type": "boolean"}
TEXTS = {"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}]}
COMMON = {
    **{name: OPENAI[name] for name in ("max_tokens", "n")},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0.1, "maximum": 1},
    "seed": {"type": "integer", "minimum": 0, "maximum": 1000},
    "stop_token_ids": IDS,
    "stream": FLAG,
    "return_token_ids": FLAG,
    "return_tokens_as_token_ids": FLAG,
    "prompt_logprobs": {"type": "integer", "minimum": 0, "maximum": 3},
}
KEPT: dict[str, dict[str, Any]] = {
    "CompletionBody": {
        **COMMON,
        "prompt": OPENAI["prompt"],
        "echo": FLAG,
        "logprobs": {"type": "integer", "minimum": 0, "maximum": 3},
    },
    "ChatBody": {
        **COMMON,
        "messages": OPENAI["messages"],
        "logprobs": FLAG,
        "max_completion_tokens": OPENAI["max_tokens"],
    },
    "EmbeddingBody": {"input": OPENAI["prompt"], "encoding_format": {"enum": ["float", "base64"]}},
    "ScoreBody": {"text_1": TEXT, "text_2": TEXTS},
    "RerankBody": {"query": TEXT, "documents": {**TEXTS["anyOf"][1]}, "return_documents": FLAG},
    "WarmBody": {"text": TEXT},
    "TokenizeBody": {"prompt": TEXT, "return_token_strs": FLAG, "add_special_tokens": FLAG},
    "DetokenizeBody": {"tokens": IDS},
    "ChatTokenizeBody": {"messages": OPENAI["messages"]},
    "TokensBody": {
        "prompt": IDS,
        "max_tokens": OPENAI["max_tokens"],
        "stream": FLAG,
        "encoding": {"enum": ["list", "base64"]},
        "stop": IDS,
        "seed": COMMON["seed"],
        "temperature": COMMON["temperature"],
        "logprobs": {"type": "integer", "minimum": 0, "maximum": 3},
    },
}
REQUIRED = {
    "ScoreBody": ["text_1", "text_2"],
    "WarmBody": ["text"],
    "TokenizeBody": ["prompt"],
    "TokensBody": ["prompt"],
}


def reduced(spec: dict[str, Any]) -> dict[str, Any]:
    schemas = spec["components"]["schemas"]
    for name, fields in KEPT.items():
        assert fields.keys() <= schemas[name]["properties"].keys(), name
        schemas[name]["properties"] = fields
        schemas[name]["required"] = [*schemas[name].get("required", ()), *REQUIRED.get(name, ())]
    schemas["GenerateBody"]["properties"]["inputs"] = TGI["inputs"]
    parameters = schemas["Parameters"]["properties"]
    for name in REFUSED:
        parameters.pop(name, None)
    parameters |= {name: small for name, small in TGI.items() if name in parameters}
    tokens = spec["paths"]["/v1/generate"]["post"]
    del tokens["parameters"]
    content = tokens["requestBody"]["content"]
    tokens["requestBody"]["content"] = {"application/json": content["application/json"]}
    return spec


if __name__ == "__main__":
    source, target = sys.argv[1:]
    with open(source) as file:
        whole = json.load(file)
    with open(target, "w") as file:
        json.dump(reduced(whole), file, indent=1)
