"""generation_config.json: what a model's makers would have sampling be, unless a request says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hibachi.errors import InvalidModelFiles, InvalidRequest
from hibachi.model.fields import read_json
from hibachi.request import SamplingParams

_FIELDS = {  # name in the file -> field of SamplingParams
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}
_RANDOM = ("temperature", "top_k", "top_p", "min_p", "typical_p")


def generation_defaults(path: str | Path) -> dict[str, Any]:
    """Fields of SamplingParams that the generation_config.json in a model's folder sets; {} without such a file.

    As in vLLM, what the file gives counts whether or not it says do_sample, and what it does not give keeps our own
    default (transformers would be greedy without do_sample). As in transformers, do_sample: false means greedy: that
    is temperature 0, and temperature, top_k, top_p, min_p and typical_p of the file are left out. null counts as not
    given. Other fields, such as max_length or num_beams, have no counterpart and are not read; the end-of-sequence ids
    are part of the model's description.

    Raises InvalidModelFiles for a value of the wrong type or out of its range.
    """
    file = Path(path) / "generation_config.json"
    if not file.is_file():
        return {}
    config = read_json(file)
    given = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    sample = config.get("do_sample")
    if sample is not None and not isinstance(sample, bool):
        raise InvalidModelFiles(f"{file}: do_sample must be true, false or null; got {sample!r:.80}. Mend the file.")
    if sample is False:
        given = {name: value for name, value in given.items() if name not in _RANDOM}
        given["temperature"] = 0.0
    for name, value in given.items():
        try:
            SamplingParams(**{_FIELDS[name]: value})
        except InvalidRequest as e:
            raise InvalidModelFiles(f"{file}: {name} cannot be used: {e} Mend the file.") from e
    return {_FIELDS[name]: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
