"""Writes the table of metrics.md from the code.

python docs/metrics_table.py
"""

from __future__ import annotations

from pathlib import Path

from hibachi.server.series import table

PAGE = Path(__file__).parent / "metrics.md"
BEGIN, END = "<!-- series, by metrics_table.py -->\n", "<!-- end of series -->"


def written(page: str) -> str:
    """The page with the table as the code has it."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
