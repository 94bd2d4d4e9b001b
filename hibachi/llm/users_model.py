"""A user's own model by name: `package.module:Name`, or `path/to/file.py:Name`, and what it says of itself.

A model is asked for these attributes; it need have none of them. Engines read all down to max_model_len
(`hibachi.engine.declared`); the others belong to models that are opened by name (`hibachi serve`, `hibachi run-batch`).

    token           one token, or of feed-forward one input, a number or an array: all others have its shape and dtype
    stop_token      ends every request; a number or an array (*tok)
    stop_rule       ends every request too: a StopRule, a predicate (also as a method), a token or a list of them
    eos_ids         tokens that end every request; of text: where it does not say ignore_eos
    padding_token   (*tok): rows of different lengths share calls
    default_params  a SamplingParams, of a model that returns logits, for requests that bring none
    max_model_len   most tokens of a request, prompt included
    feedforward     True: `forward` takes single inputs; without it `forward` returns the next token (level 0)
    labels          a list of texts: feed-forward, and what each number of an output stands for
    probabilities   True: those numbers are probabilities already, and not logits
    example_prompts prompts or inputs, or a method that returns them: the first is computed when the model is opened
    read, write     read(bytes, type) -> prompt or input, write(tokens) -> (bytes, type): bodies of types of its own
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.discover import resolve
from hibachi.common.named import object_named
from hibachi.engine.kinds import kind_of
from hibachi.errors import ConfigError, text_of


def model_named(spec: str, backend: str | ArrayBackend | None = None) -> Any:
    """The model called `spec`, an object that implements some level of the ladder.

    A class is instantiated and a function called: with `backend=` (None means NumPy) if it has a parameter of that
    name, else without arguments. Any other object is used as it is.

    Raises ConfigError if there is no such name, if making the model raises (the original is in `__cause__`), or if it
    has the methods of no level; BackendNotFound or BackendNotInstalled.
    """
    found = object_named(spec)
    if inspect.isclass(found) or inspect.isroutine(found) or isinstance(found, partial):
        found = _make(spec, found, backend)
    kind_of(found)
    return found


def _make(spec: str, make: Any, backend: str | ArrayBackend | None) -> Any:
    try:
        takes = "backend" in inspect.signature(make).parameters
    except (TypeError, ValueError):  # some classes and functions in C have no signature
        takes = False
    given = {"backend": resolve(backend) if isinstance(backend, str) else backend or resolve("numpy")} if takes else {}
    try:
        return make(**given)
    except Exception as e:
        mend = "That is what it raised itself, before any request came."
        if isinstance(e, TypeError):
            mend = (
                "A class or function is called with backend= if it has such a parameter, and with nothing else; name a "
                "function that returns the model ready to run."
            )
        raise ConfigError(f"{spec} could not be made: {text_of(e)}. {mend}") from e
