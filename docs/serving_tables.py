"""Writes the tables of serving.md, routing.md and coming-from-tgi.md from the code: settings, routes, fields.

python docs/serving_tables.py
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from hibachi.llm.dialects import forms
from hibachi.llm.dialects.messages import bodies as messages
from hibachi.llm.dialects.messages.bodies import CountBody, MessagesBody
from hibachi.llm.dialects.openai.bodies import (
    IGNORED,
    ChatBody,
    ClassifyBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
    WarmBody,
)
from hibachi.llm.dialects.openai.parse import DEFAULTS, REFUSED
from hibachi.llm.dialects.responses import parse as responses
from hibachi.llm.dialects.responses.bodies import ResponsesBody
from hibachi.router.settings import table as route_table
from hibachi.server.app import ROUTES
from hibachi.server.metrics import PATH
from hibachi.server.settings import table
from hibachi.server.tgi_settings import table as tgi_table

HERE = Path(__file__).parent
PAGE, ROUTING, COMING = HERE / "serving.md", HERE / "routing.md", HERE / "coming-from-tgi.md"
_ABOUT_OTHERS = {*IGNORED, *responses.REFUSED, "background"} - {"store", "user", "metadata"}  # see agents.md


def routes() -> str:
    rows = [f"| {r.method} | `{r.path}` | {'yes' if r.keyed else 'no'} | {_about(r.handler)} |" for r in ROUTES]
    rows.append(f"| GET | `{PATH}` | no | figures for Prometheus |")
    return "\n".join(["| | route | takes a key | |", "|---|---|---|---|", *rows])


def fields() -> str:
    text, chat = _fields(CompletionBody), _fields(ChatBody)
    both = [name for name in text if name in chat]
    rows = {
        "both completions": both,
        "`/v1/completions`": [name for name in text if name not in both],
        "`/v1/chat/completions`": [name for name in chat if name not in both],
        "`/v1/responses`": [f.name for f in msgspec.structs.fields(ResponsesBody) if f.name not in _ABOUT_OTHERS],
        "`/v1/embeddings`": _fields(EmbeddingBody),
        "`/tokenize`": _fields(TokenizeBody),
        "`/detokenize`": _fields(DetokenizeBody),
        "`/score`": _fields(ScoreBody),
        "`/rerank`": _fields(RerankBody),
        "`/classify`": _fields(ClassifyBody),
        "`/v1/warm`": _fields(WarmBody),
        "`/v1/messages` ([agents.md](agents.md))": _fields(MessagesBody, messages.REFUSED),
        "`/v1/messages/count_tokens`": _fields(CountBody, messages.REFUSED),
    }
    return "\n".join(["| | fields |", "|---|---|", *(f"| {route} | {_code(names)} |" for route, names in rows.items())])


def _fields(body: type[msgspec.Struct], refused: Iterable[str] = ()) -> list[str]:
    known = {*IGNORED, *REFUSED, *DEFAULTS, *refused}
    return [f.name for f in msgspec.structs.fields(body) if f.name not in known]


def defaults() -> str:
    both = {**DEFAULTS, **forms.DEFAULTS}
    rows = [f"| `{name}` | `{json.dumps(default)}` | {why} |" for name, (default, why) in both.items()]
    return "\n".join(["| field | may say | as |", "|---|---|---|", *rows])


def _list(names: Iterable[str]) -> str:
    return textwrap.fill(_code(names) + ".", 124)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _about(handler: object) -> str:
    first = (handler.__doc__ or "").partition("\n")[0].rstrip(".")
    return first[:1].lower() + first[1:]


TABLES = {
    "settings": table,
    "routes": routes,
    "fields": fields,
    "default fields": defaults,
    "ignored fields": lambda: _list(IGNORED),
    "refused fields": lambda: _list([*REFUSED, *forms.REFUSED]),
}

OF_ROUTE = {"settings of route": route_table}
OF_TGI = {"flags of TGI": tgi_table}


def written(page: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """The page with its tables as the code has them, each between two comments."""
    for name, make in tables.items():
        begin, end = f"<!-- {name}, by serving_tables.py -->\n", f"<!-- end of {name} -->"
        assert page.count(begin) == page.count(end) == 1, name
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{make()}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    ROUTING.write_text(written(ROUTING.read_text(), OF_ROUTE))
    COMING.write_text(written(COMING.read_text(), OF_TGI))
