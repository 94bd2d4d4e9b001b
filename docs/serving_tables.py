"""Writes the tables of serving.md from the code: every setting, every route, and the fields that change nothing.

python docs/serving_tables.py
"""

from __future__ import annotations

from pathlib import Path

from hibachi.api.bodies import IGNORED
from hibachi.serve.app import ROUTES
from hibachi.serve.settings import table

PAGE = Path(__file__).parent / "serving.md"


def routes() -> str:
    rows = [
        f"| {method} | `{path}` | {'yes' if keyed else 'no'} | {_about(handler)} |"
        for method, path, handler, keyed in ROUTES
    ]
    return "\n".join(["| | route | takes a key | |", "|---|---|---|---|", *rows])


def _about(handler: object) -> str:
    first = (handler.__doc__ or "").partition("\n")[0].rstrip(".")
    return first[:1].lower() + first[1:]


TABLES = {
    "settings": table,
    "routes": routes,
    "ignored fields": lambda: ", ".join(f"`{name}`" for name in IGNORED) + ".",
}


def written(page: str) -> str:
    """The page with its tables as the code has them, each between two comments."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}, by serving_tables.py -->\n", f"<!-- end of {name} -->"
        assert page.count(begin) == page.count(end) == 1, name
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{make()}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
