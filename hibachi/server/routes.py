"""A route, and its description."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hibachi.llm.dialects.dialects import OPENAI, Dialect
from hibachi.llm.texts import Texts
from hibachi.llm.tokenizers.own import NoTokenizer
from hibachi.server.served import Served
from hibachi.server.web.exchange import Exchange

Handler = Callable[[Served, Exchange], Awaitable[None]]


def always(served: Served) -> bool:
    return True


def for_ids(served: Served) -> bool:
    """Whether the model continues token ids, with or without a tokenizer."""
    return isinstance(served.what, Texts)


def for_text(served: Served) -> bool:
    """Whether it reads and writes text."""
    return isinstance(served.what, Texts) and not isinstance(served.what.tokenizer, NoTokenizer)


def for_chat(served: Served) -> bool:
    """Whether it has a chat template."""
    return for_text(served) and bool(served.chat_template is not None or served.texts.tokenizer.chat_templates)


def for_vectors(served: Served) -> bool:
    """Whether it makes vectors of prompts."""
    return for_ids(served) and served.what.engine.facts.has_hidden


def for_texts_vectors(served: Served) -> bool:
    """Whether it makes vectors of texts."""
    return for_text(served) and for_vectors(served)


def example_array(served: Served) -> Any:
    """An example prompt, or an input of a feed-forward model, as lists."""
    facts = served.what.engine.facts
    shape = () if facts.token is None else facts.token[0]
    found: Any = [0] * shape[-1] if shape else 0
    for n in shape[-2::-1]:
        found = [found] * n
    return found if facts.feedforward and shape else [found] * 3


@dataclass(frozen=True, slots=True)
class About:
    """The description of a route, for GET /openapi.json.

    body: type of its JSON body. answer: type of its JSON answer, or a tuple of types. events: types of the data of a
    stream's events. unwell: type of an answer 503. reads, writes: schemas of further media types. query: type of its
    query. statuses: of errors that other routes of its kind do not have. dialects: of its errors, besides the route's.
    named: it takes the name of a model. asks: it asks the engine, which may fail or be full. example: a body that is
    answered. useful: whether it does anything for the served model.
    """

    body: Any = None
    answer: Any = None
    events: tuple[Any, ...] = ()
    unwell: Any = None
    reads: Mapping[str, Any] = field(default_factory=dict)
    writes: Mapping[str, Any] = field(default_factory=dict)
    query: Any = None
    statuses: tuple[int, ...] = ()
    dialects: tuple[Dialect, ...] = ()
    named: bool = False
    asks: bool = False
    example: Callable[[Served], Any] | None = None
    useful: Callable[[Served], bool] = always


class Route(NamedTuple):
    """A route. keyed: it needs a key, where there are any. The first line of the handler's docstring describes it."""

    method: str
    path: str
    handler: Handler
    dialect: Dialect = OPENAI
    keyed: bool = True
    about: About = About()
